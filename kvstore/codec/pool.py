"""Threads that encode and decode under a byte budget, for asyncio and for plain threads alike."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from kvstore.errors import Closed, InvalidRequest, Unavailable
from kvstore.runtime.deadline import Deadline

__all__ = ["CodecPool", "PoolUsage"]

Result = TypeVar("Result")
Params = ParamSpec("Params")


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """What a pool does now.

    Attributes:
        used_bytes: Bytes of jobs that were let in and have not ended.
        limit_bytes: The budget.
        num_waiting: Callers that wait to be let in.
    """

    used_bytes: int
    limit_bytes: int
    num_waiting: int


class CodecPool:
    """At most `limit_bytes` of jobs at a time, first come first served. Safe from any thread.

    Jobs run truly in parallel as long as they stay in numpy, zstandard and xxhash, which release the GIL (`zstd.py`).

    Args:
        num_threads: At most so many jobs at a time.
        limit_bytes: Of all jobs together.
    """

    def __init__(self, *, num_threads: int, limit_bytes: int) -> None:
        if num_threads <= 0 or limit_bytes <= 0:
            raise InvalidRequest("a pool needs threads and bytes", num_threads=num_threads, limit_bytes=limit_bytes)
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._lock = threading.Lock()
        self._waiters: deque[tuple[int, Future[None]]] = deque()
        self._closed = False
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="codec")

    def try_submit(
        self, num_bytes: int, work: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> Future[Result] | None:
        """Start `work` soon, or return `None`: the budget is used up, or somebody waits for it. Never blocks.

        Args:
            num_bytes: What the job holds in memory until it ends, e.g. source and target.
            work: Runs in one of the pool's threads.
            args: Passed to `work`.
            kwargs: Passed to `work`.

        Raises:
            Closed: The pool is closed.
        """
        with self._lock:
            self._refuse_if_closed()
            if self._waiters or self._used_bytes + num_bytes > self._limit_bytes:
                return None
            self._used_bytes += num_bytes
        return self._start(num_bytes, lambda: work(*args, **kwargs))

    def submit(self, num_bytes: int, work: Callable[[], Result], *, deadline: Deadline) -> Future[Result]:
        """Start `work` as soon as the budget allows; blocks the calling thread until then.

        Raises:
            Unavailable: There was no room before the deadline; `work` was not started.
            InvalidRequest: More than the whole budget was asked for.
            Closed: The pool is closed, or was while waiting.
        """
        room = self._ask(num_bytes)
        try:
            room.result(deadline.remaining_s)
        except TimeoutError as error:
            self._withdraw(num_bytes, room)
            raise Unavailable("codec threads had no room before the deadline", num_bytes=num_bytes) from error
        except BaseException:
            self._withdraw(num_bytes, room)
            raise
        return self._start(num_bytes, work)

    async def run(self, num_bytes: int, work: Callable[[], Result], *, deadline: Deadline) -> Result:
        """Run `work` in the pool and return its result; the deadline bounds the wait for room, not the work.

        Raises:
            Unavailable: There was no room before the deadline; `work` was not started.
            InvalidRequest: More than the whole budget was asked for.
            Closed: The pool is closed, or was while waiting.

        If cancelled, it returns once `work` has ended or can no longer start: the caller's buffers are its own again.
        """
        room = self._ask(num_bytes)
        try:
            async with deadline.scope("waiting for codec threads"):
                await asyncio.wrap_future(room)
        except BaseException:
            self._withdraw(num_bytes, room)
            raise
        job = self._start(num_bytes, work)
        waiting = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if not job.cancel():
                await _ended(waiting)
            raise

    @property
    def usage(self) -> PoolUsage:
        """A consistent look at the pool."""
        with self._lock:
            return PoolUsage(self._used_bytes, self._limit_bytes, len(self._waiters))

    def close(self) -> None:
        """Turn waiters away, let started jobs end, and wait for them. Idempotent."""
        with self._lock:
            self._closed = True
            waiters, self._waiters = self._waiters, deque()
        for _, room in waiters:
            if room.set_running_or_notify_cancel():
                room.set_exception(Closed("the codec pool was closed"))
        self._executor.shutdown(wait=True)

    def _ask(self, num_bytes: int) -> Future[None]:
        """A future that is done once `num_bytes` are the asker's; `_start` or `_withdraw` must follow."""
        if num_bytes > self._limit_bytes:
            raise InvalidRequest("asked for more than the whole budget", asked=num_bytes, limit_bytes=self._limit_bytes)
        room: Future[None] = Future()
        with self._lock:
            self._refuse_if_closed()
            self._waiters.append((num_bytes, room))
        self._let_in()
        return room

    def _let_in(self) -> None:
        while True:
            with self._lock:
                if not self._waiters or self._used_bytes + self._waiters[0][0] > self._limit_bytes:
                    return
                num_bytes, room = self._waiters.popleft()
                if not room.set_running_or_notify_cancel():
                    continue
                self._used_bytes += num_bytes
            room.set_result(None)  # outside the lock: it wakes the asker, whose callbacks may come back here

    def _withdraw(self, num_bytes: int, room: Future[None]) -> None:
        """Undo `_ask`, whether the room was granted meanwhile or not."""
        room.cancel()
        with self._lock:
            if (num_bytes, room) in self._waiters:
                self._waiters.remove((num_bytes, room))
        if not room.cancelled() and room.exception() is None:
            self._give_back(num_bytes)
        else:
            self._let_in()  # whoever stood behind may fit now

    def _start(self, num_bytes: int, work: Callable[[], Result]) -> Future[Result]:
        try:
            job = self._executor.submit(work)
        except RuntimeError as error:  # the executor's word for "shut down"
            self._give_back(num_bytes)
            raise Closed("the codec pool was closed") from error
        job.add_done_callback(lambda _: self._give_back(num_bytes))
        return job

    def _give_back(self, num_bytes: int) -> None:
        with self._lock:
            self._used_bytes -= num_bytes
        self._let_in()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise Closed("the codec pool is closed")


async def _ended(job: asyncio.Future[Result]) -> None:
    """Return when `job` has ended, however often the caller is cancelled meanwhile; a job takes milliseconds."""
    while not job.done():
        try:
            await asyncio.wait([job])
        except asyncio.CancelledError:
            continue
    if not job.cancelled():
        job.exception()  # looked at: the caller was cancelled, nobody else will
