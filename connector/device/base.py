"""The contract of a device: gather blocks into host pages, scatter host pages into blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from connector.canonical.runs import BlockRun

__all__ = ["BlockCopier"]


class BlockCopier(Protocol):
    """Executes runs for the layers of one group."""

    def gather(self, runs: Sequence[BlockRun], block_ids: Sequence[int], target: torch.Tensor) -> None:
        """Copy blocks into a page.

        Args:
            runs: The plan for one slice and `len(block_ids)` blocks.
            block_ids: The blocks, in token order.
            target: uint8 `[page bytes]`, contiguous host memory.

        When it returns the blocks may be reused: what they held is in `target`, or ordered before any later write.
        """
        ...

    def scatter(
        self, runs: Sequence[BlockRun], block_ids: Sequence[int], source: torch.Tensor, first_block: int
    ) -> None:
        """Copy part of a page into blocks.

        Args:
            runs: The plan for one slice and the whole page.
            block_ids: Where to write, in token order; none of them is block 0.
            source: uint8 `[page bytes]`, contiguous host memory, the whole page.
            first_block: Index in the page of the block that goes to `block_ids[0]`.

        When it returns, a forward that is started afterwards reads the new content.

        Raises:
            InternalError: A block does not exist or is the null block; nothing was written.
        """
        ...
