"""The codec pool: a byte budget bounds jobs, waiters are served in order, nothing leaks when a caller is cancelled."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from functools import partial

import pytest

from kvstore.codec import CodecPool
from kvstore.errors import Closed, CorruptRecord, InvalidRequest, Unavailable
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.pauses import collector_paused
from kvstore.testing.waiting import soon, until


class Gate:
    """Work that reports its start and ends when it is released."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self._open = threading.Event()

    def __call__(self) -> str:
        self.started.set()
        assert self._open.wait(10)
        return "done"

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def pool() -> Iterator[CodecPool]:
    pool = CodecPool(num_threads=2, limit_bytes=100)
    yield pool
    pool.close()
    assert pool.used_bytes == 0


async def test_more_than_the_whole_budget_is_refused(pool: CodecPool) -> None:
    """A job that could never be admitted is the caller's mistake."""
    with pytest.raises(InvalidRequest):
        await pool.run(101, str, deadline=soon())
    with pytest.raises(InvalidRequest):
        CodecPool(num_threads=0, limit_bytes=1)


async def test_run_returns_results_and_errors(pool: CodecPool) -> None:
    """From asyncio the result comes back, and so does what the work raised; either way the bytes are free again."""
    assert await pool.run(100, lambda: 42, deadline=soon()) == 42
    with pytest.raises(ZeroDivisionError):
        await pool.run(100, lambda: 1 // 0, deadline=soon())
    assert await pool.run(100, lambda: 43, deadline=soon()) == 43


async def test_waiters_are_served_in_order(pool: CodecPool) -> None:
    """A small job does not overtake a large one that came first."""
    gate, order = Gate(), list[str]()
    first = asyncio.ensure_future(pool.run(60, gate, deadline=soon()))
    await asyncio.to_thread(gate.started.wait, 10)
    large = asyncio.ensure_future(pool.run(100, lambda: order.append("large"), deadline=soon()))
    await asyncio.sleep(0)
    small = asyncio.ensure_future(pool.run(10, lambda: order.append("small"), deadline=soon()))
    await asyncio.sleep(0.01)
    gate.open()
    await asyncio.gather(first, large, small)
    assert order == ["large", "small"]


async def test_run_gives_up_at_its_deadline(pool: CodecPool) -> None:
    """A caller whose deadline passes while it waits is refused, and the next one moves up."""
    gate, never = Gate(), Gate()
    first = asyncio.ensure_future(pool.run(60, gate, deadline=soon()))
    await asyncio.to_thread(gate.started.wait, 10)
    large = asyncio.ensure_future(pool.run(100, never, deadline=Deadline.after(0.02)))
    await asyncio.sleep(0)
    assert await pool.run(10, lambda: "small", deadline=soon()) == "small"
    with pytest.raises(Unavailable):
        await large
    gate.open()
    assert await first == "done"
    assert not never.started.is_set()


async def test_cancelled_while_waiting_for_room(pool: CodecPool) -> None:
    """A task cancelled in the queue leaves nothing behind: its work never starts, its bytes are never taken."""
    gate, never = Gate(), Gate()
    first = asyncio.ensure_future(pool.run(100, gate, deadline=soon()))
    await asyncio.to_thread(gate.started.wait, 10)
    waiting = asyncio.ensure_future(pool.run(100, never, deadline=soon()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.open()
    await first
    assert not never.started.is_set()


async def test_cancelled_while_the_work_runs(pool: CodecPool) -> None:
    """A task cancelled during its work ends only when the work has: until then its buffers are still written to."""
    gate = Gate()
    task = asyncio.ensure_future(pool.run(100, gate, deadline=soon()))
    await asyncio.to_thread(gate.started.wait, 10)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.005)
    assert not task.done()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await pool.run(100, lambda: "next", deadline=soon()) == "next"


async def test_cancelled_before_a_thread_is_free(pool: CodecPool) -> None:
    """A task that was admitted but has no thread is cancelled at once, and its work never starts."""
    gates, never = (Gate(), Gate()), Gate()
    running = [asyncio.ensure_future(pool.run(10, gate, deadline=soon())) for gate in gates]
    for gate in gates:
        await asyncio.to_thread(gate.started.wait, 10)
    task = asyncio.ensure_future(pool.run(10, never, deadline=soon()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
    for gate in gates:
        gate.open()
    await asyncio.gather(*running)
    assert not never.started.is_set()


async def test_close_turns_waiters_away_and_lets_jobs_end() -> None:
    """Closing waits for the jobs that run, refuses those that wait and later ones, and may be done twice."""
    pool, gate = CodecPool(num_threads=1, limit_bytes=10), Gate()
    running = asyncio.ensure_future(pool.run(10, gate, deadline=soon()))
    await asyncio.to_thread(gate.started.wait, 10)
    waiting = asyncio.ensure_future(pool.run(10, str, deadline=soon()))
    await asyncio.sleep(0.01)
    closing = asyncio.ensure_future(asyncio.to_thread(pool.close))
    await asyncio.sleep(0.01)
    gate.open()
    await closing
    assert await running == "done"
    with pytest.raises(Closed):
        await waiting
    pool.close()
    with pytest.raises(Closed):
        await pool.run(1, str, deadline=soon())
    assert pool.used_bytes == 0


async def test_close_does_not_wait_for_what_no_thread_has_begun() -> None:
    """A job that was admitted but has no thread yet is refused: an engine that stops has no time for a long queue."""
    pool, gate, begun = CodecPool(num_threads=1, limit_bytes=10), Gate(), list[bool]()
    running = asyncio.ensure_future(pool.run(5, gate, deadline=soon()))
    await asyncio.to_thread(gate.started.wait, 10)
    queued = asyncio.ensure_future(pool.run(5, lambda: begun.append(True), deadline=soon()))
    await until(lambda: pool.used_bytes >= 10)
    closing = asyncio.ensure_future(asyncio.to_thread(pool.close))
    with pytest.raises(Closed):
        await asyncio.wait_for(queued, 5)
    gate.open()
    await closing
    assert await running == "done"
    assert begun == []
    assert pool.used_bytes == 0


async def test_many_callers_and_one_budget() -> None:
    """Sixteen callers share a small pool: the budget holds, every job runs, nothing stays taken."""
    pool, lock = CodecPool(num_threads=4, limit_bytes=10), threading.Lock()
    now, peak, done = 0, 0, 0

    def work(num_bytes: int) -> None:
        nonlocal now, peak, done
        with lock:
            now += num_bytes
            peak = max(peak, now)
        with lock:
            now -= num_bytes
            done += 1

    async def call(seed: int) -> None:
        for turn in range(50):
            num_bytes = (seed + turn) % 7 + 1
            await pool.run(num_bytes, partial(work, num_bytes), deadline=soon())

    await asyncio.gather(*map(call, range(16)))
    pool.close()
    assert (done, now, pool.used_bytes) == (800, 0, 0)
    assert peak <= 10


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux alone")
async def test_a_nice_pool_leaves_the_processors_to_others() -> None:
    """Only its threads have the requested niceness."""

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before, pool = niceness(), CodecPool(num_threads=1, limit_bytes=100, niceness=7)
    assert await pool.run(1, niceness, deadline=soon()) == 7
    assert niceness() == before
    pool.close()


async def test_threads_that_may_not_be_nice_work_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a sandbox forbids a lower priority, jobs run at the one that there is."""

    def forbidden(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr("os.setpriority", forbidden)
    pool = CodecPool(num_threads=1, limit_bytes=100, niceness=7)
    assert await pool.run(1, lambda: 42, deadline=soon()) == 42
    pool.close()


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_what_failed_work_held_is_freed_at_once(pool: CodecPool, is_cancelled: bool) -> None:
    """Without the cyclic collector: work may hold a mapping of another process' memory."""

    class Buffer:
        pass

    made: list[weakref.ref[Buffer]] = []
    begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        buffer = Buffer()
        made.append(weakref.ref(buffer))
        begun.set()
        assert go_on.wait(10)
        raise CorruptRecord("damaged", buffers=len(made))

    with collector_paused():
        call = asyncio.create_task(pool.run(10, work, deadline=soon()))
        await asyncio.to_thread(begun.wait, 10)
        if is_cancelled:
            call.cancel()
            await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError if is_cancelled else CorruptRecord):
            await call
        del call
        await until(lambda: made[0]() is None)
