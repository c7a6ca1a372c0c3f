"""Deadlines, background owners, meters and retries."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from contextlib import suppress
from functools import partial
from itertools import pairwise

import pytest

from kvstore.errors import Closed, KVStoreError, Unavailable
from kvstore.runtime.background import Background
from kvstore.runtime.bounded_map import Latest
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters
from kvstore.runtime.retries import retry
from kvstore.testing.waiting import until
from tests.virtual_time import ManualClock


def test_a_deadline_counts_down_on_its_own_clock() -> None:
    """What remains shrinks with the clock and never goes below zero; the point itself does not move."""
    clock = ManualClock(100.0)
    deadline = Deadline.after(5, clock)
    assert (deadline.remaining_s, deadline.expired) == (5, False)
    clock.now_s += 4
    assert (deadline.remaining_s, deadline.expired) == (1, False)
    clock.now_s += 4
    assert (deadline.remaining_s, deadline.expired, deadline.at_s) == (0, True, 105)


def test_an_earlier_deadline_is_never_later() -> None:
    """A shorter limit makes the point earlier, a longer one changes nothing."""
    clock = ManualClock(100.0)
    deadline = Deadline.after(5, clock)
    assert deadline.earlier(2).at_s == 102
    assert deadline.earlier(50) == deadline


async def test_a_scope_ends_its_block_at_the_deadline() -> None:
    """A block still running at the deadline is cancelled and reported as unavailable, by what it did."""
    with pytest.raises(Unavailable, match="reading did not end") as caught:
        async with Deadline.after(0.01).scope("reading"):
            await asyncio.sleep(10)
    assert isinstance(caught.value, KVStoreError)
    with pytest.raises(Unavailable):
        async with Deadline.after(-1).scope("late from the start"):
            await asyncio.sleep(10)


async def test_a_late_task_leaves_nothing_to_the_collector() -> None:
    """What the frames of a task have that failed at its deadline is free with the task: its error is in no cycle."""

    class Record:
        pass

    async def work(record: Record) -> Record:
        async with Deadline.after(0.001).scope("work"):
            await asyncio.sleep(10)
        return record

    record = Record()
    seen = weakref.ref(record)
    gc.collect()
    gc.disable()
    try:
        task = asyncio.ensure_future(work(record))
        del record
        with suppress(Unavailable):
            await task
        del task
        await asyncio.sleep(0)
        assert seen() is None
    finally:
        gc.enable()


async def test_a_scope_lets_results_and_errors_through() -> None:
    """A block that ends in time is not touched, also if it raises."""
    async with Deadline.after(10).scope("quick"):
        await asyncio.sleep(0)
    with pytest.raises(KeyError):
        async with Deadline.after(10).scope("failing"):
            raise KeyError


async def test_a_cancel_from_outside_is_no_timeout() -> None:
    """A task cancelled inside a scope ends as cancelled, not as unavailable."""

    async def work() -> None:
        async with Deadline.after(10).scope("work"):
            await asyncio.sleep(10)

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_the_system_clock_tells_both_times() -> None:
    """The monotonic clock does not go back, and the wall clock is in milliseconds of this century."""
    first = SYSTEM_CLOCK.monotonic_s()
    assert SYSTEM_CLOCK.monotonic_s() >= first
    assert 1_600_000_000_000 < SYSTEM_CLOCK.wall_ms() < 5_000_000_000_000


async def test_background_logs_failures(caplog: pytest.LogCaptureFixture) -> None:
    """A task that raises is logged with its name and traceback, and its sibling continues."""
    background = Background("tests")
    go_on = asyncio.Event()

    async def fail() -> None:
        raise ValueError("on purpose")

    sibling = background.spawn(go_on.wait(), "sibling")
    with caplog.at_level(logging.ERROR):
        await asyncio.wait([background.spawn(fail(), "bad")])
    assert "task=tests:bad" in caplog.text and "on purpose" in caplog.text
    assert len(background) == 1 and not sibling.done()
    go_on.set()
    await sibling
    await background.aclose()


async def test_background_leaves_failures_to_whoever_awaits(caplog: pytest.LogCaptureFixture) -> None:
    """What an awaited task raises reaches its awaiter and is not logged a second time."""
    background = Background("tests")

    async def fail() -> None:
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        await background.spawn(fail(), "bad", is_awaited=True)
    assert caplog.text == ""
    await background.aclose()


@pytest.mark.virtual_time
async def test_work_that_must_not_end_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    """Each failure is logged with its traceback, and the pauses grow; what returns, or is closed, ends."""
    loop = asyncio.get_running_loop()
    background, starts = Background("tests"), list[float]()

    async def fail_for_a_while() -> None:
        starts.append(loop.time())
        if len(starts) < 10:
            raise KeyError("on purpose")
        raise Closed("gone")

    background.keep_running(fail_for_a_while, "loop")
    await until(lambda: not len(background), 600)
    pauses = [round(after - before) for before, after in pairwise(starts)]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert sum("task=tests:loop" in record.message and record.exc_info is not None for record in caplog.records) == 9
    background.keep_running(partial(asyncio.sleep, 3600), "sleeping")
    await background.aclose()
    assert len(background) == 0


@pytest.mark.virtual_time
async def test_work_is_repeated_after_each_pause() -> None:
    """Also after it has failed; what is closed ends."""
    loop = asyncio.get_running_loop()
    background, starts, began_s = Background("tests"), list[float](), loop.time()

    async def fail_once() -> None:
        starts.append(loop.time() - began_s)
        if len(starts) == 2:
            raise KeyError("on purpose")
        if len(starts) == 4:
            raise Closed("gone")

    background.repeat(fail_once, "loop", every_s=5.0)
    await until(lambda: not len(background), 600)
    assert [round(at_s) for at_s in starts] == [5, 10, 16, 21]  # a second more after a failure


async def test_background_ends_everything_when_closed(caplog: pytest.LogCaptureFixture) -> None:
    """Closing cancels what runs and waits for its clean-up; afterwards nothing starts any more."""
    background, log = Background("tests"), list[str]()

    async def work() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            await asyncio.sleep(0.01)
            log.append("cleaned up")

    background.spawn(work(), "one")
    background.spawn(work(), "two")
    await asyncio.sleep(0)
    await background.aclose()
    await background.aclose()
    assert log == ["cleaned up"] * 2
    assert (len(background), caplog.text) == (0, "")
    with pytest.raises(Closed):
        background.spawn(work(), "late")


async def test_a_task_may_close_its_own_owner() -> None:
    """A task that closes its owner cancels its siblings, is not cancelled itself and does not wait for itself."""
    background = Background("tests")
    sibling = background.spawn(asyncio.sleep(10), "sibling")

    async def close() -> str:
        await background.aclose()
        return "closed"

    assert await asyncio.wait_for(background.spawn(close(), "closer"), 5) == "closed"
    assert sibling.cancelled()


def test_meters_add_up_across_threads() -> None:
    """Counters lose nothing under threads; labels make numbers of their own, in one order."""
    meters = Meters()

    def work() -> None:
        for _ in range(1000):
            meters.add("reads", tier="redis", outcome="hit")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    meters.set("used_bytes", 5)
    meters.set("used_bytes", 7)
    assert meters.get("reads", outcome="hit", tier="redis") == 4000
    assert meters.get("reads") == 0
    assert meters.snapshot() == {'reads{outcome="hit",tier="redis"}': 4000, "used_bytes": 7}


@pytest.mark.parametrize(("num_failures", "is_answered"), [(0, True), (4, True), (5, False)])
async def test_a_call_is_tried_five_times(
    num_failures: int, is_answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer of the first attempt that has one, or the last failure."""
    monkeypatch.setattr("kvstore.runtime.retries.PAUSE_S", 0.0)
    failures = [Unavailable(f"failure {number}") for number in range(num_failures)]
    num_calls = 0

    async def call() -> str:
        nonlocal num_calls
        num_calls += 1
        if num_calls <= num_failures:
            raise failures[num_calls - 1]
        return "answer"

    if is_answered:
        assert await retry(call) == "answer"
        assert num_calls == num_failures + 1
    else:
        with pytest.raises(Unavailable, match="failure 4"):
            await retry(call)
        assert num_calls == 5


async def test_a_call_that_is_refused_is_not_repeated() -> None:
    """Only what may pass is tried again."""
    num_calls = 0

    async def call() -> None:
        nonlocal num_calls
        num_calls += 1
        raise Closed("closed")

    with pytest.raises(Closed):
        await retry(call)
    assert num_calls == 1


def test_the_latest_entries_are_kept() -> None:
    """What is set again counts as set now; the one that was set longest ago goes."""
    kept = Latest[str, int](2)
    for key, value in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        kept[key] = value
    assert list(kept.items()) == [("a", 3), ("c", 4)]
