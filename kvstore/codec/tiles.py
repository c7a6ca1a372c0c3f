"""Chain 4: bfloat16 in tiles that a GPU decodes, each checked by a sum of its own. Fixed rate: about .75 of raw.

Exponents of real activations take few distinct values. A table has the 16 most frequent ones, and each element stores 8
bits of sign and mantissa and a code of 4 bits for its exponent. A tile with a few other exponents lists them as
patches. One with more of them stores all its exponents whole. Layout, byte by byte: docs/formats/record-v1.md.

A decoder needs no scan: all arrays have a fixed stride, and their places follow from the head. It works on words of 32
bits only. Word `i` of row `k` (of 4) of a tile is made of word `i` of the codes and word `i` of one row (of 2) of signs
and mantissas, so that a GPU reads and writes whole rows.

A tile's sum covers what was decoded, its patches, its index and the page's seed, which is a hash of all tiles. So it
finds errors of a decoder too. Each word counts times an odd number of its place, modulo 2**64. For certain it finds:

- any change of one decoded word, so each flipped bit of signs, mantissas, codes and sums;
- any two flipped bits of these;
- two different words that are exchanged, or two tiles that are exchanged with their sums.

Any other damage is missed with a chance of about 2**-60. That is a flipped bit of a patch's place, too, or tiles of
another page. The head has such a sum of its own. The sums find accidents and are no defence against an attacker who
writes to the store. His payload may decode to anything, but both decoders stay within bounds.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from kvstore.codec.base import Buffer, ByteArray, Chain, as_bytes, words
from kvstore.codec.zstd import worthwhile_bytes
from kvstore.errors import CorruptRecord

LANES: Final = 512
"""Words of one row."""
TILE_WORDS: Final = 4 * LANES
TILE_BYTES: Final = 4 * TILE_WORDS
SIGNS_BYTES: Final = TILE_BYTES // 2
CODES_BYTES: Final = TILE_BYTES // 4
SUM_BYTES: Final = 8
HEAD_BYTES: Final = 64
TABLE_ENTRIES: Final = 16
SLOT_COUNTS: Final = (0, 4, 8, 16, 32, 64)
"""Numbers of patches for which a payload may have room in each tile."""
DECODED_BYTES_MAX: Final = (1 << 31) - 1
PATCH: Final = 1 << 31
"""Marks a patch: from bit 8 on the element's place in its tile, below it what its exponent is xored with."""
WHOLE: Final = 1 << 30
"""Marks the first slot of a tile whose exponents are stored whole: their index is in the lower bits."""
PLACE_BITS: Final = 12
"""Of an element in its tile."""

# Of the sums. All are odd; those of words are computed by `multipliers`.
WORD_FACTORS: Final = (0x9E3779B1, 0x85EBCA6B)
TILE_FACTOR: Final = 0x9E3779B97F4A7C15
SEED_FACTOR: Final = 0xC2B2AE3D27D4EB4F
HEAD_FACTOR: Final = 0xD6E8FEB86659FD93

_HEAD: Final = struct.Struct("<QQ16sQII16s")
_CHUNK_TILES: Final = 16
"""Tiles that are worked on at once: what they need fits the cache of a processor."""
_SIGNS: Final = np.uint32(0x80008000)
_MANTISSAS: Final = np.uint32(0x007F007F)
_EXPONENTS: Final = np.uint32(0x7F807F80)

Words = NDArray[np.uint32]
Sums = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class TilesHead:
    """The head of a payload. Where everything is follows from it.

    Attributes:
        decoded_bytes: Size of the page; the last tile is filled up with its last element.
        num_slots: Patches for which each tile has room, one of `SLOT_COUNTS`.
        num_whole: Tiles whose exponents are stored whole.
        seed: Part of the sum of every tile.
        table: The exponents of the 16 codes, all different.
    """

    decoded_bytes: int
    num_slots: int
    num_whole: int
    seed: int
    table: bytes

    @property
    def num_tiles(self) -> int:
        return -(-self.decoded_bytes // TILE_BYTES)

    @property
    def codes_start(self) -> int:
        return HEAD_BYTES + self.num_tiles * SIGNS_BYTES

    @property
    def slots_start(self) -> int:
        return self.codes_start + self.num_tiles * CODES_BYTES

    @property
    def whole_start(self) -> int:
        return self.slots_start + self.num_tiles * self.num_slots * 4

    @property
    def sums_start(self) -> int:
        return self.whole_start + self.num_whole * CODES_BYTES

    @property
    def payload_bytes(self) -> int:
        return self.sums_start + self.num_tiles * SUM_BYTES

    def pack(self) -> bytes:
        """The head's 64 bytes."""
        fields = (self.seed, self.table, self.decoded_bytes, self.num_slots, self.num_whole, bytes(16))
        return _HEAD.pack(_head_sum(_HEAD.pack(0, *fields)), *fields)


def read_head(payload: Buffer, decoded_bytes: int) -> TilesHead:
    """The head of a payload, checked, so that neither decoder reads or writes out of bounds.

    Args:
        payload: All of it; only its head is read.
        decoded_bytes: What the reader expects.

    Raises:
        CorruptRecord: The head is damaged, or does not fit the payload or the expected size.
    """
    return _read_head(as_bytes(payload), decoded_bytes)


def _read_head(payload: ByteArray, decoded_bytes: int) -> TilesHead:
    if payload.size < HEAD_BYTES:
        raise CorruptRecord("payload is too short for the head of tiles", expected=HEAD_BYTES, seen=payload.size)
    packed = payload[:HEAD_BYTES].tobytes()
    seen_sum, seed, table, size_bytes, num_slots, num_whole, reserved = _HEAD.unpack(packed)
    if seen_sum != _head_sum(packed):
        raise CorruptRecord("head of tiles is damaged", expected=_head_sum(packed), seen=seen_sum)
    head = TilesHead(size_bytes, num_slots, num_whole, seed, table)
    if size_bytes != decoded_bytes or not 0 < size_bytes <= DECODED_BYTES_MAX:
        raise CorruptRecord("tiles have another size than expected", expected=decoded_bytes, seen=size_bytes)
    if num_slots not in SLOT_COUNTS or len(set(table)) != TABLE_ENTRIES or any(reserved):
        raise CorruptRecord("head of tiles is not one of this format", num_slots=num_slots, table=table.hex())
    if num_whole > head.num_tiles or (num_whole and not num_slots):
        raise CorruptRecord("head of tiles is not one of this format", num_whole=num_whole, num_tiles=head.num_tiles)
    if payload.size != head.payload_bytes:
        raise CorruptRecord("tiles do not fill the payload", expected=head.payload_bytes, seen=payload.size)
    if payload.size > size_bytes:  # who reads it may have room for the page, not for more
        raise CorruptRecord("payload is larger than its content", expected_max=size_bytes, seen=payload.size)
    return head


def worthwhile_sizes(decoded_bytes: int) -> range:
    """The sizes of payloads that are stored as tiles; empty: no page of this size is."""
    smallest = TilesHead(decoded_bytes, 0, 0, 0, bytes(TABLE_ENTRIES)).payload_bytes
    return range(smallest, worthwhile_bytes(decoded_bytes) + 1) if 0 < decoded_bytes <= DECODED_BYTES_MAX else range(0)


def multipliers(start: int, stop: int) -> NDArray[np.uint32]:
    """The odd multipliers of words `start` to `stop` of a tile, its patches behind its words; all are different."""
    mixed = np.arange(start + 1, stop + 1, dtype=np.uint32)
    for factor, shift in zip(WORD_FACTORS, (16, 13), strict=True):
        mixed *= np.uint32(factor)
        mixed ^= mixed >> np.uint32(shift)
    return mixed | np.uint32(1)


_OF_WORDS: Final = multipliers(0, TILE_WORDS).astype(np.uint64)
_OF_SLOTS: Final = multipliers(TILE_WORDS, TILE_WORDS + SLOT_COUNTS[-1]).astype(np.uint64)


class Tiles(Chain):
    """bf16. Elements of other dtypes come back too, but gain nothing."""

    id: ClassVar[int] = 4
    name: ClassVar[str] = "tiles2"

    def encode(self, source: ByteArray, target: ByteArray) -> int | None:
        sizes = worthwhile_sizes(source.size)
        if not sizes:
            return None
        sums, counts = _survey(source)
        table = np.argsort(-counts, kind="stable")[:TABLE_ENTRIES].astype(np.uint8)
        codes, differences = _code_tables(table)
        if counts[differences != 0].any():
            patches = np.concatenate([_num_patches(tiles, differences) for _, tiles in _chunks(source)])
        else:
            patches = np.zeros(sums.size, np.int64)
        num_slots, num_whole = _choose_slots(patches)
        places = (2 * np.arange(sums.size, dtype=np.uint64) + np.uint64(1)) * np.uint64(SEED_FACTOR)
        head = TilesHead(source.size, num_slots, num_whole, int((sums * places).sum()), table.tobytes())
        if head.payload_bytes not in sizes:
            return None
        target[:HEAD_BYTES] = np.frombuffer(head.pack(), np.uint8)
        parts = _Parts(target, head)
        is_whole = patches > num_slots
        whole = np.where(is_whole, np.cumsum(is_whole) - 1, -1)
        for first, tiles in _chunks(source):
            chosen = slice(first, first + len(tiles))
            exponents = _exponents(tiles)
            _write(parts, chosen, tiles, np.take(codes, exponents, mode="clip"))
            if num_slots:
                _write_slots(parts, chosen, exponents, differences, whole[chosen])
        parts.sums[:] = sums + _bases(head, 0, sums.size)
        if num_slots:
            parts.sums[:] += parts.slots @ _OF_SLOTS[:num_slots]
        return head.payload_bytes

    def decode_into(self, payload: ByteArray, target: ByteArray) -> None:
        head = _read_head(payload, target.size)
        parts = _Parts(payload, head)
        # for the two codes of a byte: both exponents, where they stand in a word
        table = np.frombuffer(head.table, np.uint8).astype(np.uint32) << np.uint32(7)
        pairs = (table[:, None] << np.uint32(16) | table).reshape(-1)
        num_full = target.size // TILE_BYTES
        full = words(target[: num_full * TILE_BYTES], 4).reshape(num_full, 4, LANES)
        for first in range(0, num_full, _CHUNK_TILES):
            _read(parts, slice(first, min(first + _CHUNK_TILES, num_full)), pairs, full[first : first + _CHUNK_TILES])
        if num_full < head.num_tiles:
            last = np.empty((1, 4, LANES), np.uint32)
            _read(parts, slice(num_full, num_full + 1), pairs, last)
            rest = target[num_full * TILE_BYTES :]
            rest[:] = last.reshape(-1).view(np.uint8)[: rest.size]


class _Parts:
    """Views of a payload's arrays.

    Attributes:
        signs: `[tiles, 2, 512]`: signs and mantissas.
        codes: `[tiles, 512]`.
        slots: `[tiles, slots]`.
        whole: `[tiles whose exponents are stored whole, 512]`: the upper four bits of each exponent.
        sums: `[tiles]`.
    """

    def __init__(self, payload: ByteArray, head: TilesHead) -> None:
        def words_of(start: int, stop: int) -> Any:
            return words(payload[start:stop], 4)

        self.head = head
        self.signs: Words = words_of(HEAD_BYTES, head.codes_start).reshape(-1, 2, LANES)
        self.codes: Words = words_of(head.codes_start, head.slots_start).reshape(-1, LANES)
        self.slots: Words = words_of(head.slots_start, head.whole_start).reshape(head.num_tiles, head.num_slots)
        self.whole: Words = words_of(head.whole_start, head.sums_start).reshape(-1, LANES)
        self.sums: Sums = words(payload[head.sums_start : head.payload_bytes], 8)


def _chunks(source: ByteArray) -> Iterator[tuple[int, Words]]:
    """The tiles of a page, `[some, 4, 512]`, each time with the index of the first one."""
    num_full = source.size // TILE_BYTES
    full = words(source[: num_full * TILE_BYTES], 4).reshape(num_full, 4, LANES)
    for first in range(0, num_full, _CHUNK_TILES):
        yield first, full[first : first + _CHUNK_TILES]
    rest = source[num_full * TILE_BYTES :]
    if rest.size:
        elements = np.pad(rest, (0, rest.size % 2)).view("<u2")
        filled = np.pad(elements, (0, 2 * TILE_WORDS - elements.size), mode="edge")
        yield num_full, filled.view("<u4").reshape(1, 4, LANES)


def _exponents(tiles: Words) -> ByteArray:
    """`[tiles, 4096]`, in the order of the elements."""
    elements = tiles.view("<u2").reshape(len(tiles), 2 * TILE_WORDS)
    return (elements >> 7).astype(np.uint8)  # drops the sign


def _survey(source: ByteArray) -> tuple[Sums, NDArray[np.int64]]:
    """The sums of the tiles' words `[tiles]`, and how often each exponent occurs `[256]`."""
    counts = np.zeros(256, np.int64)
    sums = []
    for _, tiles in _chunks(source):
        counts += np.bincount(_exponents(tiles).reshape(-1), minlength=256)
        sums.append(_word_sums(tiles))
    return np.concatenate(sums), counts


def _word_sums(tiles: Words) -> Sums:
    sums: Sums = tiles.reshape(len(tiles), TILE_WORDS) @ _OF_WORDS
    return sums


def _bases(head: TilesHead, start: int, stop: int) -> Sums:
    """What the sums of tiles `start` to `stop` begin with."""
    return np.arange(start + 1, stop + 1, dtype=np.uint64) * np.uint64(TILE_FACTOR) + np.uint64(head.seed)


def _head_sum(packed: bytes) -> int:
    """Over all of the head but its own 8 bytes."""
    of_head = np.frombuffer(packed, "<u4")[2:]
    return (int((of_head * _OF_WORDS[: of_head.size]).sum(dtype=np.uint64)) + HEAD_FACTOR) % (1 << 64)


def _code_tables(table: ByteArray) -> tuple[ByteArray, ByteArray]:
    """For each of the 256 exponents its code, and what code 0's exponent is xored with to make it; 0: it has a code."""
    codes = np.zeros(256, np.uint8)
    differences = np.arange(256, dtype=np.uint8) ^ table[0]
    codes[table] = np.arange(TABLE_ENTRIES, dtype=np.uint8)
    differences[table] = 0
    return codes, differences


def _num_patches(tiles: Words, differences: ByteArray) -> NDArray[np.int64]:
    patched: NDArray[np.bool_] = np.take(differences, _exponents(tiles), mode="clip") != 0
    num_patches: NDArray[np.int64] = patched.sum(axis=1, dtype=np.int64)
    return num_patches


def _choose_slots(patches: NDArray[np.int64]) -> tuple[int, int]:
    """The number of slots that makes the smallest payload, the lower of two; and the tiles that have more patches."""
    if not patches.any():
        return 0, 0
    sizes = []
    for num_slots in SLOT_COUNTS[1:]:
        num_whole = int(np.count_nonzero(patches > num_slots))
        sizes.append((4 * num_slots * patches.size + CODES_BYTES * num_whole, num_slots, num_whole))
    return min(sizes)[1:]


def _write(parts: _Parts, chosen: slice, tiles: Words, codes: ByteArray) -> None:
    """Write signs, mantissas and codes."""
    for row in range(2):
        even, odd = tiles[:, 2 * row], tiles[:, 2 * row + 1]
        of_odd = (odd & _MANTISSAS) << np.uint32(7) | (odd & _SIGNS) >> np.uint32(1)
        parts.signs[chosen, row] = even & ~_EXPONENTS | of_odd
    parts.codes[chosen] = _nibbles(codes)


def _nibbles(values: ByteArray) -> Words:
    """Values of 4 bits, `[tiles, 4096]` in the order of the elements, packed `[tiles, 512]` as codes are."""
    pairs = values.view("<u2").reshape(len(values), 4, LANES)
    packed = (pairs | pairs >> 4).astype(np.uint8)
    return np.ascontiguousarray(packed.transpose(0, 2, 1)).view("<u4").reshape(len(values), LANES)


def _write_slots(
    parts: _Parts, chosen: slice, exponents: ByteArray, differences: ByteArray, whole: NDArray[np.int64]
) -> None:
    """Write the patches, and the exponents of tiles that have too many: those with an index in `whole`, else -1."""
    slots = parts.slots[chosen]
    slots[:] = 0
    different = np.take(differences, exponents, mode="clip")
    for tile in np.flatnonzero(whole >= 0):
        slots[tile, 0] = WHOLE | int(whole[tile])
        of_tile = exponents[tile : tile + 1]
        parts.codes[chosen.start + tile] = _nibbles(of_tile & np.uint8(15))[0]
        parts.whole[whole[tile]] = _nibbles(of_tile >> np.uint8(4))[0]
        different[tile] = 0
    tile, place = np.divmod(np.flatnonzero(different != 0), 2 * TILE_WORDS)
    first = np.searchsorted(tile, tile)  # of the same tile
    slots[tile, np.arange(tile.size) - first] = PATCH | place << 8 | different[tile, place]


def _read(parts: _Parts, chosen: slice, pairs: Words, tiles: Words) -> None:
    """Decode some tiles to `[tiles, 4, 512]`, and check their sums."""
    codes, signs = parts.codes[chosen], parts.signs[chosen]
    # [tiles, 512, 4]
    exponents = np.take(pairs, codes.view(np.uint8).reshape(len(tiles), LANES, 4), mode="clip")
    for row in range(2):
        even, odd = signs[:, row] & ~_EXPONENTS, signs[:, row] >> np.uint32(7) & _MANTISSAS
        odd |= signs[:, row] << np.uint32(1) & _SIGNS
        np.bitwise_or(even, exponents[:, :, 2 * row], out=tiles[:, 2 * row])
        np.bitwise_or(odd, exponents[:, :, 2 * row + 1], out=tiles[:, 2 * row + 1])
    sums = _bases(parts.head, chosen.start, chosen.stop)
    wrong = np.zeros(len(tiles), np.bool_)
    if parts.head.num_slots:
        slots = parts.slots[chosen]
        if slots.any():
            wrong = _apply_slots(parts, slots, codes, tiles)
        sums += slots @ _OF_SLOTS[: parts.head.num_slots]
    sums += _word_sums(tiles)
    wrong |= sums != parts.sums[chosen]
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        raise CorruptRecord(
            "tile does not have its sum",
            tile=chosen.start + first,
            expected=int(parts.sums[chosen][first]),
            seen=int(sums[first]),
        )


def _apply_slots(parts: _Parts, slots: Words, codes: Words, tiles: Words) -> NDArray[np.bool_]:
    """Change the exponents of decoded tiles `[tiles, 4, 512]` as slots say; returns which are none of this format."""
    used = np.count_nonzero(slots, axis=1)
    is_whole = slots[:, 0] & np.uint32(WHOLE) != 0
    wrong: NDArray[np.bool_] = is_whole & (used > 1)
    for tile in np.flatnonzero(is_whole):
        at = int(slots[tile, 0]) ^ WHOLE
        if at >= len(parts.whole):
            wrong[tile] = True
            continue
        for row in range(4):
            lower, upper = (_pair(each, row) for each in (codes[tile], parts.whole[at]))
            tiles[tile, row] = tiles[tile, row] & ~_EXPONENTS | (lower | upper << np.uint32(4)) << np.uint32(7)
    tile, index = np.nonzero(slots * ~is_whole[:, None])
    patch = slots[tile, index]
    is_patch = patch >> np.uint32(8 + PLACE_BITS) == PATCH >> 8 + PLACE_BITS
    wrong[tile[~is_patch | (index >= used[tile])]] = True
    place = patch >> np.uint32(8) & np.uint32(2 * TILE_WORDS - 1)
    difference = (patch & np.uint32(0xFF)) << np.uint32(7) + (place % np.uint32(2) << np.uint32(4))
    np.bitwise_xor.at(tiles.reshape(len(tiles), TILE_WORDS), (tile, place // np.uint32(2)), difference)
    return wrong


def _pair(nibbles: Words, row: int) -> Words:
    """The two nibbles of a row, in the halves of a word."""
    of_row = nibbles >> np.uint32(8 * row)
    return of_row & np.uint32(15) | (of_row & np.uint32(0xF0)) << np.uint32(12)
