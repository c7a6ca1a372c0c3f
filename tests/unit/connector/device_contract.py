"""What every `BlockCopier` must do, whatever its device: subclass, say how to make one, and the tests come along.

    class TestCpuCopier(BlockCopierContract):
        device = "cpu"

        def make(self, layers, feeds=None):
            return CpuCopier(layers, feeds or [0] * len(layers))

Each test compares with copies made byte by byte from the documented meaning of `BlockRun`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connector.canonical.attention import AttentionPages
from connector.canonical.runs import BlockRun, LayerGeometry
from connector.canonical.slices import HeadGrid
from connector.device.base import BlockCopier, Fence, PageGather, PageScatter
from connector.device.streams import DONE
from kvstore.errors import InternalError

SHARED = settings(suppress_health_check=[HealthCheck.differing_executors])
"""One test of several classes is what this suite is for."""

LAYOUTS = ("layer_outer", "block_outer", "head_outer", "padded")
"""A head's tokens stand together, as the CPU backend needs it, or"""
GPU_LAYOUTS = (*LAYOUTS, "token_outer", "block_token_outer", "block_head_outer")
"""lie anywhere."""


@dataclass(frozen=True)
class Cache:
    """A cache of one group in one allocation, filled with seeded bytes.

    Attributes:
        layout: `layer_outer` [layer, block, head, token, channel], `block_outer` [block, layer, ...], `head_outer`
            [layer, head, block, ...], `padded`: block_outer with unused bytes after each head and each block,
            `token_outer` [layer, block, token, head, channel], `block_token_outer` [block, layer, token, ...],
            `block_head_outer` [block, head, layer, token, ...].
    """

    layout: str
    num_layers: int
    num_blocks: int
    num_heads: int
    block_tokens: int
    channels: int
    element_bytes: int
    seed: int
    device: str

    def tensors(self) -> list[torch.Tensor]:
        """The layers: views [blocks, heads, tokens, channels] of one allocation."""
        dtype = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32}[self.element_bytes]
        pad = 5 if self.layout == "padded" else 0
        cell = self.block_tokens * self.channels
        head = cell + pad
        block = self.num_heads * head + pad
        layers, blocks, heads = self.num_layers, self.num_blocks, self.num_heads
        channels, row = self.channels, heads * self.channels
        strides = {  # (layer, block, head, token), in elements
            "layer_outer": (blocks * block, block, head, channels),
            "block_outer": (block, layers * block, head, channels),
            "head_outer": (blocks * block, cell, blocks * cell, channels),
            "padded": (block, layers * block, head, channels),
            "token_outer": (blocks * block, block, channels, row),
            "block_token_outer": (block, layers * block, channels, row),
            "block_head_outer": (cell, layers * block, layers * cell, channels),
        }[self.layout]
        start = 3  # the storage does not begin with the cache
        total = start + layers * blocks * block
        generator = torch.Generator().manual_seed(self.seed)
        raw = torch.randint(0, 256, (total * self.element_bytes,), dtype=torch.uint8, generator=generator)
        memory = raw.to(self.device).view(dtype)
        shape = (blocks, heads, self.block_tokens, self.channels)
        inner = (*strides[1:], 1)
        return [torch.as_strided(memory, shape, inner, start + layer * strides[0]) for layer in range(layers)]

    def plan(self, tensors: Sequence[torch.Tensor], num_slices: int) -> AttentionPages:
        layer = LayerGeometry(
            parts=1,
            part_stride=0,
            heads=self.num_heads,
            head_stride=tensors[0].stride(1) * self.element_bytes,
            tokens=self.block_tokens,
            token_stride=tensors[0].stride(2) * self.element_bytes,
            content_bytes=self.channels * self.element_bytes,
        )
        return AttentionPages(
            grid=HeadGrid(self.num_heads, num_slices), first_slice=0, layers=[layer] * self.num_layers
        )


@st.composite
def caches(draw: st.DrawFn, device: str) -> tuple[Cache, int]:
    """A cache and a number of slices that divides its heads."""
    slices = draw(st.integers(1, 3))
    cache = Cache(
        layout=draw(st.sampled_from(GPU_LAYOUTS)),
        num_layers=draw(st.integers(1, 3)),
        num_blocks=draw(st.integers(3, 9)),
        num_heads=slices * draw(st.integers(1, 2)),
        block_tokens=draw(st.integers(1, 4)),
        channels=draw(st.integers(1, 5)),
        element_bytes=draw(st.sampled_from([1, 2, 4])),
        seed=draw(st.integers(0, 1000)),
        device=device,
    )
    return cache, slices


def block_ids(draw: st.DrawFn, num_blocks: int) -> list[int]:
    """Some blocks but the null block, in any order, none twice."""
    return draw(
        st.permutations(range(1, num_blocks)).flatmap(lambda ids: st.integers(1, len(ids)).map(lambda n: ids[:n]))
    )


def storage(layer: torch.Tensor) -> torch.Tensor:
    """All bytes of the allocation behind a layer, on the host, as a copy."""
    whole = torch.empty(0, dtype=torch.uint8, device=layer.device)
    return whole.set_(layer.untyped_storage()).cpu().clone()


def byte_moves(
    layers: Sequence[torch.Tensor], runs: Sequence[BlockRun], ids: Sequence[int], first_block: int = 0
) -> list[tuple[int, int]]:
    """(byte in the storage, byte in the page) for every byte that the runs mean."""
    moves = []
    for run in runs:
        layer = layers[run.layer]
        for position, block_id in enumerate(ids):
            block = (layer.storage_offset() + block_id * layer.stride(0)) * layer.element_size()
            for piece in range(run.repeat):
                here = block + run.block_offset + piece * run.block_stride
                there = run.page_offset + (first_block + position) * run.page_block_stride + piece * run.page_stride
                moves += [(here + byte, there + byte) for byte in range(run.num_bytes)]
    return moves


def split(page: torch.Tensor, width: int) -> torch.Tensor:
    """The byte planes of elements of `width` bytes, the highest first."""
    return torch.cat([page[plane::width] for plane in reversed(range(width))])


def joined(page: torch.Tensor, width: int) -> torch.Tensor:
    return page.view(width, -1).flip(0).t().reshape(-1)


def host_page(num_bytes: int, fill: int) -> torch.Tensor:
    # a view into a larger buffer, as staging buffers are
    buffer = torch.full((num_bytes + 7,), fill, dtype=torch.uint8)
    return buffer[7:]


class BlockCopierContract(ABC):
    """Tests of one implementation of `connector.device.base.BlockCopier`."""

    device: ClassVar[str]

    @abstractmethod
    def make(self, layers: Sequence[torch.Tensor], feeds: Sequence[int] | None = None) -> BlockCopier:
        """The copier for these layers, each in the feed given for it, or all in one."""

    def fence(self) -> Fence:
        """The device's fence; one with streams overrides this."""
        return DONE

    def gather(self, copier: BlockCopier, runs: Sequence[BlockRun], ids: Sequence[Sequence[int]], page: Any) -> None:
        """Gather one page and make it canonical."""
        [ticket] = copier.gather_all([PageGather(runs, ids, page)])
        assert ticket is not None
        ticket.wait()
        page.copy_(joined(page, copier.plane_width))

    def scatter(
        self, copier: BlockCopier, runs: Sequence[BlockRun], ids: Sequence[Sequence[int]], page: Any, first_block: int
    ) -> None:
        """Scatter a canonical page."""
        source = split(page, copier.plane_width)
        kept = source.clone()
        copier.scatter_all([PageScatter(runs, ids, source, first_block)], self.fence())
        assert torch.equal(source, kept)

    def check_gather(self, layers: Sequence[torch.Tensor], runs: Sequence[BlockRun], ids: list[int], size: int) -> None:
        before = storage(layers[0])
        page = host_page(size, 0xEE)
        expected = page.clone()
        for here, there in byte_moves(layers, runs, ids):
            expected[there] = before[here]
        self.gather(self.make(layers), runs, [ids], page)
        assert torch.equal(page, expected)
        assert torch.equal(storage(layers[0]), before)

    def check_scatter(
        self, layers: Sequence[torch.Tensor], runs: Sequence[BlockRun], ids: list[int], size: int, first_block: int = 0
    ) -> None:
        page = torch.randint(0, 256, (size + 7,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))[7:]
        expected = storage(layers[0])
        for here, there in byte_moves(layers, runs, ids, first_block):
            expected[here] = page[there]
        self.scatter(self.make(layers), runs, [ids], page, first_block)
        assert torch.equal(storage(layers[0]), expected)

    @SHARED
    @given(st.data())
    def test_gather_is_the_reference(self, data: st.DataObject) -> None:
        """Any layout, any blocks in any order: a page holds what the runs mean, and the cache is untouched."""
        cache, num_slices = data.draw(caches(self.device))
        layers = cache.tensors()
        plan = cache.plan(layers, num_slices)
        ids = block_ids(data.draw, cache.num_blocks)
        slice_index = data.draw(st.integers(0, num_slices - 1))
        self.check_gather(layers, plan.runs(slice_index, len(ids)), ids, plan.decoded_bytes(len(ids)))

    @SHARED
    @given(st.data())
    def test_scatter_writes_the_named_blocks_only(self, data: st.DataObject) -> None:
        """Part of a page goes to the named blocks of the slice's heads; every other byte of the allocation stays."""
        cache, num_slices = data.draw(caches(self.device))
        layers = cache.tensors()
        plan = cache.plan(layers, num_slices)
        ids = block_ids(data.draw, cache.num_blocks)
        first_block, behind = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
        span_blocks = first_block + len(ids) + behind
        slice_index = data.draw(st.integers(0, num_slices - 1))
        runs = plan.runs(slice_index, span_blocks)
        self.check_scatter(layers, runs, ids, plan.decoded_bytes(span_blocks), first_block)

    @SHARED
    @given(st.data())
    def test_round_trip_into_other_blocks(self, data: st.DataObject) -> None:
        """All slices gathered from some blocks and scattered to others make equal blocks, bit by bit."""
        cache, num_slices = data.draw(caches(self.device))
        layers = cache.tensors()
        plan, copier = cache.plan(layers, num_slices), self.make(layers)
        order = data.draw(st.permutations(range(1, cache.num_blocks)))
        half = len(order) // 2
        source, target = list(order[:half]), list(order[half : 2 * half])
        wanted = [layer[source].clone() for layer in layers]
        for slice_index in range(num_slices):
            page = host_page(plan.decoded_bytes(half), 0)
            runs = plan.runs(slice_index, half)
            self.gather(copier, runs, [source], page)
            self.scatter(copier, runs, [target], page, 0)
        for layer, blocks in zip(layers, wanted, strict=True):
            assert torch.equal(layer[target].view(torch.uint8), blocks.view(torch.uint8))

    @pytest.mark.parametrize("ids", [[1, 2, 3], [3, 2, 1], [5, 1, 3], [2, 3, 6, 7, 5], [4]])
    @pytest.mark.parametrize("layout", GPU_LAYOUTS)
    def test_orders_of_blocks(self, layout: str, ids: list[int]) -> None:
        """Neighbouring, descending, scattered and mixed ids, both ways."""
        cache = Cache(layout, 2, 8, 2, 4, 3, 2, 7, self.device)
        layers = cache.tensors()
        plan = cache.plan(layers, 2)
        self.check_gather(layers, plan.runs(1, len(ids)), ids, plan.decoded_bytes(len(ids)))
        self.check_scatter(layers, plan.runs(1, len(ids) + 2), ids, plan.decoded_bytes(len(ids) + 2), 1)

    def test_every_layer_has_its_feed(self) -> None:
        """Layers in several of the engine's groups are placed by a table each."""
        cache = Cache("layer_outer", 3, 8, 1, 2, 3, 2, 5, self.device)
        layers = cache.tensors()
        plan, copier = cache.plan(layers, 1), self.make(layers, (0, 1, 0))
        page = host_page(plan.decoded_bytes(2), 0)
        self.gather(copier, plan.runs(0, 2), [[4, 2], [1, 7]], page)
        content = [layer.view(torch.uint8).cpu() for layer in layers]
        parts = [content[0][[4, 2]], content[1][[1, 7]], content[2][[4, 2]]]
        assert torch.equal(page, torch.cat([part.reshape(-1) for part in parts]))
        self.scatter(copier, plan.runs(0, 2), [[3], [5]], page, 1)
        after = [layer.view(torch.uint8).cpu() for layer in layers]
        assert all(
            torch.equal(after[layer][to], content[layer][of])
            for layer, to, of in ((0, 3, 2), (1, 5, 7), (2, 3, 2), (0, 5, 5), (1, 3, 3))
        )

    @pytest.mark.parametrize("apart", [False, True])
    def test_repeated_pieces(self, apart: bool) -> None:
        """Several pieces per block (tokens outside heads), close together or, with those of another run, in turn."""
        cache = Cache("layer_outer", 2, 8, 1, 4, 12, 1, 11, self.device)
        layers = cache.tensors()
        runs = [
            BlockRun(layer, 6 * half, 6, 144 * layer + 6 * half, 48, 4, 12, 12)
            if apart
            else BlockRun(layer, 6 * half, 6, 72 * (2 * layer + half), 24, 4, 12, 6)
            for layer in range(2)
            for half in range(2)
        ]
        self.check_gather(layers, runs, [6, 2, 3], 288)
        self.check_scatter(layers, runs, [6, 2], 288, 1)
        self.check_scatter(layers, runs, [3, 4, 5], 288)

    def test_pieces_of_several_shapes(self) -> None:
        """Layers that lie differently, some token by token and some whole, fill one page together."""
        cache = Cache("layer_outer", 2, 8, 1, 4, 12, 1, 12, self.device)
        layers = cache.tensors()
        runs = [
            BlockRun(0, 0, 6, 0, 24, 4, 12, 6),
            BlockRun(0, 6, 6, 48, 24, 4, 12, 6),
            BlockRun(1, 0, 48, 96, 48),
        ]
        self.check_gather(layers, runs, [6, 2], 192)
        self.check_scatter(layers, runs, [3], 192, 1)
        self.check_scatter(layers, runs, [5, 4], 192)

    def test_many_pages_at_once(self) -> None:
        """Pages of several slices and lengths in one call: each gets its own blocks, in the order they were given."""
        cache = Cache("block_outer", 2, 9, 2, 4, 4, 2, 13, self.device)
        layers = cache.tensors()
        plan, copier, before = cache.plan(layers, 2), self.make(layers), storage(layers[0])
        wanted = [(0, [3, 4]), (1, [3, 4]), (0, [8]), (1, [7, 1]), (0, [5, 6, 2]), (0, [6, 2, 5])]
        pages = [
            PageGather(plan.runs(index, len(ids)), [ids], host_page(plan.decoded_bytes(len(ids)), 0))
            for index, ids in wanted
        ]
        for page, ticket in zip(pages, copier.gather_all(pages), strict=True):
            assert ticket is not None
            ticket.wait()
            seen = joined(page.target, copier.plane_width)
            for here, there in byte_moves(layers, page.runs, page.block_ids[0]):
                assert seen[there] == before[here]

    def test_blocks_that_do_not_exist(self) -> None:
        """An id outside the cache, or the null block as target, is an error and never silence: nothing is written."""
        cache = Cache("layer_outer", 1, 4, 1, 4, 3, 2, 1, self.device)
        layers = cache.tensors()
        plan, copier, before = cache.plan(layers, 1), self.make(layers), storage(layers[0])
        page = host_page(plan.decoded_bytes(1), 1)
        for block_id in (4, 40, -1):
            with pytest.raises((InternalError, IndexError)):
                self.gather(copier, plan.runs(0, 2), [[1, block_id]], host_page(plan.decoded_bytes(2), 1))
        for block_id in (4, 40, -1, 0):
            with pytest.raises(InternalError):
                self.scatter(copier, plan.runs(0, 1), [[block_id]], page, 0)
        assert torch.equal(storage(layers[0]), before)
