"""Proves a plan right before it moves a byte: it covers every byte exactly once, on both sides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from connector.canonical.runs import PagePlan
from kvstore.errors import InvalidRequest

__all__ = ["prove_tiling"]


def prove_tiling(
    plan: PagePlan, slices: Iterable[int], layer_content: Sequence[Sequence[tuple[int, int]]], num_blocks: int
) -> None:
    """Check that the slices' runs tile the pages and the content of the blocks exactly once.

    Args:
        plan: The plan of one group on one rank.
        slices: The slices that the rank holds.
        layer_content: For each layer the byte ranges (start, stop) of a block that hold content, derived from the
            tensors themselves.
        num_blocks: Length of the page to prove it for; the plan is affine in it, so two blocks suffice to check the
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
