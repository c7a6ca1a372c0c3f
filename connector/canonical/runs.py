"""Runs: the unit that a copy between blocks and a page is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["BlockRun", "LayerGeometry", "PagePlan"]


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """How one layer's cache tensor lies in memory: `[blocks, parts, heads, tokens, content]`.

    Attributes:
        parts: Kernel blocks in one of the manager's blocks; tokens continue from one to the next.
        part_stride: Bytes between parts.
        heads: Heads.
        head_stride: Bytes between heads.
        tokens: Tokens (or states) of a part.
        token_stride: Bytes between tokens.
        content_bytes: Contiguous bytes of one token of one head.
    """

    parts: int
    part_stride: int
    heads: int
    head_stride: int
    tokens: int
    token_stride: int
    content_bytes: int

    def content(self) -> list[tuple[int, int]]:
        """The byte ranges (start, stop) of a block that hold content, from the block's own start."""
        starts = [
            part * self.part_stride + head * self.head_stride + token * self.token_stride
            for part in range(self.parts)
            for head in range(self.heads)
            for token in range(self.tokens)
        ]
        return [(start, start + self.content_bytes) for start in starts]


@dataclass(frozen=True, slots=True)
class BlockRun:
    """For every block of a span, `repeat` pieces of `num_bytes` each.

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
    """How one group's pages are laid out: a file of this folder for each kind of content."""

    def decoded_bytes(self, num_blocks: int) -> int:
        """Size of one slice's page over `num_blocks` blocks; of a state, whose `num_blocks` is 1."""
        ...

    def runs(self, slice_index: int, num_blocks: int) -> tuple[BlockRun, ...]:
        """The runs of one slice, whose global index is `slice_index`, for a page of `num_blocks` blocks."""
        ...
