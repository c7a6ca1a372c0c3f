"""Copies on CPU tensors: plain memory, no streams. Runs at memcpy speed on one core.

numpy and not torch does the copies: a torch copy starts a team of OpenMP threads in whichever thread calls it, and
these spin on the very cores that the engine's own team computes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from connector.canonical.runs import BlockRun
from kvstore.errors import InternalError

__all__ = ["CpuCopier"]

Bytes = NDArray[np.uint8]


class CpuCopier:
    """`BlockCopier` for cache tensors in host memory.

    Args:
        layers: One tensor per layer, dimension 0 = blocks; any strides.
    """

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self._storages = [_storage_bytes(layer) for layer in layers]
        self._starts = [layer.storage_offset() * layer.element_size() for layer in layers]
        self._strides = [layer.stride(0) * layer.element_size() for layer in layers]
        self._num_blocks = min(layer.shape[0] for layer in layers)

    def gather(self, runs: Sequence[BlockRun], block_ids: Sequence[int], target: torch.Tensor) -> None:
        page: Any = target.numpy()
        for run, position, first_id, count in self._copies(runs, block_ids):
            np.copyto(_page_view(page, run, position, count), self._block_view(run, first_id, count))

    def scatter(
        self, runs: Sequence[BlockRun], block_ids: Sequence[int], source: torch.Tensor, first_block: int
    ) -> None:
        if 0 in block_ids:
            raise InternalError("blocks to write must not be the null block", block_ids=tuple(block_ids))
        page: Any = source.numpy()
        for run, position, first_id, count in self._copies(runs, block_ids):
            np.copyto(self._block_view(run, first_id, count), _page_view(page, run, first_block + position, count))

    def _copies(self, runs: Sequence[BlockRun], block_ids: Sequence[int]) -> list[tuple[BlockRun, int, int, int]]:
        """Each run for each stretch of neighbouring blocks: (run, position of the first, its id, how many)."""
        if not all(0 <= block_id < self._num_blocks for block_id in block_ids):
            raise InternalError("blocks to copy must exist", block_ids=tuple(block_ids), num_blocks=self._num_blocks)
        stretches = _neighbours(block_ids)
        return [(run, *stretch) for run in runs for stretch in stretches]

    def _block_view(self, run: BlockRun, first_id: int, count: int) -> Bytes:
        # [count, repeat, num_bytes]
        stride = self._strides[run.layer]
        return np.ndarray(
            (count, run.repeat, run.num_bytes),
            np.uint8,
            self._storages[run.layer],
            self._starts[run.layer] + first_id * stride + run.block_offset,
            (stride, run.block_stride, 1),
        )


def _page_view(page: Bytes, run: BlockRun, first_block: int, count: int) -> Bytes:
    # [count, repeat, num_bytes]
    return np.ndarray(
        (count, run.repeat, run.num_bytes),
        np.uint8,
        page.data,
        run.page_offset + first_block * run.page_block_stride,
        (run.page_block_stride, run.page_stride, 1),
    )


def _storage_bytes(layer: torch.Tensor) -> Any:
    storage = layer.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
    array: Any = whole.numpy()
    return array.data


def _neighbours(block_ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """Stretches of ascending ids: (position of the first, its id, how many)."""
    found: list[tuple[int, int, int]] = []
    for position, block_id in enumerate(block_ids):
        if found and block_id == found[-1][1] + found[-1][2]:
            first, first_id, count = found[-1]
            found[-1] = (first, first_id, count + 1)
        else:
            found.append((position, block_id, 1))
    return found
