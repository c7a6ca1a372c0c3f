"""What is not a record or a manifest of this release, and which of it is damage and which is only newer."""

from __future__ import annotations

import json

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import CorruptRecord, InvalidRequest, UnsupportedFormat
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.manifest import MAX_MANIFEST_BYTES, pack_manifest, parse_manifest
from kvstore.format.names import parse_name, record_key
from kvstore.format.record import open_record, read_record, seal, verify_payload
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.model.kinds import RecordKind
from kvstore.model.layout import Span
from kvstore.model.namespace import NamespaceDescription

KEY = RecordKey(NamespaceId(bytes(16)), PrefixHash(bytes(32)), 0, 0)


SPAN = Span(0, 16)


def header(kind: RecordKind = RecordKind.PAGE, span: Span = SPAN) -> HeaderV1:
    return HeaderV1.unsealed(KEY, kind, span, codec_chain=0, decoded_bytes=4, created_ms=1)


def resealed(packed: bytes, at: int, value: bytes) -> bytes:
    """The header with a field changed and the checksum made right again, as a foreign writer would."""
    changed = bytearray(packed)
    changed[at : at + len(value)] = value
    changed[8:24] = bytes(16)
    changed[8:24] = xxhash.xxh3_128_digest(changed)
    return bytes(changed)


@pytest.mark.parametrize(
    ("at", "value"),
    [(92, b"\x00"), (92, b"\x04"), (93, b"\x01"), (132, b"\x01"), (144, b"\x01"), (160, b"\x01"), (191, b"\x80")],
    ids=["kind 0", "kind 4", "flags", "nonce", "tag", "first reserved byte", "last reserved byte"],
)
def test_fields_that_no_writer_produces_are_corrupt(at: int, value: bytes) -> None:
    """A header whose checksum is right but whose fields make no sense is refused all the same."""
    with pytest.raises(CorruptRecord):
        HeaderV1.unpack(resealed(header().pack(), at, value))


@pytest.mark.parametrize(
    ("kind", "span"),
    [(RecordKind.PAGE, Span(5, 5)), (RecordKind.TAIL, Span(6, 5)), (RecordKind.STATE, Span(4, 5))],
)
def test_spans_that_do_not_fit_the_kind_are_neither_written_nor_read(kind: RecordKind, span: Span) -> None:
    """A page has tokens, a state has none: checked when a header is packed and again when it is read."""
    with pytest.raises(InvalidRequest):
        header(kind, span).pack()
    packed = header().pack()
    packed = resealed(packed, 92, bytes([kind]))
    packed = resealed(packed, 96, span.start.to_bytes(4, "little") + span.stop.to_bytes(4, "little"))
    with pytest.raises(CorruptRecord):
        HeaderV1.unpack(packed)


def test_a_newer_version_is_unsupported_and_not_corrupt() -> None:
    """Headers of version 2, of our length, shorter or longer, are distinguished from damage while they are intact."""
    packed = header().pack()
    newer = resealed(packed, 4, b"\x02\x00")
    longer = bytearray(newer + bytes(64) + b"payload")
    longer[6:8] = (256).to_bytes(2, "little")
    longer[:256] = resealed(bytes(longer[:256]), 6, (256).to_bytes(2, "little"))
    for data in (newer, bytes(longer)):
        with pytest.raises(UnsupportedFormat):
            HeaderV1.unpack(data)
    damaged = bytearray(longer)
    damaged[200] ^= 1
    with pytest.raises(CorruptRecord):
        HeaderV1.unpack(damaged)
    with pytest.raises(CorruptRecord):
        HeaderV1.unpack(resealed(packed, 6, b"\xff\xff"))


@pytest.mark.parametrize(
    "field",
    [{"codec_chain": 1 << 16}, {"decoded_bytes": -1}, {"created_ms": 1 << 64}, {"payload_checksum": b""}, {"tag": b""}],
)
def test_header_fields_out_of_range_are_refused(field: dict[str, object]) -> None:
    """A field that does not fit its width is the writer's mistake, found before anything is stored."""
    values = {"codec_chain": 0, "decoded_bytes": 4, "payload_bytes": 0, "payload_checksum": bytes(16), "created_ms": 1}
    with pytest.raises(InvalidRequest):
        HeaderV1(key=KEY, kind=RecordKind.PAGE, span=Span(0, 16), **{**values, **field}).pack()  # type: ignore[arg-type]


def test_sealed_bytes_cannot_be_written_through_the_record() -> None:
    """A record's view of its bytes is read-only, and the payload's check is separate from the header's."""
    buffer = bytearray(HEADER_BYTES) + b"abcd"
    record = seal(header(), buffer)
    assert record.data.readonly and record.payload.readonly
    assert record.num_bytes == HEADER_BYTES + 4
    buffer[-1] ^= 1
    damaged = read_record(buffer, KEY)
    with pytest.raises(CorruptRecord, match="payload checksum"):
        verify_payload(damaged)


GOOD_NAME = "v1/" + "0" * 32 + "/ab/{" + "ab" * 32 + "}.g1.s2"


@pytest.mark.parametrize(
    "name",
    [
        GOOD_NAME.replace("v1/", "v2/"),
        GOOD_NAME.replace("/ab/", "/ac/"),
        GOOD_NAME.replace(".g1", ".g01"),
        GOOD_NAME.replace(".g1", ".g65536"),
        GOOD_NAME.replace(".s2", ".s99999"),
        GOOD_NAME.replace("{ab", "{AB"),
        GOOD_NAME.replace("{", "").replace("}", ""),
        GOOD_NAME.replace(".g1", ".g١"),
        GOOD_NAME + "\n",
        " " + GOOD_NAME,
        "/" + GOOD_NAME,
        GOOD_NAME + ".tmp",
        "",
    ],
)
def test_near_misses_are_no_names(name: str) -> None:
    """Spellings close to a name are foreign; the name itself is read, also as Redis lists it."""
    assert parse_name(GOOD_NAME) == record_key(GOOD_NAME.encode())
    with pytest.raises(InvalidRequest):
        parse_name(name)
    assert record_key(name) is record_key(name.encode()) is record_key(name.encode() + b"\xff") is None


LAYOUT = {"page_tokens": 16, "groups": [{"kind": "full_attention", "num_slices": 2}]}
DESCRIPTION = NamespaceDescription.from_fields({"model": "tiny", "layout": LAYOUT}, "somebody")


@given(st.text(max_size=40).filter(lambda t: t.isprintable()), st.text(max_size=40))
def test_a_manifest_round_trips(tenant: str, model: str) -> None:
    """Any description and tenant come back from their manifest."""
    description = NamespaceDescription.from_fields({"model": model, "layout": LAYOUT}, tenant)
    packed = pack_manifest(description)
    assert parse_manifest(packed, expected=description.id) == description
    assert len(packed) <= MAX_MANIFEST_BYTES


def test_every_damaged_manifest_is_corrupt() -> None:
    """Each bit flipped alone, each truncation and bytes behind the end are found."""
    packed = bytearray(pack_manifest(DESCRIPTION))
    for bit in range(len(packed) * 8):
        packed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptRecord):
            parse_manifest(packed)
        packed[bit // 8] ^= 1 << bit % 8
    for damaged in (*(packed[:length] for length in range(len(packed))), packed + b"\0", b"", bytes(3 << 20)):
        with pytest.raises(CorruptRecord):
            parse_manifest(damaged)
    assert parse_manifest(packed) == DESCRIPTION


def test_a_manifest_of_another_namespace_is_corrupt() -> None:
    """A manifest under the wrong name is caught, and so is one whose tenant was swapped with a right checksum."""
    packed = pack_manifest(DESCRIPTION)
    with pytest.raises(CorruptRecord, match="another namespace"):
        parse_manifest(packed, expected=NamespaceId(bytes(16)))
    with pytest.raises(CorruptRecord, match="another namespace"):
        parse_manifest(resealed(packed, 48, b"SOMEBODY"))


def test_manifests_with_a_right_checksum_and_wrong_content_are_told_apart() -> None:
    """A newer version is unsupported; sizes that do not add up and a description in another spelling are corrupt."""
    packed = pack_manifest(DESCRIPTION)
    with pytest.raises(UnsupportedFormat):
        parse_manifest(resealed(packed, 4, b"\x02\x00"))
    with pytest.raises(CorruptRecord, match="wrong size"):
        parse_manifest(resealed(packed, 40, b"\x09\x00\x00\x00"))
    spaced = packed[:56] + json.dumps(DESCRIPTION.fields).encode()
    with pytest.raises(CorruptRecord, match="does not hold"):
        parse_manifest(resealed(spaced, 44, (len(spaced) - 56).to_bytes(4, "little")))


def test_tenants_that_cannot_be_written_are_refused() -> None:
    """A tenant over 1 KiB or with half a character has no manifest."""
    for tenant in ("x" * 1025, "\ud800"):
        with pytest.raises(InvalidRequest):
            pack_manifest(NamespaceDescription(DESCRIPTION.canonical, tenant))


def test_this_release_reads_what_it_writes() -> None:
    """A record that was just sealed opens."""
    record = seal(header(), bytearray(HEADER_BYTES) + b"abcd")
    assert open_record(record.data, KEY).header.decoded_bytes == 4
