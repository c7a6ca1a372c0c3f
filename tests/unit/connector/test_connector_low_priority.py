"""Encoding at low priority: which thread runs a job, at which priority, and for how long a job waits for processors."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from connector.worker.low_priority import LowPriorityPool
from kvstore.errors import Closed, InvalidRequest, Unavailable
from kvstore.runtime.deadline import Deadline
from kvstore.testing.waiting import soon, until

JOB_BYTES = 100

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux alone")


@pytest.fixture
def threads() -> Iterator[LowPriorityPool]:
    threads = LowPriorityPool(num_threads=1, limit_bytes=2 * JOB_BYTES)
    yield threads
    threads.close()


def niceness() -> int:
    """Of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


Result = TypeVar("Result")


async def run(
    threads: LowPriorityPool,
    work: Callable[[], Result],
    *,
    num_bytes: int = JOB_BYTES,
    patience_s: float = 60,
    deadline: Deadline | None = None,
    release: Callable[[], None] = lambda: None,
) -> Result:
    return await threads.run(
        num_bytes, lambda: work, patience_s=patience_s, deadline=deadline or soon(), release=release
    )


async def occupied(threads: LowPriorityPool, gate: threading.Event) -> list[asyncio.Task[bool]]:
    """Jobs that hold every thread of low priority, until the gate opens."""
    jobs = [asyncio.create_task(run(threads, lambda: gate.wait(60))) for _ in range(2)]  # one runs, one is ready
    await until(lambda: threads.used_bytes >= 2 * JOB_BYTES)
    return jobs


@on_linux
async def test_jobs_give_way_to_all_others(threads: LowPriorityPool) -> None:
    """A job runs at the lowest priority, which no other thread gets by it."""
    before = niceness()
    assert await run(threads, niceness) == 19
    assert niceness() == before


@on_linux
async def test_a_job_that_waited_runs_as_all_others(threads: LowPriorityPool) -> None:
    """While others hold the idle time, a job starts after its patience, at the priority of its process."""
    gate = threading.Event()
    jobs = await occupied(threads, gate)
    started_s = time.monotonic()
    assert await run(threads, niceness, patience_s=0.2) == niceness()
    assert time.monotonic() - started_s >= 0.2
    gate.set()
    assert await asyncio.gather(*jobs) == [True, True]


@on_linux
async def test_a_job_that_has_begun_is_done_again(threads: LowPriorityPool) -> None:
    """A thread that gets no processor does not hold its job up; its input stays untouched until that thread is done."""
    gate, begun, released = threading.Event(), list[int](), list[bool]()

    def work() -> int:
        begun.append(niceness())
        if len(begun) == 1:
            gate.wait(60)  # as a thread does that gets no processor
        return begun[-1]

    assert await run(threads, work, patience_s=0.1, release=lambda: released.append(True)) == niceness()
    assert begun == [19, niceness()]
    await asyncio.sleep(0.05)
    assert released == []
    gate.set()
    await until(lambda: released)
    await asyncio.sleep(0.05)
    assert released == [True]


@on_linux
async def test_haste_ends_all_patience(threads: LowPriorityPool) -> None:
    """Once the engine stops, what waits is done at once, and so is what comes later."""
    gate = threading.Event()
    threads._low._executor.submit(gate.wait, 60)
    waiting = asyncio.create_task(run(threads, niceness))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    threads.hurry()
    assert await waiting == niceness()
    assert await run(threads, niceness) == niceness()
    gate.set()


async def test_haste_in_the_moment_in_which_patience_ends(threads: LowPriorityPool) -> None:
    """A wait that is over, but whose task has not noticed yet, does not keep the others waiting."""
    gate = threading.Event()
    threads._low._executor.submit(gate.wait, 60)
    ending, waiting = (asyncio.create_task(run(threads, niceness, patience_s=patience_s)) for patience_s in (30, 60))
    await asyncio.sleep(0.01)
    first = min(threads._waiting, key=lambda patience: patience.when() or 0.0)
    first._on_timeout()  # type: ignore[attr-defined] # as the loop calls it
    threads.hurry()
    assert await asyncio.wait_for(asyncio.gather(ending, waiting), 5) == [niceness()] * 2
    gate.set()


@on_linux
async def test_without_patience_nothing_waits(threads: LowPriorityPool) -> None:
    """A job that may not wait runs at the priority of its process at once."""
    assert await run(threads, niceness, patience_s=0.0) == niceness()


async def test_errors_of_a_job_are_its_own(threads: LowPriorityPool) -> None:
    """What a job raises comes back, and is not taken for a pool without room; what is too large is refused. Its input
    is released once all the same."""
    released: list[bool] = []
    with pytest.raises(ZeroDivisionError):
        await run(threads, lambda: 1 // 0, release=lambda: released.append(True))
    with pytest.raises(InvalidRequest):
        await run(threads, niceness, num_bytes=3 * JOB_BYTES, release=lambda: released.append(True))

    def refuse() -> Callable[[], int]:
        raise MemoryError

    with pytest.raises(MemoryError):
        await threads.run(1, refuse, patience_s=60, deadline=soon(), release=lambda: released.append(True))
    await asyncio.sleep(0.01)
    assert released == [True] * 3


async def test_a_cancelled_job_is_released_once_its_thread_is_done(threads: LowPriorityPool) -> None:
    gate, begun, released = threading.Event(), threading.Event(), list[bool]()

    def work() -> bool:
        begun.set()
        return gate.wait(60)

    job = asyncio.create_task(run(threads, work, release=lambda: released.append(True)))
    await until(begun.is_set)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    assert released == []
    gate.set()
    await until(lambda: released)


async def test_the_deadline_limits_both_waits(threads: LowPriorityPool) -> None:
    """A job for which there is no room at either priority ends at its deadline, not after its patience."""
    gate = threading.Event()
    jobs = await occupied(threads, gate)
    jobs += [asyncio.create_task(run(threads, lambda: gate.wait(60), patience_s=0.0)) for _ in range(2)]
    await until(lambda: threads.used_bytes >= 4 * JOB_BYTES)
    with pytest.raises(Unavailable):
        await run(threads, niceness, deadline=Deadline.after(0.1))
    gate.set()
    assert await asyncio.gather(*jobs) == [True] * 4


async def test_what_waits_ends_with_the_threads(threads: LowPriorityPool) -> None:
    """After `close` nothing starts."""
    threads.close()
    with pytest.raises(Closed):
        await run(threads, niceness)
