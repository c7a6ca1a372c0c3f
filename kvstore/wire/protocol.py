"""A connection, for both sides: frames over an asyncio transport, received directly into their target buffers."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Callable
from typing import Protocol

from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.runtime.buffers import BufferedConnection
from kvstore.wire import messages
from kvstore.wire.frames import MAX_HEAD_BYTES, FrameReader, FrameSink, pack_head

_UNIX_BUFFER_BYTES = 256 << 10
"""Small, so that the kernel reuses a few pages instead of allocating new ones for each record."""
_TCP_BUFFER_BYTES = 4 << 20
_WRITE_HIGH_BYTES = 2 << 20
"""Unsent bytes of one connection above which `send` waits. The frame that exceeds it is still written."""
_POSTED_BYTES_MAX = 4 << 20
"""Limit of unread `post` messages: a peer that sends requests but reads no answers is disconnected."""
_LINGER_S = 1.0
_TCP_INFO_ACKED = struct.Struct("=120xQ")
"""`tcpi_bytes_acked` in the kernel's `struct tcp_info`."""
_TCP_SILENCE_MS = 10_000
"""How long sent data may stay unacknowledged before the connection is considered dead."""


class FrameOwner(FrameSink, Protocol):
    """A client's or a service's end of one connection."""

    def on_lost(self, reason: str) -> None:
        """Called once, when nothing will be received or sent any more."""
        ...


class FrameConnection(BufferedConnection):
    """Sends and receives frames; the protocol of an asyncio transport.

    Args:
        owner: Receives the frames. If it raises an error of `kvstore.errors`, the connection ends with a `Refused`.
        max_payload_bytes: Larger payloads end the connection.
        max_head_bytes: Larger heads end the connection.
        on_made: Called when the connection is established, TLS handshake included. If the handshake fails, neither this
            nor `on_lost` is called.

    Attributes:
        refusal: Why this side has ended the connection; `None`: it has not.
    """

    def __init__(
        self,
        owner: FrameOwner,
        max_payload_bytes: int,
        on_made: Callable[[], None] | None = None,
        *,
        max_head_bytes: int = MAX_HEAD_BYTES,
    ) -> None:
        super().__init__()
        self._on_made = on_made
        self.reader = FrameReader(owner, max_payload_bytes, max_head_bytes)
        self.received_bytes = 0
        self.written_bytes = 0
        self.refusal: KVStoreError | None = None
        self._owner: FrameOwner | None = owner
        self._writable = asyncio.Event()
        self._writable.set()
        self._turn = asyncio.Lock()
        self._posted_bytes = 0  # since the other side has stopped reading
        self._closing = False
        self._is_held = False

    # called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self._transport is not None
        # the low mark is near the high one, so that the kernel always has something to send
        self._transport.set_write_buffer_limits(high=_WRITE_HIGH_BYTES, low=_WRITE_HIGH_BYTES * 3 // 4)
        tune_socket(self._transport.get_extra_info("socket"))
        on_made, self._on_made = self._on_made, None
        if on_made is not None:
            on_made()

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

    def on_lost(self, error: Exception | None) -> None:
        self._closing = True
        self._writable.set()
        # break the reference cycle between owner and connection: their buffers are freed at once
        owner, self._owner = self._owner, None
        self.reader.end()
        if owner is not None:
            reason = f"connection lost: {error}" if error else "connection closed by the other side"
            owner.on_lost(reason if self.refusal is None else f"what came is refused: {self.refusal}")

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._posted_bytes = 0
        self._writable.set()

    # called by the owner

    @property
    def queued_bytes(self) -> int:
        """Bytes in this side's kernel that the other side has not taken. With TLS others may wait behind them, which
        `unsent_bytes` does not count.
        """
        sock = self._socket()
        return struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))[0] if sock is not None else 0

    @property
    def arrived_bytes(self) -> int:
        """A count that grows as the other side takes what is sent to it.

        The size of the transport's buffer would not do: the kernel takes bytes from it only in large steps, and with
        TLS it empties a record at a time.
        """
        sock = self._socket()
        if sock is None:
            return self.written_bytes
        if sock.family == socket.AF_UNIX:
            return self.written_bytes - self.unsent_bytes - self.queued_bytes
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_ACKED.size)
        return int(_TCP_INFO_ACKED.unpack(info)[0])

    def _socket(self) -> socket.socket | None:
        return self._transport.get_extra_info("socket") if self._transport is not None else None

    @property
    def open(self) -> bool:
        return not self._closing and self._transport is not None

    def extra(self, name: str) -> object:
        """`get_extra_info` of the transport."""
        return self._transport.get_extra_info(name) if self._transport is not None else None

    def post(self, message: messages.Message) -> None:
        """Send a small message without waiting, even past the high-water mark; dropped when closed. If the other side
        does not read, more than 4 MiB of posted messages end the connection.
        """
        if not self.open:
            return
        head_bytes = self._write(message, None)
        if not self._writable.is_set():
            self._posted_bytes += head_bytes
            if self._posted_bytes > _POSTED_BYTES_MAX:
                self.abort()

    async def send(self, message: messages.Message, payload: memoryview | None, trace: str = "") -> None:
        """Send a message, in FIFO order and once the other side reads; the payload is not copied.

        Args:
            payload: The frame's payload; `None`: none.
            trace: A `traceparent` for the head, for a peer that reads it.

        Raises:
            Unavailable: The connection is closed.
            InternalError: The message cannot be packed; nothing of it was sent.

        If cancelled, the frame is sent completely or not at all.
        """
        async with self._turn:
            await self._writable.wait()
            if not self.open:
                raise Unavailable("the connection is closed")
            self._write(message, payload, trace)

    async def writable(self) -> None:
        """Wait until the other side has read most of what was written, or the connection is lost."""
        await self._writable.wait()

    async def send_descriptor(self, message: messages.Message, descriptor: int) -> None:
        """Send a message and a file descriptor, which the other side receives as a duplicate.

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
                # bypasses the transport, whose buffer is empty and which cannot send ancillary data
                with socket.socket(fileno=os.dup(sock.fileno())) as own:
                    sent = socket.send_fds(own, [head], [descriptor])
            except OSError as error:
                raise Unavailable("a descriptor could not be sent", error=error.strerror) from error
            if sent < len(head):  # the descriptor was sent with the first byte
                transport.write(head[sent:])

    def _write(self, message: messages.Message, payload: memoryview | None, trace: str = "") -> int:
        """Write a frame; returns the bytes of its prefix and head."""
        assert self._transport is not None
        fields = messages.encode(message)
        if trace:
            fields["trace"] = trace
        head = pack_head(fields, 0 if payload is None else len(payload))
        self._transport.write(head)
        self.written_bytes += len(head)
        if payload is not None:
            self._transport.write(payload)
            self.written_bytes += len(payload)
        return len(head)

    def provide(self, target: memoryview | None) -> None:
        """Provide the buffer after the owner answered `LATER`, and resume reading."""
        if self.open and self.reader.waiting:
            self.reader.provide(target)
            if not self._is_held:
                assert self._transport is not None
                self._transport.resume_reading()

    def hold(self) -> None:
        """Read nothing more after the current frame, until `resume`: the other side waits. Idempotent."""
        if self.open and not self._is_held:
            self._is_held = True
            assert self._transport is not None
            self._transport.pause_reading()

    @property
    def is_held(self) -> bool:
        """Whether nothing more is read, after `hold`."""
        return self._is_held

    def resume(self) -> None:
        """Read again. Idempotent."""
        if self._is_held:
            self._is_held = False
            if self.open and not self.reader.waiting:
                assert self._transport is not None
                self._transport.resume_reading()

    def refuse(self, error: KVStoreError) -> None:
        """Send the reason, and close."""
        self.refusal = self.refusal or error
        if self.open:
            self._write(messages.Refused(type(error).__name__, str(error)), None)
        self.close()

    def close(self) -> None:
        """Close once everything written is sent, but after one second at the latest. `on_lost` follows. Idempotent."""
        if self._transport is not None and not self._closing:
            self._closing = True
            self._transport.close()
            self._loop.call_later(_LINGER_S, super().abort)

    def abort(self) -> None:
        """Close at once, dropping unsent data. `on_lost` follows. Idempotent."""
        self._closing = True
        super().abort()


def tune_socket(sock: socket.socket | None) -> None:
    """Set the buffer sizes; on TCP also disable Nagle's algorithm and detect peers that are silently gone."""
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
