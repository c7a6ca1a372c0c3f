"""Triton kernels that decode and encode tiles, see `kvstore/codec/tiles.py`. `tiles.py` beside this file launches them.

All work on words of 32 bits. A variable with a tile's rows has the shape `[tiles of the program, 512]`. What they read
from a payload makes no address before it is compared with its bound; the fields of its head were checked on the host.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from kvstore.codec import tiles

# Kernels read globals only as constants.
_LANES = tl.constexpr(tiles.LANES)
_TILE_WORDS = tl.constexpr(tiles.TILE_WORDS)
_HEAD_WORDS = tl.constexpr(tiles.HEAD_BYTES // 4)
_SIGNS_WORDS = tl.constexpr(tiles.SIGNS_BYTES // 4)
_CODES_WORDS = tl.constexpr(tiles.CODES_BYTES // 4)
_SLOTS_MAX = tl.constexpr(tiles.SLOT_COUNTS[-1])
_WHOLE = tl.constexpr(tiles.WHOLE)
_PATCH_PREFIX = tl.constexpr(tiles.PATCH >> 8 + tiles.PLACE_BITS)
_FACTOR_0 = tl.constexpr(tiles.WORD_FACTORS[0])
_FACTOR_1 = tl.constexpr(tiles.WORD_FACTORS[1])
_TILE_FACTOR = tl.constexpr(tiles.TILE_FACTOR)

_TABLE_FIELDS = tl.constexpr(8)
_SEED_FACTOR = tl.constexpr(tiles.SEED_FACTOR)
_HEAD_FACTOR = tl.constexpr(tiles.HEAD_FACTOR)
_TABLE_ENTRIES = tl.constexpr(tiles.TABLE_ENTRIES)
_SLOTS_MIN = tl.constexpr(tiles.SLOT_COUNTS[1])
_PATCH = tl.constexpr(tiles.PATCH)
_COMPARED = tl.constexpr(16)
"""Exponents with which all are compared at a time."""
# What the kernels of an encoding leave for those behind them, by index, int64 each.
PLAN_FIELDS = 6
_PLAN = tl.constexpr(PLAN_FIELDS)
_SEED = tl.constexpr(0)
_LOW = tl.constexpr(1)
_HIGH = tl.constexpr(2)
_NUM_PATCHES = tl.constexpr(3)
_NUM_SLOTS = tl.constexpr(4)
_NUM_WHOLE = tl.constexpr(5)

_SIZES = ["decoded_bytes", "num_tiles"]
"""Arguments for whose values no kernel of its own is compiled, which takes a second."""


@triton.jit
def _multipliers(index):
    """`kvstore.codec.tiles.multipliers`, of uint32 indexes; as uint64."""
    mixed = (index + 1).to(tl.uint32) * _FACTOR_0
    mixed = mixed ^ (mixed >> 16)
    mixed = mixed * _FACTOR_1
    mixed = mixed ^ (mixed >> 13)
    return (mixed | 1).to(tl.uint64)


@triton.jit
def _permute(lower, upper, selector, NATIVE: tl.constexpr):
    """Byte `i` of the result is that of the 8 bytes of two words which nibble `i` of `selector` names, 0 to 7."""
    if NATIVE:  # one instruction
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [lower, upper, selector], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        both = lower.to(tl.uint64) | (upper.to(tl.uint64) << 32)
        found = selector & 0
        for index in tl.static_range(4):
            named = ((selector >> (4 * index)) & 7).to(tl.uint64)
            found = found | (((both >> (8 * named)) & 0xFF).to(tl.uint32) << (8 * index))
        return found


@triton.jit
def _exponent_bytes(codes, low, high, NATIVE: tl.constexpr):
    """The exponents of the codes in the lower half of a word, as four bytes; `low` and `high` are the table."""
    named = codes & 0x7777
    of_low = _permute((low & 0xFFFFFFFF).to(tl.uint32), (low >> 32).to(tl.uint32), named, NATIVE)
    of_high = _permute((high & 0xFFFFFFFF).to(tl.uint32), (high >> 32).to(tl.uint32), named, NATIVE)
    return _permute(of_low, of_high, ((codes >> 1) & 0x4444) | 0x3210, NATIVE)


@triton.jit
def _exponent_pairs(codes, low, high, NATIVE: tl.constexpr):
    """The exponents of two rows, each time in the halves of a word; their codes are in the lower half of `codes`."""
    exponents = _exponent_bytes(codes, low, high, NATIVE)
    zero = exponents & 0
    return _permute(exponents, zero, zero | 0x4140, NATIVE), _permute(exponents, zero, zero | 0x4342, NATIVE)


@triton.jit
def _row_pair(word, row: tl.constexpr):
    """The two nibbles that a word has for row `row`, in the halves of a word."""
    of_row = word >> (8 * row)
    return (of_row & 15) | ((of_row & 0xF0) << 12)


@triton.jit
def _whole_pair(codes, upper, row: tl.constexpr):
    return _row_pair(codes, row) | (_row_pair(upper, row) << 4)


@triton.jit
def _patched(pair, row: tl.constexpr, lanes, word, difference):
    """`pair` `[tiles, lanes]`, where the lane that `word` `[tiles]` names is xored with `difference` `[tiles]`."""
    here = (lanes + row * _LANES)[None, :] == word[:, None]
    return tl.where(here, pair ^ difference[:, None], pair)


@triton.jit
def _element_pair(exponents, signs, row: tl.constexpr):
    if row % 2 == 0:
        return (exponents << 7) | (signs & 0x807F807F)
    else:
        return (exponents << 7) | ((signs >> 7) & 0x007F007F) | ((signs << 1) & 0x80008000)


@triton.jit
def _weighted(words, row: tl.constexpr, lanes):
    return words.to(tl.uint64) * _multipliers(lanes + row * _LANES)[None, :]


@triton.jit
def _store_row(target, words, first_word, row: tl.constexpr, lanes, decoded_bytes, is_full):
    at = first_word[:, None] + (lanes + row * _LANES)[None, :]
    pointers = tl.multiple_of(target.to(tl.pointer_type(tl.uint32)) + at, [1, 16])
    if is_full:  # without a mask, since one that differs from word to word would make each of them a store of its own
        tl.store(pointers, words)
    else:
        num_words = decoded_bytes // 4
        tl.store(pointers, words, mask=at < num_words)
        has_last = at == num_words
        if tl.max(tl.max(has_last.to(tl.int32), axis=1), axis=0) > 0:
            last = tl.sum(tl.sum(tl.where(has_last, words, 0), axis=1), axis=0)
            for index in tl.static_range(3):
                rest = target.to(tl.pointer_type(tl.uint8)) + (4 * num_words + index)
                tl.store(rest, (last >> (8 * index)).to(tl.uint8), mask=index < decoded_bytes % 4)


@triton.jit
def _apply_slots(slots_at, whole_at, exists, codes, pairs, num_slots, num_whole):
    """Change exponents as slots say.

    Args:
        slots_at: `[tiles]`: the first slot of each tile.
        whole_at: Where the upper exponents start.
        exists: `[tiles]`.
        pairs: Of each row, `[tiles, 512]`, the exponents by the table.

    Returns:
        The exponents of the rows; for each tile what its slots add to the sum, and 1 if they are none of the format.
    """
    pair_0, pair_1, pair_2, pair_3 = pairs
    lanes = tl.arange(0, _LANES)
    slot = tl.arange(0, _SLOTS_MAX)
    slots = tl.load(slots_at[:, None] + slot[None, :], mask=exists[:, None] & (slot < num_slots)[None, :], other=0)
    of_slots = tl.sum(slots.to(tl.uint64) * _multipliers(slot + _TILE_WORDS)[None, :], axis=1)
    used = tl.sum((slots != 0).to(tl.int32), axis=1)
    most = tl.max(used, axis=0)
    wrong = used * 0
    if most > 0:
        first = tl.load(slots_at, mask=exists, other=0)
        is_whole = (first & _WHOLE) != 0
        whole = (first ^ _WHOLE).to(tl.int64)
        is_bad = is_whole & ((whole >= num_whole) | (used > 1))
        reads = (is_whole & (is_bad == 0))[:, None]
        upper = tl.load(whole_at + (whole * _CODES_WORDS)[:, None] + lanes[None, :], mask=reads, other=0)
        pair_0 = tl.where(reads, _whole_pair(codes, upper, 0), pair_0)
        pair_1 = tl.where(reads, _whole_pair(codes, upper, 1), pair_1)
        pair_2 = tl.where(reads, _whole_pair(codes, upper, 2), pair_2)
        pair_3 = tl.where(reads, _whole_pair(codes, upper, 3), pair_3)
        for index in range(most):
            is_used = exists & (index < used) & (is_whole == 0)
            patch = tl.load(slots_at + index, mask=is_used, other=0)
            is_patch = (patch >> 20) == _PATCH_PREFIX
            is_bad = is_bad | ((is_patch == 0) & is_used)
            word = ((patch >> 9) & (_TILE_WORDS - 1)).to(tl.int32)
            difference = tl.where(is_patch, (patch & 0xFF) << (((patch >> 8) & 1) * 16), 0)
            pair_0 = _patched(pair_0, 0, lanes, word, difference)
            pair_1 = _patched(pair_1, 1, lanes, word, difference)
            pair_2 = _patched(pair_2, 2, lanes, word, difference)
            pair_3 = _patched(pair_3, 3, lanes, word, difference)
        wrong = is_bad.to(tl.int32)
    return pair_0, pair_1, pair_2, pair_3, of_slots, wrong


@triton.jit(do_not_specialize_on_alignment=["verdict"])
def decode_kernel(table, verdict, GROUP: tl.constexpr, NATIVE: tl.constexpr):
    """Decode `GROUP` tiles of one page.

    Args:
        table: int64 `[pages, 8]`: address of the payload, of the target, decoded bytes, slots of a tile, tiles whose
            exponents are stored whole, seed, and both halves of the table of exponents.
        verdict: int32 `[1]`.
        NATIVE: Whether this is a GPU, for which there is an instruction that the interpreter does not have.
    """
    page = table + tl.program_id(1) * _TABLE_FIELDS
    decoded_bytes = tl.load(page + 2)
    num_tiles = (decoded_bytes + 4 * _TILE_WORDS - 1) // (4 * _TILE_WORDS)
    first_tile = tl.program_id(0).to(tl.int64) * GROUP
    if first_tile >= num_tiles:
        return
    payload = tl.load(page)
    target = tl.load(page + 1)
    num_slots = tl.load(page + 3)
    num_whole = tl.load(page + 4)
    seed = tl.load(page + 5).to(tl.uint64)
    low = tl.load(page + 6).to(tl.uint64)
    high = tl.load(page + 7).to(tl.uint64)

    tile = first_tile + tl.arange(0, GROUP)  # [tiles], int64 as all that follows from it
    exists = tile < num_tiles
    lanes = tl.arange(0, _LANES)
    base = payload.to(tl.pointer_type(tl.uint32))
    codes_start = num_tiles * _SIGNS_WORDS + _HEAD_WORDS
    slots_start = codes_start + num_tiles * _CODES_WORDS
    whole_start = slots_start + num_tiles * num_slots
    sums_start = whole_start + num_whole * _CODES_WORDS

    # [tiles, lanes], as all that is read or written
    codes_at = (codes_start + tile * _CODES_WORDS)[:, None] + lanes[None, :]
    signs_at = (tile * _SIGNS_WORDS + _HEAD_WORDS)[:, None] + lanes[None, :]
    here = exists[:, None]
    codes = tl.load(tl.multiple_of(base + codes_at, [1, 16]), mask=here, other=0)
    signs_0 = tl.load(tl.multiple_of(base + signs_at, [1, 16]), mask=here, other=0)
    signs_1 = tl.load(tl.multiple_of(base + signs_at + _LANES, [1, 16]), mask=here, other=0)
    stored_sum = tl.load((base + sums_start).to(tl.pointer_type(tl.uint64)) + tile, mask=exists, other=0)

    pair_0, pair_1 = _exponent_pairs(codes, low, high, NATIVE)
    pair_2, pair_3 = _exponent_pairs(codes >> 16, low, high, NATIVE)
    seen_sum = seed + (tile + 1).to(tl.uint64) * _TILE_FACTOR
    wrong = tl.zeros([GROUP], tl.int32)
    if num_slots > 0:
        pair_0, pair_1, pair_2, pair_3, of_slots, wrong = _apply_slots(
            base + slots_start + tile * num_slots,
            base + whole_start,
            exists,
            codes,
            (pair_0, pair_1, pair_2, pair_3),
            num_slots,
            num_whole,
        )
        seen_sum += of_slots

    words_0 = _element_pair(pair_0, signs_0, 0)
    words_1 = _element_pair(pair_1, signs_0, 1)
    words_2 = _element_pair(pair_2, signs_1, 2)
    words_3 = _element_pair(pair_3, signs_1, 3)
    weighted = _weighted(words_0, 0, lanes) + _weighted(words_1, 1, lanes)
    weighted += _weighted(words_2, 2, lanes) + _weighted(words_3, 3, lanes)
    seen_sum += tl.sum(weighted, axis=1)
    wrong = tl.where(exists & (seen_sum != stored_sum), 1, wrong)
    num_wrong = tl.sum(wrong, axis=0)
    if num_wrong > 0:
        tl.atomic_add(verdict, num_wrong)

    is_full = (first_tile + GROUP) * (4 * _TILE_WORDS) <= decoded_bytes
    first_word = tile * _TILE_WORDS
    _store_row(target, words_0, first_word, 0, lanes, decoded_bytes, is_full)
    _store_row(target, words_1, first_word, 1, lanes, decoded_bytes, is_full)
    _store_row(target, words_2, first_word, 2, lanes, decoded_bytes, is_full)
    _store_row(target, words_3, first_word, 3, lanes, decoded_bytes, is_full)


@triton.jit
def _page_at(pages, page, decoded_bytes):
    """Where a page begins: at a multiple of 16 bytes, which the compiler must know for wide loads and stores."""
    return pages + tl.multiple_of(page * decoded_bytes, 16)


@triton.jit
def _load_row(source, tile, row: tl.constexpr, lanes, decoded_bytes, is_full):
    """Row `row` of tiles, `[tiles, lanes]`; behind the page's end stands its last element again and again."""
    at = (tile * _TILE_WORDS)[:, None] + (lanes + row * _LANES)[None, :]
    pointers = source.to(tl.pointer_type(tl.uint32)) + at
    if is_full:
        words = tl.load(pointers)
    else:
        num_words = decoded_bytes // 4
        rest = decoded_bytes % 4
        byte_0 = tl.load(source + 4 * num_words, mask=rest > 0, other=0).to(tl.uint32)
        byte_1 = tl.load(source + 4 * num_words + 1, mask=rest > 1, other=0).to(tl.uint32)
        byte_2 = tl.load(source + 4 * num_words + 2, mask=rest > 2, other=0).to(tl.uint32)
        before = tl.load(source.to(tl.pointer_type(tl.uint32)) + num_words - 1)
        first = byte_0 | (byte_1 << 8)
        last = tl.where(rest == 0, before >> 16, tl.where(rest == 3, byte_2, first))
        fill = last | (last << 16)
        edge = tl.where(rest == 3, first | (byte_2 << 16), fill)
        words = tl.load(pointers, mask=at < num_words, other=0)
        words = tl.where(at < num_words, words, tl.where(at == num_words, edge, fill))
    return words


@triton.jit
def _histogram(words, exists, GROUP: tl.constexpr):
    """How often each exponent occurs in a row of tiles that exist, `[256]`."""
    mask = tl.reshape(exists[:, None] & (tl.zeros([1, _LANES], tl.int32) == 0), [GROUP * _LANES])
    lower = tl.reshape(((words >> 7) & 0xFF).to(tl.int32), [GROUP * _LANES])
    upper = tl.reshape(((words >> 23) & 0xFF).to(tl.int32), [GROUP * _LANES])
    return tl.histogram(lower, 256, mask=mask) + tl.histogram(upper, 256, mask=mask)


@triton.jit(do_not_specialize=_SIZES)
def survey_kernel(source, decoded_bytes, num_tiles, sums, counts, GROUP: tl.constexpr):
    """The sums of the tiles' words, int64 `[pages, tiles]`, and how often each exponent of a page occurs, added to
    int32 `[pages, 256]`.
    """
    page = tl.program_id(1).to(tl.int64)
    source, sums, counts = _page_at(source, page, decoded_bytes), sums + page * num_tiles, counts + page * 256
    first_tile = tl.program_id(0).to(tl.int64) * GROUP
    tile = first_tile + tl.arange(0, GROUP)
    exists = tile < num_tiles
    lanes = tl.arange(0, _LANES)
    is_full = (first_tile + GROUP) * (4 * _TILE_WORDS) <= decoded_bytes
    seen = tl.zeros([256], tl.int32)
    weighted = tl.zeros([GROUP, _LANES], tl.uint64)
    for row in tl.static_range(4):
        words = _load_row(source, tile, row, lanes, decoded_bytes, is_full)
        seen += _histogram(words, exists, GROUP)
        weighted += _weighted(words, row, lanes)
    tl.store(sums + tile, tl.sum(weighted, axis=1).to(tl.int64), mask=exists)
    tl.atomic_add(counts + tl.arange(0, 256), seen, mask=seen > 0)


@triton.jit(do_not_specialize=["num_tiles"])
def choose_table_kernel(counts, sums, num_tiles, codes, plan, CHUNK: tl.constexpr):
    """Choose each page's table of exponents, and compute its seed.

    Args:
        codes: int32 `[pages, 256]`: for each exponent its code, or from bit 8 on the difference of its patch.
        plan: int64 `[pages, 6]`, filled but for the last two.
    """
    page = tl.program_id(0).to(tl.int64)
    counts, codes, sums, plan = counts + page * 256, codes + page * 256, sums + page * num_tiles, plan + page * _PLAN
    exponent = tl.arange(0, 256)
    count = tl.load(counts + exponent)
    rank = tl.zeros([256], tl.int32)
    for start in range(0, 256, _COMPARED):  # with all of them at once a program has too few registers
        other = start + tl.arange(0, _COMPARED)
        of_other = tl.load(counts + other)[None, :]
        is_before = (of_other > count[:, None]) | ((of_other == count[:, None]) & (other[None, :] < exponent[:, None]))
        rank += tl.sum(is_before.to(tl.int32), axis=1)
    is_chosen = rank < _TABLE_ENTRIES
    first = tl.sum(tl.where(rank == 0, exponent, 0), axis=0)
    tl.store(codes + exponent, tl.where(is_chosen, rank, (exponent ^ first) << 8))
    wide = exponent.to(tl.uint64)
    shift = ((rank & 7) * 8).to(tl.uint64)
    low = tl.sum(tl.where(rank < 8, wide << shift, 0), axis=0)
    high = tl.sum(tl.where(is_chosen & (rank >= 8), wide << shift, 0), axis=0)
    seed = tl.zeros([CHUNK], tl.uint64)
    for start in range(0, num_tiles, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        of_tile = tl.load(sums + tile, mask=tile < num_tiles, other=0).to(tl.uint64)
        seed += of_tile * ((2 * tile + 1).to(tl.uint64) * _SEED_FACTOR)
    tl.store(plan + _SEED, tl.sum(seed, axis=0).to(tl.int64))
    tl.store(plan + _LOW, low.to(tl.int64))
    tl.store(plan + _HIGH, high.to(tl.int64))
    tl.store(plan + _NUM_PATCHES, tl.sum(tl.where(is_chosen, 0, count).to(tl.int64), axis=0))


@triton.jit(do_not_specialize=_SIZES)
def count_kernel(source, decoded_bytes, num_tiles, codes, plan, patches, GROUP: tl.constexpr):
    """The patches that each tile needs, int32 `[pages, tiles]`."""
    page = tl.program_id(1).to(tl.int64)
    source, codes, plan = _page_at(source, page, decoded_bytes), codes + page * 256, plan + page * _PLAN
    patches += page * num_tiles
    first_tile = tl.program_id(0).to(tl.int64) * GROUP
    tile = first_tile + tl.arange(0, GROUP)
    exists = tile < num_tiles
    lanes = tl.arange(0, _LANES)
    is_full = (first_tile + GROUP) * (4 * _TILE_WORDS) <= decoded_bytes
    needed = tl.zeros([GROUP, _LANES], tl.int32)
    if tl.load(plan + _NUM_PATCHES) > 0:
        for row in tl.static_range(4):
            words = _load_row(source, tile, row, lanes, decoded_bytes, is_full)
            needed += (tl.load(codes + ((words >> 7) & 0xFF)) > 255).to(tl.int32)
            needed += (tl.load(codes + ((words >> 23) & 0xFF)) > 255).to(tl.int32)
    tl.store(patches + tile, tl.sum(needed, axis=1), mask=exists)


@triton.jit(do_not_specialize=[*_SIZES, "room"], do_not_specialize_on_alignment=["result"])
def choose_slots_kernel(patches, decoded_bytes, num_tiles, room, plan, whole, target, result, CHUNK: tl.constexpr):
    """For each page choose the number of slots, number the tiles whose exponents are stored whole, and write the head.

    Args:
        room: Bytes of the largest payload that is worth it.
        plan: The rest is filled.
        whole: int32 `[pages, tiles]`: the index of a tile among those whose exponents are stored whole.
        result: int32 `[pages]`.
    """
    page = tl.program_id(0).to(tl.int64)
    patches, whole, plan = patches + page * num_tiles, whole + page * num_tiles, plan + page * _PLAN
    target, result = _page_at(target, page, decoded_bytes), result + page
    num_slots = tl.load(plan + _NUM_PATCHES) * 0
    num_whole = num_slots
    if tl.load(plan + _NUM_PATCHES) > 0:
        least = num_slots + (1 << 62)
        slots = _SLOTS_MIN * 1
        for _ in tl.static_range(5):
            more = tl.zeros([CHUNK], tl.int32)
            for start in range(0, num_tiles, CHUNK):
                tile = start + tl.arange(0, CHUNK)
                more += (tl.load(patches + tile, mask=tile < num_tiles, other=0) > slots).to(tl.int32)
            num_more = tl.sum(more, axis=0).to(tl.int64)
            size = num_more * (4 * _CODES_WORDS) + (4 * slots) * tl.cast(num_tiles, tl.int64)
            is_less = size < least
            num_slots = tl.where(is_less, slots, num_slots)
            num_whole = tl.where(is_less, num_more, num_whole)
            least = tl.where(is_less, size, least)
            slots = slots * 2
        before = tl.zeros([1], tl.int32)
        for start in range(0, num_tiles, CHUNK):
            tile = start + tl.arange(0, CHUNK)
            is_whole = (tl.load(patches + tile, mask=tile < num_tiles, other=0) > num_slots).to(tl.int32)
            tl.store(whole + tile, before + tl.cumsum(is_whole, axis=0) - is_whole, mask=tile < num_tiles)
            before += tl.sum(is_whole, axis=0)
    tl.store(plan + _NUM_SLOTS, num_slots)
    tl.store(plan + _NUM_WHOLE, num_whole)
    of_tile = 4 * num_slots + (4 * (_SIGNS_WORDS + _CODES_WORDS) + 8)
    payload_bytes = of_tile * num_tiles + num_whole * (4 * _CODES_WORDS) + 4 * _HEAD_WORDS
    if payload_bytes > room:
        tl.store(result, 0)
        return
    tl.store(result, payload_bytes.to(tl.int32))
    # [8], words of 64 bits: the sum, seed, table (2), decoded bytes, slots and whole tiles, zeros (2)
    index = tl.arange(0, 8)
    word = tl.where(index == 1, tl.load(plan + _SEED), 0)
    word = tl.where(index == 2, tl.load(plan + _LOW), word)
    word = tl.where(index == 3, tl.load(plan + _HIGH), word)
    word = tl.where(index == 4, decoded_bytes, word)
    word = tl.where(index == 5, num_slots | (num_whole << 32), word).to(tl.uint64)
    place = tl.maximum(2 * index - 2, 0)
    weighted = (word & 0xFFFFFFFF) * _multipliers(place) + (word >> 32) * _multipliers(place + 1)
    head_sum = tl.sum(tl.where(index > 0, weighted, 0), axis=0) + _HEAD_FACTOR
    tl.store(target.to(tl.pointer_type(tl.uint64)) + index, tl.where(index == 0, head_sum, word))


@triton.jit
def _store_patches(slots_at, slot, num_slots, place, code, is_patch):
    """Write patches, `[tiles, 512]`, to the slots with these indexes; returns what they add to their tile's sum."""
    patch = (place << 8) | (code >> 8) | _PATCH
    # the bound matters if the page changes while it is encoded: then the payload is wrong, and nothing else
    tl.store(slots_at[:, None] + slot, patch, mask=is_patch & (slot < num_slots))
    return tl.where(is_patch, patch.to(tl.uint64) * _multipliers(slot + _TILE_WORDS), 0)


@triton.jit
def _store_other_slots(slots_at, num_patches, is_whole, whole_index, exists, num_slots):
    """Write unused slots, and the slot of each tile whose exponents are stored whole; returns what adds to the sum."""
    slot = tl.arange(0, _SLOTS_MAX)
    marker = whole_index.to(tl.uint32) | _WHOLE
    tl.store(slots_at, marker, mask=is_whole)
    num_used = tl.where(is_whole, 1, num_patches)
    is_unused = exists[:, None] & (slot[None, :] >= num_used[:, None]) & (slot < num_slots)[None, :]
    tl.store(slots_at[:, None] + slot[None, :], marker[:, None] & (slot[None, :] * 0).to(tl.uint32), mask=is_unused)
    return tl.where(is_whole, marker.to(tl.uint64) * _multipliers(num_used * 0 + _TILE_WORDS), 0)


@triton.jit
def _copy_tiles(source, target, first_tile, decoded_bytes, GROUP: tl.constexpr):
    tile = first_tile + tl.arange(0, GROUP)
    lanes = tl.arange(0, _LANES)
    is_full = (first_tile + GROUP) * (4 * _TILE_WORDS) <= decoded_bytes
    for row in tl.static_range(4):
        words = _load_row(source, tile, row, lanes, decoded_bytes, is_full)
        _store_row(target, words, tile * _TILE_WORDS, row, lanes, decoded_bytes, is_full)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=["result"])
def write_kernel(
    source,
    decoded_bytes,
    num_tiles,
    codes,
    plan,
    sums,
    patches,
    whole,
    target,
    result,
    GROUP: tl.constexpr,
):
    """Write `GROUP` tiles of a page's payload; where that is not worth it, of the page as it is."""
    page = tl.program_id(1).to(tl.int64)
    source, codes, plan = _page_at(source, page, decoded_bytes), codes + page * 256, plan + page * _PLAN
    sums, patches, whole = sums + page * num_tiles, patches + page * num_tiles, whole + page * num_tiles
    target, result = _page_at(target, page, decoded_bytes), result + page
    if tl.load(result) == 0:
        _copy_tiles(source, target, tl.program_id(0).to(tl.int64) * GROUP, decoded_bytes, GROUP)
        return
    num_slots = tl.load(plan + _NUM_SLOTS)
    num_whole = tl.load(plan + _NUM_WHOLE)
    first_tile = tl.program_id(0).to(tl.int64) * GROUP
    tile = first_tile + tl.arange(0, GROUP)
    exists = tile < num_tiles
    here = exists[:, None]
    lanes = tl.arange(0, _LANES)
    is_full = (first_tile + GROUP) * (4 * _TILE_WORDS) <= decoded_bytes
    base = target.to(tl.pointer_type(tl.uint32))
    codes_start = tl.cast(num_tiles, tl.int64) * _SIGNS_WORDS + _HEAD_WORDS
    slots_start = codes_start + num_tiles * _CODES_WORDS
    whole_start = slots_start + num_tiles * num_slots
    sums_start = whole_start + num_whole * _CODES_WORDS

    num_patches = tl.load(patches + tile, mask=exists, other=0)
    is_whole = exists & (num_patches > num_slots)
    whole_index = tl.load(whole + tile, mask=is_whole, other=0)
    slots_at = base + slots_start + tile * num_slots
    packed = tl.zeros([GROUP, _LANES], tl.uint32)
    upper = tl.zeros([GROUP, _LANES], tl.uint32)
    signs = tl.zeros([GROUP, _LANES], tl.uint32)
    of_slots = tl.zeros([GROUP, _LANES], tl.uint64)
    before = tl.zeros([GROUP], tl.int32)  # patches of the rows above
    for row in tl.static_range(4):
        words = _load_row(source, tile, row, lanes, decoded_bytes, is_full)
        if row % 2 == 0:
            signs = words & 0x807F807F
        else:
            signs = signs | ((words & 0x007F007F) << 7) | ((words & 0x80008000) >> 1)
            signs_at = (tile * _SIGNS_WORDS + _HEAD_WORDS)[:, None] + (lanes + (row // 2) * _LANES)[None, :]
            tl.store(tl.multiple_of(base + signs_at, [1, 16]), signs, mask=here)
        exponent_0 = (words >> 7) & 0xFF
        exponent_1 = (words >> 23) & 0xFF
        code_0 = tl.load(codes + exponent_0).to(tl.uint32)
        code_1 = tl.load(codes + exponent_1).to(tl.uint32)
        pair = (code_0 & 15) | ((code_1 & 15) << 4)
        if num_slots > 0:
            pair = tl.where(is_whole[:, None], (exponent_0 & 15) | ((exponent_1 & 15) << 4), pair)
            upper = upper | (((exponent_0 >> 4) | (exponent_1 & 0xF0)) << (8 * row))
            is_patch_0 = (code_0 > 255) & here & (is_whole[:, None] == 0)
            is_patch_1 = (code_1 > 255) & here & (is_whole[:, None] == 0)
            of_word = is_patch_0.to(tl.int32) + is_patch_1.to(tl.int32)
            slot_0 = before[:, None] + tl.cumsum(of_word, axis=1) - of_word
            slot_1 = slot_0 + is_patch_0.to(tl.int32)
            before += tl.sum(of_word, axis=1)
            place = ((lanes + row * _LANES) * 2).to(tl.uint32)[None, :]
            of_slots += _store_patches(slots_at, slot_0, num_slots, place, code_0, is_patch_0)
            of_slots += _store_patches(slots_at, slot_1, num_slots, place + 1, code_1, is_patch_1)
        packed = packed | (pair << (8 * row))
    codes_at = (codes_start + tile * _CODES_WORDS)[:, None] + lanes[None, :]
    tl.store(tl.multiple_of(base + codes_at, [1, 16]), packed, mask=here)
    slots_sum = tl.sum(of_slots, axis=1)
    if num_slots > 0:
        slots_sum += _store_other_slots(slots_at, num_patches, is_whole, whole_index, exists, num_slots)
        upper_at = (whole_start + whole_index.to(tl.int64) * _CODES_WORDS)[:, None] + lanes[None, :]
        tl.store(tl.multiple_of(base + upper_at, [1, 16]), upper, mask=is_whole[:, None])
    of_tile = tl.load(sums + tile, mask=exists, other=0).to(tl.uint64) + tl.load(plan + _SEED).to(tl.uint64)
    of_tile += (tile + 1).to(tl.uint64) * _TILE_FACTOR + slots_sum
    tl.store((base + sums_start).to(tl.pointer_type(tl.uint64)) + tile, of_tile, mask=exists)
