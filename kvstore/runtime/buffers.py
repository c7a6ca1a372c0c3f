"""Bytes of connections: memory to receive into, large sends without Python's lock, and the part of a connection that
does not depend on its protocol.
"""

from __future__ import annotations

import asyncio
import os
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, Self, TypeVar, cast

import numpy as np

from kvstore.errors import Closed
from kvstore.runtime.io_loops import IoLoop


def fresh_buffer(num_bytes: int) -> memoryview:
    """A writable buffer of unspecified content; all of it must be written before it is read.

    Unlike a `bytearray`, it is not zeroed, which would block the event loop: the page faults of the first touch are
    taken by the thread that fills the buffer.
    """
    array: Any = np.empty(num_bytes, np.uint8)
    return memoryview(array)


_LARGE_BYTES = 64 << 10
"""Fewer bytes are sent in less time than a thread needs to give up Python's lock and take it again."""
_BUFFERS_MAX = 64
"""The system takes 1,024 in one call."""


def send(transport: asyncio.Transport, parts: Sequence[bytes | memoryview]) -> None:
    """Write parts in order; called on the transport's loop. Large ones are not copied: they must not change. Nothing is
    written once the transport closes: its number may belong to another file by then.

    A transport of uvloop keeps Python's lock while the kernel copies the bytes, a fifth of a second for a GB. So what
    the kernel takes at once is written here, without the lock and in one call; the transport sends the rest.
    """
    if transport.is_closing():
        return
    num_sent = _sent_at_once(transport, parts) if sum(map(len, parts)) >= _LARGE_BYTES else 0
    rest: list[bytes | memoryview] = []
    for part in parts:
        if num_sent < len(part):
            rest.append(memoryview(part)[num_sent:] if num_sent else part)
        num_sent = max(0, num_sent - len(part))
    if rest:
        transport.writelines(rest)


def _sent_at_once(transport: asyncio.Transport, parts: Sequence[bytes | memoryview]) -> int:
    """How many bytes the kernel took now."""
    # after others that wait; with TLS, other bytes go out than these
    if transport.get_write_buffer_size() or transport.get_extra_info("sslcontext") is not None:
        return 0
    try:
        return os.writev(transport.get_extra_info("socket").fileno(), parts[:_BUFFERS_MAX])
    except OSError:  # it takes none now, or the transport will meet the same error
        return 0


class BufferedConnection(asyncio.BufferedProtocol):
    """A connection whose bytes are received straight into their target; made by `asyncio`'s `create_connection`.

    A subclass says where bytes belong (`get_buffer`, `buffer_updated`), and ends all waiting callers in `on_lost`.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None  # `None` before and after the connection
        self._gone = asyncio.Event()

    @abstractmethod
    def on_lost(self, error: Exception | None) -> None:
        """Called once, when nothing more will be received; `error` is `None` if the peer closed the connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._gone.set()
        self.on_lost(exc)

    @property
    def unsent_bytes(self) -> int:
        """Bytes that were written and that the kernel has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def abort(self) -> None:
        """Drop the connection at once, with what was not sent yet. Idempotent."""
        if self._transport is not None:
            self._transport.abort()

    async def aclose(self) -> None:
        """Drop the connection and wait until it is gone. Idempotent."""
        if self._transport is not None:
            self._transport.abort()
            await self._gone.wait()


C = TypeVar("C", bound=BufferedConnection)


class OnLoop(Generic[C]):
    """A connection that lives on another loop, for the caller's loop; made with `open`.

    A subclass passes its calls on with `IoLoop.run`. Callbacks that these are given are called in the other loop's
    thread.
    """

    def __init__(self, connection: C, io_loop: IoLoop) -> None:
        self._connection = connection
        self._io_loop = io_loop

    @classmethod
    async def open(cls, connect: Callable[[], Awaitable[C]], io_loop: IoLoop) -> Self:
        """Connect on the other loop; errors as `connect`. If cancelled, no connection stays open."""
        opened: list[C] = []

        async def work() -> None:
            opened.append(await connect())

        try:
            await io_loop.run(work)
        except BaseException:
            for connection in opened:
                io_loop.soon(connection.abort)
            raise
        return cls(opened[0], io_loop)

    def abort(self) -> None:
        """Drop the connection soon. Idempotent."""
        self._io_loop.soon(self._connection.abort)

    async def aclose(self) -> None:
        """Drop the connection and wait until it is gone. Idempotent."""
        with suppress(Closed):  # the loop has ended, and its connections with it
            await self._io_loop.run(self._connection.aclose)
