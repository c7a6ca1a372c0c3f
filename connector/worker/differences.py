"""How far a page is from another computation of the same page, and how far rounding may take it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from connector.facts import CellFacts, StateFacts

Bytes = NDArray[np.uint8]

_BOUNDS = {"float64": 1e-3, "float32": 1e-3, "float16": 0.1, "bfloat16": 0.25}
"""By the types that a number passed through. The same tokens, computed in other chunks, differ by rounding: in float32
by less than 1e-6 of a norm, as measured; in bfloat16 by far more, since a mixture of experts may choose another expert
for a token. A cell of another prefix differs by more than its own norm."""

_EIGHT_BITS = 0.4
"""Of types of eight bits: a step of theirs is an eighth or a quarter of a number."""


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes `start` to `stop` of every cell, numbers of one type (torch's name of it)."""

    start: int
    stop: int
    dtype: str


def parts_of(content: CellFacts | StateFacts, cell_bytes: int) -> tuple[Part, ...]:
    """The parts of a cell: what one layer's head keeps of a block, or one layer's state."""
    if isinstance(content, CellFacts):
        return (Part(0, cell_bytes, content.dtype),)
    parts, start = [], 0
    for dtype, num_bytes in zip(content.dtypes, content.part_bytes, strict=True):
        parts.append(Part(start, start + num_bytes, dtype))
        start += num_bytes
    return tuple(parts)


def bound_for(compute_dtype: str, content: CellFacts | StateFacts) -> float:
    """The largest difference that rounding can explain."""
    kept = (content.dtype,) if isinstance(content, CellFacts) else content.dtypes
    return max(_BOUNDS.get(dtype, _EIGHT_BITS) for dtype in (compute_dtype, *kept))


def canonical_bytes(page: Bytes, plane_width: int) -> Bytes:
    """The canonical bytes of a page in host memory, whose form is `BlockCopier.plane_width`."""
    if plane_width == 1:
        return page
    # [planes, elements], the highest first; elements are little-endian
    return np.ascontiguousarray(page.reshape(plane_width, -1)[::-1].T).reshape(-1)


def some_blocks(page: Bytes, cell_bytes: int, span_blocks: int, first_block: int, num_blocks: int) -> Bytes:
    """The cells of some of a canonical page's blocks: `[rows, num_blocks, cell_bytes]`, a view."""
    return page.reshape(-1, span_blocks, cell_bytes)[:, first_block : first_block + num_blocks]


def largest_difference(computed: Bytes, stored: Bytes, parts: Sequence[Part]) -> float:
    """The largest distance of two cells, relative to the larger one's norm: 0 when equal, near 1.4 when unrelated.

    Args:
        computed: `[rows, blocks, cell_bytes]`.
        stored: The same cells.
        parts: What a cell consists of; each counts for itself.

    Returns:
        Infinite if a number is finite on one side only.
    """
    largest = 0.0
    for part in parts:
        ones = _numbers(computed[..., part.start : part.stop], part.dtype)
        others = _numbers(stored[..., part.start : part.stop], part.dtype)
        finite = np.isfinite(ones) & np.isfinite(others)
        if not np.array_equal(np.isfinite(ones), np.isfinite(others)):
            return float("inf")
        ones, others = np.where(finite, ones, 0), np.where(finite, others, 0)
        norms = np.maximum(_norms(ones), _norms(others))
        distances = _norms(np.subtract(ones, others, dtype=np.float64))
        relative = np.divide(distances, norms, out=np.zeros_like(distances), where=norms > 0)
        largest = max(largest, float(relative.max(initial=0.0)))
    return largest


def _norms(cells: NDArray[Any]) -> NDArray[np.float64]:
    squares: NDArray[np.float64] = np.square(cells, dtype=np.float64)
    norms: NDArray[np.float64] = np.sqrt(squares.sum(axis=-1))
    return norms


def _numbers(cells: Bytes, dtype: str) -> NDArray[np.float32]:
    """`[rows, blocks, elements]`."""
    cells = np.ascontiguousarray(cells)
    if dtype == "bfloat16":
        return (cells.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype in ("float16", "float32", "float64"):
        return cells.view(dtype).astype(np.float32)
    if dtype.startswith("float8"):
        table: Any = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype)).to(torch.float32).numpy()
        numbers: NDArray[np.float32] = table[cells]
        return numbers
    return cells.astype(np.float32)
