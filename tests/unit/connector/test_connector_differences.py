"""Distances of pages: nothing for equal ones, little for rounding, much for another prefix; bytes in every form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from connector.facts import CellFacts, StateFacts
from connector.worker.differences import (
    Part,
    bound_for,
    canonical_bytes,
    largest_difference,
    parts_of,
    some_blocks,
)
from kvstore.codec.planes import split_planes

CELLS = CellFacts(rank_heads=2, total_heads=2, head_size=8, head_size_v=8, element_bytes=2, dtype="bfloat16")
STATE = StateFacts(((3, 4), (2, 8)), ("bfloat16", "float32"), (24, 64), replicated=False)


def as_bytes(numbers: torch.Tensor) -> Any:
    """uint8 `[rows, blocks, cell bytes]`."""
    return numbers.contiguous().view(torch.uint8).numpy().reshape(*numbers.shape[:2], -1)


def some_numbers(seed: int = 1) -> torch.Tensor:
    return torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_rounding_is_within_bounds_and_another_page_is_not(dtype: str) -> None:
    """Numbers that went through the type twice are near, those of another page are not, equal ones are no distance."""
    kept = getattr(torch, dtype)
    numbers = some_numbers()
    page, noisy, other = (
        as_bytes(values.to(kept)) for values in (numbers, numbers * (1 + 1e-6) + 1e-7, some_numbers(2))
    )
    parts = (Part(0, page.shape[-1], dtype),)
    bound = bound_for("float32", CellFacts(1, 1, 8, 8, 1, dtype))
    assert largest_difference(page, page, parts) == 0.0
    assert largest_difference(noisy, page, parts) < bound < 1.0 < largest_difference(other, page, parts)


def test_one_wrong_cell_among_many_is_found() -> None:
    """The distance is that of the worst cell, however many are right."""
    page = as_bytes(some_numbers())
    wrong = page.copy()
    wrong[1, 2] = as_bytes(some_numbers(3))[0, 0]
    assert largest_difference(wrong, page, (Part(0, 256, "float32"),)) > 1.0


def test_what_is_not_a_number() -> None:
    """Equal pages with a number that is none are equal; where only one side has it, nothing is alike."""
    numbers = some_numbers()
    numbers[0, 0, 5] = float("nan")
    page, whole = as_bytes(numbers), as_bytes(some_numbers())
    parts = (Part(0, 256, "float32"),)
    assert largest_difference(page, page, parts) == 0.0
    assert largest_difference(page, whole, parts) == float("inf")


def test_empty_cells_are_equal() -> None:
    """Zero has no norm to compare with; zero and something have nothing in common."""
    zero, parts = np.zeros((1, 2, 16), np.uint8), (Part(0, 16, "float32"),)
    assert largest_difference(zero, zero, parts) == 0.0
    assert largest_difference(zero, as_bytes(torch.ones(1, 2, 4)), parts) == 1.0


def test_parts_of_a_state_count_for_themselves() -> None:
    """A wrong convolution window beside a right state of much larger numbers is seen."""
    parts = parts_of(STATE, 88)
    assert parts == (Part(0, 24, "bfloat16"), Part(24, 88, "float32"))
    state = np.zeros((1, 1, 88), np.uint8)
    state[..., 24:] = as_bytes(torch.full((1, 1, 16), 1e6))
    state[..., :24] = as_bytes(torch.ones(1, 1, 12, dtype=torch.bfloat16))
    wrong = state.copy()
    wrong[..., :24] = as_bytes(-torch.ones(1, 1, 12, dtype=torch.bfloat16))
    assert largest_difference(wrong, state, parts) == 2.0


def test_bounds_follow_the_coarsest_type() -> None:
    """A state kept in float32 by an engine that computes in bfloat16 is as noisy as bfloat16."""
    assert bound_for("float32", CellFacts(1, 1, 8, 8, 4, "float32")) == 1e-3
    assert bound_for("bfloat16", STATE) == bound_for("float32", CELLS) == 0.25
    assert bound_for("bfloat16", CellFacts(1, 1, 8, 8, 1, "float8_e4m3fn")) == 0.4


@pytest.mark.parametrize("width", [1, 2, 4])
def test_planes_become_canonical_bytes(width: int) -> None:
    """What a device split into byte planes is joined again."""
    page = np.random.default_rng(1).integers(0, 256, 64, np.uint8)
    planes = page.copy()
    if width > 1:
        split_planes(page, width, planes)
    assert np.array_equal(canonical_bytes(planes, width), page)


def test_some_blocks_of_a_page() -> None:
    """Blocks 1 and 2 of a page of four blocks and two rows."""
    page = np.arange(2 * 4 * 3, dtype=np.uint8)
    assert some_blocks(page, 3, 4, 1, 2).tolist() == [[[3, 4, 5], [6, 7, 8]], [[15, 16, 17], [18, 19, 20]]]
