"""Runs as rows: the indexes of one copy between a cache and a page. Pure integers, no torch.

Cache and page are seen as rows of `unit_bytes`, the largest number that divides every offset, stride and length. Piece
`k` of run `r` in block `i` is then one row: `base[r] + stride[r] * id + pieces[k]` in the cache.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from connector.canonical.runs import BlockRun
from kvstore.errors import InternalError, InvalidRequest

__all__ = ["CacheGeometry", "RowPlan", "plan_rows"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """Where a group's layers are in their common allocation.

    Attributes:
        starts: Byte of each layer's block 0.
        strides: Bytes between a layer's blocks.
        feeds: The table that places a layer's blocks.
    """

    starts: tuple[int, ...]
    strides: tuple[int, ...]
    feeds: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class RowPlan:
    """The runs of one slice and one length of page. Rows of the page are in the order run, block, piece.

    Attributes:
        unit_bytes: Bytes of a row.
        num_blocks: Blocks of the page.
        page_rows: Rows of the page.
        base: `[runs]`: the row of a run's first piece in block 0.
        stride: `[runs]`: rows between blocks.
        feed: `[runs]`: the table that places its blocks.
        pieces: `[pieces]`: rows from a run's first piece to each.
        places: `[runs, blocks, pieces]`: the row in the page.
        order: `[runs * blocks * pieces]`: indices in the flat `places` by ascending place; `None` when they ascend.
        key: Equal for plans that differ only in `base`: such pages share one copy.
    """

    unit_bytes: int
    num_blocks: int
    page_rows: int
    base: Ints
    stride: Ints
    feed: Ints
    pieces: Ints
    places: Ints
    order: Ints | None
    key: bytes


def plan_rows(
    geometry: CacheGeometry, runs: Sequence[BlockRun], page_bytes: int, *, unit_bytes_min: int = 1
) -> tuple[RowPlan, ...]:
    """The plans that together copy a page, one for each shape of piece.

    Args:
        geometry: Where the layers are.
        runs: What goes where.
        page_bytes: Of the whole page.
        unit_bytes_min: The smallest row to plan for. The index of a row has eight bytes.

    Raises:
        InternalError: The runs do not fill the page exactly.
        InvalidRequest: Rows would be smaller than `unit_bytes_min`; nothing of the page's size was made.
    """
    num_blocks, rest = divmod(page_bytes, sum(run.repeat * run.num_bytes for run in runs))
    if rest or not num_blocks:
        raise InternalError("runs must fill a page in whole blocks", page_bytes=page_bytes, blocks=num_blocks)
    unit = _unit_bytes(geometry, runs)
    if unit < unit_bytes_min:
        raise InvalidRequest(
            "the cache's layout must allow copies of larger pieces", unit_bytes=unit, expected_min=unit_bytes_min
        )
    shapes: dict[tuple[int, ...], list[BlockRun]] = {}
    for run in runs:
        shapes.setdefault((run.num_bytes, run.repeat, run.block_stride, run.page_stride), []).append(run)
    plans = [_plan_shape(geometry, alike, num_blocks, unit, page_bytes // unit) for alike in shapes.values()]
    filled = np.sort(np.concatenate([plan.places.reshape(-1) for plan in plans]))
    if filled.size != page_bytes // unit or not np.array_equal(filled, np.arange(filled.size)):
        raise InternalError("runs must fill a page exactly once", page_bytes=page_bytes)
    return tuple(plans)


def _unit_bytes(geometry: CacheGeometry, runs: Sequence[BlockRun]) -> int:
    unit = 0
    for run in runs:
        unit = math.gcd(
            unit,
            geometry.starts[run.layer],
            geometry.strides[run.layer],
            run.block_offset,
            run.num_bytes,
            run.page_offset,
            run.page_block_stride,
        )
        if run.repeat > 1:
            unit = math.gcd(unit, run.block_stride, run.page_stride)
    return unit


def _plan_shape(
    geometry: CacheGeometry, runs: Sequence[BlockRun], num_blocks: int, unit: int, page_rows: int
) -> RowPlan:
    first = runs[0]
    repeat, within = np.arange(first.repeat)[:, None], np.arange(first.num_bytes // unit)
    pieces = (repeat * (first.block_stride // unit) + within).reshape(-1)
    page_pieces = (repeat * (first.page_stride // unit) + within).reshape(-1)
    page_base = np.array([run.page_offset // unit for run in runs])
    page_stride = np.array([run.page_block_stride // unit for run in runs])
    blocks = page_stride[:, None] * np.arange(num_blocks)
    places = page_base[:, None, None] + blocks[:, :, None] + page_pieces
    flat = places.reshape(-1)
    in_order = bool(np.all(flat[1:] > flat[:-1]))
    stride = np.array([geometry.strides[run.layer] // unit for run in runs])
    feed = np.array([geometry.feeds[run.layer] for run in runs])
    return RowPlan(
        unit_bytes=unit,
        num_blocks=num_blocks,
        page_rows=page_rows,
        base=np.array([(geometry.starts[run.layer] + run.block_offset) // unit for run in runs]),
        stride=stride,
        feed=feed,
        pieces=pieces,
        places=places,
        order=None if in_order else np.argsort(flat),
        key=_digest(np.array([unit, page_rows]), places, stride, feed, pieces),
    )


def _digest(*arrays: Ints) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(array.size.to_bytes(8, "little") + array.tobytes())
    return digest.digest()
