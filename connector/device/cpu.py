"""Copies on CPU tensors: plain memory, no streams. Runs at memcpy speed on one core.

Copies use numpy, not torch: a torch copy starts a team of OpenMP threads in its calling thread, which spin on the very
cores that the engine's own team computes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from connector.canonical.runs import BlockRun
from connector.device.base import Fence, PageGather, Ticket, check_blocks
from connector.device.kernels import storage_bytes
from connector.device.memo import RunsMemo
from connector.device.streams import DONE
from connector.device.strips import LayerPlace, fold_runs

__all__ = ["CpuCopier", "CpuDevice"]

Bytes = NDArray[np.uint8]


class CpuDevice:
    """`Device` whose cache is host memory: every copy is done when its call returns."""

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
        feeds: For each layer the feed that places its blocks; all in the first one by default.
    """

    plane_width = 1  # the codec splits elements itself, faster than a strided copy could

    def __init__(self, layers: Sequence[torch.Tensor], feeds: Sequence[int] | None = None) -> None:
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
            for layer, feed in zip(layers, feeds or (0,) * len(layers), strict=True)
        ]
        self._strips = RunsMemo(lambda runs, _: fold_runs(runs, places))

    def gather_all(self, pages: Sequence[PageGather]) -> list[Ticket | None]:
        for page in pages:
            check_blocks(page.block_ids, self._num_blocks)
        for page in pages:
            target: Any = page.target.numpy()
            for blocks, place in self._copies(page.runs, page.block_ids, target):
                np.copyto(place, blocks)
        return [DONE] * len(pages)

    def scatter(
        self,
        runs: Sequence[BlockRun],
        block_ids: Sequence[Sequence[int]],
        source: torch.Tensor,
        first_block: int,
        after: Fence,
    ) -> None:
        check_blocks(block_ids, self._num_blocks, writes=True)
        page: Any = source.numpy()
        for blocks, place in self._copies(runs, block_ids, page, first_block):
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
