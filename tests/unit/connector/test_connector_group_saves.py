"""What is saved of models with windows and recurrent states, and of requests that ended."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from connector.facts import GroupFacts
from connector.identity import CacheShape, read_shape
from connector.jobs import RankReport, SaveJob
from connector.prefix_hash import PrefixChain
from connector.scheduler.ledger import Ledger, RequestState
from connector.scheduler.saves import Offer, Saves
from kvstore.model.keys import NamespaceId
from kvstore.runtime.meters import Meters
from tests.unit.connector.support import BLOCK, CELLS, FULL, STATES, WINDOW, make_facts, tokens_of

NAMESPACE = NamespaceId(bytes(16))


def shape_of(*groups: GroupFacts) -> CacheShape:
    shape = read_shape(make_facts(groups=groups))
    assert isinstance(shape, CacheShape)
    return shape


class Pins:
    """Counts pins; a block must not be unpinned more often than pinned."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def pin(self, block_ids: Sequence[int]) -> None:
        self.held += block_ids

    def unpin(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.held.remove(block_id)


class World:
    """Saves of one request, whose tokens grow as a test says."""

    def __init__(self, *groups: GroupFacts, prompt: int, limit_bytes: int = 1 << 20) -> None:
        self.shape = shape_of(*groups)
        self.ledger, self.meters, self.pins = Ledger(), Meters(), Pins()
        self.saves = Saves(self.shape, num_ranks=1, limit_bytes=limit_bytes, ledger=self.ledger, meters=self.meters)
        self.saves.pins = self.pins
        self.tokens = list(tokens_of("a", 2000))
        chain = PrefixChain(self.shape.boundary_tokens)
        self.state = RequestState("a", tuple(self.tokens[:prompt]), chain, self.tokens[:prompt])
        chain.extend(self.state.prompt)
        self.state.hashed = Future()
        self.state.hashed.set_result(None)
        self.ledger.open(self.state)

    def step(
        self, final: int, *tables: Sequence[int], offers: Sequence[Offer] = (), known: int | None = None
    ) -> list[SaveJob]:
        self.state.known = self.tokens[: known or max(final, len(self.state.known))]
        return self.saves.plan_step(self.state, NAMESPACE, final, lambda: tables, offers)

    def done(self, jobs: Sequence[SaveJob], failed: Sequence[SaveJob] = ()) -> None:
        self.saves.on_rank_report(RankReport({job.job_id: 1 for job in jobs}, {job.job_id for job in failed}))


def spans(jobs: Sequence[SaveJob]) -> list[tuple[int, int, int]]:
    return [(job.group, job.start_tokens, job.stop_tokens) for job in jobs]


def test_pages_are_no_longer_than_the_window() -> None:
    """With a window of two blocks pages are two blocks, of both groups, each with the blocks of all its feeds."""
    at = World(WINDOW, FULL, prompt=64)
    jobs = at.step(64, [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12])
    assert spans(jobs) == [(0, 0, 32), (0, 32, 64), (1, 0, 32), (1, 32, 64)]
    assert [job.block_ids for job in jobs] == [((1, 2), (9, 10)), ((3, 4), (11, 12)), ((5, 6),), ((7, 8),)]


def test_a_window_that_passed_leaves_only_its_own_page_out() -> None:
    """A page that found no room in time has lost its blocks: the window goes on without it, full attention does not
    lose anything."""
    small = len(FULL.layer_names) * CELLS.token_bytes * BLOCK
    at = World(WINDOW, FULL, prompt=96, limit_bytes=4 * small)
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
    at = World(FULL, prompt=64)
    with pytest.raises(AssertionError, match="full attention"):
        at.step(64, [], [5, 0, 7, 8])


def test_states_are_saved_where_they_are_offered() -> None:
    """A state goes with the blocks of all its groups, under the hash of its boundary; once."""
    at = World(STATES, FULL, prompt=100)
    offers = [Offer(0, 21, 96), Offer(2, 22, 96)]
    jobs = at.step(100, [0, 0, 0, 0, 0, 21], list(range(1, 8)), [0, 0, 0, 0, 0, 22], offers=offers)
    assert spans(jobs) == [(1, start, start + BLOCK) for start in range(0, 96, BLOCK)] + [(0, 96, 96)]
    assert (jobs[-1].block_ids, jobs[-1].prefix) == (((21,), (22,)), jobs[-2].prefix)
    assert at.step(100, [], list(range(1, 8)), [], offers=offers) == []


@pytest.mark.parametrize(
    "offers",
    [
        [Offer(0, 21, 96)],  # one of two groups
        [Offer(0, 21, 90), Offer(2, 22, 90)],  # inside a block
        [Offer(0, 0, 96), Offer(2, 22, 96)],  # the null block
        [Offer(0, 21, 112), Offer(2, 22, 112)],  # tokens that are not known yet
    ],
)
def test_offers_that_cannot_be_used(offers: list[Offer]) -> None:
    """Half a state, one inside a block or one of unknown tokens is left out."""
    at = World(STATES, FULL, prompt=100)
    assert [job for job in at.step(100, [], list(range(1, 8)), [], offers=offers) if job.group == 0] == []


def test_decoding_fills_pages_and_brings_states() -> None:
    """Behind the prompt pages and states follow as their tokens become known, one step late where need be."""
    at = World(STATES, FULL, prompt=40)
    assert spans(at.step(40, [], [1, 2, 3], [])) == [(1, 0, 16), (1, 16, 32)]
    # asynchronous scheduling: the forward writes token 47, whose value the scheduler does not know yet
    assert at.step(48, [], [1, 2, 3], [], known=47) == []
    offers = [Offer(0, 8, 48), Offer(2, 9, 48)]
    assert spans(at.step(49, [], [1, 2, 3], [], offers=offers, known=48)) == [(1, 32, 48), (0, 48, 48)]


def test_the_end_of_a_request_saves_its_tail_from_pinned_blocks() -> None:
    """What was generated up to the last boundary is saved when the request ends; its blocks stay until it is."""
    at = World(FULL, prompt=64)
    first = at.step(64, [], list(range(1, 5)))
    at.done(first)
    at.state.known = at.tokens[:90]
    at.ledger.close("a")
    at.saves.plan_end(at.state, NAMESPACE, 89, [[], [1, 2, 3, 4, 5, 6]])
    assert len(at.saves) == 1
    (job,) = at.saves.take_ended()
    assert spans([job]) == [(0, 0, 80)]
    assert sorted(at.pins.held) == [1, 2, 3, 4, 5]
    at.done([job])
    assert (at.pins.held, len(at.saves)) == ([], 0)


def test_the_end_without_a_block_pool() -> None:
    """Without vLLM's block pool a tail cannot be kept alive and is left out."""
    at = World(FULL, prompt=40)
    at.saves.pins = None
    at.saves.plan_end(at.state, NAMESPACE, 39, [[], [1, 2, 3]])
    assert at.saves.take_ended() == []


def test_pins_end_with_failed_saves_too() -> None:
    """A tail that could not be stored gives its blocks back."""
    at = World(FULL, prompt=40)
    at.saves.plan_end(at.state, NAMESPACE, 39, [[], [1, 2, 3]])
    jobs = at.saves.take_ended()
    at.done(jobs, failed=jobs)
    assert (at.pins.held, len(at.saves)) == ([], 0)


def test_what_has_no_second_chance_is_lost_without_room() -> None:
    """A state that finds no room, and the end of a request, are counted as lost and not as waiting."""
    at = World(STATES, FULL, prompt=40, limit_bytes=1)
    at.step(32, [], [1, 2, 3], [], offers=[Offer(0, 8, 32), Offer(2, 9, 32)])  # one page always fits
    assert at.meters.get("connector_saves", outcome="no_room") == 1
    assert at.meters.get("connector_saves_delayed") == 1  # the second page, which the next step tries again
    at.saves.plan_end(at.state, NAMESPACE, 39, [[], [1, 2, 3], []])
    assert at.meters.get("connector_saves", outcome="no_room") == 2
    assert at.meters.get("connector_saves_delayed") == 1


def test_jobs_that_were_never_sent() -> None:
    """An error later in the step takes its jobs back, but not those of requests that ended: these go out next."""
    at = World(FULL, prompt=40)
    at.saves.plan_end(at.state, NAMESPACE, 39, [[], [1, 2, 3]])
    first = at.saves.next_job_id
    at.state.cursors.clear()
    assert len(at.step(40, [], [1, 2, 3])) == 1
    at.saves.withdraw(first)
    assert len(at.saves) == 1
    assert len(at.saves.take_ended()) == 1


def test_resumed_requests_hash_what_they_generated() -> None:
    """After a preemption the prompt to look up is everything known by then."""
    at = World(FULL, prompt=40)
    at.step(60, [], [1, 2, 3, 4])
    at.state.resume()
    assert (len(at.state.prompt), at.state.hashed, at.state.lookup) == (60, None, None)
