"""Runs, the unit that a copy between blocks and a page is made of; and the proof that they cover every byte once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """How one layer's cache tensor lies in memory: `[blocks, parts, heads, tokens, content]`, strides in bytes.

    Attributes:
        parts: Kernel blocks in one of the manager's blocks; tokens continue from one to the next.
        tokens: Tokens (or states) of a part.
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
    all in bytes, the first from the block's own start. `layer` is an index in the group's list of layers.
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
    """How one group's pages are laid out. Each kind of content has a file of this folder."""

    def decoded_bytes(self, num_blocks: int) -> int:
        """Size of one slice's page over `num_blocks` blocks; of a state, whose `num_blocks` is 1."""
        ...

    def runs(self, slice_index: int, num_blocks: int) -> tuple[BlockRun, ...]:
        """The runs of one slice, whose global index is `slice_index`, for a page of `num_blocks` blocks."""
        ...


def prove_tiling(
    plan: PagePlan, slices: Iterable[int], layer_content: Sequence[Sequence[tuple[int, int]]], num_blocks: int
) -> None:
    """Check that the slices' runs tile the pages and the content of the blocks exactly once.

    Args:
        slices: The slices that the rank holds.
        layer_content: For each layer the byte ranges (start, stop) of a block that hold content, derived from the
            tensors themselves.
        num_blocks: Length of the page to prove it for. The plan is affine in it, so two blocks suffice to check the
            strides (a state is one block).

    Raises:
        InvalidRequest: A byte is missing, is written twice or lies outside; the group must not be cached.
    """
    in_blocks: list[list[tuple[int, int]]] = [[] for _ in layer_content]
    for slice_index in slices:
        in_page: list[tuple[int, int]] = []
        for run in plan.runs(slice_index, num_blocks):
            for piece in range(run.repeat):
                start = run.block_offset + piece * run.block_stride
                in_blocks[run.layer].append((start, start + run.num_bytes))
                for block in range(num_blocks):
                    start = run.page_offset + block * run.page_block_stride + piece * run.page_stride
                    in_page.append((start, start + run.num_bytes))
        _expect(in_page, [(0, plan.decoded_bytes(num_blocks))], f"page of slice {slice_index}")
    for layer, (runs, content) in enumerate(zip(in_blocks, layer_content, strict=True)):
        _expect(runs, content, f"block of layer {layer}")


def _expect(pieces: Sequence[tuple[int, int]], content: Sequence[tuple[int, int]], where: str) -> None:
    merged = _merge(pieces, where)
    expected = _merge(content, where)
    if merged != expected:
        raise InvalidRequest(
            "the runs do not tile the bytes exactly once", where=where, expected=expected[:4], seen=merged[:4]
        )


def _merge(ranges: Sequence[tuple[int, int]], where: str) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start < merged[-1][1]:
            raise InvalidRequest("two runs cover the same byte", where=where, byte=start)
        if merged and start == merged[-1][1]:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged
