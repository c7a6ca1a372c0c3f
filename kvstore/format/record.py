"""Records: a header and its payload in one buffer, sealed by checksums."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Record:
    """A sealed record.

    Attributes:
        header: The unpacked header; equals the start of `data`.
        data: Header and payload, contiguous bytes (`memoryview` of format "B"). Never written to once sealed.
    """

    header: HeaderV1
    data: memoryview

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


def seal(header: HeaderV1, data: bytearray | memoryview) -> Record:
    """Seal a payload that is already at `data[192:]`: writes the header with its size and checksum in front of it.

    Args:
        header: All fields but payload size and checksum, which are computed here.
        data: A writable buffer of 192 bytes and the payload, nothing more; the record takes it over.
    """
    view = memoryview(data).cast("B")
    sealed = header.with_payload(view[HEADER_BYTES:])
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
