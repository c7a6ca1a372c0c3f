"""Slices: shares of the KV heads, and which rank of which stage holds and writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.canonical.slices import MAX_HEAD_SHARES, SliceGrid, head_grid, heads_on_ranks
from kvstore.errors import InvalidRequest


@given(st.integers(1, 200))
def test_grid_is_the_finest_that_fits(heads: int) -> None:
    """Shares are equal, at most eight, and no larger number of shares would do."""
    grid = head_grid(heads)
    assert grid.num_slices * grid.heads_per_slice == heads
    assert 1 <= grid.num_slices <= MAX_HEAD_SHARES
    assert all(heads % more for more in range(grid.num_slices + 1, MAX_HEAD_SHARES + 1))


@given(st.integers(1, 200), st.integers(1, 16))
def test_ranks_share_out_the_slices(heads: int, ranks: int) -> None:
    """Ranks hold all slices once, in order; a number of ranks that would cut a slice is refused."""
    grid = head_grid(heads)
    slices = SliceGrid(grid.num_slices)
    if grid.num_slices % ranks:
        with pytest.raises(InvalidRequest, match="must divide") as refusal:
            slices.slices_of(0, ranks)
        assert (refusal.value.details["tp"], refusal.value.details["num_slices"]) == (ranks, grid.num_slices)
        return
    held = [slices.slices_of(rank, ranks) for rank in range(ranks)]
    assert [index for part in held for index in part] == list(range(grid.num_slices))
    assert len({len(part) for part in held}) == 1


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.integers(1, 4))
def test_stages_have_slices_of_their_own(heads: int, ranks: int, stages: int) -> None:
    """The stages of a pipeline hold all slices, one stage's after the other's, and a stage's ranks hold the stage's."""
    slices = heads_on_ranks(head_grid(heads), max(1, heads // ranks), ranks, stages)
    assert slices.num_slices == stages * heads
    held = [[slices.slices_of(rank, ranks, stage) for rank in range(ranks)] for stage in range(stages)]
    assert [index for ranges in held for part in ranges[:: slices.replicas] for index in part] == [
        *range(heads * stages)
    ]


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8, 16, 32]), st.binary(min_size=32, max_size=32))
def test_replicas_take_turns(heads: int, ranks: int, prefix: bytes) -> None:
    """With more ranks than heads neighbours hold the same slice, and exactly one of them writes each record of it."""
    slices = heads_on_ranks(head_grid(heads), max(1, heads // ranks), ranks)
    written = [index for rank in range(ranks) if slices.writes(rank, prefix) for index in slices.slices_of(rank, ranks)]
    assert written == list(range(heads))


@pytest.mark.parametrize(("heads", "rank_heads", "ranks"), [(6, 2, 4), (5, 3, 2), (16, 1, 16), (4, 1, 3), (2, 0, 2)])
def test_uneven_shares_are_refused(heads: int, rank_heads: int, ranks: int) -> None:
    """Ranks that hold parts of a share, or overlap in another way than as replicas, are not cached."""
    with pytest.raises(InvalidRequest):
        heads_on_ranks(head_grid(heads), rank_heads, ranks)


def test_known_grids() -> None:
    """Grids are in the names of stored records: these models keep theirs."""
    assert {heads: head_grid(heads).num_slices for heads in (1, 2, 4, 6, 8, 10, 12, 16, 40, 11)} == {
        1: 1,
        2: 2,
        4: 4,
        6: 6,
        8: 8,
        10: 5,
        12: 6,
        16: 8,
        40: 8,
        11: 1,
    }
