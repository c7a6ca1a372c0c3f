"""The first prompts of a fresh engine: they wait for what is certain to come soon, and for nothing else."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

import connector.scheduler.namespace
from kvstore.errors import Unavailable
from tests.unit.connector.scheduler_harness import SchedulerHarness, harness, unready_harness
from tests.unit.connector.support import WEIGHTS, bridge_to_memory, eventually

TIMEOUT_MS = 60


def asked_for_s(at: SchedulerHarness, request_id: str) -> tuple[int, float]:
    """The final answer to vLLM's question, and after how long it came."""
    started_s = time.monotonic()
    return at.ask(request_id), time.monotonic() - started_s


def after(seconds: float, work: Any) -> None:
    threading.Timer(seconds, work).start()


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
    """Nobody listens: no prompt waits, not even the first; once it listens, hits are back."""
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
    """A digest that was kept is waited for; one that takes minutes is not."""
    monkeypatch.setattr(connector.scheduler.namespace, "_DIGEST_S", 0.2)
    digested = threading.Event()

    def digest(*_: object) -> str:
        assert digested.wait(10)
        return WEIGHTS

    monkeypatch.setattr(connector.scheduler.namespace, "find_weights_id", digest)
    with bridge_to_memory() as bridge:
        at = SchedulerHarness(bridge, tmp_path, {}, {"lookup_timeout_ms": 5000, "weights_id": None})
        at.new("first", 170)
        assert at.side.matched_tokens("first", 0) is None
        answer, seconds = asked_for_s(at, "first")
        assert answer == 0 and seconds < 2.0
        digested.set()
        at.become_ready()
        at.side.shutdown()
