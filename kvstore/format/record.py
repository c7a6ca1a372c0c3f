"""Records: a header and its payload in one buffer, sealed by checksums."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import xxhash

from kvstore.errors import CorruptRecord
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.model.keys import RecordKey

MAX_RECORD_BYTES = 1 << 30
"""No record is larger; a length from outside is checked against this before memory is allocated."""

Buffer = bytes | bytearray | memoryview
RunningChecksum = xxhash.xxh3_128
"""The checksum of a payload that arrives in pieces: `update` it with each, then `digest`. A piece that was just
received is still in the processor's cache, where its checksum costs least."""
_PIECE_BYTES = 256 << 10
"""A piece of this size and its copy fit into the fast caches of one processor core."""


@dataclass(frozen=True, slots=True)
class Record:
    """A sealed record.

    Attributes:
        header: The unpacked header; equals the start of `data`.
        data: Header and payload, contiguous bytes (`memoryview` of format "B"). Never written to once sealed.
        is_verified: All of `data` was verified in memory that only this process can write to.
    """

    header: HeaderV1
    data: memoryview
    is_verified: bool = field(default=False, compare=False)

    @property
    def key(self) -> RecordKey:
        return self.header.key

    @property
    def num_bytes(self) -> int:
        """Header and payload."""
        return len(self.data)

    @property
    def payload(self) -> memoryview:
        return self.data[HEADER_BYTES:]


def copy_and_sum(source: memoryview, target: memoryview, checksum: RunningChecksum) -> None:
    """Copy bytes, and add the copy to a checksum, piece by piece: each is summed while it is in the processor's cache.
    Other threads run during the copy and during the sum: neither holds Python's lock.

    Args:
        source: Bytes, which others may write to: the checksum is that of the copy.
        target: As many bytes, which only the caller may write to.
        checksum: Is updated.
    """
    for start in range(0, len(target), _PIECE_BYTES):
        piece = target[start : start + _PIECE_BYTES]
        np.copyto(np.frombuffer(piece, np.uint8), np.frombuffer(source[start : start + _PIECE_BYTES], np.uint8))
        checksum.update(piece)


def seal(header: HeaderV1, data: bytearray | memoryview, checksum: bytes | None = None) -> Record:
    """Seal a payload that is already at `data[192:]`: writes the header with its size and checksum in front of it.

    Args:
        header: All fields but payload size and checksum.
        data: A writable buffer of 192 bytes and the payload, nothing more; the record takes it over.
        checksum: The payload's, if it was computed while it was copied there; by default it is computed here.
    """
    view = memoryview(data).cast("B")
    sealed = header.with_payload(view[HEADER_BYTES:], checksum)
    view[:HEADER_BYTES] = sealed.pack()
    return Record(sealed, view.toreadonly())


def read_record(data: Buffer, expected: RecordKey | None = None) -> Record:
    """Read a record's header and check it against the buffer's size and `expected`, but not the payload's checksum.

    Raises:
        CorruptRecord: Truncated, too long, damaged in the header, or another record than expected.
        UnsupportedFormat: Another format version.
    """
    view = memoryview(data).cast("B").toreadonly()
    header = HeaderV1.unpack(view)
    if len(view) - HEADER_BYTES != header.payload_bytes:
        raise CorruptRecord(
            "payload has the wrong size", key=header.key, expected=header.payload_bytes, seen=len(view) - HEADER_BYTES
        )
    if expected is not None and header.key != expected:
        raise CorruptRecord("another record stands under this name", expected=expected, seen=header.key)
    return Record(header, view)


def verify_payload(record: Record, checksum: bytes | None = None) -> None:
    """Verify the payload's checksum. Releases the GIL for large payloads.

    Args:
        record: As `read_record` returned it.
        checksum: The payload's, if it was computed on arrival (`RunningChecksum`); by default it is computed here.

    Raises:
        CorruptRecord: The payload was changed after it was sealed.
    """
    if checksum is None:
        checksum = xxhash.xxh3_128_digest(record.payload)
    if checksum != record.header.payload_checksum:
        raise CorruptRecord("payload checksum does not match", key=record.key)


def open_record(data: Buffer, expected: RecordKey | None = None, checksum: bytes | None = None) -> Record:
    """Read a record and verify all of it: `read_record` and `verify_payload`."""
    record = read_record(data, expected)
    verify_payload(record, checksum)
    return record
