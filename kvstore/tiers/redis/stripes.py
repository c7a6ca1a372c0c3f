"""How a record becomes Redis values: one, or a header and stripes. Pure; specified in docs/formats/record-v1.md."""

from __future__ import annotations

from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.names import stripe_name

__all__ = ["STRIPE_BYTES", "is_striped", "stripe_names", "stripe_ranges"]

STRIPE_BYTES = 4 * 1024 * 1024 - 64
"""The largest value: 4 MiB less what Redis puts in front of a string, so that it fills one 4 MiB allocation."""


def is_striped(header: HeaderV1) -> bool:
    """True when header and payload together do not fit one value."""
    return HEADER_BYTES + header.payload_bytes > STRIPE_BYTES


def stripe_ranges(header: HeaderV1) -> list[tuple[int, int]]:
    """Where each stripe's bytes start and stop in the record (header included)."""
    end = HEADER_BYTES + header.payload_bytes
    return [(start, min(start + STRIPE_BYTES, end)) for start in range(HEADER_BYTES, end, STRIPE_BYTES)]


def stripe_names(header: HeaderV1) -> list[str]:
    """The names hold the payload's checksum: two writers of one record meet only if their bytes are equal."""
    return [stripe_name(header.key, header.payload_checksum, index) for index in range(len(stripe_ranges(header)))]
