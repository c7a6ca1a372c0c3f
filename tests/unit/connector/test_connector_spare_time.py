"""Encoding in spare time: who runs a job, at which priority, and for how long a job waits for idle processors."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from connector.worker.spare_time import SpareTime
from connector.worker.staging import BufferPool
from kvstore.errors import Closed, InvalidRequest, Unavailable
from kvstore.runtime.deadline import Deadline

JOB_BYTES = 100

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux alone")


@pytest.fixture
def threads() -> Iterator[SpareTime]:
    threads = SpareTime(num_threads=1, job_bytes_max=JOB_BYTES, limit_bytes=2 * JOB_BYTES)
    yield threads
    threads.close()


def niceness() -> int:
    """Of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def soon() -> Deadline:
    return Deadline.after(60)


async def occupied(threads: SpareTime, gate: threading.Event) -> list[asyncio.Task[bool]]:
    """Jobs that hold all that runs in spare time, until the gate opens."""
    jobs = [
        asyncio.create_task(threads.run(JOB_BYTES, lambda: gate.wait(60), patience_s=60, deadline=soon()))
        for _ in range(2)  # one runs, one is ready
    ]
    while threads._spare.usage.used_bytes < 2 * JOB_BYTES:
        await asyncio.sleep(0.001)
    return jobs


@on_linux
async def test_jobs_give_way_to_all_others(threads: SpareTime) -> None:
    """A job runs at the lowest priority, which no other thread gets by it."""
    before = niceness()
    assert await threads.run(1, niceness, patience_s=60, deadline=soon()) == 19
    assert niceness() == before


@on_linux
async def test_a_job_that_waited_runs_as_all_others(threads: SpareTime) -> None:
    """While others hold the idle time, a job starts after its patience, at the priority of its process."""
    gate = threading.Event()
    jobs = await occupied(threads, gate)
    started_s = time.monotonic()
    assert await threads.run(JOB_BYTES, niceness, patience_s=0.2, deadline=soon()) == niceness()
    assert time.monotonic() - started_s >= 0.2
    gate.set()
    assert await asyncio.gather(*jobs) == [True, True]


@on_linux
async def test_without_patience_nothing_waits(threads: SpareTime) -> None:
    """A job that may not wait runs at the priority of its process at once."""
    assert await threads.run(JOB_BYTES, niceness, patience_s=0.0, deadline=soon()) == niceness()


async def test_errors_of_a_job_are_its_own(threads: SpareTime) -> None:
    """What a job raises comes back, and is not taken for a pool without room; what is too large is refused."""
    with pytest.raises(ZeroDivisionError):
        await threads.run(1, lambda: 1 // 0, patience_s=60, deadline=soon())
    with pytest.raises(InvalidRequest):
        await threads.run(3 * JOB_BYTES, niceness, patience_s=60, deadline=soon())


async def test_the_deadline_limits_both_waits(threads: SpareTime) -> None:
    """A job for which there is no room at either priority ends at its deadline, not after its patience."""
    gate = threading.Event()
    jobs = await occupied(threads, gate)
    jobs += [
        asyncio.create_task(threads.run(JOB_BYTES, lambda: gate.wait(60), patience_s=0.0, deadline=soon()))
        for _ in range(2)
    ]
    while threads._normal.usage.used_bytes < 2 * JOB_BYTES:
        await asyncio.sleep(0.001)
    with pytest.raises(Unavailable):
        await threads.run(JOB_BYTES, niceness, patience_s=60, deadline=Deadline.after(0.1))
    gate.set()
    assert await asyncio.gather(*jobs) == [True] * 4


async def test_what_waits_ends_with_the_threads(threads: SpareTime) -> None:
    """After `close` nothing starts."""
    threads.close()
    with pytest.raises(Closed):
        await threads.run(1, niceness, patience_s=60, deadline=soon())


def test_half_of_the_buffers() -> None:
    """The buffers say when half of them is in use: from then on nothing is put off."""
    buffers = BufferPool(4 * JOB_BYTES)
    held: list[torch.Tensor | None] = [buffers.take(JOB_BYTES)]
    assert not buffers.is_half_used
    held.append(buffers.take(JOB_BYTES))
    assert buffers.is_half_used
    for one in held:
        assert one is not None
        buffers.put(one)
    assert not buffers.is_half_used
