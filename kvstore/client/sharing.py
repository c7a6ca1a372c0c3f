"""Reads records where they are in the service's shared memory, which is mapped once for each service."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.api import LeasedRecord, LeaseId, LoadedRecord, PageStore
from kvstore.client.connection import ClientOptions, Connection
from kvstore.errors import CorruptRecord, KVStoreError, Unavailable
from kvstore.format.record import Record, read_record
from kvstore.model.keys import RecordKey
from kvstore.runtime.arena import ArenaView, Place
from kvstore.runtime.deadline import Deadline
from kvstore.wire import messages
from kvstore.wire.address import UnixAddress
from kvstore.wire.frames import FrameReader, Head, pack_head
from kvstore.wire.messages import PROTOCOL_VERSION, Message, decode, encode, raise_error

_log = logging.getLogger(__name__)

_AT_ONCE_S = 1e-6
"""The shortest timeout: zero would make the socket non-blocking."""


class SharedMemory:
    """The service's shared memory, if it has any, says where records are in it, and we could map it.

    Attributes:
        arena: Id of the mapped arena; empty: none. Named in each request for places, since a restarted service has
            another one.
        view: The mapping; `None`: none.
    """

    def __init__(self, options: ClientOptions) -> None:
        self.arena = b""
        self.view: ArenaView | None = None
        self._options = options

    async def follow(self, connection: Connection) -> None:
        """Map the arena that the service of a new connection shares. Never fails: without one records are sent."""
        arena = connection.welcome.arena if connection.welcome.locates else b""
        if arena == self.arena or not self._options.shared_memory:
            return
        self.arena, self.view = b"", None
        if not arena or not isinstance(connection.address, UnixAddress):
            return
        path = connection.address.path
        try:
            shared, view = await asyncio.get_running_loop().run_in_executor(None, map_arena, path, self._options)
        except (KVStoreError, OSError) as error:
            _log.debug("cannot map the service's memory, records are sent instead reason=%s", error)
            return
        self.arena, self.view = shared, view


class MappedRecord(LeasedRecord):
    """A leased record that is read where it is in the service's memory.

    Raises:
        InvalidRequest: There is no such place in that memory.
    """

    def __init__(self, store: PageStore, lease: LeaseId, key: RecordKey, view: ArenaView, place: Place) -> None:
        super().__init__(store, lease, key)
        self._loaded = _MappedBytes(key, view, place)

    async def load(self, *, deadline: Deadline, allocate: Callable[[int], memoryview] | None = None) -> LoadedRecord:
        return self._loaded


class _MappedBytes(LoadedRecord):
    def __init__(self, key: RecordKey, view: ArenaView, place: Place) -> None:
        view.at(place)  # a service may answer anything
        self._key, self._view, self._place = key, view, place

    @property
    def num_bytes(self) -> int:
        return self._place.num_bytes

    @contextmanager
    def reading(self) -> Iterator[Record]:
        try:
            record = read_plain(self._view.at(self._place), self._key)
            with record.data:  # which cannot be read after the block
                yield record
        finally:
            if not self._view.holds(self._place):
                raise Unavailable("the record is no longer there: its lease has ended", key=self._key)


def read_plain(data: memoryview, key: RecordKey) -> Record:
    """As `read_record`, of what a service hands out: a plain record, since no reader here could decrypt one.

    Raises:
        CorruptRecord: As `read_record`, or the record is encrypted.
    """
    record = read_record(data, key)
    if record.header.key_id:
        raise CorruptRecord("the service answered a load with an encrypted record", key=key)
    return record


class _Heads:
    """A frame sink that keeps messages; payloads are dropped."""

    def __init__(self) -> None:
        self.received: list[Message] = []

    def on_head(self, head: Head, payload_bytes: int) -> None:
        return None

    def on_frame(self, head: Head, payload: memoryview | None) -> None:
        self.received.append(decode(head))


def map_arena(path: str, options: ClientOptions) -> tuple[bytes, ArenaView]:
    """The id and a view of the memory that a service shares.

    Asks for the descriptor on a connection of its own: an event loop's transports drop received descriptors.

    Raises:
        Unavailable: The service shares none.
        OSError: It cannot be reached, or has not answered after `hello_timeout_s`.
    """
    deadline = Deadline.after(options.hello_timeout_s)
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
                _receive(connection, reader, descriptors, deadline)
            answer = sink.received[-1]
            if isinstance(answer, messages.Error | messages.Refused):
                raise_error(answer)
            if not isinstance(answer, messages.ArenaShared) or not descriptors:
                raise Unavailable("the service shared no memory")
            return answer.arena, ArenaView(descriptors[0], answer.capacity_bytes)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _receive(connection: socket.socket, reader: FrameReader, descriptors: list[int], deadline: Deadline) -> None:
    connection.settimeout(deadline.remaining_s or _AT_ONCE_S)
    target = reader.buffer()
    data, received, _, _ = socket.recv_fds(connection, len(target), 1, socket.MSG_CMSG_CLOEXEC)
    descriptors += received
    if not data:
        raise Unavailable("the service went away")
    target[: len(data)] = data
    reader.received(len(data))
