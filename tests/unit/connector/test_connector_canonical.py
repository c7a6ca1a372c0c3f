"""Canonical pages: slices of the heads, lengths of pages, and a proof that finds every way to be wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.canonical.attention import AttentionPages, page_tokens_for
from connector.canonical.runs import BlockRun
from connector.canonical.slices import MAX_HEAD_SHARES, HeadGrid, head_grid
from connector.canonical.tiling import prove_tiling
from kvstore.errors import InvalidRequest

Content = list[list[tuple[int, int]]]


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
    if grid.num_slices % ranks:
        with pytest.raises(InvalidRequest, match="must divide") as refusal:
            grid.slices_of(0, ranks)
        assert (refusal.value.details["tp"], refusal.value.details["num_slices"]) == (ranks, grid.num_slices)
        return
    held = [grid.slices_of(rank, ranks) for rank in range(ranks)]
    assert [index for slices in held for index in slices] == list(range(grid.num_slices))
    assert len({len(slices) for slices in held}) == 1


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


@given(st.integers(1, 1 << 24), st.sampled_from([1, 2, 4, 8]), st.integers(1, 4096))
def test_pages_are_whole_blocks_and_bounded(token_bytes: int, element_bytes: int, block_tokens: int) -> None:
    """A page is at least one block, a whole number of them, and past one block neither too long nor too large."""
    tokens = page_tokens_for(token_bytes, element_bytes, block_tokens)
    assert tokens > 0
    assert tokens % block_tokens == 0
    if tokens > block_tokens:
        assert tokens <= 1024
        assert tokens * token_bytes * {2: 0.70, 4: 0.86}.get(element_bytes, 1.0) <= 4 << 20


@given(st.integers(1, 1 << 20), st.sampled_from([1, 2, 4]), st.sampled_from([16, 32, 64, 128]))
def test_usual_blocks_do_not_change_the_page(token_bytes: int, element_bytes: int, block_tokens: int) -> None:
    """Engines with blocks that are powers of two up to the page meet on one page length."""
    alone = page_tokens_for(token_bytes, element_bytes, 1)
    assert page_tokens_for(token_bytes, element_bytes, block_tokens) == max(alone, block_tokens)


def test_known_pages() -> None:
    """Page lengths are part of the namespace: frozen for a few sizes."""
    sizes = [(1024, 4, 128), (4096, 2, 16), (16384, 2, 16), (65536, 2, 128), (1 << 22, 2, 16), (1024, 2, 48)]
    assert [page_tokens_for(*size) for size in sizes] == [1024, 1024, 256, 128, 16, 1008]


@dataclass(frozen=True)
class Shape:
    """A random rank's share of a random cache."""

    layers: int
    heads_per_slice: int
    num_slices: int
    ranks: int
    rank: int
    block_tokens: int
    cell_bytes: int
    gap_bytes: int
    num_blocks: int

    @property
    def grid(self) -> HeadGrid:
        return HeadGrid(self.heads_per_slice * self.num_slices, self.num_slices)

    @property
    def slices(self) -> range:
        return self.grid.slices_of(self.rank, self.ranks)

    def plan(self, **changes: int) -> AttentionPages:
        values = {
            "num_layers": self.layers,
            "first_head": self.slices.start * self.heads_per_slice,
            "block_tokens": self.block_tokens,
            "cell_bytes": self.cell_bytes,
            "head_stride": self.cell_bytes + self.gap_bytes,
            **changes,
        }
        return AttentionPages(grid=self.grid, **values)

    def content(self) -> Content:
        stride = self.cell_bytes + self.gap_bytes
        heads = len(self.slices) * self.heads_per_slice
        return [[(head * stride, head * stride + self.cell_bytes) for head in range(heads)]] * self.layers


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    ranks = draw(st.integers(1, 4))
    return Shape(
        layers=draw(st.integers(1, 4)),
        heads_per_slice=draw(st.integers(1, 3)),
        num_slices=ranks * draw(st.integers(1, 2)),
        ranks=ranks,
        rank=draw(st.integers(0, ranks - 1)),
        block_tokens=16,
        cell_bytes=draw(st.integers(1, 40)),
        gap_bytes=draw(st.integers(0, 9)),
        num_blocks=draw(st.integers(1, 5)),
    )


@given(shapes())
def test_the_plan_tiles(shape: Shape) -> None:
    """For any shape, share of heads and padding between heads the plan's runs cover page and blocks exactly once."""
    prove_tiling(shape.plan(), shape.slices, shape.content(), shape.num_blocks)


@given(shapes())
def test_page_order(shape: Shape) -> None:
    """A page holds layer, head of the slice, block, cell: the order that every reader relies on."""
    plan, heads = shape.plan(), shape.heads_per_slice
    for slice_index in shape.slices:
        seen = {}
        for run in plan.runs(slice_index, shape.num_blocks):
            head = run.block_offset // (shape.cell_bytes + shape.gap_bytes) + shape.slices.start * heads
            for block in range(shape.num_blocks):
                seen[run.page_offset + block * run.page_block_stride] = (run.layer, head, block)
        expected = [
            (layer, slice_index * heads + head, block)
            for layer in range(shape.layers)
            for head in range(heads)
            for block in range(shape.num_blocks)
        ]
        assert [seen[offset] for offset in sorted(seen)] == expected
        assert sorted(seen) == [index * shape.cell_bytes for index in range(len(expected))]


@given(shapes(), st.integers(-3, 3), st.integers(-3, 3), st.integers(-3, 3), st.integers(-1, 1))
def test_plans_for_another_cache_are_refused(shape: Shape, heads: int, cell: int, stride: int, layers: int) -> None:
    """A plan that is off by some heads, bytes of a cell, of the stride or a layer does not pass for this cache."""
    if not (heads or cell or stride or layers):
        return
    single_head = len(shape.slices) * shape.heads_per_slice == 1
    if single_head and not (heads or cell or layers):
        return  # with one head there is no stride to be wrong about
    wrong = shape.plan(
        first_head=shape.slices.start * shape.heads_per_slice + heads,
        cell_bytes=max(1, shape.cell_bytes + cell),
        head_stride=shape.cell_bytes + shape.gap_bytes + stride,
        num_layers=max(1, shape.layers + layers),
    )
    same = shape.plan()
    if all(wrong.runs(index, 2) == same.runs(index, 2) for index in shape.slices):
        return
    with pytest.raises((InvalidRequest, IndexError)):
        prove_tiling(wrong, shape.slices, shape.content())


class Altered:
    """A plan with its runs changed."""

    block_tokens = 16

    def __init__(self, plan: AttentionPages, change: Callable[[list[BlockRun]], list[BlockRun]]) -> None:
        self._plan, self._change = plan, change

    def decoded_bytes(self, num_blocks: int) -> int:
        return self._plan.decoded_bytes(num_blocks)

    def runs(self, slice_index: int, num_blocks: int) -> tuple[BlockRun, ...]:
        return tuple(self._change(list(self._plan.runs(slice_index, num_blocks))))


def change_first(**changes: int) -> Callable[[list[BlockRun]], list[BlockRun]]:
    """Add to fields of the first run."""
    return lambda runs: [
        replace(runs[0], **{name: getattr(runs[0], name) + by for name, by in changes.items()}),
        *runs[1:],
    ]


CHANGES: dict[str, Callable[[list[BlockRun]], list[BlockRun]]] = {
    "a run dropped": lambda runs: runs[1:],
    "the last run dropped": lambda runs: runs[:-1],
    "a run twice": lambda runs: [*runs, runs[0]],
    "shifted in the block": change_first(block_offset=1),
    "before the block": change_first(block_offset=-1),
    "shifted in the page": change_first(page_offset=1),
    "before the page": change_first(page_offset=-1),
    "a byte too long": change_first(num_bytes=1),
    "a byte too short": change_first(num_bytes=-1),
    "blocks too near in the page": change_first(page_block_stride=-1),
    "blocks too far in the page": change_first(page_block_stride=1),
    "all blocks to one place": change_first(page_block_stride=-24),
    "a piece twice": change_first(repeat=1),
    "no piece": change_first(repeat=-1),
    "another layer": change_first(layer=1),
    "two runs to one place": lambda runs: [replace(runs[0], page_offset=runs[1].page_offset), *runs[1:]],
    "two runs from one place": lambda runs: [replace(runs[0], block_offset=runs[1].block_offset), *runs[1:]],
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("gap_bytes", [0, 8])
def test_every_mistake_is_found(change: str, gap_bytes: int) -> None:
    """Each way to miss, repeat or leave a byte, on either side, is refused with the place where it is."""
    shape = Shape(2, 2, 2, 2, 1, 16, 24, gap_bytes, 2)
    prove_tiling(Altered(shape.plan(), lambda runs: runs), shape.slices, shape.content())
    with pytest.raises(InvalidRequest, match=r"tile|cover") as refusal:
        prove_tiling(Altered(shape.plan(), CHANGES[change]), shape.slices, shape.content())
    assert "page of slice 1" in str(refusal.value) or "block of layer" in str(refusal.value)


def test_repeated_pieces_tile() -> None:
    """A run of several pieces per block (a layout with tokens outside heads) is proven piece by piece."""

    class Interleaved:
        block_tokens = 4

        def decoded_bytes(self, num_blocks: int) -> int:
            return 64 * num_blocks

        def runs(self, slice_index: int, num_blocks: int) -> tuple[BlockRun, ...]:
            # block: token, slice, 16 bytes; page: block, token, 16 bytes
            return (BlockRun(0, 16 * slice_index, 16, 0, 64, repeat=4, block_stride=32, page_stride=16),)

    prove_tiling(Interleaved(), (0, 1), [[(0, 128)]])
    with pytest.raises(InvalidRequest):
        prove_tiling(Interleaved(), (0,), [[(0, 128)]])
    with pytest.raises(InvalidRequest, match="cover the same byte"):
        prove_tiling(Interleaved(), (0, 0), [[(0, 128)]])


def test_missing_slices_and_layers_are_found() -> None:
    """Holding fewer slices than the content has, one twice, or a layer too many, is no tiling."""
    shape = Shape(2, 1, 4, 2, 0, 16, 24, 0, 2)
    for slices in ((0,), (0, 0), (0, 1, 1), (0, 2)):
        with pytest.raises(InvalidRequest):
            prove_tiling(shape.plan(), slices, shape.content())
    with pytest.raises(InvalidRequest, match="layer 2"):
        prove_tiling(shape.plan(), shape.slices, [*shape.content(), [(0, 48)]])


@pytest.mark.parametrize("hole", [(0, 20), (4, 24)])
def test_content_must_be_the_tensors(hole: tuple[int, int]) -> None:
    """What the tensors say they hold is what must be covered, not what the plan believes."""
    shape = Shape(1, 1, 1, 1, 0, 16, 24, 0, 2)
    with pytest.raises(InvalidRequest, match="block of layer 0"):
        prove_tiling(shape.plan(), (0,), [[hole]])
