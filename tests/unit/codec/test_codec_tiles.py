"""Chain 4: every page comes back, every damage is found, and the layout is that of docs/formats/record-v1.md."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.codec import TILES, decode_into
from kvstore.codec.tiles import (
    DECODED_BYTES_MAX,
    HEAD_BYTES,
    SLOT_COUNTS,
    TILE_BYTES,
    TILE_WORDS,
    TilesHead,
    multipliers,
    read_head,
    worthwhile_sizes,
)
from kvstore.errors import CorruptRecord
from tests.unit.codec.tile_pages import activations, hostile_payloads, page_of_all_kinds, payload_of, special_pages

STORED_AS_TILES = {name for name, page in special_pages().items() if payload_of(page) is not None}


def decoded(payload: bytes, decoded_bytes: int) -> bytes:
    target = bytearray(decoded_bytes)
    decode_into(TILES, payload, target)
    return bytes(target)


def stored(page: bytes) -> bytes:
    payload = payload_of(page)
    assert payload is not None
    return payload


@pytest.mark.parametrize("name", sorted(special_pages()))
def test_special_pages_come_back(name: str) -> None:
    """Every bit pattern, constant pages, all numbers of patches and odd ends, as tiles or raw."""
    page = special_pages()[name]
    payload = payload_of(page)
    if payload is not None:
        assert decoded(payload, len(page)) == page
        assert len(payload) == read_head(payload, len(page)).payload_bytes <= 0.95 * len(page)


def test_only_pages_that_gain_nothing_are_raw() -> None:
    """Noise, other dtypes and pages of less than a tile are stored raw; all else is not."""
    raw = {"too short", "empty", "one byte", "noise", "fp32", "seventeen exponents, equally many"}
    assert set(special_pages()) - STORED_AS_TILES == raw


@settings(max_examples=60)
@given(
    st.integers(1, 60_000),
    st.integers(0, 3),
    st.integers(0, 1 << 32),
    st.sampled_from([0.0, 0.0005, 0.004, 0.02]),
    st.sampled_from([0.0, 0.2]),
)
def test_random_pages_come_back(num_elements: int, cut: int, seed: int, odd: float, noise: float) -> None:
    """Pages of any size with any share of odd elements decode to themselves, and gain 5% at least."""
    page = activations(num_elements, seed, odd=odd, noise=noise)[: 2 * num_elements - cut]
    payload = payload_of(page)
    if payload is not None:
        assert len(payload) <= 0.95 * len(page)
        assert decoded(payload, len(page)) == page


def test_activations_take_three_quarters() -> None:
    """A page of some megabytes takes .753 of its size: 12 of 16 bits, a sum and room for patches in each tile."""
    page = activations(2 << 20)
    assert 0.75 < len(stored(page)) / len(page) < 0.7555


def test_the_layout_is_that_of_the_specification() -> None:
    """A reader that follows the page of the formats, element by element, reads what was written."""
    page = page_of_all_kinds()
    payload = stored(page)
    elements = np.frombuffer(page, "<u2").tolist()
    seed, table, decoded_bytes, num_slots, num_whole = struct.unpack_from("<Q16sQII", payload, 8)
    assert (decoded_bytes, payload[48:64]) == (len(page), bytes(16))
    num_tiles = -(-decoded_bytes // 8192)
    signs = 64
    codes = signs + 4096 * num_tiles
    slots = codes + 2048 * num_tiles
    whole = slots + 4 * num_slots * num_tiles
    sums = whole + 2048 * num_whole
    assert len(payload) == sums + 8 * num_tiles
    factors = [int(factor) for factor in multipliers(0, TILE_WORDS + num_slots)]

    def word(at: int) -> int:
        return int.from_bytes(payload[at : at + 4], "little")

    for tile in range(num_tiles):
        of_slots = [word(slots + 4 * (num_slots * tile + index)) for index in range(num_slots)]
        patches = {slot >> 8 & 0xFFF: slot & 0xFF for slot in of_slots if slot >> 31}
        seen = []
        for place in range(4096):
            at, half = divmod(place, 2)
            row, lane = divmod(at, 512)
            code = word(codes + 2048 * tile + 4 * lane) >> (8 * row + 4 * half) & 15
            pair = word(signs + 4096 * tile + 2048 * (row // 2) + 4 * lane) >> 16 * half
            mantissa, sign = (pair >> 7 & 0x7F, pair >> 14 & 1) if row % 2 else (pair & 0x7F, pair >> 15 & 1)
            if of_slots[0] >> 30 == 1:
                upper = word(whole + 2048 * (of_slots[0] & 0x3FFFFFFF) + 4 * lane) >> (8 * row + 4 * half) & 15
                exponent = code | upper << 4
            else:
                exponent = table[code] ^ patches.get(place, 0)
            seen.append(sign << 15 | exponent << 7 | mantissa)
        expected = elements[4096 * tile : 4096 * (tile + 1)]
        assert seen == expected + [elements[-1]] * (4096 - len(expected))
        of_words = [seen[2 * index] | seen[2 * index + 1] << 16 for index in range(2048)]
        expected_sum = seed + (tile + 1) * 0x9E3779B97F4A7C15
        expected_sum += sum(factor * each for factor, each in zip(factors, of_words + of_slots, strict=True))
        assert int.from_bytes(payload[sums + 8 * tile :][:8], "little") == expected_sum % (1 << 64)


def test_what_the_sums_find_for_certain() -> None:
    """That rests on these properties of the multipliers, which are the same numbers in every release.

    A flipped code changes its word by a difference of two exponents, so by an odd number below 256 times a power of 2.
    No two words' multipliers, times such numbers, may be equal; then no two flipped bits cancel out.
    """
    factors = multipliers(0, TILE_WORDS + SLOT_COUNTS[-1])
    assert len(set(factors.tolist())) == factors.size
    assert np.all(factors & 1) and factors.min() > 1
    products = factors[:TILE_WORDS, None].astype(np.uint64) * np.arange(1, 256, 2, dtype=np.uint64)
    in_order = np.sort(products, axis=None)
    assert np.all(in_order[1:] != in_order[:-1])
    mixed = 0x9E3779B1
    mixed = (mixed ^ mixed >> 16) * 0x85EBCA6B % (1 << 32)
    assert int(factors[0]) == mixed ^ mixed >> 13 | 1


def test_every_flipped_bit_is_found() -> None:
    """Bytes of all parts have one of their bits flipped in turn: head, signs, codes, slots, exponents and sums."""
    page = page_of_all_kinds()
    payload = bytearray(stored(page))
    head = read_head(payload, len(page))
    assert head.num_slots and head.num_whole
    generator = np.random.default_rng(6)
    outside_signs = [*range(HEAD_BYTES), *generator.integers(head.codes_start, head.slots_start, 500)]
    places = [*outside_signs, *range(head.slots_start, head.whole_start), *range(head.sums_start, head.payload_bytes)]
    places += [*generator.integers(HEAD_BYTES, head.codes_start, 500)]
    places += [*generator.integers(head.whole_start, head.sums_start, 300)]
    for place, bit in zip(places, generator.integers(0, 8, len(places)), strict=True):
        payload[place] ^= 1 << bit
        with pytest.raises(CorruptRecord):
            decoded(payload, len(page))
        payload[place] ^= 1 << bit
    assert decoded(payload, len(page)) == page


def test_tiles_out_of_place_are_found() -> None:
    """Two tiles exchanged, with or without their sums, and a tile of another page of the same exponents."""
    page, other = activations(40_960), activations(40_960, seed=2)
    payload, foreign = stored(page), stored(other)
    head, foreign_head = read_head(payload, len(page)), read_head(foreign, len(other))
    foreign_head = replace(foreign_head, num_slots=head.num_slots)

    def parts(tile: int, *, with_sum: bool = True) -> list[slice]:
        starts = (
            (HEAD_BYTES, 4096),
            (head.codes_start, 2048),
            (head.slots_start, 4 * head.num_slots),
            *([(head.sums_start, 8)] if with_sum else []),
        )
        return [slice(start + size * tile, start + size * (tile + 1)) for start, size in starts]

    for with_sum in (True, False):
        damaged = bytearray(payload)
        for first, second in zip(parts(1, with_sum=with_sum), parts(2, with_sum=with_sum), strict=True):
            damaged[first], damaged[second] = payload[second], payload[first]
        with pytest.raises(CorruptRecord, match="sum"):
            decoded(damaged, len(page))
    assert len(foreign) == len(payload)
    mixed = bytearray(foreign)
    mixed[:HEAD_BYTES] = payload[:HEAD_BYTES]
    for part in parts(1):
        mixed[part] = payload[part]
    with pytest.raises(CorruptRecord, match="sum"):
        decoded(mixed, len(page))


def _with(head: TilesHead, **changes: int | bytes) -> bytes:
    return replace(head, **changes).pack()  # type: ignore[arg-type]


def test_a_head_that_lies_is_corrupt() -> None:
    """A head whose own sum is right and whose fields are not: sizes, slots, tables, and pages of another size."""
    page = page_of_all_kinds()
    payload = stored(page)
    head = read_head(payload, len(page))
    lies = [
        _with(head, decoded_bytes=head.decoded_bytes + 1),
        _with(head, decoded_bytes=DECODED_BYTES_MAX),
        _with(head, decoded_bytes=1 << 63),
        _with(head, decoded_bytes=0),
        _with(head, num_slots=5),
        _with(head, num_slots=0),
        _with(head, num_slots=64),
        _with(head, num_slots=(1 << 32) - 1),
        _with(head, num_whole=0),
        _with(head, num_whole=(1 << 32) - 1),
        _with(head, table=bytes(16)),
    ]
    for lie in lies:
        with pytest.raises(CorruptRecord):
            read_head(lie + payload[HEAD_BYTES:], len(page))
    with_more = _with(head, num_whole=head.num_tiles + 1) + payload[HEAD_BYTES:]
    with_more += bytes(2048 * (head.num_tiles + 1 - head.num_whole))
    without_slots = _with(head, num_slots=0) + payload[HEAD_BYTES : head.slots_start] + payload[head.whole_start :]
    with_rest = bytearray(payload)
    with_rest[50] = 1
    with_rest[:8] = (int.from_bytes(payload[:8], "little") + (int(multipliers(10, 11)[0]) << 16)).to_bytes(9, "little")[
        :8
    ]
    for lie in (with_more, without_slots, bytes(with_rest)):
        with pytest.raises(CorruptRecord, match="not one of this format"):
            read_head(lie, len(page))
    larger = _with(head, num_whole=head.num_tiles) + payload[HEAD_BYTES:]
    with pytest.raises(CorruptRecord, match="larger than its content"):
        read_head(larger + bytes(2048 * (head.num_tiles - head.num_whole)), len(page))
    for size in (len(page) - 1, len(page) + 1, 0, TILE_BYTES):
        with pytest.raises(CorruptRecord, match="size"):
            read_head(payload, size)
    for damaged in (payload[:-1], payload + b"\0", payload[:HEAD_BYTES], payload[: HEAD_BYTES - 1], b""):
        with pytest.raises(CorruptRecord):
            read_head(damaged, len(page))


def test_hostile_slots_are_corrupt() -> None:
    """Slots that name tiles and elements that there are not, even under sums that are right."""
    page = page_of_all_kinds()
    for payload in hostile_payloads(stored(page), len(page)):
        with pytest.raises(CorruptRecord):
            decoded(payload, len(page))


@given(st.binary(max_size=400), st.integers(0, 40_000))
def test_garbage_is_corrupt(payload: bytes, decoded_bytes: int) -> None:
    """Bytes that no writer made are refused before anything is decoded."""
    with pytest.raises(CorruptRecord):
        decode_into(TILES, payload, bytearray(decoded_bytes))


def test_the_largest_page() -> None:
    """Places in tiles are 32-bit numbers on a device: a page of 2 GiB or more is stored raw."""
    assert worthwhile_sizes(DECODED_BYTES_MAX)
    assert not worthwhile_sizes(DECODED_BYTES_MAX + 1)
    assert not worthwhile_sizes(0)
