"""Canonical pages: their lengths, and a proof that finds every way to be wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.canonical.attention import AttentionPages, latent_pages, page_tokens_for, within_windows
from connector.canonical.recurrent import StatePages, layer_bands
from connector.canonical.runs import BlockRun, LayerGeometry, prove_tiling
from connector.canonical.slices import MAX_HEAD_SHARES, HeadGrid, SliceGrid, head_grid, heads_on_ranks
from kvstore.errors import InvalidRequest
from kvstore.model.kinds import ChunkedLocal, FullAttention, SlidingWindow

Content = list[list[tuple[int, int]]]


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
        return SliceGrid(self.num_slices).slices_of(self.rank, self.ranks)

    def plan(self, *, layers: int = 0, first_slice: int = 0, cell: int = 0, stride: int = 0) -> AttentionPages:
        """The plan of this share, or one that is off by some layers, slices or bytes."""
        # a cell is one "token" here: what is inside does not matter
        layer = LayerGeometry(
            parts=1,
            part_stride=0,
            heads=len(self.slices) * self.heads_per_slice,
            head_stride=self.cell_bytes + self.gap_bytes + stride,
            tokens=1,
            token_stride=max(1, self.cell_bytes + cell),
            content_bytes=max(1, self.cell_bytes + cell),
        )
        return AttentionPages(
            grid=self.grid, first_slice=self.slices.start + first_slice, layers=[layer] * max(1, self.layers + layers)
        )

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
def test_plans_for_another_cache_are_refused(shape: Shape, slices: int, cell: int, stride: int, layers: int) -> None:
    """A plan that is off by some slices, bytes of a cell, of the stride or a layer does not pass for this cache."""
    wrong = shape.plan(first_slice=slices, cell=cell, stride=stride, layers=layers)
    same = shape.plan()
    if all(wrong.runs(index, 2) == same.runs(index, 2) for index in shape.slices):
        return
    with pytest.raises((InvalidRequest, IndexError)):
        prove_tiling(wrong, shape.slices, shape.content(), 2)


@dataclass(frozen=True)
class Order:
    """A memory order of `[parts, heads, tokens]`, with unused bytes behind each."""

    outer: str
    parts: int
    heads: int
    tokens: int
    content_bytes: int
    gap_bytes: int

    def geometry(self) -> LayerGeometry:
        extents = {"p": self.parts, "h": self.heads, "t": self.tokens}
        strides, size = {}, self.content_bytes
        for axis in reversed(self.outer):
            strides[axis] = size
            size = size * extents[axis] + self.gap_bytes
        return LayerGeometry(
            self.parts, strides["p"], self.heads, strides["h"], self.tokens, strides["t"], self.content_bytes
        )


@given(
    st.permutations("pht").map("".join),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 8),
    st.integers(0, 5),
)
def test_any_order_in_memory_tiles(outer: str, parts: int, heads: int, tokens: int, size: int, gap: int) -> None:
    """Kernel blocks, heads and tokens in any order, packed or padded: pages are the same bytes, all of them once."""
    order = Order(outer, parts, heads, tokens, size, gap).geometry()
    packed = Order("hpt", parts, heads, tokens, size, 0).geometry()
    grid = HeadGrid(heads, heads)
    plan = AttentionPages(grid=grid, first_slice=0, layers=[order, packed])
    prove_tiling(plan, range(heads), [order.content(), packed.content()], 2)
    plain = AttentionPages(grid=grid, first_slice=0, layers=[packed])
    assert plan.decoded_bytes(3) == 2 * plain.decoded_bytes(3)
    assert places(plan, order, 0) == places(plain, packed, 0)


def places(plan: AttentionPages, layer: LayerGeometry, index: int) -> dict[int, tuple[int, int, int]]:
    """For each byte of the last head's page of one block the (head, token, byte) that it comes from."""
    found = {}
    starts = {
        part * layer.part_stride + head * layer.head_stride + token * layer.token_stride: (
            head,
            part * layer.tokens + token,
        )
        for part in range(layer.parts)
        for head in range(layer.heads)
        for token in range(layer.tokens)
    }
    for run in plan.runs(layer.heads - 1, 1):
        if run.layer != index:
            continue
        for piece in range(run.repeat):
            for byte in range(run.num_bytes):
                here = run.block_offset + piece * run.block_stride + byte
                start = max(at for at in starts if at <= here)
                found[run.page_offset + piece * run.page_stride + byte] = (*starts[start], here - start)
    return found


@given(st.lists(st.integers(1, 64), min_size=1, max_size=4), st.integers(1, 1 << 23))
def test_bands_of_states(stages: list[int], layer_bytes: int) -> None:
    """Bands are equal within a stage, near 4 MiB where layers are smaller, and no more of them than it takes."""
    bands, most, finest = layer_bands(stages, layer_bytes), max(stages), gcd(*stages)
    assert finest % bands == 0
    assert bands == finest or most // bands * layer_bytes <= 4 << 20
    fewer = [fewer for fewer in range(1, bands) if finest % fewer == 0]
    assert all(most // count * layer_bytes > 4 << 20 for count in fewer)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 64), st.data())
def test_states_tile(bands: int, per_band: int, ranks: int, size: int, data: st.DataObject) -> None:
    """Each rank's states are in its own slices once, band by band."""
    rank = data.draw(st.integers(0, ranks - 1))
    layer = LayerGeometry(1, 0, 1, size, 1, size, size)
    held = SliceGrid(bands * ranks).slices_of(rank, ranks)
    plan = StatePages(num_bands=bands, first_slice=held.start, layers=[layer] * (bands * per_band))
    prove_tiling(plan, held, [layer.content()] * (bands * per_band), 1)
    with pytest.raises((InvalidRequest, IndexError)):
        prove_tiling(plan, held, [[(0, size + 1)]] * (bands * per_band), 1)


def test_states_and_latents_must_be_what_they_are() -> None:
    """A state that does not stand together, and a latent cache with heads, are refused."""
    whole = LayerGeometry(1, 0, 1, 8, 1, 8, 8)
    for broken in (replace(whole, heads=2), replace(whole, tokens=2), replace(whole, content_bytes=4)):
        with pytest.raises(InvalidRequest):
            StatePages(num_bands=1, first_slice=0, layers=[whole, broken])
    with pytest.raises(InvalidRequest, match="one vector"):
        latent_pages([whole, replace(whole, heads=2)])
    plan = latent_pages([replace(whole, tokens=4, token_stride=10)])
    assert plan.decoded_bytes(2) == 64


@given(st.integers(1, 4096), st.integers(1, 4096), st.sampled_from([16, 128, 640]))
def test_pages_fit_windows(wanted: int, window: int, boundary: int) -> None:
    """A page is at most the window and at least one boundary, in whole boundaries."""
    for kind in (SlidingWindow(window), ChunkedLocal(window)):
        tokens = within_windows(wanted, [FullAttention(), kind], boundary)
        assert tokens % boundary == 0
        assert tokens == boundary or tokens <= min(wanted, window)


class Altered:
    """A plan with its runs changed."""

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
    prove_tiling(Altered(shape.plan(), lambda runs: runs), shape.slices, shape.content(), 2)
    with pytest.raises(InvalidRequest, match=r"tile|cover") as refusal:
        prove_tiling(Altered(shape.plan(), CHANGES[change]), shape.slices, shape.content(), 2)
    assert "page of slice 1" in str(refusal.value) or "block of layer" in str(refusal.value)


def test_repeated_pieces_tile() -> None:
    """A run of several pieces per block (a layout with tokens outside heads) is proven piece by piece."""

    class Interleaved:
        def decoded_bytes(self, num_blocks: int) -> int:
            return 64 * num_blocks

        def runs(self, slice_index: int, num_blocks: int) -> tuple[BlockRun, ...]:
            # block: token, slice, 16 bytes; page: block, token, 16 bytes
            return (BlockRun(0, 16 * slice_index, 16, 0, 64, repeat=4, block_stride=32, page_stride=16),)

    prove_tiling(Interleaved(), (0, 1), [[(0, 128)]], 2)
    with pytest.raises(InvalidRequest):
        prove_tiling(Interleaved(), (0,), [[(0, 128)]], 2)
    with pytest.raises(InvalidRequest, match="cover the same byte"):
        prove_tiling(Interleaved(), (0, 0), [[(0, 128)]], 2)


def test_missing_slices_and_layers_are_found() -> None:
    """Holding fewer slices than the content has, one twice, or a layer too many, is no tiling."""
    shape = Shape(2, 1, 4, 2, 0, 16, 24, 0, 2)
    for slices in ((0,), (0, 0), (0, 1, 1), (0, 2)):
        with pytest.raises(InvalidRequest):
            prove_tiling(shape.plan(), slices, shape.content(), 2)
    with pytest.raises(InvalidRequest, match="layer 2"):
        prove_tiling(shape.plan(), shape.slices, [*shape.content(), [(0, 48)]], 2)


@pytest.mark.parametrize("hole", [(0, 20), (4, 24)])
def test_content_must_be_the_tensors(hole: tuple[int, int]) -> None:
    """What the tensors say they hold is what must be covered, not what the plan believes."""
    shape = Shape(1, 1, 1, 1, 0, 16, 24, 0, 2)
    with pytest.raises(InvalidRequest, match="block of layer 0"):
        prove_tiling(shape.plan(), (0,), [[hole]], 2)


# ---- slices: shares of the KV heads, and which rank of which stage holds and writes them


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


def test_the_runs_of_all_lengths_of_a_page_are_kept() -> None:
    """Prompts end anywhere, and a copier plans anew for runs that are made anew, on the engine's thread."""
    layer = LayerGeometry(parts=1, part_stride=0, heads=8, head_stride=96, tokens=16, token_stride=6, content_bytes=6)
    plan = AttentionPages(grid=HeadGrid(8, 8), first_slice=0, layers=[layer])
    made = {(slice_, blocks): plan.runs(slice_, blocks) for blocks in range(1, 65) for slice_ in range(8)}
    assert all(plan.runs(*of) is runs for of, runs in made.items())


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
