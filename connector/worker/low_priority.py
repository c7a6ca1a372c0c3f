"""Encodes an engine's pages without taking processors from the engine, as long as they can wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from kvstore.api import Deadline
from kvstore.codec import CodecPool
from kvstore.errors import Unavailable

Result = TypeVar("Result")

_NICENESS = 19


class LowPriorityPool:
    """Runs a job at the lowest priority, and a second time at normal priority if that takes too long.

    An engine that computes on all processors loses more to a thread beside it than the time that this thread takes. Its
    compute threads wait for each other at the end of every kernel, so that one descheduled thread delays the rest. At
    the lowest priority a thread runs between kernels and between steps. If it is descheduled while it holds the
    interpreter's lock, the thread that waits for the lock leaves it a processor.

    Beside other busy processes such a thread may get next to no time, and a process may not raise a thread's priority
    again. So a job that takes too long is done once more, by a thread of normal priority.

    Args:
        num_threads: Threads of either priority.
        limit_bytes: Byte budget of the jobs at either priority; at least the largest job.
    """

    def __init__(self, *, num_threads: int, limit_bytes: int) -> None:
        self._low = CodecPool(num_threads=num_threads, limit_bytes=limit_bytes, niceness=_NICENESS)
        self._normal = CodecPool(num_threads=num_threads, limit_bytes=limit_bytes)
        self._waiting: set[asyncio.Timeout] = set()
        self._hurries = False

    async def run(
        self,
        num_bytes: int,
        begin: Callable[[], Callable[[], Result]],
        *,
        patience_s: float,
        deadline: Deadline,
        release: Callable[[], None],
    ) -> Result:
        """Run a job and return its result. Belongs to one event loop, as `hurry` does.

        Args:
            num_bytes: What it counts in the budget.
            begin: Called here before each try; returns the job, with memory of its own for its result.
            patience_s: A job without a result after this long is done again at normal priority. 0: it begins there.
            deadline: Limits the wait for a thread, not the work.
            release: Called once, when no thread reads the job's input any more. That may be after `run` has returned.

        Raises:
            Unavailable: It could not start until the deadline.
            InvalidRequest: It is larger than the budget.
            Closed: `close` was called.
        """
        readers = 1  # this call, until it starts no further try

        def ended(_: object = None) -> None:
            nonlocal readers
            readers -= 1
            if not readers:
                release()

        def start(pool: CodecPool) -> asyncio.Future[Result]:
            nonlocal readers
            trying = asyncio.ensure_future(pool.run(num_bytes, begin(), deadline=deadline))
            readers += 1
            trying.add_done_callback(ended)
            return trying

        try:
            if patience_s > 0 and not self._hurries:
                low = start(self._low)
                try:
                    return await self._wait(low, patience_s)
                except (TimeoutError, Unavailable):
                    pass
                finally:
                    low.cancel()  # if its thread has begun, it is done once that thread is
            return await start(self._normal)
        finally:
            ended()

    async def _wait(self, trying: asyncio.Future[Result], patience_s: float) -> Result:
        """The result, or `TimeoutError` when the patience is over."""
        async with asyncio.timeout(patience_s) as timeout:
            self._waiting.add(timeout)
            try:
                return await asyncio.shield(trying)
            finally:
                self._waiting.discard(timeout)

    def hurry(self) -> None:
        """Start every job at normal priority from now on, those included that wait already: the engine stops."""
        self._hurries = True
        now_s = asyncio.get_running_loop().time()
        for timeout in self._waiting:
            if not timeout.expired():  # its task has not noticed yet
                timeout.reschedule(now_s)

    @property
    def used_bytes(self) -> int:
        """Bytes of the jobs that run or wait for a thread, at either priority."""
        return self._low.used_bytes + self._normal.used_bytes

    def close(self) -> None:
        """Fail what no thread has begun, and wait for the rest. Idempotent."""
        self._low.close()
        self._normal.close()
