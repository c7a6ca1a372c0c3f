"""Work for an engine's pages that leaves the processors to the engine while it can wait."""

from __future__ import annotations

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

    Args:
        num_threads: Threads of either priority.
        job_bytes_max: Bytes of the largest job.
        limit_bytes: Byte budget of the jobs at normal priority.
    """

    def __init__(self, *, num_threads: int, job_bytes_max: int, limit_bytes: int) -> None:
        # one job is ready for each thread, and one more: what waits behind them can still be taken elsewhere
        spare_bytes = (num_threads + 1) * job_bytes_max
        self._spare = CodecPool(num_threads=num_threads, limit_bytes=spare_bytes, niceness=_NICENESS)
        self._normal = CodecPool(num_threads=num_threads, limit_bytes=max(limit_bytes, job_bytes_max))

    async def run(self, num_bytes: int, work: Callable[[], Result], *, patience_s: float, deadline: Deadline) -> Result:
        """Run `work` and return its result, as `CodecPool.run`; after `patience_s` without a start at normal priority.

        `work` raises no `Unavailable`: that would be taken for a wait that was too long.

        Raises:
            Unavailable: It could not start until the deadline.
            InvalidRequest: It is larger than the largest job.
            Closed: `close` was called.
        """
        try:
            return await self._spare.run(num_bytes, work, deadline=deadline.earlier(patience_s))
        except Unavailable:
            return await self._normal.run(num_bytes, work, deadline=deadline)

    def close(self) -> None:
        """Fail what waits, and wait for what was started. Idempotent."""
        self._spare.close()
        self._normal.close()
