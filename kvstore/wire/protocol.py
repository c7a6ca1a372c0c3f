"""A connection as both sides use it: frames over an asyncio transport, received into their owner's buffers."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Protocol, cast

from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.wire import messages
from kvstore.wire.frames import FrameReader, FrameSink, Later, pack_head

__all__ = ["FrameConnection", "FrameOwner", "Later"]

_UNIX_BUFFER_BYTES = 256 << 10
"""Small, so that the kernel uses a few pages again and again instead of touching fresh ones for each record."""
_TCP_BUFFER_BYTES = 4 << 20
_WRITE_HIGH_BYTES = 8 << 20
_LINGER_S = 1.0
_TCP_SILENCE_MS = 10_000


class FrameOwner(FrameSink, Protocol):
    """A client's or a service's end of one connection."""

    def on_lost(self, reason: str) -> None:
        """Called once, when nothing will be received or sent any more."""
        ...


class FrameConnection(asyncio.BufferedProtocol):
    """Frames in both directions; the protocol of an asyncio transport.

    Args:
        owner: Gets what is received. Errors of `kvstore.errors` that it raises end the connection with a `Refused`.
        max_payload_bytes: Larger payloads end the connection.
        on_made: Called when there is a connection: one whose TLS handshake fails is never made, and never lost.
    """

    def __init__(self, owner: FrameOwner, max_payload_bytes: int, on_made: Callable[[], None] = lambda: None) -> None:
        self._on_made = on_made
        self.reader = FrameReader(owner, max_payload_bytes)
        self.received_bytes = 0
        self.sent_bytes = 0
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._turn = asyncio.Lock()
        self._closing = False

    # called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_WRITE_HIGH_BYTES)
        tune_socket(self._transport.get_extra_info("socket"))
        self._on_made()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self.received_bytes += nbytes
        if self._closing:
            return
        try:
            self.reader.received(nbytes)
        except KVStoreError as error:
            self.refuse(error)
        if self.reader.waiting and self._transport is not None:
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._transport = None
        self._writable.set()
        self._owner.on_lost(f"connection lost: {exc}" if exc else "connection closed by the other side")

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # called by the owner

    @property
    def open(self) -> bool:
        return not self._closing and self._transport is not None

    def extra(self, name: str) -> object:
        """`get_extra_info` of the transport."""
        return self._transport.get_extra_info(name) if self._transport is not None else None

    def post(self, message: messages.Message) -> None:
        """Send a message without waiting, even past the high-water mark; for small ones. Dropped when closed."""
        if self.open:
            self._write(message, None)

    async def send(self, message: messages.Message, payload: memoryview | None = None, trace: str = "") -> None:
        """Send a message when it is its turn and the other side reads; the payload is not copied.

        Args:
            message: What to say.
            payload: Behind it.
            trace: A `traceparent` for its head, for a side that reads it.

        Raises:
            Unavailable: The connection is closed.

        If cancelled, the frame is wholly sent or not begun.
        """
        async with self._turn:
            await self._writable.wait()
            if not self.open:
                raise Unavailable("the connection is closed")
            self._write(message, payload, trace)

    async def send_descriptor(self, message: messages.Message, descriptor: int) -> None:
        """Send a message and with it a descriptor, which the other side gets a duplicate of.

        Raises:
            InvalidRequest: Not a Unix socket.
            Unavailable: The connection is closed, or the other side does not read.
        """
        async with self._turn:
            transport = self._transport
            if transport is None or self._closing:
                raise Unavailable("the connection is closed")
            sock = transport.get_extra_info("socket")
            if sock is None or sock.family != socket.AF_UNIX:
                raise InvalidRequest("descriptors travel over Unix sockets only")
            if transport.get_write_buffer_size():
                raise Unavailable("the other side does not read")
            head = pack_head(messages.encode(message))
            try:
                # past the transport, which has nothing to send at the moment and knows no ancillary data
                with socket.socket(fileno=os.dup(sock.fileno())) as own:
                    sent = socket.send_fds(own, [head], [descriptor])
            except OSError as error:
                raise Unavailable("a descriptor could not be sent", error=error.strerror) from error
            self.sent_bytes += sent
            if sent < len(head):  # the descriptor went with the first byte
                transport.write(head[sent:])

    def _write(self, message: messages.Message, payload: memoryview | None, trace: str = "") -> None:
        assert self._transport is not None
        fields = messages.encode(message)
        if trace:
            fields["trace"] = trace
        head = pack_head(fields, 0 if payload is None else len(payload))
        self.sent_bytes += len(head) + (0 if payload is None else len(payload))
        self._transport.write(head)
        if payload is not None:
            self._transport.write(payload)

    def provide(self, target: memoryview | None) -> None:
        """Give the buffer that the owner answered `LATER` for, and read on."""
        if self.open and self.reader.waiting:
            self.reader.provide(target)
            assert self._transport is not None
            self._transport.resume_reading()

    def refuse(self, error: KVStoreError) -> None:
        """Tell the other side why, where it still reads, and close."""
        if self.open:
            self._write(messages.Refused(type(error).__name__, str(error)), None)
        self.close()

    def close(self) -> None:
        """Close after what was written is sent, at the latest after a second. `on_lost` follows. Idempotent."""
        if self._transport is not None and not self._closing:
            self._closing = True
            self._transport.close()
            asyncio.get_running_loop().call_later(_LINGER_S, self._abort)

    def abort(self) -> None:
        """Close at once, dropping what is not sent. `on_lost` follows. Idempotent."""
        self._closing = True
        self._abort()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def tune_socket(sock: socket.socket | None) -> None:
    """Buffers that suit the family; on TCP no delay, and an end to connections whose peer is silently gone."""
    if sock is None:
        return
    buffer_bytes = _UNIX_BUFFER_BYTES if sock.family == socket.AF_UNIX else _TCP_BUFFER_BYTES
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _TCP_SILENCE_MS)
