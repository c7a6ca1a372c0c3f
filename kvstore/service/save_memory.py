"""Memory that clients make records in: a record there is copied, and not sent."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Sequence
from functools import partial

from kvstore.codec import CodecPool
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.format.header_v1 import HEADER_BYTES
from kvstore.format.record import Record, RunningChecksum, copy_and_sum, open_record
from kvstore.runtime.arena import ArenaView, Place, memory_file
from kvstore.runtime.budget import Shares
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.turns import Turns, who_asks
from kvstore.service.incoming import Receipt
from kvstore.service.limits import ServiceLimits
from kvstore.wire import messages
from kvstore.wire.places import parse_save_places

_THREADS = 4
"""Large records that are copied at a time. One thread copies some GB/s."""
INLINE_BYTES = (1 << 20) + (64 << 10)
"""Up to this size (200 us) a record is copied on the event loop: to receive it there would take longer, and to start a
thread and wait for it too."""
INLINE_AT_ONCE = 2
"""Saves whose records are copied, or given to a thread, in one round of the event loop: many that come in one go do not
delay other clients, nor hold memory before it is their turn."""
_LEAST_BYTES = 16 << 20
"""No memory is smaller, so that `save_memory_bytes` bounds the number of descriptors too."""


class SaveMemory:
    """The memory of one connection, which its client writes to at any time; made by `SaveMemories.open`.

    Attributes:
        id: 16 random bytes that only its client gets.
        capacity_bytes: Its size, which never changes.
        tenant: Of its client.
    """

    def __init__(self, view: ArenaView, capacity_bytes: int, tenant: str) -> None:
        self.id = secrets.token_bytes(16)
        self.capacity_bytes = capacity_bytes
        self.tenant = tenant
        self._view: ArenaView | None = view

    def check(self, place: Place) -> None:
        """Raise what `copy` would raise now.

        A place that was never written is refused here: reading it would make memory, on this service's account.
        """
        view = self._open_view()
        view.at(place)
        if not view.holds(place):
            raise _reused()

    def copy(self, place: Place, target: memoryview) -> Record:
        """Copy the record at a place to `target`, which no client can write to, and verify it there. On any thread.

        A client may write at any time, so the copy may have mixed bytes, and its header too. Only the copy is verified.

        Raises:
            InvalidRequest: There is no such place in this memory.
            Unavailable: Its connection has ended, or the client has used the place for something else.
            CorruptRecord, UnsupportedFormat: As `open_record`.
        """
        view = self._open_view()
        source, checksum = view.at(place), RunningChecksum()
        target[:HEADER_BYTES] = source[:HEADER_BYTES]
        copy_and_sum(source[HEADER_BYTES:], target[HEADER_BYTES:], checksum)
        if not view.holds(place):
            raise _reused()
        copied = open_record(target, checksum=checksum.digest())
        return Record(copied.header, copied.data, is_verified=True)

    def _open_view(self) -> ArenaView:
        view = self._view
        if view is None:
            raise Unavailable("the memory that has the record is gone: its connection has ended")
        return view

    def close(self) -> None:
        """Drop the mapping, once no thread copies from it. Idempotent."""
        self._view = None


def _copy_all(memory: SaveMemory, copies: Sequence[tuple[Place, memoryview]]) -> list[Record]:
    return [memory.copy(place, target) for place, target in copies]


def _reused() -> Unavailable:
    return Unavailable("the record is no longer there: its memory was used again before the save was answered")


class SaveMemories:
    """The memory of all connections, bounded, and the threads that copy records from it. Belongs to one event loop."""

    def __init__(self, limits: ServiceLimits) -> None:
        self._limits = limits
        self._shares = Shares(limits.save_memory_bytes)
        self._all: dict[bytes, SaveMemory] = {}
        self._turns = Turns(INLINE_AT_ONCE)
        self._threads = CodecPool(num_threads=_THREADS, limit_bytes=limits.receive_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes of the memory of all connections."""
        return self._shares.used

    def open(self, num_bytes: int, tenant: str) -> tuple[SaveMemory, int]:
        """Make memory for a connection, of about `num_bytes`, and a descriptor of it, which the caller closes.

        Raises:
            Unavailable: The connections have too much memory already, or the system does not support it.
        """
        capacity_bytes = min(max(num_bytes, _LEAST_BYTES), self._limits.save_memory_of_one_bytes)
        if capacity_bytes > self._shares.left_for(tenant):
            limit = self._shares.limit
            raise Unavailable("the clients have as much memory for saves as they may", limit_bytes=limit)
        try:
            descriptor = memory_file(capacity_bytes)
        except OSError as error:
            raise Unavailable("no memory can be shared here", error=error.strerror) from error
        try:
            memory = SaveMemory(ArenaView(descriptor, capacity_bytes), capacity_bytes, tenant)
        except BaseException:
            os.close(descriptor)
            raise
        self._shares.take(tenant, capacity_bytes)
        self._all[memory.id] = memory
        return memory, descriptor

    async def copy(
        self,
        request: messages.Save,
        receipt: Receipt,
        allocate: Callable[[int], memoryview],
        *,
        tenant: str,
        deadline: Deadline,
    ) -> list[Record]:
        """Copies of the records that a save names, which no client can change, verified.

        Args:
            request: The save.
            receipt: Gets room in the service's budget, as for records that are sent.
            allocate: Makes the buffer of a copy.
            tenant: Of the connection that sent the save.
            deadline: Limits the wait for room and for a thread.

        Raises:
            InvalidRequest: There is no such place, or no records of that size are accepted.
            Unavailable: There is no such memory, no room in time, or a record is no longer there.
            CorruptRecord, UnsupportedFormat: As `open_record`.

        If cancelled, raises `CancelledError` only once no thread copies any more.
        """
        memory = self._all.get(request.memory)
        if memory is None or memory.tenant != tenant:
            raise Unavailable("no connection of this client has such memory")
        self._check_size(request.num_bytes)
        if not await receipt.take_room(request.num_bytes, deadline):
            raise Unavailable("no room to copy this record before its deadline")
        await self._turns.begin(who_asks())
        asyncio.get_running_loop().call_soon(self._turns.end)  # in the next round
        places = parse_save_places(request)
        for place in places:
            self._check_size(place.num_bytes)
            memory.check(place)
        copy = partial(_copy_all, memory, [(place, allocate(place.num_bytes)) for place in places])
        if request.num_bytes <= INLINE_BYTES:
            return copy()
        return await self._threads.run(request.num_bytes, copy, deadline=deadline)

    def _check_size(self, num_bytes: int) -> None:
        if not HEADER_BYTES <= num_bytes <= self._limits.max_payload_bytes:
            raise InvalidRequest(
                "no record has this size",
                field="save.num_bytes",
                expected=f"{HEADER_BYTES} to {self._limits.max_payload_bytes}",
                seen=num_bytes,
            )

    def close(self, memory: SaveMemory) -> None:
        """The connection of this memory has ended. Idempotent."""
        if self._all.pop(memory.id, None) is not None:
            memory.close()
            self._shares.give_back(memory.tenant, memory.capacity_bytes)

    def shutdown(self) -> None:
        """Start no further copy, and wait for those that run. Idempotent."""
        self._threads.close()
