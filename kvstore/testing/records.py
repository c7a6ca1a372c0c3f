"""Sealed records for tests: seeded bytes, so that a failure repeats."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.record import Record, seal
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.model.kinds import RecordKind
from kvstore.model.layout import Span

NAMESPACE = NamespaceId(hashlib.sha256(b"namespace of the tests").digest()[:16])


def make_key(number: int, *, group: int = 0, slice_: int = 0, namespace: NamespaceId = NAMESPACE) -> RecordKey:
    """A key that depends on `number` alone."""
    prefix = PrefixHash(hashlib.sha256(f"prefix {number}".encode()).digest())
    return RecordKey(namespace, prefix, group, slice_)


def make_record(key: RecordKey | int, payload_bytes: int = 1000, *, seed: int = 0) -> Record:
    """A sealed page of random bytes under `key` (or `make_key(key)`); another `seed` gives other bytes."""
    if isinstance(key, int):
        key = make_key(key)
    digest = hashlib.sha256(
        key.prefix + bytes([key.group % 256, key.slice % 256]) + seed.to_bytes(8, "little")
    ).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    data = bytearray(HEADER_BYTES) + bytearray(generator.bytes(payload_bytes))
    header = HeaderV1.unsealed(
        key, RecordKind.PAGE, Span(0, 256), codec_chain=0, decoded_bytes=payload_bytes, created_ms=1_700_000_000_000
    )
    return seal(header, data)


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
