"""Runs that repeat at equal distances, folded into one strided view for copies in host memory.

A slice of a page has the same run in every layer, and layers are at equal distances in one allocation. Folding these
runs into one saves the interpreter's work on each, which otherwise is a third of the cost of a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from connector.canonical.runs import BlockRun

__all__ = ["LayerPlace", "Strip", "fold_runs"]


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a layer is.

    Attributes:
        memory: Which allocation.
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
