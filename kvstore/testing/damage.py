"""Ways in which stored bytes are not the record that their name says."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.format.header_v1 import HEADER_BYTES

__all__ = ["DAMAGE", "flipped"]


def flipped(data: bytes, bit: int) -> bytes:
    """`data` with one bit changed."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


DAMAGE: dict[str, Callable[[bytes, bytes], bytes]] = {
    "empty": lambda data, other: b"",
    "cut inside the header": lambda data, other: data[:100],
    "cut behind the header": lambda data, other: data[:HEADER_BYTES],
    "one byte short": lambda data, other: data[:-1],
    "one byte long": lambda data, other: data + b"\0",
    "header bit": lambda data, other: flipped(data, 8 * 60 + 3),
    "payload bit": lambda data, other: flipped(data, 8 * (HEADER_BYTES + 500) + 5),
    "another record": lambda data, other: other,
    "another record's payload": lambda data, other: data[:HEADER_BYTES] + other[HEADER_BYTES:],
    "foreign bytes": lambda data, other: b"<html>not a record</html>" * 40,
}
"""Stored bytes, made of the record's own and of another's."""
