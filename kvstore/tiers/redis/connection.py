"""One connection to a Redis server: many commands in flight, large replies received straight into their target."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from kvstore.errors import KVStoreError, Unavailable
from kvstore.runtime.buffers import fresh_buffer
from kvstore.runtime.deadline import Deadline
from kvstore.tiers.redis.resp import Argument, ErrorReply, ProtocolError, Reply, ReplyParser, encode_command, joined

__all__ = ["Connection", "Sink"]

_HANG_S = 0.2
_UNSENT_BYTES_MAX = 64 << 20

Sink = Callable[[int, int], memoryview]
"""Given the index of a command in its pipeline and the size of its reply, the buffer to receive that reply into."""


class _Pipeline:
    """Commands sent together: they are done when the last one is answered."""

    __slots__ = ("error", "future", "num_commands", "replies", "sent_s", "sink", "wanted")

    def __init__(self, num_commands: int, sink: Sink | None, sent_s: float, future: asyncio.Future[None]) -> None:
        self.num_commands = num_commands
        self.sink = sink
        self.sent_s = sent_s
        self.future = future
        self.replies: list[Reply] = []
        self.error: KVStoreError | None = None
        self.wanted = True

    def finish(self, error: KVStoreError | None = None) -> None:
        self.error = self.error or error
        if not self.future.done():
            self.future.set_result(None)


class Connection(asyncio.BufferedProtocol):
    """Made by `asyncio`'s `create_connection`; of no further use once `alive` is false.

    Args:
        address: Who it leads to, for messages.

    A read whose caller was cancelled or out of time is received into scrap from that moment on: its buffer is free.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = ReplyParser(self._sink_for, self._on_reply)
        self._waiting: deque[_Pipeline] = deque()
        self._received_s = self._loop.time()
        self._closed = asyncio.Event()

    @property
    def alive(self) -> bool:
        """True while commands can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def num_in_flight(self) -> int:
        """Pipelines that are not answered yet."""
        return len(self._waiting)

    async def run(
        self, commands: Sequence[Sequence[Argument]], *, deadline: Deadline, sink: Sink | None = None
    ) -> list[Reply]:
        """Send commands in one go and return their replies; errors of single commands are `ErrorReply` values.

        Raises:
            Unavailable: The connection was lost, or the deadline came first. What was sent may still be carried out.
                Or bytes of earlier callers are still waiting to be sent.

        If cancelled, what was sent may still be carried out; buffers from `sink` are not written to any more.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            raise Unavailable("the connection to Redis is lost", address=self.address)
        if transport.get_write_buffer_size() > _UNSENT_BYTES_MAX:
            # callers that gave up leave their bytes here, beyond every limit for bytes in flight
            raise Unavailable("Redis takes bytes too slowly: check its load and the network", address=self.address)
        pipeline = _Pipeline(len(commands), sink, self._loop.time(), self._loop.create_future())
        self._waiting.append(pipeline)
        for part in joined([encode_command(*command) for command in commands]):
            transport.write(part)
        try:
            await asyncio.wait({pipeline.future}, timeout=deadline.remaining_s)
        finally:
            if not pipeline.future.done():
                self._abandon(pipeline)
        if not pipeline.future.done():
            raise Unavailable(
                "Redis did not answer before the deadline: check its load, SLOWLOG and the network",
                address=self.address,
            )
        if pipeline.error is not None:
            raise pipeline.error
        return pipeline.replies

    def _abandon(self, pipeline: _Pipeline) -> None:
        pipeline.wanted = False
        if self._waiting and self._waiting[0] is pipeline:
            self._parser.drop_target()
        # Nothing at all though something is due: the server hangs, and so would whatever is sent behind it. A caller
        # that leaves early shows nothing, and must not end what others have in flight.
        due_s = max(self._received_s, self._waiting[0].sent_s)
        if self._loop.time() - due_s >= _HANG_S:
            self.abort()

    def abort(self) -> None:
        """Drop the connection at once; everything in flight fails with `Unavailable`. Idempotent."""
        if self._transport is not None:
            self._transport.abort()

    async def aclose(self) -> None:
        """Drop the connection and wait until it is gone. Idempotent."""
        if self._transport is not None:
            self._transport.abort()
            await self._closed.wait()

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

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

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(Unavailable("the connection to Redis was lost", address=self.address, error=exc))
        self._closed.set()

    def _fail(self, error: Unavailable) -> None:
        while self._waiting:
            self._waiting.popleft().finish(error)

    def _sink_for(self, num_bytes: int) -> memoryview | None:
        if not self._waiting:
            raise ProtocolError("a reply that nobody asked for")
        pipeline = self._waiting[0]
        if not pipeline.wanted or pipeline.error is not None:
            return None
        if pipeline.sink is None:
            return fresh_buffer(num_bytes)
        try:
            return pipeline.sink(len(pipeline.replies), num_bytes)
        except KVStoreError as error:
            pipeline.error = error
            return None

    def _on_reply(self, reply: Reply) -> None:
        if not self._waiting:
            raise ProtocolError("a reply that nobody asked for")
        pipeline = self._waiting[0]
        if isinstance(reply, ErrorReply):
            reply = replace(reply, address=self.address)
        pipeline.replies.append(reply)
        if len(pipeline.replies) == pipeline.num_commands:
            self._waiting.popleft().finish()
