"""The copies that run on a stream, as plain tensor operations: the same code for a GPU and for tensors in host memory.

Nothing here waits for the device, and what is launched depends on no value on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from connector.device.rows import RowPlan

__all__ = ["Cargo", "gather_rows", "join_planes", "pack_rows", "scatter_rows", "split_planes", "storage_bytes"]

_WIDEST_FIRST = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


@dataclass(frozen=True, slots=True)
class Cargo:
    """What the device needs to know of some pages with equal plans, in one upload.

    Attributes:
        host: int64, in memory that the device reads later; must not change any more.
        shapes: Shapes of its parts: ids `[pages, feeds, blocks]`, base `[pages, runs]`, stride and feed `[runs]`,
            pieces `[pieces]`, order (empty: they are in order) and places (empty: all of the page) `[rows]`.
        unit_bytes: Bytes of a row.
    """

    host: torch.Tensor
    shapes: tuple[tuple[int, ...], ...]
    unit_bytes: int

    def land(self, device: torch.device) -> list[torch.Tensor]:
        """The parts on the device."""
        parts = self.host.to(device, non_blocking=True).split([int(np.prod(shape)) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


def pack_rows(
    plans: Sequence[RowPlan],
    block_ids: Sequence[Sequence[Sequence[int]]],
    *,
    first_block: int = 0,
    is_alone: bool,
    allocate: Callable[[int], torch.Tensor],
) -> Cargo:
    """The cargo of pages that are copied together.

    Args:
        plans: One for each page, all with the same `key`.
        block_ids: For each page and feed the blocks, from `first_block` of the page on.
        first_block: First block of the pages that is copied.
        is_alone: No other plan copies to the same pages.
        allocate: Returns memory that the device can read and that nobody else uses while it does.
    """
    plan = plans[0]
    ids: NDArray[np.int64] = np.asarray(block_ids, dtype=np.int64)
    nothing = np.empty(0, np.int64)
    order, places = nothing, nothing
    if is_alone and ids.shape[2] == plan.num_blocks:
        order = nothing if plan.order is None else plan.order
    else:
        places = plan.places[:, first_block : first_block + ids.shape[2]].reshape(-1)
    base = np.stack([each.base for each in plans])
    parts = (ids, base, plan.stride, plan.feed, plan.pieces, order, places)
    host = allocate(8 * sum(part.size for part in parts)).view(torch.int64)
    packed: Any = host.numpy()
    np.concatenate([part.reshape(-1) for part in parts], out=packed)
    return Cargo(host, tuple(part.shape for part in parts), plan.unit_bytes)


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 `[all bytes of the allocation]` of a tensor, over the same memory."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def gather_rows(cache: torch.Tensor, cargo: Cargo, target: torch.Tensor) -> None:
    """Copy rows of the cache to whole pages, which are consecutive in `target`; both uint8."""
    ids, base, stride, feed, pieces, order, places = cargo.land(cache.device)
    index = _cache_rows(ids, base, stride, feed, pieces)
    cache_rows, page_rows = _as_rows(cache, cargo.unit_bytes), _as_rows(target, cargo.unit_bytes)
    if order.numel():
        index = index.index_select(1, order)
    if not places.numel():
        torch.index_select(cache_rows, 0, index.view(-1), out=page_rows)
        return
    num_pages, width = index.shape[0], cache_rows.shape[1]
    pieces_of_pages = cache_rows.index_select(0, index.view(-1)).view(num_pages, -1, width)
    page_rows.view(num_pages, -1, width).index_copy_(1, places, pieces_of_pages)


def scatter_rows(cache: torch.Tensor, cargo: Cargo, source: torch.Tensor) -> None:
    """Copy rows of one page to the cache, both uint8."""
    ids, base, stride, feed, pieces, order, places = cargo.land(cache.device)
    index = _cache_rows(ids, base, stride, feed, pieces)
    rows = _as_rows(source, cargo.unit_bytes)
    if order.numel():
        index = index.index_select(1, order)
    if places.numel():
        rows = rows.index_select(0, places)
    _as_rows(cache, cargo.unit_bytes).index_copy_(0, index.view(-1), rows)


def split_planes(source: torch.Tensor, num_pages: int, width: int, target: torch.Tensor) -> None:
    """Elements of `width` bytes to byte planes, page by page, the highest plane first; uint8, of equal length."""
    elements, planes = source.view(num_pages, -1, width), target.view(num_pages, width, -1)
    for plane in range(width):
        planes[:, plane].copy_(elements[:, :, width - 1 - plane])


def join_planes(source: torch.Tensor, width: int, target: torch.Tensor) -> None:
    """The inverse of `split_planes`, for one page."""
    planes, elements = source.view(width, -1), target.view(-1, width)
    for plane in range(width):
        elements[:, width - 1 - plane].copy_(planes[plane])


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
