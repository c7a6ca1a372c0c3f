"""Receiving bytes: uninitialised memory, and the part of a connection that does not depend on its protocol."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import Any, cast

import numpy as np


def fresh_buffer(num_bytes: int) -> memoryview:
    """A writable buffer of unspecified content; all of it must be written before it is read.

    Unlike a `bytearray`, it is not zeroed, which would block the event loop: the page faults of the first touch are
    taken by the thread that fills the buffer.
    """
    array: Any = np.empty(num_bytes, np.uint8)
    return memoryview(array)


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
