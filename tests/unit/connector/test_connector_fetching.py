"""Fetches: a request's end ends its lease, no hit is promised on an ended lease, and staged records are proven."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from connector.prefix_hash import PrefixChain
from connector.scheduler.audits import Audits
from connector.scheduler.costs import Costs
from connector.scheduler.hits import Hits
from connector.scheduler.requests import RequestState
from connector.settings import ConnectorSettings
from connector.weights import Adapters
from kvstore.api import Staged
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.runtime.instruments import Instruments
from kvstore.runtime.meters import Meters
from kvstore.testing.waiting import eventually, soon
from tests.unit.connector.scheduler_harness import SchedulerHarness, harness
from tests.unit.connector.support import BLOCK, tokens_of
from tests.virtual_time import ManualClock


def test_abort_while_staging(at: SchedulerHarness) -> None:
    """A request that ends while its records are fetched cancels the fetch and leaves no lease."""
    at.keep("a", 170)
    at.store.held.add("stage")
    at.new("a", 170)
    at.ask_until_staged("a")
    eventually(lambda: at.store.calls["stage"] == 1)
    at.side.on_finished("a")
    eventually(lambda: at.store.cancelled == ["stage"])
    at.store.held.clear()
    at.no_leases()


def test_abort_in_the_moment_of_the_lease(at: SchedulerHarness) -> None:
    """A request ends after its lease was granted and before its thread heard of it: the lease ends all the same."""
    at.keep("a", 170)
    granted, go_on = threading.Event(), threading.Event()

    def stop_the_loop() -> None:
        # runs after the stage's task has ended, before its future is done
        granted.set()
        assert go_on.wait(10)

    at.store.after_stage = lambda: at.bridge._loop.call_soon(stop_the_loop) and None
    at.new("a", 170)
    at.ask_until_staged("a")
    assert granted.wait(10)
    assert at.store.num_leases == 1
    at.side.on_finished("a")
    go_on.set()
    at.no_leases()


def test_abort_with_a_staged_hit(at: SchedulerHarness) -> None:
    """A request that ends before it was admitted gives its lease back."""
    at.keep("a", 170)
    at.new("a", 170)
    assert at.ask("a") == 160
    at.side.on_finished("a")
    at.no_leases()


def test_abort_while_loading(at: SchedulerHarness) -> None:
    """The lease of an aborted request lives until the ranks report, since they still read under it."""
    at.keep("a", 170)
    at.new("a", 170)
    at.admit("a", at.ask("a"))
    at.side.on_finished("a")
    at.bridge.run(lambda store: store.status(deadline=soon()))  # earlier work on the store's thread is done
    assert at.store.num_leases == 1
    at.finished("a")
    at.no_leases()
    at.finished("a")  # a second report of it has no effect


def test_abort_before_the_lookup_is_answered(at: SchedulerHarness) -> None:
    """A request that ends early takes its question with it."""
    at.store.held.add("lookup")
    at.new("a", 170)
    eventually(lambda: at.store.calls["lookup"] == 1)
    at.side.on_finished("a")
    eventually(lambda: at.store.cancelled == ["lookup"])


def test_two_requests_with_one_prefix(tmp_path: Path) -> None:
    """In an engine without a cache of its own each has a lease, and the end of one does not end the other's."""
    with harness(tmp_path, facts={"prefix_caching": False}) as at:
        at.keep("a", 170)
        at.new("a", 170)
        at.new("b", 170, "a")
        assert (at.ask("a"), at.ask("b")) == (160, 160)
        at.side.on_finished("a")
        eventually(lambda: at.store.num_leases == 1)
        (job,) = at.admit("b", 160).loads
        assert job.request_id == "b"
        at.finished("b")


def test_a_closed_store(at: SchedulerHarness) -> None:
    """Once the client is closed nothing raises that vLLM does not catch: admission, release and reports go on."""
    at.keep("a", 170)
    at.new("a", 170)
    hit = at.ask("a")
    at.bridge.refuse_further_work()
    (job,) = at.admit("a", hit).loads
    assert job.pieces is not None
    at.finished("a")
    at.side.on_finished("a")
    at.bridge._closed = False
    at.bridge.run(lambda store: store.release(job.lease))  # type: ignore[arg-type]


class LookupsHarness:
    """`Hits` alone, on a clock that the test moves."""

    def __init__(self, at: SchedulerHarness) -> None:
        self.clock, self.at, self.meters = ManualClock(), at, Meters()
        settings = ConnectorSettings(lookup_timeout_ms=5000, max_wait_ms=2000)
        self.hits = Hits(
            at.bridge,
            settings,
            at.facts,
            at.shape,
            costs=Costs(),
            adapters=Adapters(Path("/nowhere"), {}, self.meters),
            audits=Audits(0, at.shape, facts=at.facts, meters=self.meters),
            instruments=Instruments(self.clock, self.meters),
        )
        self.state = RequestState("a", tokens_of("a", 170), PrefixChain(BLOCK))

    @property
    def namespace(self) -> bytes:
        assert self.at.side.namespace.id is not None
        return self.at.side.namespace.id

    def hit(self) -> int | None:
        return self.hits.poll(self.state, self.namespace, 0)  # type: ignore[arg-type]

    def staged(self) -> None:
        eventually(lambda: self.hit() == 160)


def test_lease_is_renewed_by_asking(at: SchedulerHarness) -> None:
    """Each question after a third of the lease's time renews it, once; sooner ones do not."""
    at.keep("a", 170)
    leases = LookupsHarness(at)
    leases.staged()
    for after_s, renewals in ((9.0, 0), (2.0, 1), (9.0, 1), (2.0, 2), (0.0, 2), (29.0, 3)):
        leases.clock.now_s += after_s
        assert leases.hit() == 160
        eventually(lambda renewals=renewals: at.store.calls["renew"] == renewals)
    leases.hits.forget(leases.state)


def test_admission_renews_the_lease(at: SchedulerHarness) -> None:
    """The load starts with the whole time of the lease, however long the hit had waited for its blocks."""
    at.keep("a", 170)
    at.new("a", 170)
    at.admit("a", at.ask("a"))
    eventually(lambda: at.store.calls["renew"] == 1)
    at.finished("a")


def test_lease_of_a_forgotten_hit(at: SchedulerHarness) -> None:
    """Not asked for longer than the lease lasts: it is staged again, never promised on a lease that has ended."""
    at.keep("a", 170)
    leases = LookupsHarness(at)
    leases.staged()
    leases.clock.now_s += 30.0
    assert leases.hit() is None
    leases.staged()
    assert at.store.calls["stage"] == 2
    eventually(lambda: at.store.num_leases == 1)
    leases.hits.forget(leases.state)


def test_lookup_timeout_counts_from_the_first_question(at: SchedulerHarness) -> None:
    """With 5 s to wait, 4.9 s since vLLM's first question are fine, 5.1 s are not."""
    at.keep("a", 170)
    at.store.held.add("lookup")
    leases = LookupsHarness(at)
    leases.hits.lookups.start(leases.state, leases.namespace)  # type: ignore[arg-type]
    leases.clock.now_s += 50
    assert leases.hit() is None
    leases.clock.now_s += 4.9
    assert leases.hit() is None
    leases.clock.now_s += 0.2
    assert leases.hit() == 0
    assert leases.meters.get("connector_misses", reason="lookup_timeout") == 1
    leases.hits.forget(leases.state)


def test_stage_has_a_ceiling(at: SchedulerHarness) -> None:
    """A stage call that does not even keep its own deadline is given up, and leaves no lease when it ends."""
    at.keep("a", 170)
    at.store.held.add("stage")
    leases = LookupsHarness(at)
    eventually(lambda: leases.hit() is None and leases.state.fetch is not None)
    leases.clock.now_s += 2.4
    assert leases.hit() is None
    leases.clock.now_s += 0.2
    assert leases.hit() == 0
    assert leases.meters.get("connector_misses", reason="stage_timeout") == 1
    at.store.held.clear()
    at.no_leases()


def test_steps_longer_than_an_answer_is_fresh(at: SchedulerHarness) -> None:
    """An engine whose steps take seconds asks that rarely: a question put when it asked is answered the next time."""
    at.keep("a", 170)
    leases = LookupsHarness(at)
    leases.hits.lookups.start(leases.state, leases.namespace)  # type: ignore[arg-type]
    for _ in range(4):
        eventually(lambda: leases.state.lookup is not None and leases.state.lookup.done())
        leases.clock.now_s += 2.5
        assert leases.hit() is None
        if leases.state.fetch is not None:
            break
    assert leases.state.fetch is not None
    assert at.store.calls["lookup"] == 2
    leases.hits.forget(leases.state)


NUM_SLICES = 2
"""Of a page of `make_facts`: a prompt of 170 tokens is staged as two pages and a tail of two records each."""


def without(staged: Staged, *dropped: int) -> Staged:
    """The answer without some of its records."""
    kept = [index for index in range(len(staged.keys)) if index not in dropped]
    return replace(
        staged,
        keys=tuple(staged.keys[index] for index in kept),
        spans=tuple(staged.spans[index] for index in kept),
    )


def first_key(staged: Staged, **changes: Any) -> Staged:
    """The answer with another first key."""
    first, *others = staged.keys
    parts = dict(zip(("namespace", "prefix", "group", "slice"), first, strict=True)) | changes
    return replace(staged, keys=(RecordKey(**parts), *others))


WRONG: dict[str, Callable[[Staged], Staged]] = {
    "a page is missing": lambda staged: without(staged, *range(NUM_SLICES)),
    "a slice is missing": lambda staged: without(staged, 1),
    "all is missing": lambda staged: without(staged, *range(len(staged.keys))),
    "a slice in place of another": lambda staged: first_key(staged, slice=staged.keys[1].slice),
    "a slice that does not exist": lambda staged: first_key(staged, slice=NUM_SLICES),
    "a group that does not exist": lambda staged: first_key(staged, group=1),
    "another prompt's page": lambda staged: first_key(staged, prefix=PrefixHash(bytes(32))),
    "another namespace's page": lambda staged: first_key(staged, namespace=NamespaceId(bytes(16))),
    "a page under another page's span": lambda staged: replace(staged, spans=((64, 128), *staged.spans[1:])),
    "a lease that has ended": lambda staged: replace(staged, lease_s=0.0),
    "a point beyond the prompt": lambda staged: replace(staged, resume_tokens=4096),
    "a point inside a block": lambda staged: replace(staged, resume_tokens=150),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_answer_that_does_not_restore_the_prompt(
    at: SchedulerHarness, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """For each fault: no hit is promised, the engine's hooks raise nothing, and its lease ends."""
    at.keep("a", 170)
    at.store.on_stage = WRONG[what]
    at.new("a", 170)
    with caplog.at_level(logging.ERROR, logger="vllm.kvstore"):
        assert at.ask("a") == 0
    at.no_leases()
    assert at.side.meters.get("connector_misses", reason="stage_failed") == 1
    assert "do not restore the prompt" in caplog.text


def test_an_answer_that_does(at: SchedulerHarness) -> None:
    """The same answer as it was, and one that repeats a record, are hits."""
    at.keep("a", 170)
    at.new("a", 170)
    assert at.ask("a") == 160
    at.side.on_finished("a")
    at.store.on_stage = lambda staged: replace(
        staged, keys=(*staged.keys, staged.keys[0]), spans=(*staged.spans, staged.spans[0])
    )
    at.new("b", 170, "a")
    assert at.ask("b") == 160


def test_vllm_takes_more_than_was_promised(at: SchedulerHarness) -> None:
    """Nothing is staged for the rest: the load fails and all is computed."""
    at.keep("a", 170)
    at.new("a", 170)
    assert at.ask("a") == 160
    (job,) = at.admit("a", 176).loads
    assert job.pieces is None
    at.finished("a", failed=True)
