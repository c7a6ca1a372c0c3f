"""`gather_rows` and `scatter_rows` of `rows.py` as one kernel, which computes where each row is and copies it.

The tensor operations in `rows.py` take some ten launches for the same. On an H200 that is half a millisecond of the
interpreter, in which the link could have copied 25 MB.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from connector.device.rows import RowIndexes

_WORD_BYTES = 8
_ROWS = 32
_WORDS = 64
ROWS_INTERPRETED = 1024
"""The interpreter takes a while for each program, even for a small one."""


def copies(unit_bytes: int) -> bool:
    """Whether rows of this size are copied here."""
    return unit_bytes % _WORD_BYTES == 0


def copy_rows(cache: torch.Tensor, indexes: RowIndexes, pages: torch.Tensor, *, to_cache: bool) -> None:
    """Order the copies of rows between the cache and whole pages, which are consecutive in `pages`, on the current
    stream; both uint8, at multiples of 8 bytes.
    """
    table = indexes.table.to(cache.device, non_blocking=True)
    rows = _ROWS if cache.device.type == "cuda" else ROWS_INTERPRETED
    # in one dimension: the others have at most 65,535 programs
    copy_rows_kernel[(indexes.num_pages * triton.cdiv(indexes.page_rows, rows),)](
        _words(cache),
        _words(pages),
        table,
        indexes.unit_bytes // _WORD_BYTES,
        TO_CACHE=to_cache,
        ROWS=rows,
        WORDS=_WORDS,
    )


def _words(data: torch.Tensor) -> torch.Tensor:
    return data[: data.numel() // _WORD_BYTES * _WORD_BYTES].view(torch.int64)


@triton.jit(do_not_specialize=["num_words"])
def copy_rows_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    cache, pages, table, num_words, TO_CACHE: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr
):
    """`ROWS` rows of one page. The table is that of `RowIndexes`."""
    num_rows, rows_of_page, num_runs = tl.load(table), tl.load(table + 1), tl.load(table + 2)
    num_blocks, num_pieces, num_feeds = tl.load(table + 3), tl.load(table + 4), tl.load(table + 5)
    ids, base, stride = table + tl.load(table + 6), table + tl.load(table + 7), table + tl.load(table + 8)
    feeds, pieces, places_begin = table + tl.load(table + 9), table + tl.load(table + 10), tl.load(table + 11)
    programs_of_page = tl.cdiv(num_rows, ROWS)
    page = tl.program_id(0) // programs_of_page
    row = tl.program_id(0) % programs_of_page * ROWS + tl.arange(0, ROWS)
    within = row < num_rows
    # the order of rows: run, block, piece
    piece, block, run = row % num_pieces, row // num_pieces % num_blocks, row // (num_pieces * num_blocks)
    feed = tl.load(feeds + run, mask=within, other=0)
    block_id = tl.load(ids + (page * num_feeds + feed) * num_blocks + block, mask=within, other=0)
    cache_row = tl.load(base + page * num_runs + run, mask=within, other=0)
    cache_row += tl.load(stride + run, mask=within, other=0) * block_id
    cache_row += tl.load(pieces + piece, mask=within, other=0)
    place = row
    if places_begin != 0:
        place = tl.load(table + places_begin + row, mask=within, other=0)
    page_row = page * rows_of_page + place
    for first_word in range(0, num_words, WORDS):
        word = first_word + tl.arange(0, WORDS)
        chosen = within[:, None] & (word < num_words)[None, :]
        in_cache = cache + cache_row[:, None] * num_words + word[None, :]
        in_page = pages + page_row[:, None] * num_words + word[None, :]
        if TO_CACHE:
            tl.store(in_cache, tl.load(in_page, mask=chosen), mask=chosen)
        else:
            tl.store(in_page, tl.load(in_cache, mask=chosen), mask=chosen)
