"""Memory that a client shares with a service: the service's, where records are read, and some where they are made."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from kvstore.api import LeasedRecord, LeaseId, LoadedRecord, PageStore
from kvstore.client.connection import ClientOptions, Connection, socket_id
from kvstore.errors import CorruptRecord, KVStoreError, Unavailable
from kvstore.format.record import Record, read_record
from kvstore.model.keys import RecordKey
from kvstore.runtime.arena import Arena, ArenaView, Place
from kvstore.runtime.background import Background
from kvstore.runtime.deadline import Deadline
from kvstore.wire import messages
from kvstore.wire.address import UnixAddress
from kvstore.wire.frames import FrameReader, Head, pack_head
from kvstore.wire.messages import PROTOCOL_VERSION, Message, decode, encode, raise_error
from kvstore.wire.places import save_fields

_log = logging.getLogger(__name__)

SHARED_BYTES_MIN = 64 << 10
"""Smaller records are sent: a socket is as fast for them."""
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

    def close(self) -> None:
        """Give the mapping up; records that are being read keep it until they are read. Idempotent."""
        self.arena, self.view = b"", None


class SaveMemory:
    """Memory that records are made in and that the service reads, if it shares some with us.

    The service makes it and bounds it. It is ours until its connection ends; then another one is asked for when the
    service is followed again. Belongs to one event loop.
    """

    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        self._id = b""
        self._arena: Arena | None = None
        self._tasks = Background("save-memory")
        self._using: asyncio.Task[None] | None = None
        self._socket_id: tuple[int, int] | None = None

    def follow(self, connection: Connection) -> None:
        """Ask the service of a new connection for memory, in the background. Without any, records are sent."""
        before, self._using = self._using, None
        if before is not None:
            before.cancel()
        is_wanted = self._options.save_memory_bytes > 0 and connection.welcome.save_memory
        if is_wanted and isinstance(connection.address, UnixAddress):
            self._using = self._tasks.spawn(self._use(connection.address.path, before), "memory for saves")

    def sockets(self) -> list[tuple[int, int]]:
        """Descriptor and inode of its connection, if there is one."""
        return [self._socket_id] if self._socket_id is not None else []

    def take(self, num_bytes: int) -> memoryview | None:
        """A buffer in it; `None`: there is none, too little is free, or the record is so small that it may be sent."""
        return self._arena.take(num_bytes) if self._arena is not None and self.fits(num_bytes) else None

    def fits(self, num_bytes: int) -> bool:
        """Whether a buffer of this size can be taken when all of it is free."""
        return self._arena is not None and num_bytes >= SHARED_BYTES_MIN and self._arena.fits(num_bytes)

    def where(self, records: Sequence[Record]) -> dict[str, Any]:
        """Where records are in it, as fields of a `Save`; empty: one is elsewhere."""
        places = list[Place]()
        for record in records:
            place = self._arena.place(record.data) if self._arena is not None else None
            if place is None:
                return {}
            places.append(place)
        return save_fields(self._id, places)

    async def _use(self, path: str, before: asyncio.Task[None] | None) -> None:
        """Ask for shared memory, and keep it until its connection ends."""
        if before is not None:
            await asyncio.wait([before])
        with socket.socket(socket.AF_UNIX) as connection:
            self._socket_id = socket_id(connection)
            try:
                self._id, self._arena = await self._ask(connection, path)
                connection.setblocking(False)
                await asyncio.get_running_loop().sock_recv(connection, 1)  # the connection ends, or is about to
            except (KVStoreError, OSError) as error:
                _log.debug("there is no shared memory for saves, records are sent instead reason=%s", error)
            finally:
                arena, self._id, self._arena, self._socket_id = self._arena, b"", None, None
                if arena is not None:
                    arena.close()  # what was taken from it stays valid

    async def _ask(self, connection: socket.socket, path: str) -> tuple[bytes, Arena]:
        """Ask in a thread. If cancelled, return once that has ended, since it uses the connection."""
        asking = asyncio.get_running_loop().run_in_executor(None, map_save_memory, connection, path, self._options)
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            while not asking.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([asking])
            if asking.exception() is None:
                asking.result()[1].close()
            raise

    async def aclose(self) -> None:
        """Give the memory up; what was taken from it stays valid. Idempotent."""
        await self._tasks.aclose()


class MappedRecord(LeasedRecord):
    """A leased record that is read where it is in the service's memory.

    Raises:
        InvalidRequest: There is no such place in that memory.
    """

    def __init__(self, store: PageStore, lease: LeaseId, key: RecordKey, view: ArenaView, place: Place) -> None:
        super().__init__(store, lease, key)
        self._loaded = _MappedBytes(key, view, place)
        self.memory = view
        self.offset, self.num_bytes = place.offset, place.num_bytes

    async def load(self, *, deadline: Deadline, allocate: Callable[[int], memoryview] | None = None) -> LoadedRecord:
        return self._loaded


class _MappedBytes(LoadedRecord):
    """The bytes of a `MappedRecord`. Each reading of them is checked at its end: the service may use their memory
    again.
    """

    def __init__(self, key: RecordKey, view: ArenaView, place: Place) -> None:
        view.at(place)  # a service may answer anything
        self._key, self._view, self._place = key, view, place

    @property
    def num_bytes(self) -> int:
        return self._place.num_bytes

    def peek(self) -> Record:
        return read_plain(self._view.at(self._place), self._key)

    @contextmanager
    def reading(self) -> Iterator[Record]:
        try:
            record = self.peek()
            with record.data:  # which cannot be read after the block
                yield record
        finally:
            self.check()

    def check(self) -> None:
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
    with socket.socket(socket.AF_UNIX) as connection:
        answer, descriptor = _ask(
            connection, path, options, messages.ShareArena(1, int(options.hello_timeout_s * 1000))
        )
        try:
            if not isinstance(answer, messages.ArenaShared):
                raise Unavailable("the service shared no memory")
            return answer.arena, ArenaView(descriptor, answer.capacity_bytes)
        finally:
            os.close(descriptor)


def map_save_memory(connection: socket.socket, path: str, options: ClientOptions) -> tuple[bytes, Arena]:
    """The id of memory that a service reads saved records from, and an arena over it. The arena is the caller's.

    Args:
        connection: A new Unix socket. The memory is there until it is closed.
        path: Of the service.
        options: Say how much memory to ask for.

    Raises:
        Unavailable: The service shares none.
        OSError: It cannot be reached, or has not answered after `hello_timeout_s`.
    """
    request = messages.ShareSaveMemory(1, int(options.hello_timeout_s * 1000), options.save_memory_bytes)
    answer, descriptor = _ask(connection, path, options, request)
    try:
        if not isinstance(answer, messages.SaveMemoryShared):
            raise Unavailable("the service shared no memory")
        # made resident ahead of use, as the first pages are made while the engine computes
        return answer.memory, Arena.over(descriptor, answer.capacity_bytes, ahead_bytes=answer.capacity_bytes)
    except BaseException:
        os.close(descriptor)
        raise


def _ask(
    connection: socket.socket, path: str, options: ClientOptions, request: messages.Request
) -> tuple[Message, int]:
    """The answer to a request on a new connection, and the descriptor that came with it, which the caller closes."""
    deadline = Deadline.after(options.hello_timeout_s)
    hello = messages.Hello(PROTOCOL_VERSION, options.token, "memory", options.name)
    connection.settimeout(options.hello_timeout_s)
    connection.connect(path)
    for message in (hello, request):
        connection.sendall(pack_head(encode(message)))
    sink, descriptors = _Heads(), list[int]()
    reader = FrameReader(sink, 0)
    try:
        while len(sink.received) < 2:
            _receive(connection, reader, descriptors, deadline)
        answer = sink.received[-1]
        if isinstance(answer, messages.Error | messages.Refused):
            raise_error(answer)
        if not descriptors:
            raise Unavailable("the service shared no memory")
        return answer, descriptors.pop(0)
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
