"""One connection to a Redis server: many commands in flight, large replies received straight into their target."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from kvstore.errors import KVStoreError, Unavailable
from kvstore.runtime.buffers import BufferedConnection, OnLoop, fresh_buffer, send
from kvstore.runtime.deadline import Deadline
from kvstore.tiers.redis.reading import Reading
from kvstore.tiers.redis.replies import check_form
from kvstore.tiers.redis.resp import Argument, ErrorReply, ProtocolError, Reply, ReplyParser, encode_command, joined

_HANG_S = 0.2
UNSENT_BYTES_MAX = 64 << 20

_AHEAD = 2
"""Parts of a read that are requested at a time: the server prepares one while another is received."""


class _Call:
    """Commands whose replies a caller waits for.

    Attributes:
        num_due: Replies that have not arrived yet.
        ended: The last reply has arrived, or the connection was lost.
        wanted: False once the caller has left.
    """

    __slots__ = ("ended", "error", "future", "num_due", "reading", "replies", "sent_s", "wanted")

    def __init__(self, reading: Reading | None, sent_s: float, future: asyncio.Future[None]) -> None:
        self.reading = reading
        self.sent_s = sent_s
        self.future = future
        self.num_due = 0
        self.replies: list[Reply] = []
        self.error: KVStoreError | None = None
        self.ended = False
        self.wanted = True

    def finish(self, error: KVStoreError | None = None) -> None:
        self.error = self.error or error
        self.ended = True
        self.stop_waiting()

    def stop_waiting(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class Connection(BufferedConnection):
    """Many commands in flight; unusable once `alive` is false.

    When the caller of a read is cancelled or out of time, the rest is received into scratch memory: its buffer is free.

    Args:
        address: The peer, for messages.
    """

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address
        self._parser = ReplyParser(self._sink_for, self._on_reply)
        self._waiting: deque[_Call] = deque()  # the calls of the next replies, one entry per reply
        self._received_s = self._loop.time()

    @property
    def alive(self) -> bool:
        """True while commands can be sent. May be read in any thread."""
        transport = self._transport
        return transport is not None and not transport.is_closing()

    async def run(self, commands: Sequence[Sequence[Argument]], *, deadline: Deadline) -> list[Reply]:
        """Send commands together and return their replies; errors of single commands are `ErrorReply` values.

        Raises:
            Unavailable: The connection was lost, the deadline came first, or too many bytes wait to be sent.

        After an error or a cancellation, commands that were sent may still be executed.
        """
        transport = self._writable()
        call = _Call(None, self._loop.time(), self._loop.create_future())
        call.num_due = len(commands)
        self._waiting.extend([call] * len(commands))
        send(transport, joined([encode_command(*command) for command in commands]))
        await self._answered(call, deadline)
        try:
            for command, reply in zip(commands, call.replies, strict=True):
                check_form(command, reply, self.address)
        except Unavailable:
            self.abort()  # later replies cannot be trusted either
            raise
        return call.replies

    async def read(self, reading: Reading, *, deadline: Deadline) -> None:
        """Send the commands of a reading, a few at a time, and pass it the replies; the result is in the reading.

        Raises:
            Unavailable: As `run`.
            CorruptRecord, InvalidRequest: From the reading.

        If cancelled, its buffer is no longer written.
        """
        self._writable()
        call = _Call(reading, self._loop.time(), self._loop.create_future())
        self._send_next(call)
        await self._answered(call, deadline)

    def _writable(self) -> asyncio.Transport:
        transport = self._transport
        if transport is None or transport.is_closing():
            raise Unavailable("the connection to Redis is lost", address=self.address)
        if self.unsent_bytes > UNSENT_BYTES_MAX:
            # bytes of callers that left stay here, and are not counted as bytes in flight
            raise Unavailable("Redis takes bytes too slowly: check its load and the network", address=self.address)
        return transport

    def _send_next(self, call: _Call) -> None:
        """Send a reading's next commands, as far ahead as `_AHEAD` allows."""
        reading, transport = call.reading, self._transport
        while reading is not None and transport is not None and call.wanted and call.error is None:
            if call.num_due >= _AHEAD or (command := reading.next()) is None:
                return
            call.num_due += 1
            self._waiting.append(call)
            transport.write(b"".join(encode_command(*command)))

    async def _answered(self, call: _Call, deadline: Deadline) -> None:
        timer = self._loop.call_later(deadline.remaining_s, call.stop_waiting)
        try:
            await call.future
        finally:
            timer.cancel()
            if not call.ended:
                self._abandon(call)
        if not call.ended:
            raise _silent(self.address)
        if call.error is not None:
            raise call.error

    def _abandon(self, call: _Call) -> None:
        call.wanted = False
        if self._waiting[0] is call:
            self._parser.drop_target()
        # If replies are due and no byte has arrived, the server hangs, and later commands would hang too. Otherwise the
        # connection stays: it has the commands of other callers in flight.
        due_s = max(self._received_s, self._waiting[0].sent_s)
        if self._loop.time() - due_s >= _HANG_S:
            self._fail(_silent(self.address))
            self.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._parser.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._received_s = self._loop.time()
        try:
            self._parser.received(nbytes)
        except ProtocolError as error:
            self._fail(
                Unavailable(
                    "the server does not speak the Redis protocol: check the port; one with TLS is rediss://",
                    address=self.address,
                    seen=error,
                )
            )
            self.abort()

    def on_lost(self, error: Exception | None) -> None:
        details = {} if error is None else {"error": error}  # none: it was closed in order, by either side
        text = "the connection to Redis was lost: check whether Redis runs, its log and the network"
        self._fail(Unavailable(text, address=self.address, **details))

    def _fail(self, error: Unavailable) -> None:
        while self._waiting:
            self._waiting.popleft().finish(error)

    def _sink_for(self, num_bytes: int) -> memoryview | None:
        if not self._waiting:
            raise ProtocolError("a reply without a command")
        call = self._waiting[0]
        if not call.wanted or call.error is not None:
            return None
        if call.reading is None:
            return fresh_buffer(num_bytes)
        try:
            place = call.reading.place(num_bytes, self._parser.head())
        except KVStoreError as error:
            call.error = error
            return None
        self._parser.on_piece = call.reading.received
        self._send_next(call)  # the size is known now, and so are the next parts
        return place

    def _on_reply(self, reply: Reply) -> None:
        if not self._waiting:
            raise ProtocolError("a reply without a command")
        call = self._waiting.popleft()
        call.num_due -= 1
        if isinstance(reply, ErrorReply):
            reply = replace(reply, address=self.address)
        if call.reading is None:
            call.replies.append(reply)
        elif call.wanted and call.error is None:
            try:
                call.reading.answered(reply)
            except KVStoreError as error:
                call.error = error
            self._send_next(call)
        if call.num_due == 0:
            call.finish()


def _silent(address: str) -> Unavailable:
    text = "Redis did not answer before the deadline: check its load, SLOWLOG and the network"
    return Unavailable(text, address=address)


class ConnectionOnLoop(OnLoop[Connection]):
    """A connection whose bytes move on another loop: it encodes, receives and sums them there.

    A reading belongs to that loop while `read` runs, so its `allocate` is called in that thread.
    """

    @property
    def address(self) -> str:
        return self._connection.address

    @property
    def alive(self) -> bool:
        """As `Connection.alive`. It may change at any moment; then the next call fails."""
        return self._connection.alive

    async def run(self, commands: Sequence[Sequence[Argument]], *, deadline: Deadline) -> list[Reply]:
        """As `Connection.run`; `Closed` if the other loop is closed."""
        return await self._io_loop.run(partial(self._connection.run, commands, deadline=deadline))

    async def read(self, reading: Reading, *, deadline: Deadline) -> None:
        """As `Connection.read`; `Closed` if the other loop is closed. If cancelled, its buffer is no longer written."""
        await self._io_loop.run(partial(self._connection.read, reading, deadline=deadline))
