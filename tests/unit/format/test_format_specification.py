"""docs/formats/record-v1.md agrees with the code: the tables are read from the page and held against the structs."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from kvstore.codec import CHAINS
from kvstore.codec.zstd import MAX_WINDOW_BYTES
from kvstore.format import header_v1, manifest
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.names import format_name, stripe_name
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.model.kinds import RecordKind
from kvstore.model.layout import Span
from kvstore.tiers.redis.reading import STRIPE_BYTES, is_striped, stripe_names, stripe_ranges

PAGE = (Path(__file__).parents[3] / "docs" / "formats" / "record-v1.md").read_text()
ROW = re.compile(r"\| (?P<offset>\d+) \| (?P<size>\d+) \| (?P<field>\w+) \| (?P<meaning>.+) \|")


class Row(NamedTuple):
    offset: int
    size: int
    field: str
    meaning: str


def table(heading: str) -> list[Row]:
    """The rows of the first table under a heading."""
    section = PAGE.split(f"\n## {heading}", 1)[1].split("\n## ", 1)[0]
    rows = [match for line in section.splitlines() if (match := ROW.fullmatch(line))]
    return [Row(int(row["offset"]), int(row["size"]), row["field"], row["meaning"]) for row in rows]


def struct_sizes(layout: struct.Struct) -> list[int]:
    """Bytes of each field of a little-endian struct, in order."""
    assert layout.format.startswith("<")
    return [struct.calcsize("<" + code) for code in re.findall(r"\d*s|[A-Z]", layout.format[1:])]


@pytest.mark.parametrize(
    ("heading", "layout", "num_fields"),
    [("Header: 192 bytes", header_v1._FIELDS, 21), ("Manifest", manifest._HEAD, 7)],
    ids=["header", "manifest"],
)
def test_offsets_and_sizes_are_those_of_the_struct(heading: str, layout: struct.Struct, num_fields: int) -> None:
    """Each row starts where the one before ends, has its field's size in the struct, and the last ends the struct."""
    rows = table(heading)
    assert len(rows) == num_fields
    assert [row.size for row in rows] == struct_sizes(layout)
    assert [row.offset for row in rows] == [sum(r.size for r in rows[:index]) for index in range(len(rows))]
    assert rows[-1].offset + rows[-1].size == layout.size


def test_every_field_is_packed_at_its_offset() -> None:
    """A header with a different value in each field has each value where the page says."""
    header = HeaderV1(
        key=RecordKey(NamespaceId(b"N" * 16), PrefixHash(b"P" * 32), 0x0102, 0x0304),
        kind=RecordKind.TAIL,
        span=Span(0x11121314, 0x21222324),
        codec_chain=0x0506,
        decoded_bytes=0x3132333435363738,
        payload_bytes=0x4142434445464748,
        payload_checksum=b"C" * 16,
        created_ms=0x5152535455565758,
        key_id=0x61626364,
        nonce=b"n" * 12,
        tag=b"t" * 16,
    )
    packed = header.pack()
    found = {row.field: packed[row.offset : row.offset + row.size] for row in table("Header: 192 bytes")}
    checksum = found.pop("header_checksum")
    assert any(checksum)
    numbers = {
        "version": 1,
        "header_bytes": HEADER_BYTES,
        "group": 0x0102,
        "slice": 0x0304,
        "kind": 2,
        "flags": 0,
        "codec_chain": 0x0506,
        "span_start": 0x11121314,
        "span_stop": 0x21222324,
        "decoded_bytes": 0x3132333435363738,
        "payload_bytes": 0x4142434445464748,
        "created_ms": 0x5152535455565758,
        "key_id": 0x61626364,
    }
    assert {name: int.from_bytes(found.pop(name), "little") for name in numbers} == numbers
    assert found == {
        "magic": b"KVR1",
        "payload_checksum": b"C" * 16,
        "namespace": b"N" * 16,
        "prefix": b"P" * 32,
        "nonce": b"n" * 12,
        "tag": b"t" * 16,
        "reserved": bytes(32),
    }


def test_the_page_names_every_kind_and_chain() -> None:
    """Kinds and chains of the code are on the page with their numbers, and no others."""
    kinds = next(row.meaning for row in table("Header: 192 bytes") if row.field == "kind")
    assert kinds == ", ".join(f"{kind.value} {kind.name.lower()}" for kind in RecordKind)
    chains = re.findall(r"^### Chain (\d+): (\w+)", PAGE, re.MULTILINE)
    assert chains == [(str(id_), re.match(r"[a-z]+", chain.name)[0]) for id_, chain in sorted(CHAINS.items())]  # type: ignore[index]
    assert f"a window of at most {MAX_WINDOW_BYTES >> 10} KiB" in PAGE


def test_names_are_spelled_as_on_the_page() -> None:
    """A record's name and a stripe's, spelled out."""
    key = RecordKey(NamespaceId(bytes(range(16))), PrefixHash(b"\xab" * 32), 12, 0)
    name = "v1/000102030405060708090a0b0c0d0e0f/ab/{" + "ab" * 32 + "}.g12.s0"
    assert format_name(key) == name
    assert stripe_name(key, b"\x01" * 16, 3) == name + "." + "01" * 16 + ".3"
    assert "`<name>.<payload checksum, 32 hex digits>.<index>`" in PAGE


def test_stripes_are_as_long_as_on_the_page() -> None:
    """The Redis tier cuts where the page says, and its stripes are the payload without gap or overlap."""
    assert f"({STRIPE_BYTES:,} bytes)" in PAGE and f"`i * {STRIPE_BYTES}`" in PAGE
    key = RecordKey(NamespaceId(bytes(16)), PrefixHash(bytes(32)), 0, 0)
    header = HeaderV1(key, RecordKind.STATE, Span(9, 9), 0, 0, 3 * STRIPE_BYTES + 1, b"\x01" * 16, 1)
    ranges = stripe_ranges(header)
    assert [start for start, _ in ranges] == [HEADER_BYTES + index * STRIPE_BYTES for index in range(4)]
    assert [stop - start for start, stop in ranges] == [STRIPE_BYTES] * 3 + [1]
    assert stripe_names(header) == [stripe_name(key, b"\x01" * 16, index) for index in range(4)]
    assert not is_striped(replace(header, payload_bytes=STRIPE_BYTES - HEADER_BYTES))
    assert is_striped(replace(header, payload_bytes=STRIPE_BYTES - HEADER_BYTES + 1))
