"""Copies on CPU tensors: plain memory, no streams, at the speed of memcpy on one core.

Copies use numpy, not torch: a torch copy starts a team of OpenMP threads in its calling thread, which spin on the very
cores that the engine's own team computes on.

Runs that repeat at equal distances are folded into one strided view (a strip): a slice of a page has the same run in
every layer, and layers are at equal distances in one allocation. Without it the interpreter's work on each run is a
third of the cost of a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from connector.canonical.runs import BlockRun
from connector.device.base import Device, Fence, PageGather, PageScatter, RunsMemo, Ticket, check_blocks, storage_bytes
from connector.device.streams import DONE
from kvstore.errors import InternalError

Bytes = NDArray[np.uint8]


class CpuDevice(Device):
    """A device whose cache is host memory: every copy is done when its call returns.

    It reads no shared memory: a copy to blocks is the last read of its source, and no check could come between them.
    """

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def fence(self) -> Fence:
        return DONE

    def copier(self, layers: Sequence[torch.Tensor], feeds: Sequence[int], element_bytes: int) -> CpuCopier:
        return CpuCopier(layers, feeds)


class CpuCopier:
    """`BlockCopier` for cache tensors in host memory.

    Args:
        layers: One tensor per layer, dimension 0 = blocks; any strides.
        feeds: For each layer the feed that places its blocks.
    """

    plane_width = 1  # the codec splits elements itself, faster than a strided copy could

    def __init__(self, layers: Sequence[torch.Tensor], feeds: Sequence[int]) -> None:
        memories: dict[int, Any] = {}
        for layer in layers:
            memories.setdefault(layer.untyped_storage().data_ptr(), storage_bytes(layer).numpy().data)
        self._memories = list(memories.values())
        self._num_blocks = min(layer.shape[0] for layer in layers)
        places = [
            LayerPlace(
                memory=list(memories).index(layer.untyped_storage().data_ptr()),
                start=layer.storage_offset() * layer.element_size(),
                block_stride=layer.stride(0) * layer.element_size(),
                feed=feed,
            )
            for layer, feed in zip(layers, feeds, strict=True)
        ]
        self._strips = RunsMemo(lambda runs, _: fold_runs(runs, places))

    def gather_all(self, pages: Sequence[PageGather], *, as_tiles: bool = False) -> list[Ticket | None]:
        check_blocks(pages, self._num_blocks)
        for page in pages:
            target: Any = page.target.numpy()
            for blocks, place in self._copies(page.runs, page.block_ids, target):
                np.copyto(place, blocks)
        return [Ticket(DONE)] * len(pages)

    def scatter_all(self, pages: Sequence[PageScatter], after: Fence) -> None:
        check_blocks(pages, self._num_blocks, writes=True)
        for page in pages:
            page.check()
            if not isinstance(page.source, torch.Tensor):
                raise InternalError("this device reads no shared memory")
            source: Any = page.source.numpy()
            for blocks, place in self._copies(page.runs, page.block_ids, source, page.first_block):
                np.copyto(blocks, place)

    def _copies(
        self, runs: Sequence[BlockRun], block_ids: Sequence[Sequence[int]], page: Bytes, first_block: int = 0
    ) -> Iterator[tuple[Bytes, Bytes]]:
        """Views of the cache and of the page, for each strip and each stretch of adjacent blocks."""
        stretches = [_neighbours(ids) for ids in block_ids]
        for strip in self._strips.of(runs, page.size):
            memory, layer = self._memories[strip.layer.memory], strip.layer
            for position, first_id, count in stretches[layer.feed]:
                shape = (*strip.counts, count, strip.num_bytes)
                yield (
                    np.ndarray(
                        shape,
                        np.uint8,
                        memory,
                        layer.start + first_id * layer.block_stride + strip.offset,
                        (*strip.strides, layer.block_stride, 1),
                    ),
                    np.ndarray(
                        shape,
                        np.uint8,
                        page.data,
                        strip.page_offset + (first_block + position) * strip.page_block_stride,
                        (*strip.page_strides, strip.page_block_stride, 1),
                    ),
                )


def _neighbours(block_ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """Stretches of consecutive ids: (position of the first, its id, how many)."""
    found: list[tuple[int, int, int]] = []
    for position, block_id in enumerate(block_ids):
        if found and block_id == found[-1][1] + found[-1][2]:
            first, first_id, count = found[-1]
            found[-1] = (first, first_id, count + 1)
        else:
            found.append((position, block_id, 1))
    return found


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a layer is.

    Attributes:
        memory: Index of its allocation.
        start: Byte of its block 0.
        block_stride: Bytes between its blocks.
        feed: The table that places its blocks.
    """

    memory: int
    start: int
    block_stride: int
    feed: int


@dataclass(frozen=True, slots=True)
class Strip:
    """For every block of a span a number of pieces, at equal distances in one or more dimensions.

    Attributes:
        layer: Where the first piece's layer is.
        offset: First byte of the first piece, from the start of block 0.
        page_offset: The same in the page.
        page_block_stride: Distance between the pieces of neighbouring blocks in the page.
        counts: Pieces along each dimension, the outermost first.
        strides: Distances in the cache along each.
        page_strides: Distances in the page.
        num_bytes: Of one piece.
    """

    layer: LayerPlace
    offset: int
    page_offset: int
    page_block_stride: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]
    page_strides: tuple[int, ...]
    num_bytes: int


def fold_runs(runs: Iterable[BlockRun], layers: Sequence[LayerPlace]) -> tuple[Strip, ...]:
    """The same copies as strips, with adjacent runs folded as far as possible."""
    strips = [
        Strip(
            layer=layers[run.layer],
            offset=run.block_offset,
            page_offset=run.page_offset,
            page_block_stride=run.page_block_stride,
            counts=(run.repeat,),
            strides=(run.block_stride,),
            page_strides=(run.page_stride,),
            num_bytes=run.num_bytes,
        )
        for run in runs
    ]
    while True:
        folded = _fold(strips)
        if len(folded) == len(strips):
            return tuple(strips)
        strips = folded


def _fold(strips: Sequence[Strip]) -> list[Strip]:
    """Fold neighbours at equal distances into one strip with one more dimension."""
    folded: list[Strip] = []
    start = 0
    while start < len(strips):
        first, stop = strips[start], start + 1
        step = _distance(first, strips[stop]) if stop < len(strips) else None
        while stop < len(strips) and step is not None and _distance(strips[stop - 1], strips[stop]) == step:
            stop += 1
        if step is not None:
            first = replace(
                first,
                counts=(stop - start, *first.counts),
                strides=(step[0], *first.strides),
                page_strides=(step[1], *first.page_strides),
            )
        folded.append(first)
        start = stop
    return folded


def _distance(first: Strip, second: Strip) -> tuple[int, int] | None:
    """Bytes between two strips in the cache and in the page; `None`: they differ in more than their place."""
    moved = replace(
        second,
        layer=replace(second.layer, start=first.layer.start),
        offset=first.offset,
        page_offset=first.page_offset,
    )
    if moved != first:
        return None
    cache = second.layer.start + second.offset - first.layer.start - first.offset
    return cache, second.page_offset - first.page_offset
