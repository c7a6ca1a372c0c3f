"""Which saves the scheduler side orders: credits, holes, and when it orders none at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from connector.facts import GroupFacts
from connector.jobs import RankReport, StepJobs
from connector.prefix_hash import AdapterRequest, PromptContent
from connector.request_parameters import RequestFlags
from connector.scheduler.hook_facts import PromptFacts, StateOffer, StepFacts
from connector.weights import adapter_identities
from kvstore.api import Retention
from kvstore.errors import InternalError, InvalidRequest, Unavailable, UnsupportedFormat
from kvstore.testing.waiting import eventually
from tests.unit.connector.scheduler_harness import BLOCK_BYTES, SchedulerHarness, harness, unready_harness
from tests.unit.connector.support import FULL, PAGE, STATES, WINDOW
from tests.virtual_time import ManualClock

PAGE_BYTES = BLOCK_BYTES * 4


def stops(jobs: StepJobs) -> list[int]:
    return [job.stop_tokens for job in jobs.saves]


def test_pages_are_saved_as_they_become_final(at: SchedulerHarness) -> None:
    """Chunks of a prompt order its pages and its tail, each once, with their blocks and their own hash."""
    state = at.new("a", 170)
    at.hashed("a")
    steps = [at.step({"a": final}) for final in (60, 130, 170, 171)]
    assert [stops(step) for step in steps] == [[], [64, 128], [160], []]
    jobs = [job for step in steps for job in step.saves]
    assert [(job.start_tokens, job.block_ids) for job in jobs] == [
        (0, ((100, 101, 102, 103),)),
        (64, ((104, 105, 106, 107),)),
        (128, ((108, 109),)),
    ]
    assert state.chain is not None
    by_tokens = {boundary.tokens: boundary.prefix for boundary in state.chain.boundaries}
    assert [job.prefix for job in jobs] == [by_tokens[job.stop_tokens] for job in jobs]
    assert len({job.job_id for job in jobs}) == 3


def test_a_replaced_adapter_stops_the_saves_of_open_requests(at: SchedulerHarness, tmp_path: Path) -> None:
    """Their next chunk may be computed with other weights; requests with another adapter go on."""
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(b"%d" % number)
        adapter = AdapterRequest(number, str(folder), adapter_identities(str(folder)))
        at.new(str(number), 170, content=PromptContent(adapter=adapter))
    at.hashed("1", "2")
    jobs = at.step({"1": 64, "2": 64}).saves
    assert [(job.stop_tokens, job.adapter) for job in jobs] == [
        (64, (str(tmp_path / number), adapter_identities(str(tmp_path / number)))) for number in ("1", "2")
    ]
    at.side.stop_adapter(1)
    last = at.step({"1": 130, "2": 130}).saves
    assert [(job.stop_tokens, job.prefix == at.state("2").prefix_at(128, 16)) for job in last] == [(128, True)]


def test_an_idle_engine_steps_on_until_its_saves_are_done(at: SchedulerHarness) -> None:
    """From the first save's order to the ranks' report of the last."""
    at.new("a", 130)
    at.hashed("a")
    assert not at.side.has_pending_saves
    first, second = at.step({"a": 130}).saves
    at.ranks_done(first.job_id)
    assert at.side.has_pending_saves
    at.ranks_done(second.job_id)
    assert not at.side.has_pending_saves


def test_what_is_there_is_not_saved(at: SchedulerHarness) -> None:
    """Pages that the lookup saw are left out; the tail of a longer prompt is new."""
    at.keep("a", 128)
    at.new("b", 170, "a")
    at.hashed("b")
    assert stops(at.step({"b": 170})) == [160]


def test_a_page_of_which_a_slice_is_missing_is_saved(at: SchedulerHarness) -> None:
    """Half a page is no page."""
    records = at.keep("a", 128)

    async def lose_a_slice(store: object) -> None:
        at.store.inner.memory.remove(records[1].key)

    at.bridge.run(lose_a_slice)
    at.new("a", 128)
    at.hashed("a")
    assert stops(at.step({"a": 128})) == [64]


def test_nothing_twice_over_a_preemption(at: SchedulerHarness) -> None:
    """A preempted request computes its prompt again, and saves only what it had not saved."""
    at.new("a", 170)
    at.hashed("a")
    assert stops(at.step({"a": 130})) == [64, 128]
    assert stops(at.step({}, preempted=("a",))) == []
    assert stops(at.step({"a": 100})) == []
    assert stops(at.step({"a": 170})) == [160]


def test_before_the_prompt_is_hashed(at: SchedulerHarness) -> None:
    """Nothing is saved until the hash is known; then everything that is final by then."""
    at.store.held.add("lookup")
    state = at.new("a", 170)
    eventually(lambda: state.is_hashed)
    state.hashed, hashed = type(state.hashed)(), state.hashed  # type: ignore[misc]
    assert stops(at.step({"a": 130})) == []
    state.hashed = hashed
    assert stops(at.step({"a": 170})) == [64, 128, 160]


@pytest.mark.parametrize("fleeting", [STATES, WINDOW], ids=["states", "window"])
def test_what_is_offered_once_is_not_computed_before_the_prompt_is_hashed(tmp_path: Path, fleeting: GroupFacts) -> None:
    """Also where nothing is looked up for it: an engine that only saves computes a short prompt in its first step."""
    with harness(tmp_path, {"groups": (fleeting, FULL)}, mode="save") as at:
        offers = [StateOffer(feed, 7, 160) for feed in fleeting.feed_groups]
        with at.bridge.stopped():
            state = at.new("a", 170)
            assert at.side.matched_tokens("a", 0) is None
        eventually(lambda: state.is_hashed)
        assert at.side.matched_tokens("a", 0) == 0
        at.side.on_allocated("a", [], 0)
        tables = {"a": [tuple(range(100, 164))] * 3}
        jobs = at.side.plan_step(StepFacts({"a": 170}, tables, {"a": offers} if fleeting is STATES else {}))
        assert {job.group for job in jobs.saves} == {0, 1}
        assert max(stops(jobs)) == 160


def test_an_answer_that_reaches_the_first_boundary(tmp_path: Path) -> None:
    """Of a prompt that ends before it: vLLM offers the state there once, in the step that computes it. Nothing is
    looked up for such a prompt, and it waits for nothing."""
    with harness(tmp_path, {"groups": (STATES, FULL)}) as at:
        state = at.new("a", 15)
        assert at.side.matched_tokens("a", 0) == 0
        at.side.on_allocated("a", [], 0)
        eventually(lambda: state.is_hashed)
        state.tokens = [*state.prompt, 1, 2]
        offers = {"a": [StateOffer(feed, 7, 16) for feed in STATES.feed_groups]}
        jobs = at.side.plan_step(StepFacts({"a": 16}, {"a": [tuple(range(100, 164))] * 3}, offers))
        assert {job.group for job in jobs.saves} == {0, 1}
        assert state.lookup is None


def test_a_prompt_that_cannot_be_hashed_in_time_is_computed(tmp_path: Path) -> None:
    with harness(tmp_path, {"groups": (STATES, FULL)}, mode="save", lookup_timeout_ms=20) as at, at.bridge.stopped():
        at.new("a", 170)
        assert at.ask("a") == 0
        assert stops(at.step({"a": 170}, offers={"a": [StateOffer(0, 7, 160)]})) == []
        assert at.side.meters.get("connector_saves", outcome="not_hashed") == 1


def test_pages_that_can_be_saved_later_are_not_waited_for(tmp_path: Path) -> None:
    """Full attention keeps its blocks: the request is computed at once."""
    with harness(tmp_path, mode="save") as at, at.bridge.stopped():
        at.new("a", 170)
        assert at.side.matched_tokens("a", 0) == 0


def test_a_prompt_that_cannot_be_hashed(at: SchedulerHarness) -> None:
    """Tokens that are no 32-bit numbers leave their own request uncached and no other one."""
    at.side.on_new_request(PromptFacts("bad", (2**32, *range(99))))
    at.new("a", 64)
    at.hashed("a")
    bad = at.state("bad")
    eventually(lambda: bad.hashed is not None and bad.hashed.done())
    assert at.ask("bad") == 0
    assert stops(at.step({"bad": 100, "a": 64})) == [64]


def test_credits(tmp_path: Path) -> None:
    """With room for two pages a third waits for its turn, until the ranks report; nothing is skipped or repeated."""
    with harness(tmp_path, pinned_bytes=2 * 2 * PAGE_BYTES) as at:
        at.new("a", 5 * PAGE)
        at.hashed("a")
        first = at.step({"a": 5 * PAGE})
        assert stops(first) == [64, 128]
        assert stops(at.step({"a": 5 * PAGE + 1})) == []
        assert at.side.meters.get("connector_saves_delayed") == 1
        at.ranks_done(first.saves[0].job_id)
        second = at.step({"a": 5 * PAGE + 2})
        assert stops(second) == [192]
        at.ranks_done(first.saves[1].job_id, second.saves[0].job_id)
        assert stops(at.step({"a": 5 * PAGE + 3})) == [256, 320]


def test_a_common_prefix_is_saved_once(at: SchedulerHarness) -> None:
    """Requests that arrive together all find it missing; what is in flight for one is not saved for another."""
    for name in "abc":
        at.new(name, 170, "same")
    at.hashed(*"abc")
    jobs = at.step(dict.fromkeys("ab", 130)).saves
    assert [(job.request_id, job.stop_tokens) for job in jobs] == [("a", 64), ("a", 128)]
    at.ranks_done(*(job.job_id for job in jobs))
    later = at.step(dict.fromkeys("abc", 170)).saves
    assert [(job.request_id, job.stop_tokens) for job in later] == [("a", 160)]


def test_what_was_saved_before_the_lookup_and_is_gone_is_saved_again(at: SchedulerHarness) -> None:
    """The store evicts; the lookup knows."""
    at.new("a", 64, "same")
    at.hashed("a")
    (job,) = at.step({"a": 64}).saves
    at.ranks_done(job.job_id)  # the store has nothing
    at.new("b", 64, "same")
    at.hashed("b")
    assert stops(at.step({"b": 64})) == [64]


def test_what_failed_for_one_request_is_saved_for_another(at: SchedulerHarness) -> None:
    at.new("a", 64, "same")
    at.new("b", 64, "same")
    at.hashed("a", "b")
    (job,) = at.step({"a": 64}).saves
    at.ranks_done(job.job_id, failed=(job.job_id,))
    assert stops(at.step({"b": 64})) == [64]


def test_what_fails_for_one_request_is_saved_for_those_that_relied_on_it(tmp_path: Path) -> None:
    """As soon as one rank has failed; also if the other request has gone on meanwhile."""
    with harness(tmp_path, {"tp_size": 2}) as at:
        for name in "ab":
            at.new(name, 170, "same")
        at.hashed("a", "b")
        first, second = at.step({"a": 130, "b": 130}).saves
        assert first.request_id == second.request_id == "a"
        at.side.on_rank_report(RankReport({first.job_id: 1}, {first.job_id}))
        again = at.step({"a": 131, "b": 131}).saves
        assert [(job.request_id, job.stop_tokens) for job in again] == [("b", 64)]
        at.side.on_rank_report(RankReport({first.job_id: 1, second.job_id: 2, again[0].job_id: 2}, set()))
        assert [(job.request_id, job.stop_tokens) for job in at.step({"a": 170, "b": 170}).saves] == [("b", 160)]


def test_what_was_saved_long_ago_is_saved_again(tmp_path: Path) -> None:
    """A request that waits for its turn was looked up when it came; the store may have dropped the page since."""
    clock = ManualClock()
    with harness(tmp_path, clock=clock) as at:
        at.new("a", 64, "same")
        at.new("b", 64, "same")
        at.hashed("a", "b")
        (job,) = at.step({"a": 64}).saves
        at.ranks_done(job.job_id)
        clock.now_s += 31
        assert stops(at.step({"b": 64})) == [64]


def test_a_page_that_found_no_room_is_saved_for_the_first_that_finds_some(tmp_path: Path) -> None:
    """A page without host memory may be lost, so another request that has it in its blocks plans it too."""
    with harness(tmp_path, pinned_bytes=2 * PAGE_BYTES) as at:
        for name, prompt in (("a", "first"), ("b", "same"), ("c", "same")):
            at.new(name, 64, prompt)
        at.hashed(*"abc")
        (first,) = at.step({"a": 64, "b": 64}).saves
        at.side.on_finished("a")
        assert at.step({"b": 64, "c": 64}).saves == ()
        at.ranks_done(first.job_id)
        (job,) = at.step({"c": 64}).saves
        assert at.step({"b": 65, "c": 65}).saves == ()
        at.ranks_done(job.job_id)
        assert at.step({"b": 66, "c": 66}).saves == ()


def test_a_request_whose_pages_are_kept_otherwise_saves_them_itself(at: SchedulerHarness) -> None:
    at.new("a", 64, "same")
    at.new("b", 64, "same", flags=RequestFlags(retention=Retention.SHORT))
    at.hashed("a", "b")
    jobs = at.step({"a": 64, "b": 64}).saves
    assert [(job.request_id, job.retention) for job in jobs] == [("a", Retention.NORMAL), ("b", Retention.SHORT)]


def test_credits_are_shared_by_requests(tmp_path: Path) -> None:
    """One request's saves in flight hold back another's, and a request's end does not give them back."""
    with harness(tmp_path, pinned_bytes=2 * PAGE_BYTES) as at:
        at.new("a", 64)
        at.new("b", 64)
        at.hashed("a", "b")
        (job,) = at.step({"a": 64, "b": 64}).saves
        at.side.on_finished("a")
        assert at.step({"b": 65}).saves == ()
        at.ranks_done(job.job_id)
        assert stops(at.step({"b": 66})) == [64]


def test_a_page_that_never_fits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Half of the room is less than a page: nothing is saved, the log says so once and names the value that would do,
    and with that value the page is saved."""
    caplog.set_level("INFO", logger="vllm.kvstore")
    with harness(tmp_path, pinned_bytes=10) as at:
        at.new("a", 128)
        at.hashed("a")
        assert at.step({"a": 128}).saves == ()
        assert at.side.budget.needed_bytes == 2 * PAGE_BYTES
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "never saved" in said and 'set "pinned_bytes":"1MiB" or more' in said
    with harness(tmp_path, pinned_bytes=2 * PAGE_BYTES) as at:
        at.new("a", 128)
        at.hashed("a")
        (job,) = at.step({"a": 128}).saves
        at.ranks_done(job.job_id)
        assert stops(at.step({"a": 129})) == [128]


def test_every_rank_must_report(tmp_path: Path) -> None:
    """Room is given back when the last of two ranks has reported, in one report or in two."""
    with harness(tmp_path, {"tp_size": 2, "rank_heads": 1}, pinned_bytes=PAGE_BYTES) as at:
        at.new("a", 5 * PAGE)
        at.hashed("a")
        (first,) = at.step({"a": 320}).saves
        at.ranks_done(first.job_id)
        assert at.step({"a": 321}).saves == ()
        at.ranks_done(first.job_id)
        (second,) = at.step({"a": 322}).saves
        one = RankReport({second.job_id: 1}, set())
        at.side.on_rank_report(one.merge(RankReport({second.job_id: 1}, set())))
        assert stops(at.step({"a": 323})) == [192]


def test_reports_add_up() -> None:
    """Reports of ranks add counts and unite failures, and change neither of the two."""
    one, other = RankReport({1: 1, 2: 1}, {7}), RankReport({2: 1, 3: 1}, {8})
    assert one.merge(other) == RankReport({1: 1, 2: 2, 3: 1}, {7, 8})
    assert (one, other) == (RankReport({1: 1, 2: 1}, {7}), RankReport({2: 1, 3: 1}, {8}))


def test_a_failed_save_ends_its_request_s_saves(at: SchedulerHarness) -> None:
    """Behind a page that was dropped nothing could ever be used; other requests go on."""
    at.new("a", 170)
    at.new("b", 170)
    at.hashed("a", "b")
    jobs = at.step({"a": 64, "b": 64}).saves
    at.ranks_done(jobs[0].job_id, jobs[1].job_id, failed=(jobs[0].job_id,))
    assert [job.start_tokens for job in at.step({"a": 170, "b": 170}).saves] == [64, 128]
    assert len(at.side.save_jobs) == 2


def test_reports_of_unknown_jobs(at: SchedulerHarness) -> None:
    """A report about a job that is long done changes nothing."""
    at.ranks_done(99, failed=(98, 99))
    at.new("a", 64)
    at.hashed("a")
    assert stops(at.step({"a": 64})) == [64]


def test_an_error_in_a_step_leaks_no_credit(tmp_path: Path) -> None:
    """Jobs of a step that ended with an error were never sent: their room is free again, and loads are not lost."""
    with harness(tmp_path, pinned_bytes=2 * PAGE_BYTES) as at:
        at.keep("h", 70)
        at.new("h", 70)
        at.side.on_allocated("h", [[1, 2, 3, 4, 5]], at.ask("h"))
        for name in "ab":
            at.new(name, 64)
        at.hashed("a", "b")
        with pytest.raises(KeyError):
            at.side.plan_step(StepFacts({"a": 64, "b": 64}, {"a": [range(1, 5)]}))
        assert len(at.side.save_jobs) == 0
        at.new("c", 64)
        at.hashed("c")
        jobs = at.step({"c": 64})
        assert stops(jobs) == [64]
        assert [job.request_id for job in jobs.loads] == ["h"]
        at.finished("h")


def test_what_is_withdrawn_from_one_request_is_saved_for_those_that_relied_on_it(at: SchedulerHarness) -> None:
    """Their step ended with an error, and the first request is aborted."""
    for name in "ab":
        at.new(name, 64, "same")
    at.new("c", 64)
    at.hashed(*"abc")
    with pytest.raises(KeyError):
        at.side.plan_step(StepFacts(dict.fromkeys("abc", 64), {name: [range(1, 5)] for name in "ab"}))
    at.side.on_finished("a")
    assert [(job.request_id, job.stop_tokens) for job in at.step({"b": 65}).saves] == [("b", 64)]


def test_a_chain_out_of_order_saves_nothing(at: SchedulerHarness) -> None:
    """Were a boundary ever not where it belongs, the step would fail instead of storing a page under a wrong name."""
    state = at.new("a", 170)
    at.hashed("a")
    assert state.chain is not None
    state.lookup = None
    state.chain.boundaries.insert(1, state.chain.boundaries[1])
    with pytest.raises(AssertionError):
        at.step({"a": 170})
    assert len(at.side.save_jobs) == 0


@pytest.fixture
def unready(tmp_path: Path) -> Iterator[SchedulerHarness]:
    with unready_harness(tmp_path) as made:
        yield made


def neither_hits_nor_saves(at: SchedulerHarness) -> None:
    at.new("n", 170)
    assert at.ask("n") == 0
    assert at.step({"n": 170}) == StepJobs()
    assert not at.side.is_ready


def test_not_ready_without_a_namespace(tmp_path: Path) -> None:
    """Until the service has opened the namespace there are neither hits nor saves; afterwards both, also for a request
    that came before."""
    with unready_harness(tmp_path, lookup_timeout_ms=50) as at:
        at.new("early", 170)
        neither_hits_nor_saves(at)
        at.store.held.clear()
        eventually(lambda: at.side.is_ready)
        saved: list[int] = []  # from the step on after which it is hashed
        eventually(lambda: bool(saved.extend(stops(at.step({"early": 170}))) or saved))
        assert saved == [64, 128, 160]
        at.new("later", 170)
        assert at.ask("later") == 0
        assert at.store.calls["lookup"] >= 1


def test_first_request_waits_for_the_namespace(unready: SchedulerHarness) -> None:
    """A request that comes while the namespace is opened is asked again, and then hits."""
    at = unready
    at.keep("a", 170)
    at.new("a", 170)
    assert at.side.matched_tokens("a", 0) is None
    at.store.held.clear()
    assert at.ask("a") == 160


def test_a_service_that_is_not_there_slows_nobody(tmp_path: Path) -> None:
    """Once the first request has waited in vain, no other one waits at all."""
    with unready_harness(tmp_path, lookup_timeout_ms=20) as at:
        at.new("lora", 170, uncacheable="lora")
        assert at.side.matched_tokens("lora", 0) == 0
        at.new("a", 170)
        assert at.side.matched_tokens("a", 0) is None
        assert at.ask("a") == 0
        for number in range(5):
            at.new(str(number), 170)
            assert at.side.matched_tokens(str(number), 0) == 0


def test_a_rank_that_refuses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One rank whose layout is not proven leaves the whole engine uncached, and says why, once."""
    with (
        caplog.at_level("WARNING", logger="vllm.kvstore"),
        unready_harness(tmp_path, {0: None, 1: "unknown cache layout", 2: "another"}) as at,
    ):
        at.store.held.clear()
        neither_hits_nor_saves(at)
        assert at.side.namespace.refusal == "rank 1: unknown cache layout"
        assert at.store.calls["open_namespace"] == 0
    assert len([record for record in caplog.records if "not cached" in record.message]) == 1


@pytest.mark.parametrize(
    "error",
    [InvalidRequest("other tenant"), UnsupportedFormat("protocol 9"), InternalError("bug"), ZeroDivisionError("oops")],
)
def test_a_service_that_refuses(tmp_path: Path, error: Exception) -> None:
    """For every answer of the service but "not now", the engine runs uncached and the reason can be read."""
    with unready_harness(tmp_path) as at:
        at.store.errors["open_namespace"] = error
        at.store.held.clear()
        assert str(error) in eventually(lambda: at.side.namespace.refusal)
        neither_hits_nor_saves(at)


def test_a_service_that_comes_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that starts before its service is cached once the service is there."""
    monkeypatch.setattr("connector.scheduler.namespace._OPEN_RETRY_S", 0.01)
    with unready_harness(tmp_path) as at:
        at.store.errors["open_namespace"] = Unavailable("not yet")
        at.store.held.clear()
        eventually(lambda: at.store.calls["open_namespace"] >= 3)
        assert not at.side.is_ready
        at.store.errors.clear()
        eventually(lambda: at.side.is_ready)


def test_no_weights(tmp_path: Path) -> None:
    """Without weight files and without an id the engine runs uncached and says what to set."""
    with unready_harness(tmp_path, weights_id=None) as at:
        assert "set weights_id" in eventually(lambda: at.side.namespace.refusal)
        neither_hits_nor_saves(at)
        assert at.store.calls["open_namespace"] == 0


def test_weights_are_digested_off_the_engine_s_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a large checkpoint is read, the constructor has returned and requests are answered."""
    gate = threading.Event()

    def slow(*_: object) -> str:
        assert gate.wait(10)
        return "digest"

    monkeypatch.setattr("connector.scheduler.namespace.find_weights_id", slow)
    with unready_harness(tmp_path, weights_id=None, lookup_timeout_ms=10) as at:
        at.store.held.clear()
        neither_hits_nor_saves(at)
        gate.set()
        eventually(lambda: at.side.is_ready)


def test_shutdown_twice(at: SchedulerHarness) -> None:
    """Shutting down ends the leases of what was staged, and doing it again is fine."""
    at.keep("a", 170)
    at.new("a", 170)
    assert at.ask("a") == 160
    at.side.shutdown()
    at.no_leases()
    at.side.shutdown()
    assert len(at.side.requests) == 0
