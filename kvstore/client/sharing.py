"""Reads records from the service's shared memory, which is mapped once for each service."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable

from kvstore.client.connection import ClientOptions, Connection
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.runtime.arena import ArenaView, Place
from kvstore.runtime.buffers import fresh_buffer
from kvstore.wire import messages
from kvstore.wire.address import UnixAddress
from kvstore.wire.frames import FrameReader, Head, pack_head
from kvstore.wire.messages import PROTOCOL_VERSION, Message, decode, encode, raise_error

_log = logging.getLogger(__name__)


class SharedRecords:
    """The service's shared memory, if it has any and we could map it.

    Attributes:
        arena: Id of the mapped arena; empty: none. Named in each load, so that a restarted service, which has another
            one, sends the record instead.
    """

    def __init__(self, options: ClientOptions) -> None:
        self.arena = b""
        self._options = options
        self._view: ArenaView | None = None

    async def follow(self, connection: Connection) -> None:
        """Map the arena that the service of a new connection shares. Never fails: without one records are sent."""
        arena = connection.welcome.arena
        if arena == self.arena or not self._options.shared_memory:
            return
        self.arena, self._view = b"", None
        if not arena or not isinstance(connection.address, UnixAddress):
            return
        path = connection.address.path
        try:
            shared, view = await asyncio.get_running_loop().run_in_executor(None, _map, path, self._options)
        except (KVStoreError, OSError) as error:
            _log.debug("cannot map the service's memory, records are sent instead reason=%s", error)
            return
        self.arena, self._view = shared, view

    def read(
        self, arena: bytes, answer: messages.Loaded, allocate: Callable[[int], memoryview] | None
    ) -> memoryview | None:
        """Copy a record out of the arena that the load named. `None`: the record is gone.

        Raises:
            InvalidRequest: The answer makes no sense, or the caller's buffer cannot take the record.
        """
        view = self._view
        if view is None or arena != self.arena:  # remapped meanwhile
            return None
        target = memoryview((allocate or fresh_buffer)(answer.num_bytes)).cast("B")
        if target.readonly or len(target) < answer.num_bytes:
            raise InvalidRequest("allocate must return a writable buffer of that size", expected=answer.num_bytes)
        if not view.copy(Place(answer.offset, answer.num_bytes, answer.stamp), target):
            return None
        return target[: answer.num_bytes]


class _Heads:
    """A frame sink that keeps messages; payloads are dropped."""

    def __init__(self) -> None:
        self.received: list[Message] = []

    def on_head(self, head: Head, payload_bytes: int) -> None:
        return None

    def on_frame(self, head: Head, payload: memoryview | None) -> None:
        self.received.append(decode(head))


def _map(path: str, options: ClientOptions) -> tuple[bytes, ArenaView]:
    """Ask for the descriptor on a connection of its own: an event loop's transports drop received descriptors."""
    deadline_ms = int(options.hello_timeout_s * 1000)
    requests = (
        messages.Hello(PROTOCOL_VERSION, options.token, "arena", options.name),
        messages.ShareArena(1, deadline_ms),
    )
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(options.hello_timeout_s)
        connection.connect(path)
        for request in requests:
            connection.sendall(pack_head(encode(request)))
        sink, descriptors = _Heads(), list[int]()
        reader = FrameReader(sink, 0)
        try:
            while len(sink.received) < len(requests):
                _receive(connection, reader, descriptors)
            answer = sink.received[-1]
            if isinstance(answer, messages.Error | messages.Refused):
                raise_error(answer)
            if not isinstance(answer, messages.ArenaShared) or not descriptors:
                raise Unavailable("the service shared no memory")
            return answer.arena, ArenaView(descriptors[0], answer.capacity_bytes)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _receive(connection: socket.socket, reader: FrameReader, descriptors: list[int]) -> None:
    target = reader.buffer()
    data, received, _, _ = socket.recv_fds(connection, len(target), 1, socket.MSG_CMSG_CLOEXEC)
    descriptors += received
    if not data:
        raise Unavailable("the service went away")
    target[: len(data)] = data
    reader.received(len(data))
