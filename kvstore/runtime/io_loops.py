"""Event loops in threads of their own, for connections that move bytes while the main loop decides.

The kernel's copies, checksums and TLS run without Python's lock, so several loops use several processors for them. The
rest of a received byte's cost holds the lock: docs/redis.md says how far more loops help.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Generic, TypeVar

import uvloop

from kvstore.errors import Closed
from kvstore.runtime.background import Work, on_loose_exception

T = TypeVar("T")


class IoLoop:
    """One event loop in one thread.

    Args:
        name: Of its thread.
    """

    def __init__(self, name: str) -> None:
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._loop.set_exception_handler(on_loose_exception)
        self._lock = threading.Lock()  # what was accepted is queued before the stop, and so runs before it
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def run(self, work: Work[T]) -> T:
        """Run `work` on this loop, in the caller's context, and return its result; errors are those of `work`.

        Raises:
            Closed: This loop is closed, or was closed during the work.

        If cancelled, the work is cancelled and has ended when this call ends. Its result is lost.
        """
        call = _Call(work, self._loop)
        self._soon(call.start)
        is_cancelled = False
        while not call.has_ended:
            try:
                await call.gone
            except asyncio.CancelledError:
                is_cancelled, call.gone = True, call.home.create_future()
                with suppress(Closed):  # then it was cancelled already
                    self._soon(call.cancel)
        if is_cancelled:
            call.drop_result()
            raise asyncio.CancelledError
        return call.result()

    def soon(self, callback: Callable[[], object]) -> None:
        """Call `callback` on this loop; without effect once it is closed."""
        with suppress(Closed):
            self._soon(callback)

    def _soon(self, callback: Callable[[], object]) -> None:
        with self._lock:
            if self._closed:
                raise Closed("the loop is closed", thread=self._thread.name)
            self._loop.call_soon_threadsafe(callback)

    async def aclose(self) -> None:
        """Cancel what runs here, and end the thread. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            while tasks := asyncio.all_tasks(self._loop):
                for task in tasks:
                    task.cancel()
                self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self._loop.close()


class _Call(Generic[T]):
    """One call, from `home` to another loop. Each method says on which of the two it runs.

    Attributes:
        home: The caller's loop.
        gone: A future of `home`, set when the work has ended.
        has_ended: Read and written on `home`.
    """

    def __init__(self, work: Work[T], loop: asyncio.AbstractEventLoop) -> None:
        self.home = asyncio.get_running_loop()
        self.gone: asyncio.Future[None] = self.home.create_future()
        self.has_ended = False
        self._work = work
        self._loop = loop
        self._task: asyncio.Task[T] | None = None

    def start(self) -> None:
        """On the other loop, in the context of the caller: the task inherits it."""
        self._task = self._loop.create_task(self._work())
        self._task.add_done_callback(self._report)

    def cancel(self) -> None:
        """On the other loop, after `start`."""
        assert self._task is not None
        self._task.cancel()

    def _report(self, _: asyncio.Task[T]) -> None:
        """On the other loop."""
        with suppress(RuntimeError):  # the caller's loop was closed
            self.home.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        """At home."""
        self.has_ended = True
        if not self.gone.done():
            self.gone.set_result(None)

    def result(self) -> T:
        """At home, after the end, once.

        Raises:
            Closed: The other loop was closed during the work.
        """
        task, self._task = self._task, None
        assert task is not None
        if task.cancelled():
            raise Closed("the loop was closed during a call")
        try:
            return task.result()
        finally:
            # an exception knows this frame, and the task the exception: buffers that the frames of the work hold would
            # last until the cyclic collector runs
            del task

    def drop_result(self) -> None:
        """At home, after the end: the caller is cancelled, and does not learn of an exception."""
        if self._task is not None and not self._task.cancelled():
            self._task.exception()


@asynccontextmanager
async def open_io_loops(num_threads: int) -> AsyncIterator[Sequence[IoLoop]]:
    """Loops for a number of threads, closed at the end of the block; none for one thread, which is the caller's own."""
    io_loops = [IoLoop(f"kvstore-io-{number}") for number in range(num_threads)] if num_threads > 1 else []
    try:
        yield io_loops
    finally:
        await asyncio.gather(*(io_loop.aclose() for io_loop in io_loops))


def call_on(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *arguments: object) -> None:
    """Call `callback` on a loop, from any thread: now if that loop runs here, else soon. Without effect once it is
    closed."""
    if asyncio._get_running_loop() is loop:
        callback(*arguments)
        return
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *arguments)
