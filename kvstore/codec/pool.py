"""Threads that encode and decode under a byte budget."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from kvstore.errors import Closed, InvalidRequest
from kvstore.runtime.budget import ByteBudget
from kvstore.runtime.deadline import Deadline

Result = TypeVar("Result")


class CodecPool:
    """Runs jobs in threads, at most `limit_bytes` of them at a time, first come first served. For one event loop.

    Jobs run in parallel where numpy, zstandard and xxhash release the GIL (see `zstd.py`).

    Args:
        num_threads: Jobs that run at a time, at most.
        limit_bytes: Byte budget of all jobs together.
        niceness: Priority of the threads, from 0 to 19 (lowest); on Linux only.
    """

    def __init__(self, *, num_threads: int, limit_bytes: int, niceness: int = 0) -> None:
        if num_threads <= 0:
            raise InvalidRequest("a pool needs threads", num_threads=num_threads)
        self._budget = ByteBudget(limit_bytes)
        self._closed = False
        self._executor = ThreadPoolExecutor(
            num_threads, thread_name_prefix="codec", initializer=_be_nice, initargs=(niceness,)
        )

    async def run(self, num_bytes: int, work: Callable[[], Result], *, deadline: Deadline) -> Result:
        """Run `work` in the pool and return its result; the deadline limits the wait for the budget, not the work.

        Raises:
            Unavailable: The budget was exhausted until the deadline; `work` was not started.
            InvalidRequest: More than the whole budget was requested.
            Closed: The pool is closed, or was closed while waiting.

        If cancelled, raises `CancelledError` only once `work` has ended or can no longer start, so that the caller may
        reuse its buffers.
        """
        if self._closed:
            raise Closed("the codec pool is closed")
        grant = await self._budget.take_until(deadline, "waiting for codec threads", num_bytes)
        try:
            return await self._run(work)
        finally:
            self._budget.give_back(grant)

    async def _run(self, work: Callable[[], Result]) -> Result:
        try:
            job = self._executor.submit(work)
        except RuntimeError as error:  # the executor was shut down
            raise Closed("the codec pool was closed") from error
        waiting = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if waiting.cancelled():  # not the caller: `close`
                raise Closed("the codec pool was closed") from None
            if not job.cancel():
                await _ended(waiting)
            raise
        finally:
            # an exception of the work knows this frame, and these know the exception: what its frames hold, such as
            # mappings of other processes' memory, would last until the cyclic collector runs
            del job, waiting

    @property
    def limit_bytes(self) -> int:
        return self._budget.limit_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of jobs that were admitted and have not ended."""
        return self._budget.used_bytes

    def close(self) -> None:
        """Wait for the jobs that run; callers of the others get `Closed`. From any thread; idempotent."""
        self._closed = True
        self._executor.shutdown(wait=True, cancel_futures=True)


def _be_nice(niceness: int) -> None:
    """Lower the priority of the calling thread; only Linux has one for each thread."""
    if niceness and sys.platform == "linux":
        with suppress(OSError):  # a sandbox may forbid it: then the priority stays
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


async def _ended(job: asyncio.Future[Result]) -> None:
    """Return when `job` has ended, even if the caller is cancelled again while it waits; jobs are short."""
    while not job.done():
        try:
            await asyncio.wait([job])
        except asyncio.CancelledError:
            continue
    if not job.cancelled():
        job.exception()  # retrieved, since the caller was cancelled and no other task awaits it
