"""Runs: the unit that a copy between blocks and a page is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["BlockRun", "PagePlan"]


@dataclass(frozen=True, slots=True)
class BlockRun:
    """For every block of a span, `repeat` pieces of `num_bytes` that stand together in the block and in the page.

    Piece `r` of the span's block `i` (whose id is `b`) is
        in the cache: layer `layer`, block `b`, at `block_offset + r * block_stride`
        in the page:  at `page_offset + i * page_block_stride + r * page_stride`
    all in bytes, the first from the block's own start.

    Attributes:
        layer: Index in the group's list of layers.
        block_offset: First byte in the block.
        num_bytes: Length of one piece.
        page_offset: First byte in the page for its first block.
        page_block_stride: Distance between the pieces of neighbouring blocks in the page.
        repeat: Number of pieces per block.
        block_stride: Distance between pieces in the block.
        page_stride: Distance between pieces in the page.
    """

    layer: int
    block_offset: int
    num_bytes: int
    page_offset: int
    page_block_stride: int
    repeat: int = 1
    block_stride: int = 0
    page_stride: int = 0


class PagePlan(Protocol):
    """How one group's pages are laid out: a file of this folder for each kind of cache."""

    block_tokens: int
    """Tokens of one block; spans are whole multiples of it."""

    def decoded_bytes(self, num_blocks: int) -> int:
        """Size of one slice's page over `num_blocks` blocks."""
        ...

    def runs(self, slice_index: int, num_blocks: int) -> tuple[BlockRun, ...]:
        """The runs of one slice, whose global index is `slice_index`, for a page of `num_blocks` blocks."""
        ...
