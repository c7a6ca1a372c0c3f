"""Recent events: bounded, in order, from any thread."""

from __future__ import annotations

import threading

from kvstore.runtime.events import EventKind, Events
from tests.virtual_time import ManualClock


def test_no_kind_pushes_out_another() -> None:
    """A tier that comes and goes all night fills its own ring; the quarantine before it is still told."""
    events = Events()
    events.add(EventKind.QUARANTINED, "a record was quarantined")
    for number in range(1000):
        events.add(EventKind.TIER_DOWN, f"down {number}")
    kept = events.after(0)
    assert len(kept) == 257 and kept[0].kind is EventKind.QUARANTINED
    assert kept[-1].text == "down 999" and events.last == kept[-1].number


def test_numbers_grow_whatever_the_clock_does() -> None:
    """Several in a millisecond, and a clock that goes back: each number is larger than the last one. A reader with a
    larger number, from an earlier process, gets all events.
    """
    clock = ManualClock(1.0)
    events = Events(clock)
    for at_ms in (1_000, 1_000, 500, 2_000):
        clock.now_s = at_ms / 1000
        events.add(EventKind.ADMIN, str(at_ms))
    assert [event.number for event in events.after(0)] == [1_000, 1_001, 1_002, 2_000]
    assert [event.text for event in events.after(1_001)] == ["500", "2000"]
    assert events.after(2_000) == [] and len(events.after(9_999)) == 4


def test_texts_are_cut() -> None:
    """An error of a medium may be long; what is kept is not."""
    events = Events()
    events.add(EventKind.TIER_DOWN, "x" * 10_000, detail={"reason": "y" * 10_000, "tier": "redis"})
    (event,) = events.after(0)
    assert len(event.text) == len(str(event.detail["reason"])) == 300


def test_any_thread_may_tell() -> None:
    """Four threads tell, a fifth reads: no number twice, none lost."""
    events = Events()

    def tell() -> None:
        for _ in range(50):
            events.add(EventKind.EVICTED, "some left")

    threads = [threading.Thread(target=tell) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        numbers = [event.number for event in events.after(0)]
        assert numbers == sorted(set(numbers))
    assert len(events.after(0)) == 200
