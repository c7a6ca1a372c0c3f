"""The first prompts of a fresh engine: they wait for what is certain to come soon, and for nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import connector.scheduler.lookups
import connector.scheduler.namespace
from connector.prefix_hash import PrefixChain
from connector.request_parameters import Handoff
from connector.scheduler.hook_facts import StateOffer
from kvstore.errors import Unavailable
from kvstore.testing.waiting import eventually
from tests.unit.connector.saves_harness import SavesHarness
from tests.unit.connector.scheduler_harness import SchedulerHarness, harness, unready_harness
from tests.unit.connector.support import BLOCK, FULL, STATES, WEIGHTS, bridge_to_memory

TIMEOUT_MS = 60


def asked_for_s(at: SchedulerHarness, request_id: str) -> tuple[int, float]:
    """The final answer to vLLM's question, and after how long it came."""
    started_s = time.monotonic()
    return at.ask(request_id), time.monotonic() - started_s


def after(seconds: float, work: Any) -> None:
    threading.Timer(seconds, work).start()


def test_prompts_are_hashed_by_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads that hash would keep the interpreter from the engine's thread, and one long prompt the others."""
    turns: list[int] = []
    busy = threading.Lock()
    extend = PrefixChain.extend

    def watched(chain: PrefixChain, tokens: Any, num_tokens: int) -> None:
        assert busy.acquire(blocking=False), "two prompts are hashed at a time"
        turns.append(len(tokens))
        time.sleep(0.005)
        extend(chain, tokens, num_tokens)
        busy.release()

    monkeypatch.setattr(connector.scheduler.lookups, "HASHED_AT_ONCE", 64)
    with harness(tmp_path) as at:
        monkeypatch.setattr(PrefixChain, "extend", watched)
        for request_id, count in (("long", 200), ("a", 20), ("b", 64)):
            at.new(request_id, count)
        at.hashed("long", "a", "b")
        assert turns[1:3] == [20, 64] and sorted(turns) == [20, 64, *[200] * 4]
        assert [at.state(name).hashed_tokens for name in ("long", "a", "b")] == [192, 16, 64]


def test_a_namespace_that_opens_late(tmp_path: Path) -> None:
    """It takes twenty times what a lookup may, as a private service may to start: the first prompts are hits."""
    with unready_harness(tmp_path, lookup_timeout_ms=TIMEOUT_MS) as at:
        for request_id in ("first", "second"):
            at.keep(request_id, 170)
            at.new(request_id, 170)
            assert at.side.matched_tokens(request_id, 0) is None
        after(20 * TIMEOUT_MS / 1000, at.store.held.clear)
        assert at.ask("first") == 160
        assert at.ask("second") == 160


def test_a_first_lookup_that_is_slow(tmp_path: Path) -> None:
    """A service that was just started answers its first lookups late: they are waited for, and no later one is."""
    with harness(tmp_path, lookup_timeout_ms=TIMEOUT_MS) as at:
        at.store.held.add("lookup")
        for request_id in ("first", "second"):
            at.keep(request_id, 170)
            at.new(request_id, 170)
            assert at.side.matched_tokens(request_id, 0) is None
        after(5 * TIMEOUT_MS / 1000, at.store.held.clear)
        assert at.ask("first") == 160
        assert at.ask("second") == 160
        at.store.held.add("lookup")
        at.new("later", 170)
        answer, seconds = asked_for_s(at, "later")
        assert answer == 0 and seconds < 4 * TIMEOUT_MS / 1000


def test_a_service_that_never_answers_costs_the_time_once(tmp_path: Path) -> None:
    """The first prompt gives up after thirty times the time of a lookup, and those after it at once."""
    with unready_harness(tmp_path, lookup_timeout_ms=TIMEOUT_MS) as at:
        at.new("first", 170)
        answer, seconds = asked_for_s(at, "first")
        assert answer == 0 and 25 * TIMEOUT_MS / 1000 < seconds < 8.0
        at.new("later", 170)
        assert at.side.matched_tokens("later", 0) == 0


def test_a_service_that_is_down_costs_nothing(tmp_path: Path) -> None:
    """No service listens: no prompt waits, not even the first; once one listens, hits are back."""
    with bridge_to_memory() as bridge:
        bridge.store.errors["open_namespace"] = Unavailable("the service is not reachable")
        at = SchedulerHarness(bridge, tmp_path, {}, {"lookup_timeout_ms": 5000})
        eventually(lambda: bridge.store.calls["open_namespace"])
        eventually(lambda: not at.side.namespace.is_expected)
        at.new("first", 170)
        assert at.side.matched_tokens("first", 0) == 0
        del bridge.store.errors["open_namespace"]
        at.become_ready()
        at.keep("a", 170)
        at.new("later", 170, name="a")
        assert at.ask("later") == 160
        at.side.shutdown()


def test_weights_that_take_long_to_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest that was kept is waited for, also on a busy machine; one that takes minutes is not."""
    monkeypatch.setattr(connector.scheduler.namespace, "_DIGEST_S", 0.2)
    reads, digested = threading.Event(), threading.Event()

    def digest(_facts: object, _cache_folder: Path, on_read: Callable[[], None]) -> str:
        assert reads.wait(10)
        on_read()
        assert digested.wait(10)
        return WEIGHTS

    monkeypatch.setattr(connector.scheduler.namespace, "find_weights_id", digest)
    with bridge_to_memory() as bridge:
        at = SchedulerHarness(bridge, tmp_path, {}, {"lookup_timeout_ms": 5000, "weights_id": None})
        at.new("first", 170)
        ends_s = time.monotonic() + 0.5
        while time.monotonic() < ends_s:
            assert at.side.matched_tokens("first", 0) is None
        reads.set()
        answer, seconds = asked_for_s(at, "first")
        assert answer == 0 and seconds < 2.0
        digested.set()
        at.become_ready()
        at.side.shutdown()


@pytest.mark.parametrize("ends", [True, False])
def test_an_engine_that_ends_while_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, ends: bool
) -> None:
    """It failed for a reason of its own, which the end of its log should say. Other errors of ours are logged."""
    why = "cannot schedule new futures after interpreter shutdown" if ends else "a bug"
    asked = threading.Event()

    def digest(*_: object) -> str:
        asked.set()
        raise RuntimeError(why)

    monkeypatch.setattr(connector.scheduler.namespace, "find_weights_id", digest)
    with bridge_to_memory() as bridge:
        at = SchedulerHarness(bridge, tmp_path, {}, {"weights_id": None})
        assert asked.wait(10)
        if ends:
            time.sleep(0.3)
            assert at.side.namespace.refusal is None and "namespace" not in caplog.text
        else:
            eventually(lambda: at.side.namespace.refusal == "RuntimeError: a bug")
            assert "the namespace could not be opened" in caplog.text
        at.side.shutdown()


def lookups_begun(made: SchedulerHarness) -> float:
    return made.side.meters.get("connector_lookup_seconds_count")


def test_a_decode_engine_waits_for_what_is_promised(tmp_path: Path) -> None:
    """A third of a promised prompt is there: the engine asks again, and when the rest has come takes all of it."""
    with harness(tmp_path, max_wait_ms=20_000) as made:
        made.keep("prompt", 6 * BLOCK, ends=[2 * BLOCK])
        made.new("r", 6 * BLOCK + 1, "prompt", handoff=Handoff(6 * BLOCK, wait_s=20.0))
        eventually(lambda: made.side.matched_tokens("r", 0) is not None or lookups_begun(made) >= 3)
        assert made.state("r").fetch is None
        made.keep("prompt", 6 * BLOCK)
        assert made.ask("r") == 6 * BLOCK
        assert made.side.meters.get("connector_handoffs", outcome="arrived") == 1


def test_a_promise_that_is_not_kept_costs_its_time(tmp_path: Path) -> None:
    """The rest never comes: when the time is over, the engine takes what is there."""
    with harness(tmp_path) as made:
        made.keep("prompt", 2 * BLOCK)
        made.new("r", 6 * BLOCK + 1, "prompt", handoff=Handoff(6 * BLOCK, wait_s=0.1))
        assert made.ask("r") == 2 * BLOCK
        assert made.side.meters.get("connector_handoffs", outcome="late") == 1


def test_a_promise_of_which_nothing_comes(tmp_path: Path) -> None:
    """Nothing is ever stored: the request is computed when the time is over."""
    with harness(tmp_path) as made:
        made.new("r", 6 * BLOCK + 1, handoff=Handoff(6 * BLOCK, wait_s=0.1))
        assert made.ask("r") == 0
        assert made.side.meters.get("connector_misses", reason="nothing_stored") == 1


def test_what_the_engine_holds_itself_is_not_waited_for(tmp_path: Path) -> None:
    """A promise that vLLM's own cache covers is kept already, as is one beyond what a hit may cover."""
    with harness(tmp_path) as made:
        made.new("r", 4 * BLOCK, handoff=Handoff(4 * BLOCK, wait_s=20.0))
        assert made.ask("r", local_tokens=3 * BLOCK) == 0
        assert made.side.meters.get("connector_handoffs", outcome="arrived") == 1


def test_a_prefill_engine_promises_what_it_saves(tmp_path: Path) -> None:
    """Pages that are stored, being saved or planned at the request's end count, up to the last block; no more."""
    with harness(tmp_path) as made:
        state = made.new("r", 5 * BLOCK + 7)
        made.hashed("r")
        made.step({"r": 3 * BLOCK + 1})
        assert made.side.saves.promised_tokens(state) <= 3 * BLOCK
        made.step({"r": 5 * BLOCK + 7})
        assert made.side.saves.promised_tokens(state) == 5 * BLOCK


def test_a_hole_is_not_promised(tmp_path: Path) -> None:
    """Without room for a page nothing is promised beyond it."""
    with harness(tmp_path, pinned_bytes=1) as made:
        made.new("first", 8 * BLOCK)
        state = made.new("r", 5 * BLOCK)
        made.hashed("first", "r")
        made.step({"first": 8 * BLOCK})  # takes all the room there is
        made.step({"r": 5 * BLOCK})
        assert made.side.saves.promised_tokens(state) == 0


def test_a_hybrid_promises_a_boundary_with_a_state() -> None:
    """Attention is saved further, but a prompt resumes where there is a state too; without one nowhere."""
    at = SavesHarness(STATES, FULL, prompt=100)
    at.step(100, [], list(range(1, 8)), [])
    assert at.saves.promised_tokens(at.state) == 0
    at = SavesHarness(STATES, FULL, prompt=100)
    at.step(64, [], list(range(1, 5)), [], offers=[StateOffer(0, 21, 64), StateOffer(2, 22, 64)])
    at.step(100, [], list(range(1, 8)), [])
    assert at.saves.promised_tokens(at.state) == 64
