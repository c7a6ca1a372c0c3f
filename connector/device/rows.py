"""Copies between a cache and pages as rows: their indexes as integers, and the tensor operations that execute them.

Cache and page are seen as rows of `unit_bytes`, the largest number that divides every offset, stride and length. Piece
`k` of run `r` in block `i` is then one row: `base[r] + stride[r] * id + pieces[k]` in the cache.

The operations run on a stream of a GPU, and in tests on tensors in host memory. None waits for the device, and what
they launch depends on no value on the device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from connector.canonical.runs import BlockRun
from kvstore.errors import InternalError, InvalidRequest

Ints = NDArray[np.int64]
_WIDEST_FIRST = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


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
        base: `[runs]`: the row of a run's first piece in block 0.
        stride: `[runs]`: rows between blocks.
        feed: `[runs]`: the table that places its blocks.
        pieces: `[pieces]`: rows from a run's first piece to each.
        places: `[runs, blocks, pieces]`: the row in the page.
        is_in_order: Whether the flat `places` ascend.
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
    is_in_order: bool
    key: bytes


def plan_rows(
    geometry: CacheGeometry, runs: Sequence[BlockRun], page_bytes: int, *, unit_bytes_min: int = 1
) -> tuple[RowPlan, ...]:
    """The plans that together copy a page, one for each shape of piece.

    Args:
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
        is_in_order=bool(np.all(flat[1:] > flat[:-1])),
        key=_digest(np.array([unit, page_rows]), places, stride, feed, pieces),
    )


def _digest(*arrays: Ints) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(array.size.to_bytes(8, "little") + array.tobytes())
    return digest.digest()


@dataclass(frozen=True, slots=True)
class RowIndexes:
    """Where the rows of some pages with equal plans are, for one upload to the device.

    Attributes:
        table: int64, in memory that the device reads later; must not change any more. First `HEAD_FIELDS`, see `_head`,
            then the parts.
        shapes: Shapes of its parts: ids `[pages, feeds, blocks]`, base `[pages, runs]`, stride and feed `[runs]`,
            pieces `[pieces]`, and places `[rows]` in a page (empty: the rows are all of the page, in its order).
        unit_bytes: Bytes of a row.
        page_rows: Rows that are copied of each page.
    """

    table: torch.Tensor
    shapes: tuple[tuple[int, ...], ...]
    unit_bytes: int
    page_rows: int

    @property
    def num_pages(self) -> int:
        return self.shapes[0][0]

    def parts_on_device(self, device: torch.device) -> list[torch.Tensor]:
        sizes = [HEAD_FIELDS, *(math.prod(shape) for shape in self.shapes)]
        _, *parts = self.table.to(device, non_blocking=True).split(sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


HEAD_FIELDS = 12


def _head(plan: RowPlan, page_rows: int, shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """What `row_kernels` reads first: rows of a page that are copied and that it has, runs, blocks, pieces, feeds, and
    where each part begins in the table; 0: it is empty.
    """
    (_, num_feeds, num_blocks), (_, num_runs), (num_pieces,) = shapes[0], shapes[1], shapes[4]
    begins, start = [], HEAD_FIELDS
    for shape in shapes:
        begins.append(start if math.prod(shape) else 0)
        start += math.prod(shape)
    return [page_rows, plan.page_rows, num_runs, num_blocks, num_pieces, num_feeds, *begins]


def pack_indexes(
    plans: Sequence[RowPlan],
    block_ids: Sequence[Sequence[Sequence[int]]],
    *,
    first_block: int = 0,
    is_alone: bool,
    allocate: Callable[[int], torch.Tensor],
) -> RowIndexes:
    """The indexes of pages that are copied together.

    Args:
        plans: One for each page, all with the same `key`.
        block_ids: The blocks to copy, from block `first_block` of each page on. Shape (pages, feeds, blocks).
        first_block: First block of the pages that is copied.
        is_alone: No other plan copies to the same pages.
        allocate: Returns memory that the device can read and that is not reused before it has.
    """
    plan = plans[0]
    ids: NDArray[np.int64] = np.asarray(block_ids, dtype=np.int64)
    num_blocks = ids.shape[2]
    places = np.empty(0, np.int64)
    if not (is_alone and num_blocks == plan.num_blocks and plan.is_in_order):
        places = plan.places[:, first_block : first_block + num_blocks].reshape(-1)
    base = np.stack([each.base for each in plans])
    parts = (ids, base, plan.stride, plan.feed, plan.pieces, places)
    shapes = tuple(part.shape for part in parts)
    page_rows = plan.base.size * num_blocks * plan.pieces.size
    table = allocate(8 * (HEAD_FIELDS + sum(part.size for part in parts))).view(torch.int64)
    packed: Any = table.numpy()
    np.concatenate([_head(plan, page_rows, shapes), *(part.reshape(-1) for part in parts)], out=packed)
    return RowIndexes(table, shapes, plan.unit_bytes, page_rows)


def gather_rows(cache: torch.Tensor, indexes: RowIndexes, target: torch.Tensor) -> None:
    """Copy rows of the cache to whole pages, which are consecutive in `target`; both uint8."""
    *parts, places = indexes.parts_on_device(cache.device)
    index = _cache_rows(*parts)
    cache_rows, page_rows = _as_rows(cache, indexes.unit_bytes), _as_rows(target, indexes.unit_bytes)
    if not places.numel():
        torch.index_select(cache_rows, 0, index.view(-1), out=page_rows)
        return
    num_pages, width = index.shape[0], cache_rows.shape[1]
    pieces_of_pages = cache_rows.index_select(0, index.view(-1)).view(num_pages, -1, width)
    page_rows.view(num_pages, -1, width).index_copy_(1, places, pieces_of_pages)


def scatter_rows(cache: torch.Tensor, indexes: RowIndexes, source: torch.Tensor) -> None:
    """Copy rows of whole pages, which are consecutive in `source`, to the cache; both uint8."""
    *parts, places = indexes.parts_on_device(cache.device)
    index = _cache_rows(*parts)
    cache_rows, rows = _as_rows(cache, indexes.unit_bytes), _as_rows(source, indexes.unit_bytes)
    if places.numel():
        num_pages, width = index.shape[0], cache_rows.shape[1]
        rows = rows.view(num_pages, -1, width).index_select(1, places).view(-1, width)
    cache_rows.index_copy_(0, index.view(-1), rows)


def split_planes(source: torch.Tensor, num_pages: int, width: int, target: torch.Tensor) -> None:
    """Elements of `width` bytes to byte planes, page by page, the highest plane first; uint8, of equal length."""
    elements, planes = source.view(num_pages, -1, width), target.view(num_pages, width, -1)
    for plane in range(width):
        planes[:, plane].copy_(elements[:, :, width - 1 - plane])


def join_planes(source: torch.Tensor, num_pages: int, width: int, target: torch.Tensor) -> None:
    """The inverse of `split_planes`."""
    planes, elements = source.view(num_pages, width, -1), target.view(num_pages, -1, width)
    for plane in range(width):
        elements[:, :, width - 1 - plane].copy_(planes[:, plane])


def _cache_rows(
    ids: torch.Tensor, base: torch.Tensor, stride: torch.Tensor, feed: torch.Tensor, pieces: torch.Tensor
) -> torch.Tensor:
    """`[pages, rows]`: for each page the cache's rows in the order run, block, piece."""
    by_run = ids.index_select(1, feed)  # [pages, runs, blocks]
    first = by_run * stride[:, None] + base[:, :, None]
    return (first[..., None] + pieces).view(ids.shape[0], -1)


def _as_rows(data: torch.Tensor, unit_bytes: int) -> torch.Tensor:
    """`[rows, words]` over the same memory, in the widest words that fit; bytes after the last row are left out."""
    width, dtype = next((width, dtype) for width, dtype in _WIDEST_FIRST if unit_bytes % width == 0)
    num_rows = data.numel() // unit_bytes
    return data[: num_rows * unit_bytes].view(dtype).view(num_rows, unit_bytes // width)
