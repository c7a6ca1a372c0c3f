"""vLLM's own cache views on a GPU, in every layout and block size: a page is the same bytes, whoever made it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
    group_kernel_blocks,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from benchmarks.gpu.kit import InlineStreams
from connector.device.base import PageGather, PageScatter
from connector.device.gpu import StreamDevice
from connector.device.host_memory import HostPages
from connector.identity import CacheShape, describe_namespace, read_shape
from connector.worker.groups import RankGroup, check_round_trip, prove_group
from tests.unit.connector.device_contract import joined
from tests.unit.connector.support import make_facts

LAYERS, HEADS, CHANNELS, SPAN = 3, 4, 12, 128
NAMES = [f"layer.{number}" for number in range(LAYERS)]
CONTENT = torch.randint(
    0, 1 << 15, (LAYERS, SPAN, HEADS, CHANNELS), dtype=torch.int16, generator=torch.Generator().manual_seed(1)
)
"""[layer, token, head, channel]"""

FORMS = [  # layout, block, kernel's block
    *((layout, 16, None) for layout in KVCacheLayout),
    (KVCacheLayout.LBNHC, 64, None),
    (KVCacheLayout.LBNHC, 64, 16),
    (KVCacheLayout.LBHNC, 64, 16),
    (KVCacheLayout.LBHNC, 32, None),
]


@dataclass
class Engine:
    """A cache as vLLM makes it, and the connector's group on it."""

    views: list[torch.Tensor]
    shape: CacheShape
    group: RankGroup
    device: StreamDevice
    table: list[int]
    block_tokens: int
    namespace: bytes

    def tokens(self) -> list[torch.Tensor]:
        """For each layer its cache as [blocks, parts, tokens, heads, channels], whatever its layout."""
        whole = [view if view.dim() == 5 else view.unsqueeze(1) for view in self.views]
        return [view.transpose(2, 3).view(torch.int16) for view in whole]

    def fill(self) -> None:
        for layer, content in zip(self.tokens(), CONTENT, strict=True):
            for index, block in enumerate(self.table):
                part = content[index * self.block_tokens : (index + 1) * self.block_tokens]
                layer[block].copy_(part.view(layer[block].shape))

    def content(self) -> torch.Tensor:
        layers = [torch.cat([layer[block].flatten(0, 1) for block in self.table]) for layer in self.tokens()]
        return torch.stack(layers)

    def gather(self) -> list[torch.Tensor]:
        num_blocks = len(self.table)
        pages = [
            PageGather(
                self.group.plan.runs(index, num_blocks),
                [self.table],
                self.device.host_memory(self.group.plan.decoded_bytes(num_blocks)),
            )
            for index in self.group.held
        ]
        for ticket in self.group.copier.gather_all(pages):
            assert ticket is not None
            ticket.wait()
        return [page.target for page in pages]

    def scatter(self, pages: Sequence[torch.Tensor]) -> None:
        for index, page in zip(self.group.held, pages, strict=True):
            runs = self.group.plan.runs(index, len(self.table))
            self.group.copier.scatter_all([PageScatter(runs, [self.table], page)], self.device.fence())


def engine(layout: KVCacheLayout, block_tokens: int, kernel_tokens: int | None) -> Engine:
    num_blocks = 2 + 2 * SPAN // block_tokens
    spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=HEADS, head_size=CHANNELS // 2, dtype=torch.bfloat16)
    layer_stride, block_stride, *_ = compute_layout_strides(spec, num_blocks, LAYERS, layout)
    size = LAYERS * num_blocks * spec.page_size_bytes
    raw = torch.zeros(size, dtype=torch.int8)
    placed = KVCacheTensor(size=size, layers=NAMES, layer_stride=layer_stride, block_stride=block_stride)
    made = create_kv_cache_views(raw, spec, num_blocks, layout, placed, kernel_tokens)
    views = [group_kernel_blocks(view, num_blocks) for view in made]
    facts = _facts(block_tokens, num_blocks)
    shape = read_shape(facts)
    assert isinstance(shape, CacheShape), shape
    device = StreamDevice(InlineStreams(), ring_bytes=1 << 20, page_bytes_max=1 << 16, unit_bytes_min=1)
    group = prove_group(shape.groups[0], shape.layout.groups[0], views, facts, device, compression="planes")
    table = list(range(num_blocks - 1, 1, -2))  # no two neighbours
    namespace = describe_namespace(facts, shape, "weights").id
    return Engine(views, shape, group, device, table, block_tokens, namespace)


def _facts(block_tokens: int, num_blocks: int) -> Any:
    facts = make_facts(
        device="cuda",
        total_heads=HEADS,
        rank_heads=HEADS,
        head_size=CHANNELS // 2,
        head_size_v=CHANNELS // 2,
        element_bytes=2,
        dtype="bfloat16",
        num_blocks=num_blocks,
        scheduler_block_tokens=block_tokens,
    )
    group = replace(
        facts.groups[0],
        stages=(tuple(NAMES),),
        feeds=(0,) * LAYERS,
        block_tokens=block_tokens,
        packing={"cell": "token"},
    )
    return replace(facts, groups=(group,))


@pytest.mark.parametrize(("layout", "block_tokens", "kernel_tokens"), FORMS)
def test_a_page_is_its_tokens(layout: KVCacheLayout, block_tokens: int, kernel_tokens: int | None) -> None:
    """Layer, head, token, channel: nothing in a page's bytes tells of the layout and the block size of its engine."""
    one = engine(layout, block_tokens, kernel_tokens)
    one.fill()
    pages = one.gather()
    assert len(pages) == one.shape.layout.groups[0].num_slices == HEADS
    for head, page in enumerate(pages):
        assert torch.equal(joined(page, 2).view(torch.int16), CONTENT[:, :, head].reshape(-1))


@pytest.mark.parametrize(("layout", "block_tokens", "kernel_tokens"), FORMS)
def test_any_engine_resumes_from_it(layout: KVCacheLayout, block_tokens: int, kernel_tokens: int | None) -> None:
    """What an engine of another layout and block size saved is in the right places, and belongs to its namespace."""
    source = engine(KVCacheLayout.BLNHC, 16, None)
    source.fill()
    target = engine(layout, block_tokens, kernel_tokens)
    host = HostPages(torch.empty(1 << 20, dtype=torch.uint8))
    check_round_trip(target.group, target.views, target.device, host, page_tokens=target.shape.layout.page_tokens)
    target.scatter(source.gather())
    assert torch.equal(target.content(), CONTENT)
    assert target.shape.layout == source.shape.layout
    assert target.namespace == source.namespace
