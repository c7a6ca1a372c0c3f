"""Checks that every tier makes: records against their seal, buffers, deadlines, the budget of the quarantine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvstore.errors import CorruptRecord, InvalidRequest, Unavailable, UnsupportedFormat
from kvstore.format.header_v1 import HEADER_BYTES
from kvstore.format.record import Record, open_record
from kvstore.model.keys import RecordKey
from kvstore.runtime.buffers import fresh_buffer
from kvstore.runtime.deadline import Deadline

_INLINE_BYTES = (4 << 20) + (64 << 10)
"""Up to this size (140 us) a record is checked inline, while its bytes are in this core's cache. In a thread, on
another core, the same check costs three times the processor time."""
_QUARANTINE_BYTES = 256 << 20


def open_or_reason(data: bytearray | memoryview, expected: RecordKey, checksum: bytes | None = None) -> Record | str:
    """Verify bytes that came from a medium: returns the record, or why a tier must quarantine them.

    `checksum` is the payload's, if it was computed while receiving. An intact header of another format version counts
    as damage too: it does not belong under a name of this one.
    """
    try:
        return open_record(data, expected, checksum)
    except (CorruptRecord, UnsupportedFormat) as error:
        return str(error)


async def open_off_loop(data: bytearray | memoryview, expected: RecordKey) -> Record | str:
    """`open_or_reason`, in a thread for large records. If cancelled, the thread keeps reading; it writes nothing."""
    if len(data) <= _INLINE_BYTES:
        return open_or_reason(data, expected)
    return await asyncio.to_thread(open_or_reason, data, expected)


def is_same(data: memoryview, seen: memoryview) -> bool:
    """Whether two records have the same bytes. Costs two copies: for quarantines, not for every read."""
    is_alike = len(data) == len(seen) and data[:HEADER_BYTES] == seen[:HEADER_BYTES]
    return is_alike and bytes(data) == bytes(seen)


def check_deadline(deadline: Deadline, tier: str) -> None:
    """Refuse a call that has no time left before it starts.

    Raises:
        Unavailable: The deadline has passed.
    """
    if deadline.expired:
        raise Unavailable("the deadline had passed before the call started", tier=tier)


def allocate_exactly(num_bytes: int, allocate: Callable[[int], memoryview] | None) -> memoryview:
    """A writable view of exactly `num_bytes`, from `allocate` or fresh.

    Raises:
        InvalidRequest: `allocate` returned a buffer of another size, or a read-only one.
    """
    if allocate is None:
        return fresh_buffer(num_bytes)
    buffer = memoryview(allocate(num_bytes)).cast("B")
    if len(buffer) != num_bytes or buffer.readonly:
        raise InvalidRequest(
            "allocate must return a writable buffer of the requested size",
            expected=num_bytes,
            seen=len(buffer),
            readonly=buffer.readonly,
        )
    return buffer


class QuarantineBudget:
    """Limits the bytes that this process keeps in the quarantine of a shared tier. Beyond it, damaged records are
    removed.
    """

    def __init__(self) -> None:
        self._used_bytes = 0

    def keeps(self, num_bytes: int) -> bool:
        """Whether one more record of this size is kept; if so, it counts from now on."""
        if self._used_bytes + num_bytes > _QUARANTINE_BYTES:
            return False
        self._used_bytes += num_bytes
        return True
