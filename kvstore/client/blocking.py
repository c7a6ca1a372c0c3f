"""`BlockingStore`: the store for plain threads, over one event loop in one thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import uvloop

from kvstore.api import LeaseId, PageStore
from kvstore.client.connection import ClientOptions
from kvstore.client.embedded import EmbeddedOptions
from kvstore.client.remote import RemoteStore, connect
from kvstore.errors import Closed, InvalidRequest, Unavailable
from kvstore.runtime.background import on_loose_exception
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.machine import leave_pinned_core

P = ParamSpec("P")
Value = TypeVar("Value")
_LATE_S = 0.25
_CLOSE_S = 3.0


def _waited(
    method: Callable[Concatenate[RemoteStore, P], Coroutine[Any, Any, Value]],
) -> Callable[Concatenate[BlockingStore, P], Value]:
    """Make a blocking method of one of `RemoteStore`: it waits for the result, never past its deadline."""

    @wraps(method)
    def wait(self: BlockingStore, /, *args: P.args, **kwargs: P.kwargs) -> Value:
        deadline = kwargs["deadline"]
        assert isinstance(deadline, Deadline)
        return self._wait(self.submit(lambda _: method(self._store, *args, **kwargs)), deadline)

    return wait


class BlockingStore:
    """The calls of `PageStore`, which wait, never past their deadline; `submit` returns a future at once.

    Futures fail as `PageStore` does. Cancelling one cancels its call; a cancelled stage leaves nothing leased. After
    a failed or cancelled load the buffer may still be written for a moment: drop it. Callbacks of futures, `progress`
    and `allocate` run on the loop's thread. They must be quick, and may not make calls of this object that wait: these
    are refused.

    A forked child must not use its parent's object (it gets `Closed`). It holds none of the connections, so that the
    service notices when the parent ends.

    The arguments are those of `connect`, which neither blocks nor fails when there is no service.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        options: ClientOptions | None = None,
        embedded: EmbeddedOptions | None = None,
    ) -> None:
        self._store = connect(url, token=token, options=options, embedded=embedded)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._loop.set_exception_handler(on_loose_exception)
        self._executor = ThreadPoolExecutor(thread_name_prefix="kvstore-client")
        self._loop.set_default_executor(self._executor)
        self._thread = threading.Thread(target=self._run, name="kvstore-client", daemon=True)
        self._thread.start()
        self._loop.call_soon_threadsafe(self._store.start)
        _living.add(self)
        atexit.register(self.close)

    @property
    def url(self) -> str:
        """The url that it was made with."""
        return self._store.url

    # calls

    def submit(self, work: Callable[[PageStore], Coroutine[Any, Any, Value]]) -> Future[Value]:
        """Run `work(store)` on the loop's thread, e.g. several calls as one task.

        Raises:
            Closed: The client is closed, or belongs to another process.
        """
        if os.getpid() != self._pid:
            raise Closed("this store belongs to another process: make one after the fork", pid=self._pid)
        with self._lock:  # so that no thread closes the loop between the check and the call
            if self._closed:
                raise Closed("the client is closed")
            return asyncio.run_coroutine_threadsafe(self._answer(work), self._loop)

    def run(self, work: Callable[[PageStore], Coroutine[Any, Any, Value]], *, deadline: Deadline) -> Value:
        """`submit`, and wait for the result, never past `deadline`."""
        return self._wait(self.submit(work), deadline)

    wait_ready = _waited(RemoteStore.wait_ready)
    open_namespace = _waited(RemoteStore.open_namespace)
    lookup = _waited(RemoteStore.lookup)
    stage = _waited(RemoteStore.stage)
    renew = _waited(RemoteStore.renew)
    load = _waited(RemoteStore.load)
    save = _waited(RemoteStore.save)
    save_many = _waited(RemoteStore.save_many)
    discard = _waited(RemoteStore.discard)
    status = _waited(RemoteStore.status)
    explain = _waited(RemoteStore.explain)

    def release(self, lease: LeaseId) -> None:
        """End a lease; returns at once and never fails."""
        with suppress(Closed):
            self.submit(lambda store: store.release(lease))

    # the bridge

    async def _answer(self, work: Callable[[PageStore], Coroutine[Any, Any, Value]]) -> Value:
        try:
            return await work(self._store)
        except asyncio.CancelledError:
            if not self._closed:
                raise
            if (task := asyncio.current_task()) is not None:  # a caller that gave up does not read it
                task.add_done_callback(asyncio.Task.exception)
            raise Closed("the client was closed during the call") from None

    def _wait(self, future: Future[Value], deadline: Deadline) -> Value:
        if threading.current_thread() is self._thread:
            future.cancel()
            raise InvalidRequest("a call that waits was made from the client's own thread: use `submit` there")
        try:
            # the call ends by itself at the deadline; the margin is for a loop whose thread is not scheduled
            return future.result(deadline.remaining_s + _LATE_S)
        except FutureTimeout:
            future.cancel()
            raise Unavailable("the client's thread did not answer in time") from None
        except CancelledError:
            raise Closed("the client was closed during the call") from None
        finally:
            del future  # it has the error, whose traceback has this frame

    def _run(self) -> None:
        leave_pinned_core()  # inherited by all that this thread starts, an embedded service too
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            # `shutdown_default_executor` would start a thread, which Python 3.12 refuses while the interpreter exits.
            self._executor.shutdown()
            self._loop.close()

    # the end

    def close(self) -> None:
        """Close the connections and end the thread, within three seconds; running calls fail `Closed`. Idempotent.

        In a forked process it does nothing. From the loop's own thread it is refused.
        """
        if os.getpid() != self._pid:
            return
        if threading.current_thread() is self._thread:
            raise InvalidRequest("the client cannot be closed from its own thread")
        with self._lock:
            if self._closed:
                return
            self._closed = True
            ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        atexit.unregister(self.close)
        _living.discard(self)
        with suppress(FutureTimeout, CancelledError):
            ending.result(_CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)

    async def _end(self) -> None:
        await self._store.aclose()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=1.0)

    def __enter__(self) -> BlockingStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forget_sockets(self) -> None:
        """In a forked child: drop the parent's connections without sending anything to the service."""
        for descriptor, inode in self._store.sockets():
            with suppress(OSError):
                if os.fstat(descriptor).st_ino == inode:
                    # replaced, not closed: a later close of this number must not hit an unrelated file
                    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
                    os.dup2(null, descriptor, inheritable=False)
                    os.close(null)


_living: weakref.WeakSet[BlockingStore] = weakref.WeakSet()


def _after_fork() -> None:
    for store in list(_living):
        store._forget_sockets()


os.register_at_fork(after_in_child=_after_fork)
