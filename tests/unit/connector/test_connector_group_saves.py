"""What is saved of models with windows and recurrent states, and of requests that ended."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from connector.facts import CellFacts
from connector.jobs import SaveJob
from connector.scheduler.hook_facts import StateOffer
from tests.unit.connector.saves_harness import NAMESPACE, SavesHarness
from tests.unit.connector.support import BLOCK, CELLS, FULL, STATES, WINDOW


def spans(jobs: Sequence[SaveJob]) -> list[tuple[int, int, int]]:
    return [(job.group, job.start_tokens, job.stop_tokens) for job in jobs]


def test_pages_are_no_longer_than_the_window() -> None:
    """With a window of two blocks pages are two blocks, of both groups, each with the blocks of all its feeds."""
    at = SavesHarness(WINDOW, FULL, prompt=64)
    jobs = at.step(64, [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12])
    assert spans(jobs) == [(0, 0, 32), (0, 32, 64), (1, 0, 32), (1, 32, 64)]
    assert [job.block_ids for job in jobs] == [((1, 2), (9, 10)), ((3, 4), (11, 12)), ((5, 6),), ((7, 8),)]


def test_a_window_that_passed_leaves_only_its_own_page_out() -> None:
    """A page that found no room in time has lost its blocks: the window continues without it, full attention does not
    lose anything."""
    small = len(FULL.layer_names) * CELLS.token_bytes * BLOCK
    at = SavesHarness(WINDOW, FULL, prompt=96, limit_bytes=4 * small)
    first = at.step(32, [1, 2], [5, 6], [9, 10])
    assert spans(first) == [(0, 0, 32)]  # no room for the full group's
    at.done(first)
    later = at.step(96, [0, 0, 3, 0, 1, 2], [5, 6, 7, 8, 4, 15], [0, 0, 11, 0, 13, 14])
    assert spans(later) == [(0, 64, 96)]
    assert at.meters.get("connector_saves", outcome="window_passed") == 1
    at.done(later)
    assert spans(at.step(97, [], [5, 6, 7, 8, 4, 15], [], known=97)) == [(1, 0, 32), (1, 32, 64)]


def test_a_lost_block_of_full_attention_is_an_error() -> None:
    """Full attention never loses a block; were one gone, nothing would be saved under its name."""
    at = SavesHarness(FULL, prompt=64)
    with pytest.raises(AssertionError, match="full attention"):
        at.step(64, [], [5, 0, 7, 8])


def test_states_are_saved_where_they_are_offered() -> None:
    """A state goes with the blocks of all its groups, under the hash of its boundary; once."""
    at = SavesHarness(STATES, FULL, prompt=100)
    offers = [StateOffer(0, 21, 96), StateOffer(2, 22, 96)]
    jobs = at.step(100, [0, 0, 0, 0, 0, 21], list(range(1, 8)), [0, 0, 0, 0, 0, 22], offers=offers)
    assert spans(jobs) == [(0, 96, 96), *((1, start, start + BLOCK) for start in range(0, 96, BLOCK))]
    assert (jobs[0].block_ids, jobs[0].prefix) == (((21,), (22,)), jobs[-1].prefix)
    assert at.step(100, [], list(range(1, 8)), [], offers=offers) == []


@pytest.mark.parametrize(
    "offers",
    [
        [StateOffer(0, 21, 96)],  # one of two groups
        [StateOffer(0, 21, 90), StateOffer(2, 22, 90)],  # inside a block
        [StateOffer(0, 0, 96), StateOffer(2, 22, 96)],  # the null block
        [StateOffer(0, 21, 112), StateOffer(2, 22, 112)],  # tokens that are not known yet
    ],
)
def test_offers_that_cannot_be_used(offers: list[StateOffer]) -> None:
    """Half a state, one inside a block or one of unknown tokens is left out."""
    at = SavesHarness(STATES, FULL, prompt=100)
    assert [job for job in at.step(100, [], list(range(1, 8)), [], offers=offers) if job.group == 0] == []


def test_decoding_fills_pages_and_brings_states() -> None:
    """Behind the prompt pages and states follow as their tokens become known, one step late where need be."""
    at = SavesHarness(STATES, FULL, prompt=40)
    assert spans(at.step(40, [], [1, 2, 3], [])) == [(1, 0, 16), (1, 16, 32)]
    # asynchronous scheduling: the forward writes token 47, whose value the scheduler does not know yet
    assert at.step(48, [], [1, 2, 3], [], known=47) == []
    offers = [StateOffer(0, 8, 48), StateOffer(2, 9, 48)]
    assert spans(at.step(49, [], [1, 2, 3], [], offers=offers, known=48)) == [(0, 48, 48), (1, 32, 48)]


def test_the_end_of_a_request_saves_its_tail_from_pinned_blocks() -> None:
    """What was generated up to the last boundary is saved when the request ends; its blocks stay until it is."""
    at = SavesHarness(FULL, prompt=64)
    first = at.step(64, [], list(range(1, 5)))
    at.done(first)
    at.state.tokens = at.tokens[:90]
    at.requests.pop("a")
    at.saves.plan_end(at.state, NAMESPACE, 89, [[], [1, 2, 3, 4, 5, 6]])
    assert len(at.jobs) == 1
    (job,) = at.saves.plan_step([])
    assert spans([job]) == [(0, 0, 80)]
    assert sorted(at.pins.held) == [1, 2, 3, 4, 5]
    at.done([job])
    assert (at.pins.held, len(at.jobs)) == ([], 0)


def test_no_block_is_held_while_vllm_drops_its_cache() -> None:
    """It does not while one is held. What the ranks have is saved all the same."""
    at = SavesHarness(FULL, prompt=64)
    at.done(at.step(64, [], list(range(1, 5))))
    at.state.tokens = at.tokens[:90]
    at.saves.plan_end(at.state, NAMESPACE, 89, [[], [1, 2, 3, 4, 5, 6]])
    (job,) = at.saves.plan_step([])
    assert (len(at.jobs), bool(at.pins.held)) == (1, True)
    at.jobs.give_blocks_back()
    assert (at.pins.held, len(at.jobs)) == ([], 1)
    at.done([job])
    assert (at.pins.held, len(at.jobs)) == ([], 0)


def test_the_end_without_a_block_pool() -> None:
    """Without vLLM's block pool a tail cannot be kept alive and is left out."""
    at = SavesHarness(FULL, prompt=40)
    at.jobs.pins = None
    at.saves.plan_end(at.state, NAMESPACE, 39, [[], [1, 2, 3]])
    assert at.saves.plan_step([]) == []


def test_pins_end_with_failed_saves_too() -> None:
    """A tail that could not be stored gives its blocks back."""
    at = SavesHarness(FULL, prompt=40)
    at.saves.plan_end(at.state, NAMESPACE, 39, [[], [1, 2, 3]])
    jobs = at.saves.plan_step([])
    assert jobs
    at.done(jobs, failed=jobs)
    assert (at.pins.held, len(at.jobs)) == ([], 0)


FULL_BLOCK = len(FULL.layer_names) * CELLS.token_bytes * BLOCK
STATE_BYTES = STATES.rank_block_bytes
STATE_AT_32 = (StateOffer(0, 8, 32), StateOffer(2, 9, 32))


def test_a_state_gets_room_before_pages() -> None:
    """In a step that makes both, the state is saved and the pages of full attention wait in their blocks."""
    at = SavesHarness(STATES, FULL, prompt=40, limit_bytes=STATE_BYTES + FULL_BLOCK)
    first = at.step(32, [], [1, 2, 3], [], offers=STATE_AT_32)
    assert spans(first) == [(0, 32, 32), (1, 0, 16)]
    assert at.meters.get("connector_saves_delayed") == 1
    at.done(first)
    assert spans(at.step(33, [], [1, 2, 3], [])) == [(1, 16, 32)]
    assert at.losses.reported == []


def test_a_state_without_room_waits_in_its_pinned_blocks() -> None:
    """The room is full when the state is made: its blocks stay, no page of full attention gets room before it, and it
    is saved once there is room."""
    at = SavesHarness(STATES, FULL, prompt=64, limit_bytes=2 * STATE_BYTES)
    other = at.open("b", 64)
    offers = [StateOffer(0, 5, 32), StateOffer(2, 6, 32), StateOffer(0, 15, 48), StateOffer(2, 16, 48)]
    states = at.saves.plan_step([at.running(other, 48, [], [11, 12, 13], [], offers=offers)])
    assert spans(states) == [(0, 32, 32), (0, 48, 48)]
    assert at.step(32, [], [1, 2], [], offers=STATE_AT_32) == []
    assert sorted(at.pins.held) == [8, 9]
    assert at.step(33, [], [1, 2], []) == []
    at.done(states[:1])
    assert spans(at.step(34, [], [1, 2], [])) == [(0, 32, 32)]  # before the pages, which came earlier
    assert sorted(at.pins.held) == [8, 9]  # until the ranks answer: its request may give the blocks back
    assert at.step(35, [], [1, 2], [], offers=STATE_AT_32) == []  # not a second time


def test_an_end_without_room_waits_in_its_pinned_blocks() -> None:
    """What is left of a request that has ended is saved before pages of those that run, and all of it."""
    at = SavesHarness(STATES, FULL, prompt=48, limit_bytes=FULL_BLOCK)
    other = at.open("b", 48)
    (first,) = at.step(48, [], [1, 2, 3], [])
    at.requests.pop("a")
    at.saves.plan_end(at.state, NAMESPACE, 48, [[], [1, 2, 3], []])
    assert sorted(at.pins.held) == [2, 3]
    at.done([first])
    seen = []
    for _ in range(4):
        jobs = at.saves.plan_step([at.running(other, 48, [], [11, 12, 13], [])])
        seen += [(job.request_id, job.start_tokens) for job in jobs]
        at.done(jobs)
    assert seen == [("a", 16), ("a", 32), ("b", 0), ("b", 16)]
    assert at.pins.held == []
    assert at.losses.reported == []


def fill(at: SavesHarness) -> list[SaveJob]:
    """Jobs that take all the room."""
    other = at.open("other", 16)
    return at.saves.plan_step([at.running(other, 16, [], [40], [])])


def test_what_waits_too_long_is_lost_by_name() -> None:
    """A store that does not keep up does not hold the engine's blocks: after some seconds they are given back, and
    what was lost is counted and told."""
    at = SavesHarness(STATES, FULL, prompt=48, limit_bytes=FULL_BLOCK)
    assert len(fill(at)) == 1
    assert at.step(32, [], [1, 2], [], offers=STATE_AT_32) == []
    at.requests.pop("a")
    at.saves.plan_end(at.state, NAMESPACE, 48, [[], [1, 2, 3], []])
    assert len(at.pins.held) == 5
    at.clock.now_s += 4.9
    at.saves.plan_step([])
    assert len(at.pins.held) == 5
    at.clock.now_s += 0.2
    at.saves.plan_step([])
    assert at.pins.held == []
    assert at.meters.get("connector_saves", outcome="no_room") == 4
    lost = [(0, 32), (1, 16), (1, 32), (1, 48)]
    assert at.losses.reported == [("a", tokens, group, "save_no_room") for group, tokens in lost]
    assert len(at.jobs) == 1  # what the ranks have


def test_a_long_step_is_no_reason_to_lose_anything() -> None:
    """What waited while one long step was computed gets the room that is free after it."""
    at = SavesHarness(STATES, FULL, prompt=48, limit_bytes=FULL_BLOCK)
    jobs = fill(at)
    assert at.step(32, [], [1, 2], [], offers=STATE_AT_32) == []
    at.clock.now_s += 20
    at.done(jobs)
    assert spans(at.saves.plan_step([])) == [(0, 32, 32)]
    assert at.losses.reported == []


def test_a_lost_state_may_come_again() -> None:
    """A state that was lost is saved if the request is computed again."""
    at = SavesHarness(STATES, FULL, prompt=48, limit_bytes=FULL_BLOCK)
    jobs = fill(at)
    at.step(32, [], [1, 2], [], offers=STATE_AT_32)
    at.clock.now_s += 5.1
    at.saves.plan_step([])
    at.done(jobs)
    assert at.step(32, [], [1, 2], [], offers=STATE_AT_32)[0].group == 0


def test_a_step_looks_at_the_first_page_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """While host memory is full, long prompts have thousands of pages behind it, and each step would look at all."""
    at = SavesHarness(FULL, prompt=1600, limit_bytes=FULL_BLOCK)
    asked: list[int] = []
    monkeypatch.setattr(at.jobs, "has_saved", lambda record, *_: asked.append(record[2]))
    for _ in range(3):
        assert at.step(1600, [], range(1, 101)) == []
    assert len(asked) == 3


def test_only_so_many_blocks_wait() -> None:
    """Half of the engine's blocks at most: what is beyond is lost, so that requests that run keep the others."""
    at = SavesHarness(STATES, FULL, prompt=160, limit_bytes=FULL_BLOCK, num_blocks=8)
    at.saves.plan_end(at.state, NAMESPACE, 160, [[], list(range(1, 11)), []])
    assert sorted(at.pins.held) == [1, 2, 3, 4]
    assert at.losses.reported == [("a", 80, 1, "save_no_room")]


def test_without_a_block_pool_a_state_cannot_wait() -> None:
    """It is lost at once: its blocks cannot be pinned."""
    at = SavesHarness(STATES, FULL, prompt=48, limit_bytes=FULL_BLOCK)
    at.jobs.pins = None
    fill(at)
    assert at.step(32, [], [1, 2], [], offers=STATE_AT_32) == []
    assert at.losses.reported == [("a", 32, 0, "save_no_room")]


def test_what_waits_when_the_engine_stops_is_told() -> None:
    """Its blocks are given back, once."""
    at = SavesHarness(FULL, prompt=40)
    at.saves.plan_end(at.state, NAMESPACE, 39, [[], [1, 2, 3]])
    at.jobs.close()
    at.jobs.close()
    assert (at.pins.held, len(at.jobs)) == ([], 0)
    assert at.losses.reported == [("a", 32, 0, "save_stopped")]


def test_a_failed_state_is_no_hole() -> None:
    """Pages behind a lost state can be used from a later one: they are saved. Behind a lost page they cannot."""
    at = SavesHarness(STATES, FULL, prompt=96)
    state, page = at.step(32, [], [1, 2], [], offers=STATE_AT_32)[:2]
    at.done([state], failed=[state])
    assert spans(at.step(48, [], [1, 2, 3], [])) == [(1, 32, 48)]
    at.done([page], failed=[page])
    assert at.step(64, [], [1, 2, 3, 4], []) == []


def test_jobs_that_were_never_sent() -> None:
    """An error later in the step takes its jobs back: pages and states are planned again, ends wait again."""
    at = SavesHarness(STATES, FULL, prompt=40)
    ended = at.open("b", 40)
    at.requests.pop("b")
    at.saves.plan_end(ended, NAMESPACE, 39, [[], [11, 12, 13], []])
    jobs = at.step(40, [], [1, 2, 3], [], offers=STATE_AT_32)
    assert [(job.request_id, job.group) for job in jobs] == [("a", 0), ("b", 1), ("b", 1), ("a", 1), ("a", 1)]
    at.jobs.withdraw(jobs)
    assert len(at.jobs) == 2
    again = at.step(40, [], [1, 2, 3], [], offers=STATE_AT_32)
    assert spans(again) == spans(jobs)
    at.done(again)
    assert (at.pins.held, len(at.jobs), at.jobs._in_flight_bytes) == ([], 0, 0)


def test_hashing_generated_tokens_reads_no_others() -> None:
    """The engine's steps wait for it, and of a long conversation all tokens are many."""
    read: list[int] = []

    class Tokens(list[int]):
        def __getitem__(self, at: Any) -> Any:
            found = super().__getitem__(at)
            read.append(len(found))
            return found

    at = SavesHarness(FULL, prompt=1600)
    at.state.tokens = Tokens(at.tokens[:1650])
    at.state.extend_chain(1640, BLOCK)
    assert (at.state.hashed_tokens, read) == (1632, [32])


def test_whether_a_prompt_is_hashed_is_asked_until_it_is() -> None:
    """Each step of the engine asks it of all requests."""
    asked: list[bool] = []

    class Watched(Future[None]):
        def done(self) -> bool:
            asked.append(super().done())
            return asked[-1]

    state, hashed = SavesHarness(FULL, prompt=40).state, Watched()
    state.hashed = hashed
    assert not state.is_hashed
    hashed.set_result(None)
    assert [state.is_hashed for _ in range(3)] == [True] * 3
    assert asked == [False, True]
    state.hashed = Future()
    state.hashed.set_exception(ValueError())
    assert not state.is_hashed
    state.hashed = None
    assert not state.is_hashed


def test_resumed_requests_hash_what_they_generated() -> None:
    """After a preemption the prompt to look up is everything known by then."""
    at = SavesHarness(FULL, prompt=40)
    at.step(60, [], [1, 2, 3, 4])
    at.state.preempt()
    assert (len(at.state.prompt), at.state.hashed, at.state.lookup) == (60, None, None)


def test_what_is_lost_before_a_rank_has_it_is_counted_in_records() -> None:
    """One for each slice, as the ranks count theirs."""
    four_heads = replace(FULL, content=CellFacts(4, 4, 4, 4, 2, "bfloat16"))
    at = SavesHarness(four_heads, prompt=40)
    num_slices = at.shape.groups[0].slices.num_slices
    assert num_slices > 1
    at.saves.plan_end(at.state, NAMESPACE, 39, [[], [1, 2, 3]])
    num_jobs = len(at.jobs)
    at.jobs.close()
    assert at.losses.num_records == num_jobs * num_slices > 0
    assert at.meters.get("connector_saves", outcome="stopped") == num_jobs * num_slices
