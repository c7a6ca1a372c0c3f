"""How records are cut into Redis values."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.names import format_name
from kvstore.model.kinds import RecordKind
from kvstore.model.layout import Span
from kvstore.testing.records import make_key
from kvstore.tiers.redis.reading import PART_BYTES, STRIPE_BYTES, is_striped, parts_of, stripe_names, stripe_ranges


def header(payload_bytes: int, checksum: bytes = bytes(range(16))) -> HeaderV1:
    return HeaderV1(make_key(1), RecordKind.PAGE, Span(0, 256), 0, payload_bytes, payload_bytes, checksum, 0)


@given(st.integers(STRIPE_BYTES - HEADER_BYTES + 1, 1 << 30))
def test_stripes_tile_the_payload(payload_bytes: int) -> None:
    """Stripes cover the payload once, in order, and none is larger than a value may be."""
    ranges = stripe_ranges(header(payload_bytes))
    assert is_striped(header(payload_bytes))
    assert ranges[0][0] == HEADER_BYTES
    assert ranges[-1][1] == HEADER_BYTES + payload_bytes
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    assert all(0 < stop - start <= STRIPE_BYTES for start, stop in ranges)
    assert len(stripe_names(header(payload_bytes))) == len(ranges)


@given(st.integers(STRIPE_BYTES - HEADER_BYTES + 1, 64 << 20))
def test_parts_tile_the_stripes(payload_bytes: int) -> None:
    """Parts are read in the record's order, cover it once, and the last one of a stripe reads to the stripe's end."""
    parts = parts_of(header(payload_bytes))
    assert (parts[0].start, parts[-1].stop) == (HEADER_BYTES, HEADER_BYTES + payload_bytes)
    assert all(before.stop == after.start for before, after in itertools.pairwise(parts))
    assert all(0 < part.stop - part.start <= PART_BYTES for part in parts)
    for name, (start, stop) in zip(
        stripe_names(header(payload_bytes)), stripe_ranges(header(payload_bytes)), strict=True
    ):
        own = [part for part in parts if part.name == name]
        assert [part.first for part in own] == [part.start - start for part in own]
        assert [part.last for part in own] == [part.stop - start - 1 for part in own[:-1]] + [-1]
        assert own[-1].stop == stop


def test_up_to_the_limit_one_value() -> None:
    """A record that fits one value is not cut."""
    assert not is_striped(header(STRIPE_BYTES - HEADER_BYTES))


def test_names() -> None:
    """A stripe's name holds the record's, with its hash tag, and the payload's checksum."""
    names = stripe_names(header(STRIPE_BYTES))
    stem = f"{format_name(make_key(1))}.000102030405060708090a0b0c0d0e0f"
    assert names == [f"{stem}.0"]
    assert set(names).isdisjoint(stripe_names(header(STRIPE_BYTES, bytes(16))))
