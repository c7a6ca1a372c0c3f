"""Lookups of vLLM's own offloading, over a door that answers in an order of the test's."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from connector.offloading.lookups import Lookups, Request
from kvstore.testing.waiting import eventually

KEYS = [f"chunk {at}".encode() + bytes(4) for at in range(2)]
TIMEOUT_S = 5.0


class Door:
    """Everything is stored. The second key is answered first."""

    def __init__(self) -> None:
        self.layout = SimpleNamespace(chained=True, page_tokens=16)
        self.reported: list[str] = []

    def present(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        if KEYS[0] in keys:
            eventually(lambda: "second" in self.reported)
        return [True] * len(keys)

    def report(self, request: str, *_: Any, **__: Any) -> None:
        self.reported.append(request)


def test_an_answer_that_came_in_time_counts_after_a_long_step(monkeypatch: Any) -> None:
    """Two requests are looked up, and the engine's step takes longer than an answer may: both answers came before."""
    door, now_s = Door(), [time.monotonic()]
    clock = SimpleNamespace(monotonic_s=lambda: now_s[0])
    monkeypatch.setattr("connector.offloading.lookups.SYSTEM_CLOCK", clock)
    missed = Counter[str]()
    lookups = Lookups(TIMEOUT_S, lambda reason, num: missed.update({reason: num}))
    requests = [lookups.request(name) for name in ("first", "second")]
    for request, key in zip(requests, KEYS, strict=True):
        request.note(key, 16)
        assert lookups.lookup(request, key) is None
    lookups.send(cast(Any, {0: door}))
    eventually(lambda: len(door.reported) == 2)
    now_s[0] += 2 * TIMEOUT_S
    assert [lookups.lookup(request, key) for request, key in zip(requests, KEYS, strict=True)] == [True, True]
    assert not missed.total()
    lookups.close()


class SlowDoor:
    """The store: each answer takes a share of the time that it may."""

    layout = SimpleNamespace(chained=False)

    def __init__(self, now_s: list[float], share: float) -> None:
        self._now_s = now_s
        self._share = share
        self._lock = threading.Lock()

    def present(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        with self._lock:
            self._now_s[0] += self._share * TIMEOUT_S
        return [True] * len(keys)


@pytest.mark.parametrize(("num_requests", "share", "num_found"), [(80, 0.1, 80), (300, 0.1, 100), (16, 0.9, 2)])
def test_many_requests_of_one_step_wait_for_their_turn(
    monkeypatch: Any, num_requests: int, share: float, num_found: int
) -> None:
    """The store answers one after the other: while it is quick, none is a miss before it has waited ten times as long.
    If each answer comes at the last moment, the others do not wait for it.
    """
    now_s = [100.0]
    monkeypatch.setattr("connector.offloading.lookups.SYSTEM_CLOCK", SimpleNamespace(monotonic_s=lambda: now_s[0]))
    missed = Counter[str]()
    lookups = Lookups(TIMEOUT_S, lambda reason, num: missed.update({reason: num}))
    requests = [lookups.request(str(number)) for number in range(num_requests)]
    assert [lookups.lookup(request, KEYS[0]) for request in requests] == [None] * num_requests
    lookups.send(cast(Any, {0: SlowDoor(now_s, share)}))
    eventually(lambda: all(request.answers for request in requests))
    found = [lookups.lookup(request, KEYS[0]) for request in requests].count(True)
    assert num_found <= found <= num_found + 4 and missed == Counter(lookup_timeout=num_requests - found)
    lookups.close()


def test_a_load_asks_for_no_place_again() -> None:
    """The scheduler waits while a load is submitted, and each of its chunks was looked up before."""
    request, asked = Request("r"), list[bytes]()
    request.note(KEYS[0], 16)
    request.note_new(KEYS, lambda key: asked.append(key) or 32)  # type: ignore[func-returns-value]
    assert asked == KEYS[1:] and request.place == {KEYS[0]: 16, KEYS[1]: 32}


def test_the_misses_of_an_answer_are_counted_at_once() -> None:
    """A prompt has thousands of chunks, and the scheduler waits while they are counted."""
    counted: list[tuple[str, int]] = []
    lookups = Lookups(TIMEOUT_S, lambda reason, num: counted.append((reason, num)))
    request = lookups.request("r")
    for key in KEYS:
        assert lookups.lookup(request, key) is None
    lookups.send({})
    eventually(lambda: lookups.lookup(request, KEYS[0]) is False)
    assert lookups.lookup(request, KEYS[1]) is False and counted == [("engine_not_cached", 2)]
    lookups.close()


def test_what_is_not_answered_in_time_is_a_miss() -> None:
    """No answer comes at all: the chunk is a miss for this request, and stays one."""
    missed = Counter[str]()
    lookups = Lookups(0.0, lambda reason, num: missed.update({reason: num}))
    request = lookups.request("r")
    assert lookups.lookup(request, KEYS[0]) is None
    assert [lookups.lookup(request, KEYS[0]) for _ in range(2)] == [False, False]
    assert missed == {"lookup_timeout": 1}
    lookups.close()
