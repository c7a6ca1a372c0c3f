"""Records, manifests and payloads that were never sealed, or were forged: refused, in bounded memory."""

from __future__ import annotations

import random
import struct
from contextlib import suppress

import pytest
import xxhash
import zstandard

from kvstore.codec import CHAINS, ZSTD, decode_into
from kvstore.errors import CorruptRecord, InvalidRequest, UnsupportedFormat
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.manifest import pack_manifest, parse_manifest
from kvstore.format.names import format_name, parse_name
from kvstore.format.record import MAX_RECORD_BYTES, open_record
from kvstore.model.keys import RecordKey
from kvstore.store.namespaces import check_header
from kvstore.testing.prompts import HYBRID, describe
from kvstore.testing.records import make_key, make_record
from kvstore.tiers.verify import open_or_reason
from tests.fuzz.inputs import bounded_memory, fuzz, mutated

RECORDS = [bytes(make_record(number, size).data) for number, size in enumerate((0, 1, 300, 2000))]
MANIFEST = pack_manifest(describe(HYBRID))
FIELDS = struct.Struct(
    "<4sHH16s16s16s32sHHBBHIIQQQI12s16s32s"
)  # written out: the fuzz must not share its target's code
NUMBERS = (0, 1, 2, 3, 63, 64, 65, 0x7F, 0xFF, 0xFFFF, 1 << 30, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1)
BOMB = zstandard.ZstdCompressor(level=19).compress(bytes(64 << 20))


@fuzz(50_000)
def test_mutated_records(choose: random.Random) -> None:
    """A damaged record is corrupt or of another version; it is never served, unless the damage changed nothing."""
    number = choose.randrange(len(RECORDS))
    expected = make_key(number) if choose.random() < 0.9 else make_key(number + 1)
    data = mutated(RECORDS[number], choose)
    opened = open_or_reason(memoryview(bytearray(data)), expected)
    assert isinstance(opened, str) or (data == RECORDS[number] and opened.key == expected)


@fuzz(40_000)
def test_headers_with_a_right_checksum_and_wrong_fields(choose: random.Random) -> None:
    """The checksums are right, all else is forged: a record that opens is consistent with its name and size."""
    payload = choose.randbytes(choose.choice((0, 1, 200)))
    number = lambda bits: choose.choice(NUMBERS) & (1 << bits) - 1  # noqa: E731
    key = make_key(choose.randrange(3))
    checksum = xxhash.xxh3_128_digest(payload) if choose.random() < 0.8 else bytes(16)
    payload_bytes = len(payload) if choose.random() < 0.7 else number(64)
    fields = [b"KVR1", 1, HEADER_BYTES, bytes(16), checksum, key.namespace, key.prefix, key.group, key.slice]
    fields += [choose.choice((0, 1, 2, 3, 4, 255)), 0, number(16), number(32), number(32), number(64), payload_bytes]
    fields += [number(64), 0, bytes(12), bytes(16), bytes(32)]
    for index, value in ((1, number(16)), (2, number(16)), (7, number(16)), (10, 1), (17, number(32))):
        if choose.random() < 0.1:
            fields[index] = value
    packed = bytearray(FIELDS.pack(*fields))
    packed[8:24] = xxhash.xxh3_128_digest(packed)
    data = bytes(packed) + payload
    try:
        record = open_record(data, key)
    except (CorruptRecord, UnsupportedFormat):
        return
    assert record.key == key and record.num_bytes == len(data) and bytes(record.payload) == payload
    with suppress(CorruptRecord):  # what the store asks before it keeps or serves one
        check_header(record.header, HYBRID, choose.choice((None, 64, 128)))
        assert record.header.decoded_bytes <= MAX_RECORD_BYTES
        assert record.header.key.group < len(HYBRID.groups)


@fuzz(20_000)
def test_payloads_of_any_kind(choose: random.Random) -> None:
    """A payload decodes to exactly the announced bytes or is corrupt; nothing behind its target is touched."""
    compressed = zstandard.ZstdCompressor().compress(choose.randbytes(choose.choice((0, 10, 500))) * 3)
    payload = choose.choice((compressed, mutated(compressed, choose), choose.randbytes(choose.randrange(100)), BOMB))
    chain = choose.choice([*CHAINS, 99])
    target = bytearray(b"\xa5" * 4000)
    decoded_bytes = choose.choice((0, 1, 30, 1500, 3000))
    with suppress(CorruptRecord, UnsupportedFormat, InvalidRequest):
        decode_into(chain, payload, memoryview(target)[:decoded_bytes])
    assert target[decoded_bytes:] == b"\xa5" * (4000 - decoded_bytes)


@fuzz(10_000)
def test_mutated_manifests(choose: random.Random) -> None:
    """A damaged manifest is refused; one that is not gives the namespace it was made of."""
    data = mutated(MANIFEST, choose)
    try:
        description = parse_manifest(data)
    except (CorruptRecord, UnsupportedFormat):
        return
    assert data == MANIFEST and description.id == describe(HYBRID).id


@fuzz(10_000)
def test_mutated_names(choose: random.Random) -> None:
    """A name is refused, or it is the spelling of what it parses to."""
    name = mutated(format_name(make_key(choose.randrange(4))).encode(), choose).decode("latin-1")
    with suppress(InvalidRequest):
        key = parse_name(name)
        assert isinstance(key, RecordKey) and format_name(key) == name


@pytest.mark.parametrize("announced_bytes", [100, 1 << 20])
def test_a_decompression_bomb_is_refused_in_bounded_memory(announced_bytes: int) -> None:
    """2 KiB that expand to 64 MiB, in a record that announces far less: corrupt, with no more memory than announced."""
    header = HeaderV1.unpack(RECORDS[2])
    assert len(BOMB) < 8192
    target = bytearray(announced_bytes)
    with bounded_memory(4 << 20), pytest.raises(CorruptRecord):
        decode_into(ZSTD, BOMB, target)
    with pytest.raises(CorruptRecord):  # and a record that admits to what it would become is not let in at all
        check_header(
            HeaderV1(
                header.key, header.kind, header.span, ZSTD, MAX_RECORD_BYTES + 1, len(BOMB), bytes(16), created_ms=0
            ),
            HYBRID,
        )
