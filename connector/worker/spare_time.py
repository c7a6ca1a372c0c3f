"""Work for an engine's pages that leaves the processors to the engine while it can wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from kvstore.api import Deadline
from kvstore.codec import CodecPool
from kvstore.errors import Unavailable

__all__ = ["SpareTime"]

Result = TypeVar("Result")

_NICENESS = 19


class SpareTime:
    """Runs jobs where no other thread wants a processor, and at normal priority if that takes too long.

    An engine that computes on all processors loses more to a thread beside it than the time that this thread takes: its
    compute threads wait for each other at every kernel's end, so that one that was put aside holds up the rest. At the
    lowest priority such a thread runs between kernels and between steps. It may then be put aside while it holds the
    interpreter's lock; the thread that waits for the lock leaves it a processor.

    Beside other busy processes such a thread may get next to no time at all, and a process may not raise a thread's
    priority again. So what takes too long is done once more, by a thread of normal priority.

    Args:
        num_threads: Threads of either priority.
        limit_bytes: Byte budget of the jobs at either priority; at least the largest job.
    """

    def __init__(self, *, num_threads: int, limit_bytes: int) -> None:
        self._spare = CodecPool(num_threads=num_threads, limit_bytes=limit_bytes, niceness=_NICENESS)
        self._normal = CodecPool(num_threads=num_threads, limit_bytes=limit_bytes)
        self._patient: set[asyncio.Timeout] = set()
        self._in_haste = False

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
            patience_s: After this long without a result the job is done again at normal priority.
            deadline: Limits the wait for a thread, not the work.
            release: Called once, when no thread reads the job's input any more; it may be after `run` has returned.

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
            if patience_s > 0 and not self._in_haste:
                spare = start(self._spare)
                try:
                    return await self._patiently(spare, patience_s)
                except (TimeoutError, Unavailable):
                    pass
                finally:
                    spare.cancel()  # it is done once its thread is, if that has begun
            return await start(self._normal)
        finally:
            ended()

    async def _patiently(self, trying: asyncio.Future[Result], patience_s: float) -> Result:
        """The result, or `TimeoutError` when the patience is over."""
        async with asyncio.timeout(patience_s) as patience:
            self._patient.add(patience)
            try:
                return await asyncio.shield(trying)
            finally:
                self._patient.discard(patience)

    def hurry(self) -> None:
        """Have no patience from now on, for what waits already either: the engine stops."""
        self._in_haste = True
        now_s = asyncio.get_running_loop().time()
        for patience in self._patient:
            if not patience.expired():  # its task has not noticed yet
                patience.reschedule(now_s)

    def close(self) -> None:
        """Fail what no thread has begun, and wait for the rest. Idempotent."""
        self._spare.close()
        self._normal.close()
