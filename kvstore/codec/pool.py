"""Threads that encode and decode under a byte budget."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from kvstore.errors import Closed, InvalidRequest
from kvstore.runtime.deadline import Deadline

__all__ = ["CodecPool", "PoolUsage"]

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """The current load of a pool.

    Attributes:
        used_bytes: Bytes of jobs that were admitted and have not ended.
        limit_bytes: The budget.
        num_waiting: Callers that wait to be admitted.
    """

    used_bytes: int
    limit_bytes: int
    num_waiting: int


class CodecPool:
    """Runs jobs in threads, at most `limit_bytes` of them at a time, first come first served. Safe from any thread.

    Jobs run in parallel where numpy, zstandard and xxhash release the GIL (see `zstd.py`).

    Args:
        num_threads: Jobs that run at a time, at most.
        limit_bytes: Byte budget of all jobs together.
        niceness: Priority of the threads, from 0 to 19 (lowest); on Linux only.
    """

    def __init__(self, *, num_threads: int, limit_bytes: int, niceness: int = 0) -> None:
        if num_threads <= 0 or limit_bytes <= 0:
            raise InvalidRequest("a pool needs threads and bytes", num_threads=num_threads, limit_bytes=limit_bytes)
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._lock = threading.Lock()
        self._waiters: deque[tuple[int, Future[None]]] = deque()
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
        grant = self._request(num_bytes)
        try:
            async with deadline.scope("waiting for codec threads"):
                await asyncio.wrap_future(grant)
        except BaseException:
            self._withdraw(num_bytes, grant)
            raise
        job = self._start(num_bytes, work)
        waiting = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if waiting.cancelled():  # not the caller: `close`
                raise Closed("the codec pool was closed") from None
            if not job.cancel():
                await _ended(waiting)
            raise

    @property
    def usage(self) -> PoolUsage:
        """A consistent snapshot."""
        with self._lock:
            return PoolUsage(self._used_bytes, self._limit_bytes, len(self._waiters))

    def close(self) -> None:
        """Fail jobs that no thread has begun with `Closed`, and wait for the others. Idempotent."""
        with self._lock:
            self._closed = True
            waiters, self._waiters = self._waiters, deque()
        for _, grant in waiters:
            if grant.set_running_or_notify_cancel():
                grant.set_exception(Closed("the codec pool was closed"))
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _request(self, num_bytes: int) -> Future[None]:
        """A future that is done once `num_bytes` are granted to the caller; `_start` or `_withdraw` must follow."""
        if num_bytes > self._limit_bytes:
            raise InvalidRequest(
                "requested more than the whole budget", requested=num_bytes, limit_bytes=self._limit_bytes
            )
        grant: Future[None] = Future()
        with self._lock:
            self._refuse_if_closed()
            self._waiters.append((num_bytes, grant))
        self._admit()
        return grant

    def _admit(self) -> None:
        while True:
            with self._lock:
                if not self._waiters or self._used_bytes + self._waiters[0][0] > self._limit_bytes:
                    return
                num_bytes, grant = self._waiters.popleft()
                if not grant.set_running_or_notify_cancel():
                    continue
                self._used_bytes += num_bytes
            grant.set_result(None)  # outside the lock: the waiter's callbacks may call this pool again

    def _withdraw(self, num_bytes: int, grant: Future[None]) -> None:
        """Undo `_request`, whether or not the bytes have been granted."""
        grant.cancel()
        with self._lock:
            if (num_bytes, grant) in self._waiters:
                self._waiters.remove((num_bytes, grant))
        if not grant.cancelled() and grant.exception() is None:
            self._free(num_bytes)
        else:
            self._admit()  # the next waiter may fit now

    def _start(self, num_bytes: int, work: Callable[[], Result]) -> Future[Result]:
        try:
            job = self._executor.submit(work)
        except RuntimeError as error:  # the executor was shut down
            self._free(num_bytes)
            raise Closed("the codec pool was closed") from error
        job.add_done_callback(lambda _: self._free(num_bytes))
        return job

    def _free(self, num_bytes: int) -> None:
        with self._lock:
            self._used_bytes -= num_bytes
        self._admit()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise Closed("the codec pool is closed")


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
