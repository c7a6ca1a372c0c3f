"""Copies on CPU tensors: plain memory, no streams. Runs at memcpy speed on one core."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from connector.canonical.runs import BlockRun
from kvstore.errors import InternalError

__all__ = ["CpuCopier"]


class CpuCopier:
    """`BlockCopier` for cache tensors in host memory.

    Args:
        layers: One tensor per layer, dimension 0 = blocks; any strides.
    """

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self._storages = [_storage_bytes(layer) for layer in layers]
        self._starts = [layer.storage_offset() * layer.element_size() for layer in layers]
        self._strides = [layer.stride(0) * layer.element_size() for layer in layers]
        self._num_blocks = [layer.shape[0] for layer in layers]

    def gather(self, runs: Sequence[BlockRun], block_ids: Sequence[int], target: torch.Tensor) -> None:
        count = len(block_ids)
        index = torch.tensor(block_ids, dtype=torch.int64)
        for run in runs:
            page = _page_view(target, run, 0, count)
            blocks = self._block_view(run)
            if page.is_contiguous():
                torch.index_select(blocks, 0, index, out=page)
            else:
                page.copy_(blocks[index])

    def scatter(
        self, runs: Sequence[BlockRun], block_ids: Sequence[int], source: torch.Tensor, first_block: int
    ) -> None:
        # a slice beyond the cache would be empty, and a copy to it would do nothing without a word
        if not all(0 < block_id < min(self._num_blocks) for block_id in block_ids):
            raise InternalError("blocks to write must exist and not be the null block", block_ids=tuple(block_ids))
        # index_copy_ into strided memory is ten times slower than copies of neighbouring blocks
        neighbours = _neighbours(block_ids)
        for run in runs:
            blocks = self._block_view(run)
            for position, first_id, count in neighbours:
                page = _page_view(source, run, first_block + position, count)
                blocks[first_id : first_id + count].copy_(page)

    def _block_view(self, run: BlockRun) -> torch.Tensor:
        # [num_blocks, repeat, num_bytes], uint8
        return torch.as_strided(
            self._storages[run.layer],
            (self._num_blocks[run.layer], run.repeat, run.num_bytes),
            (self._strides[run.layer], run.block_stride, 1),
            self._starts[run.layer] + run.block_offset,
        )


def _page_view(page: torch.Tensor, run: BlockRun, first_block: int, count: int) -> torch.Tensor:
    # [count, repeat, num_bytes], uint8
    return torch.as_strided(
        page,
        (count, run.repeat, run.num_bytes),
        (run.page_block_stride, run.page_stride, 1),
        page.storage_offset() + run.page_offset + first_block * run.page_block_stride,
    )


def _storage_bytes(layer: torch.Tensor) -> torch.Tensor:
    storage = layer.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=layer.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _neighbours(block_ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs of ascending ids: (position of the first, its id, how many)."""
    found: list[tuple[int, int, int]] = []
    for position, block_id in enumerate(block_ids):
        if found and block_id == found[-1][1] + found[-1][2]:
            first, first_id, count = found[-1]
            found[-1] = (first, first_id, count + 1)
        else:
            found.append((position, block_id, 1))
    return found
