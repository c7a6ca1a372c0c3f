"""From a request to a hit and back: the scheduler side on a real loop thread and a real store."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from connector.jobs import LoadJob
from connector.prefix_hash import AdapterRequest, PrefixChain
from kvstore.client import trace_parent
from kvstore.errors import Unavailable
from kvstore.testing.steered_store import SteeredStore
from kvstore.testing.waiting import eventually
from tests.unit.connector.scheduler_harness import SchedulerHarness, harness
from tests.unit.connector.support import BLOCK


def blocks_of(job: LoadJob) -> list[int]:
    """The blocks of the first layer group that a load writes."""
    assert job.pieces is not None
    return sorted({block for piece in job.pieces for block in piece.block_ids[0]})


def test_hit_path(at: SchedulerHarness) -> None:
    """A stored prompt is found, staged, loaded into the blocks that vLLM allocates; its lease ends with the load."""
    at.keep("a", 170)
    at.new("a", 170)
    assert at.ask("a") == 160
    assert at.ask("a") == 160, "a question that is asked again has the same answer"
    (job,) = at.admit("a", 160).loads
    assert (job.request_id, at.store.num_leases) == ("a", 1)
    assert job.pieces is not None
    written = sorted((piece.key.slice, block) for piece in job.pieces for block in piece.block_ids[0])
    assert written == [(slice_, block) for slice_ in (0, 1) for block in range(1, 11)]
    assert at.step().loads == (), "a load is ordered once"
    at.finished("a")
    at.no_leases()
    assert at.store.calls["stage"] == 1
    at.side.on_finished("a")


def test_the_trace_of_a_request_goes_with_its_questions(at: SchedulerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookup and stage of a traced request are asked in its trace; those of another one, before and after, in none."""
    seen: list[tuple[str, str]] = []
    for name in ("lookup", "stage"):
        original = getattr(SteeredStore, name)

        async def watched(self: Any, *given: Any, of: Any = original, what: str = name, **more: Any) -> Any:
            seen.append((what, trace_parent.get()))
            return await of(self, *given, **more)

        monkeypatch.setattr(SteeredStore, name, watched)
    at.keep("a", 170)
    for request_id, trace in (("a1", ""), ("a2", "00-a-b-01"), ("a3", "")):
        seen.clear()
        at.new(request_id, 170, "a", trace=trace)
        assert at.ask(request_id) == 160
        assert seen == [("lookup", trace), ("stage", trace)]
        (job,) = at.admit(request_id, 160).loads
        assert job.trace == trace
        at.finished(request_id)
        at.side.on_finished(request_id)
        at.no_leases()


def test_hit_beyond_the_local_one(at: SchedulerHarness) -> None:
    """With 80 tokens in vLLM's own cache only what lies behind is staged and loaded."""
    at.keep("a", 170)
    at.new("a", 170)
    assert at.ask("a", 80) == 80
    (job,) = at.admit("a", 80, 80).loads
    assert blocks_of(job) == [6, 7, 8, 9, 10]
    at.finished("a")


def test_one_token_is_left_to_compute(at: SchedulerHarness) -> None:
    """A prompt that is stored to its last token is resumed one block earlier, from a record that reaches further."""
    at.keep("a", 160)
    at.new("a", 160)
    assert at.ask("a") == 144
    (job,) = at.admit("a", 144).loads
    assert blocks_of(job) == list(range(1, 10))
    at.finished("a")


def test_scheduler_blocks_larger_than_blocks(tmp_path: Path) -> None:
    """Hits end on multiples of vLLM's scheduler block."""
    with harness(tmp_path, {"scheduler_block_tokens": 64}) as at:
        at.keep("a", 170)
        at.new("a", 170)
        assert at.ask("a") == 128


def test_nothing_there(at: SchedulerHarness) -> None:
    """A prompt that is not stored is answered with 0 for good, and nothing is staged."""
    at.new("a", 170)
    assert at.ask("a") == 0
    at.keep("a", 170)
    assert at.side.matched_tokens("a", 0) == 0
    assert at.store.calls["stage"] == 0


def test_a_request_that_stood_in_the_queue_is_looked_up_again(at: SchedulerHarness) -> None:
    """Nothing was stored when it came; when it is its turn, those before it have saved what it shares with them."""
    at.new("a", 170)
    at.hashed("a")
    at.keep("a", 170)
    at.state("a").lookup_started_s -= 3.0
    assert at.ask("a") == 160
    assert at.store.calls["lookup"] == 2


def test_nothing_beyond_the_local_hit(at: SchedulerHarness) -> None:
    """What vLLM holds itself is not fetched."""
    at.keep("a", 170)
    at.new("a", 170)
    assert at.ask("a", 160) == 0
    assert at.store.calls["stage"] == 0


def test_prompts_without_a_resume_point_never_wait(at: SchedulerHarness) -> None:
    """A prompt of one block is answered at once: a step of waiting could not help."""
    for count in (0, 1, BLOCK - 1, BLOCK):
        at.new(f"of {count}", count)
        assert at.side.matched_tokens(f"of {count}", 0) == 0


def test_other_salt_other_pages(at: SchedulerHarness) -> None:
    """A request with a salt does not see what was stored without."""
    at.keep("a", 170)
    at.new("a", 170, cache_salt="tenant")
    assert at.ask("a") == 0


@pytest.mark.parametrize("reason", ["lora", "multimodal"])
def test_uncacheable_requests(at: SchedulerHarness, reason: str) -> None:
    """A request whose pages depend on more than its tokens is neither looked up nor saved, and is counted."""
    at.keep("a", 170)
    at.new("a", 170, uncacheable=reason)
    assert at.side.matched_tokens("a", 0) == 0
    assert at.step({"a": 170}).saves == ()
    assert at.side.meters.get("connector_uncacheable_requests", reason=reason) == 1


def test_unknown_requests(at: SchedulerHarness) -> None:
    """Questions about a request that we were never told of are answered as if there were no connector."""
    assert at.side.matched_tokens("x", 0) == 0
    at.side.on_allocated("x", [[1, 2]], 0)
    at.side.on_loads_finished({"x"}, {"x"})
    at.side.on_finished("x")
    jobs = at.step({"x": 64}, preempted=("x",))
    assert (jobs.loads, jobs.saves) == ((), ())


def test_lookup_too_slow(tmp_path: Path) -> None:
    """An answer that does not come in time is 0, and stays 0 when it comes later."""
    with harness(tmp_path, lookup_timeout_ms=30) as at:
        at.keep("a", 170)
        at.store.held.add("lookup")
        state = at.new("a", 170)
        assert at.ask("a") == 0
        assert sum(at.side.meters.get("connector_misses", reason=f"lookup_{why}") for why in ("timeout", "failed")) == 1
        at.store.held.clear()
        eventually(lambda: state.lookup is not None and state.lookup.done())
        assert [at.side.matched_tokens("a", 0) for _ in range(3)] == [0, 0, 0]
        assert at.store.calls["stage"] == 0


@pytest.mark.parametrize("call", ["lookup", "stage"])
def test_failing_calls(at: SchedulerHarness, call: str) -> None:
    """A lookup or a stage that fails is 0, for this request only."""
    at.keep("a", 170)
    at.store.errors[call] = Unavailable("told to")
    at.new("a", 170)
    assert at.ask("a") == 0
    at.store.errors.clear()
    assert at.side.matched_tokens("a", 0) == 0
    assert at.side.meters.get("connector_misses", reason=f"{call}_failed") == 1
    at.new("b", 170, "a")
    assert at.ask("b") == 160


def test_staging_brings_nothing(at: SchedulerHarness) -> None:
    """Records that went between lookup and stage are a miss, not an endless wait."""
    records = at.keep("a", 170)
    at.store.held.add("stage")
    at.new("a", 170)
    at.ask_until_staged("a")

    async def remove_all(store: object) -> None:
        for record in records:
            at.store.inner.memory.remove(record.key)

    at.bridge.run(remove_all)
    at.store.held.clear()
    assert at.ask("a") == 0
    assert at.side.matched_tokens("a", 0) == 0


def test_local_hit_grows_while_staged(at: SchedulerHarness) -> None:
    """vLLM's own hit may have grown when it asks again: it is promised, and loads, less."""
    at.keep("a", 170)
    at.new("a", 170)
    assert at.ask("a") == 160
    assert at.ask("a", 96) == 64
    (job,) = at.admit("a", 64, 96).loads
    assert blocks_of(job) == [7, 8, 9, 10]
    at.finished("a")


def test_local_hit_outgrows_the_staged_one(at: SchedulerHarness) -> None:
    """When vLLM has everything itself, the lease ends."""
    at.keep("a", 170)
    at.new("a", 170)
    assert at.ask("a") == 160
    assert at.ask("a", 160) == 0
    at.no_leases()


def test_local_hit_shrinks_while_staged(at: SchedulerHarness) -> None:
    """vLLM evicted what it had when we fetched: the rest is fetched too, and the first lease ends."""
    at.keep("a", 170)
    at.new("a", 170)
    assert at.ask("a", 96) == 64
    assert at.side.matched_tokens("a", 0) is None, "what lies below is not staged"
    assert at.ask("a", 0) == 160
    eventually(lambda: at.store.num_leases == 1)
    assert at.store.calls["stage"] == 2
    (job,) = at.admit("a", 160).loads
    assert blocks_of(job) == list(range(1, 11))
    at.finished("a")


def test_vllm_takes_less_than_it_was_promised(at: SchedulerHarness) -> None:
    """The blocks behind its own hit are loaded up to what it took, not the last ones of the promise."""
    at.keep("a", 170)
    at.new("a", 170)
    assert at.ask("a", 32) == 128
    (job,) = at.admit("a", 64, 32).loads
    assert blocks_of(job) == [3, 4, 5, 6]
    at.finished("a")


@pytest.mark.parametrize(("how", "hits"), [("loaded", 1), ("failed", 0), ("aborted", 0)])
def test_a_hit_is_counted_once_it_is_loaded(at: SchedulerHarness, how: str, hits: int) -> None:
    """What a rank could not load is computed, and the load of a request that has ended is discarded: no hit."""
    at.keep("a", 170)
    at.new("a", 170)
    at.admit("a", at.ask("a", 32), 32)
    if how == "aborted":
        at.side.on_finished("a")
    at.finished("a", failed=how == "failed")
    assert at.side.meters.get("connector_hits") == hits
    assert at.side.meters.get("connector_external_tokens") == 128 * hits
    assert at.side.meters.get("connector_staged_records", tier="memory") == 6 * hits


def test_a_hit_of_which_nothing_came_is_no_shorter_hit(at: SchedulerHarness) -> None:
    """What vanished between lookup and stage is a miss, and counted as that alone."""
    records = at.keep("a", 170)
    at.new("a", 170)
    at.hashed("a")

    async def lose_all(store: SteeredStore) -> None:
        for record in records:
            store.inner.memory.remove(record.key)

    at.bridge.run(lose_all)
    assert at.ask("a") == 0
    assert at.side.meters.get("connector_misses", reason="nothing_staged") == 1
    assert at.side.meters.get("connector_hits_cut", reason="staged_less") == 0


def test_not_taken(at: SchedulerHarness) -> None:
    """Blocks were allocated without the hit: the lease ends, nothing is loaded."""
    at.keep("a", 170)
    at.new("a", 170)
    assert at.ask("a") == 160
    assert at.admit("a", 0).loads == ()
    at.no_leases()


@pytest.mark.parametrize("table", [[0, 0, 3, 4], [1, 2]])
def test_a_load_that_cannot_be_planned(at: SchedulerHarness, table: list[int]) -> None:
    """A null block or a short table where the load should go: the ranks report a failure, and none writes."""
    at.keep("a", 64)
    at.new("a", 70, "a")
    assert at.ask("a") == 64
    at.side.on_allocated("a", [table], 64)
    (job,) = at.step().loads
    assert job.pieces is None
    at.finished("a", failed=True)
    at.no_leases()


def test_a_load_of_a_replaced_adapter_is_not_begun(at: SchedulerHarness) -> None:
    """The request would compute the rest with other weights; what is staged for one that waits is given up too."""
    at.keep("a", 170)
    for name in ("ordered", "staged"):
        at.new(name, 170, "a").adapter = AdapterRequest(1, "adapter")
        assert at.ask(name) == 160
    at.side.on_allocated("ordered", [list(range(1, 13))], 160)
    at.side.stop_adapter(1)
    (job,) = at.step().loads
    assert job.pieces is None
    at.finished("ordered", failed=True)
    assert at.ask("ordered") == at.ask("staged") == 0
    at.no_leases()


def test_failed_load_is_never_asked_again(at: SchedulerHarness) -> None:
    """After a failed load the request computes, even when it is preempted and asked for again; others still hit."""
    at.keep("a", 170)
    at.new("a", 170)
    at.admit("a", at.ask("a"))
    at.finished("a", failed=True)
    at.no_leases()
    assert at.side.matched_tokens("a", 0) == 0
    at.step({"a": 100}, preempted=("a",))
    assert at.side.matched_tokens("a", 0) == 0
    assert at.store.calls["stage"] == 1
    at.new("b", 170, "a")
    assert at.ask("b") == 160


def test_preemption_asks_again(at: SchedulerHarness) -> None:
    """A preempted request may resume from the store, whether or not it had a hit before."""
    at.new("a", 170)
    assert at.ask("a") == 0
    at.keep("a", 170)
    at.step({}, preempted=("a",))
    assert at.ask("a") == 160
    at.admit("a", 160)
    at.finished("a")
    at.step({}, preempted=("a",))
    assert at.ask("a") == 160
    assert len({boundary.tokens for boundary in at.state("a").chain.boundaries}) == 10  # type: ignore[union-attr]


def test_preemption_while_the_prompt_is_hashed(at: SchedulerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is hashed by one thread only, however often it is asked for: two would mix up the chain."""
    gate, running, overlaps = threading.Event(), [], []
    extend = PrefixChain.extend

    def slow(chain: PrefixChain, tokens: tuple[int, ...], num_tokens: int) -> None:
        overlaps.append(len(running))
        running.append(chain)
        assert gate.wait(10)
        extend(chain, tokens, num_tokens)
        running.remove(chain)

    monkeypatch.setattr(PrefixChain, "extend", slow)
    at.new("a", 170)
    eventually(lambda: running)
    for _ in range(3):
        at.step({}, preempted=("a",))
        assert at.side.matched_tokens("a", 0) is None
    gate.set()
    assert at.ask("a") == 0
    assert overlaps == [0]
    assert [boundary.tokens for boundary in at.state("a").chain.boundaries] == list(range(16, 161, 16))  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", ["save", "load"])
def test_modes(tmp_path: Path, mode: str) -> None:
    """An engine that only saves never asks for a hit; one that only loads never saves."""
    with harness(tmp_path, mode=mode) as at:
        at.keep("a", 170)
        at.new("a", 170)
        assert at.ask("a") == (160 if mode == "load" else 0)
        at.new("b", 170)
        at.hashed("b")
        assert bool(at.step({"b": 170}).saves) == (mode == "save")
