"""Names, headers and sealed records: every value comes back, every change is found."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import CorruptRecord, InvalidRequest
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.names import format_name, manifest_name, parse_name, stripe_name
from kvstore.format.record import Record, open_record, seal
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.model.kinds import RecordKind
from kvstore.model.layout import Span

U16, U64 = (st.integers(0, (1 << bits) - 1) for bits in (16, 64))
KEYS = st.builds(
    RecordKey,
    namespace=st.binary(min_size=16, max_size=16).map(NamespaceId),
    prefix=st.binary(min_size=32, max_size=32).map(PrefixHash),
    group=U16,
    slice=U16,
)


@st.composite
def headers(draw: st.DrawFn) -> HeaderV1:
    kind = draw(st.sampled_from(RecordKind))
    start = draw(st.integers(0, (1 << 32) - 2))
    stop = start if kind is RecordKind.STATE else draw(st.integers(start + 1, (1 << 32) - 1))
    return HeaderV1(
        key=draw(KEYS),
        kind=kind,
        span=Span(start, stop),
        codec_chain=draw(U16),
        decoded_bytes=draw(U64),
        payload_bytes=draw(U64),
        payload_checksum=draw(st.binary(min_size=16, max_size=16)),
        created_ms=draw(U64),
    )


@given(KEYS)
def test_a_name_parses_back_to_its_key(key: RecordKey) -> None:
    """Every key has a name, and the name is that key again."""
    assert parse_name(format_name(key)) == key


@given(KEYS, KEYS)
def test_two_keys_never_share_a_name(one: RecordKey, other: RecordKey) -> None:
    """Names differ exactly when keys do."""
    assert (format_name(one) == format_name(other)) == (one == other)


@given(KEYS, st.integers(0, 200), st.characters(), st.sampled_from(["replace", "insert", "delete"]))
def test_a_changed_name_is_another_key_or_refused(key: RecordKey, at: int, letter: str, how: str) -> None:
    """No two spellings mean one key: a changed name is foreign, or it spells exactly the key it parses to."""
    name = format_name(key)
    at %= len(name)
    changed = name[:at] + ("" if how == "delete" else letter) + name[at + (how != "insert") :]
    try:
        parsed = parse_name(changed)
    except InvalidRequest:
        return
    assert format_name(parsed) == changed
    assert (parsed == key) == (changed == name)


@given(st.text())
def test_foreign_names_are_refused(name: str) -> None:
    """Text that is no name is refused as an invalid request, with no other exception."""
    with pytest.raises(InvalidRequest):
        parse_name(name)


@given(KEYS, st.binary(min_size=16, max_size=16), st.integers(0, 300))
def test_manifests_and_stripes_are_no_records(key: RecordKey, checksum: bytes, index: int) -> None:
    """What stands beside the records is never taken for one of them."""
    for name in (manifest_name(key.namespace), stripe_name(key, checksum, index)):
        with pytest.raises(InvalidRequest):
            parse_name(name)


@given(headers())
def test_a_header_round_trips(header: HeaderV1) -> None:
    """Every header is 192 bytes that read back as the same header."""
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    assert HeaderV1.unpack(packed) == header


@given(headers(), st.integers(1, (1 << 32) - 1))
def test_the_header_of_an_encrypted_record_round_trips(header: HeaderV1, key_id: int) -> None:
    """Tiers verify encrypted records without their key: key id, nonce and tag are fields like others."""
    encrypted = replace(header, key_id=key_id, nonce=b"n" * 12, tag=b"t" * 16)
    assert HeaderV1.unpack(encrypted.pack()) == encrypted


@given(headers(), st.binary(max_size=300))
def test_a_sealed_record_opens(header: HeaderV1, payload: bytes) -> None:
    """A sealed record opens under its key with the same payload, and under no other key."""
    record = seal(header, bytearray(HEADER_BYTES) + payload)
    opened = open_record(record.data, expected=header.key)
    assert bytes(opened.payload) == payload
    assert opened.header == replace(header, payload_bytes=len(payload), payload_checksum=opened.header.payload_checksum)
    with pytest.raises(CorruptRecord):
        open_record(record.data, expected=RecordKey(*header.key[:-1], header.key.slice ^ 1))


@given(st.binary(max_size=600))
def test_arbitrary_bytes_are_no_record(data: bytes) -> None:
    """Bytes of any length that were never sealed are corrupt."""
    with pytest.raises(CorruptRecord):
        open_record(data)


def sealed(payload_bytes: int) -> Record:
    key = RecordKey(NamespaceId(bytes(range(16))), PrefixHash(bytes(range(32))), 3, 7)
    header = HeaderV1.unsealed(
        key=key,
        kind=RecordKind.PAGE,
        span=Span(256, 512),
        codec_chain=1,
        decoded_bytes=4096,
        created_ms=1,
    )
    return seal(header, bytearray(HEADER_BYTES) + random.Random(payload_bytes).randbytes(payload_bytes))


def test_ten_thousand_single_bit_flips_are_all_detected() -> None:
    """5,000 random flips in the header and 5,000 in the payload, one at a time: each makes the record corrupt."""
    record = sealed(3000)
    data = bytearray(record.data)
    choose = random.Random(20261120)
    for region in (range(HEADER_BYTES), range(HEADER_BYTES, len(data))):
        for _ in range(5000):
            at, bit = choose.choice(region), 1 << choose.randrange(8)
            data[at] ^= bit
            with pytest.raises(CorruptRecord):
                open_record(data)
            data[at] ^= bit
    assert open_record(data, expected=record.key).header == record.header


def test_every_header_bit_is_guarded() -> None:
    """Each of the 1,536 header bits, flipped alone, makes the record corrupt: none is ignored."""
    data = bytearray(sealed(64).data)
    for bit in range(HEADER_BYTES * 8):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptRecord):
            open_record(data)
        data[bit // 8] ^= 1 << bit % 8
    open_record(data)


def test_every_truncation_and_extension_is_detected() -> None:
    """A record with bytes missing at its end, or with bytes behind it, is corrupt at every length."""
    data = bytes(sealed(200).data)
    for length in range(len(data)):
        with pytest.raises(CorruptRecord):
            open_record(data[:length])
    for more in (b"\0", b"x" * 192, data):
        with pytest.raises(CorruptRecord):
            open_record(data + more)
    open_record(data)
