"""How a record becomes Redis values: one, or a header and stripes. Pure; specified in docs/formats/record-v1.md."""

from __future__ import annotations

from typing import NamedTuple

from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.names import stripe_name

__all__ = [
    "PART_BYTES",
    "STRIPE_BYTES",
    "Part",
    "is_striped",
    "parts_behind",
    "parts_of",
    "stripe_names",
    "stripe_ranges",
]

STRIPE_BYTES = 4 * 1024 * 1024 - 64
"""The largest value: 4 MiB less Redis's own header of a string, so that it fills one 4 MiB allocation."""


PART_BYTES = 1 << 20
"""Bytes of a value read at a time: Redis copies each reply, and copies of 1 MiB cost it least per byte (0.12 to 0.2
s/GB; of 4 MiB 0.13, or 0.4 when two are in flight and its allocator returns memory in between)."""


class Part(NamedTuple):
    """Some bytes of a value.

    Attributes:
        name: Name of the value.
        first: Index of its first byte in the value.
        last: Index of its last byte in the value; -1 for the value's end, so that a value that is too long is noticed.
        start: Where the bytes start in the record.
        stop: Where they stop in the record.
    """

    name: str
    first: int
    last: int
    start: int
    stop: int


def is_striped(header: HeaderV1) -> bool:
    """True when header and payload together do not fit one value."""
    return HEADER_BYTES + header.payload_bytes > STRIPE_BYTES


def stripe_ranges(header: HeaderV1) -> list[tuple[int, int]]:
    """Where each stripe's bytes start and stop in the record (header included)."""
    end = HEADER_BYTES + header.payload_bytes
    return [(start, min(start + STRIPE_BYTES, end)) for start in range(HEADER_BYTES, end, STRIPE_BYTES)]


def stripe_names(header: HeaderV1) -> list[str]:
    """Names of the stripes. They contain the payload's checksum, so that two writers collide only with equal bytes."""
    return [stripe_name(header.key, header.payload_checksum, index) for index in range(len(stripe_ranges(header)))]


def parts_of(header: HeaderV1) -> list[Part]:
    """The parts in which a striped record's stripes are read."""
    stripes = zip(stripe_names(header), stripe_ranges(header), strict=True)
    return [part for name, (start, stop) in stripes for part in _parts(name, start, start, stop)]


def parts_behind(name: str, num_bytes: int) -> list[Part]:
    """The parts in which the rest of a single value is read, after its first part."""
    return _parts(name, PART_BYTES, 0, num_bytes) if num_bytes > PART_BYTES else []


def _parts(name: str, at: int, start: int, stop: int) -> list[Part]:
    """The parts from `at` on of a value that is at `start` to `stop` in its record."""
    ends = [*range(at + PART_BYTES, stop, PART_BYTES), stop]
    starts = [at, *ends[:-1]]
    return [
        Part(name, first - start, -1 if end == stop else end - start - 1, first, end)
        for first, end in zip(starts, ends, strict=True)
    ]
