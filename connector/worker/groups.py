"""One canonical group on one rank: its layout proven against the tensors, its copies proven on the device.

`prove_tiling` and the tests prove the byte order of pages on any machine. Only the machine at hand can prove that its
streams, kernels and layout do what those integers mean: `check_round_trip` copies blocks at start, while the cache is
empty. A group that fails either proof is not cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from connector.canonical.attention import AttentionPages, latent_pages
from connector.canonical.recurrent import StatePages
from connector.canonical.runs import LayerGeometry, PagePlan, prove_tiling
from connector.device.base import BlockCopier, Device, PageGather, PageScatter
from connector.device.host_memory import HostPages
from connector.facts import CellFacts, EngineFacts, GroupFacts, StateFacts
from connector.identity import GroupShape
from kvstore.codec import PLANES2, PLANES4, RAW, TILES, chain_for_element_bytes
from kvstore.errors import InvalidRequest
from kvstore.model.kinds import Latent
from kvstore.model.layout import GroupLayout

_CHECKED_BLOCKS = 2
_GAPS_BYTES = 1 << 20
"""Between pages, which start at multiples of 512 bytes."""
_AUTO = {"cpu": "planes", "cuda": "none"}
"""What the setting `compression: auto` means, by the engine's device. A GPU copies what is not compressed five times as
fast as processors decode planes for it."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A group that this rank can save and load.

    Attributes:
        layout: The group as the store sees it.
        plan: Its pages on this rank.
        copier: Copies between its blocks and pages.
        held: The slices that this rank holds, and loads.
        shape: How the ranks share it.
        chain: Codec chain to encode with.
    """

    layout: GroupLayout
    plan: PagePlan
    copier: BlockCopier
    held: range
    shape: GroupShape
    rank: int
    chain: int

    def written(self, prefix: bytes) -> range:
        """The slices that this rank writes of the record of `prefix`: replicas take turns."""
        return self.held if self.shape.slices.writes(self.rank, prefix) else range(0)


def prove_group(
    shape: GroupShape,
    layout: GroupLayout,
    layers: Sequence[torch.Tensor],
    engine: EngineFacts,
    device: Device,
    *,
    compression: str = "auto",
) -> RankGroup:
    """Make the plan for these tensors and prove it.

    Args:
        layout: The group as the store sees it.
        layers: The cache tensors, dimension 0 = the manager's blocks, in the order of the group's layers.
        compression: The operator's setting. Only if pages are stored as planes does the device split elements; else
            the processor joins those of a page that another engine has split.

    Raises:
        InvalidRequest: The tensors do not match the facts, or the pages do not hold every content byte exactly once.
    """
    held = shape.slices.slices_of(engine.tp_rank, engine.tp_size, shape.facts.stage)
    geometries = []
    for name, layer in zip(shape.facts.layer_names, layers, strict=True):
        geometry = _geometry(name, layer)
        _compare(name, geometry, layer, shape.facts, engine)
        geometries.append(geometry)
    plan: PagePlan
    if shape.heads is None:
        num_bands = len(held)
        plan = StatePages(num_bands=num_bands, first_slice=held.start, layers=geometries)
    elif isinstance(shape.facts.kind, Latent):
        plan = latent_pages(geometries, held_slice=held.start)
    else:
        plan = AttentionPages(grid=shape.heads, first_slice=held.start, layers=geometries)
    prove_tiling(plan, held, [geometry.content() for geometry in geometries], 1 if shape.is_state else 2)
    chain = written_chain(compression, engine.device, shape.facts.content)
    if chain == TILES:
        device.prepare_tiles()
    split_bytes = shape.facts.content.element_bytes if chain in (PLANES2, PLANES4) else 1
    return RankGroup(
        layout=layout,
        plan=plan,
        copier=device.copier(layers, shape.facts.feeds, split_bytes),
        held=held,
        shape=shape,
        rank=engine.tp_rank,
        chain=chain,
    )


def written_chain(compression: str, device: str, content: CellFacts | StateFacts) -> int:
    """The codec chain with which an engine stores a group; it reads every chain.

    Tiles are for bfloat16. What has another type is stored as it is on a GPU, else as `planes` says.

    Args:
        compression: The operator's setting.
        device: Of the engine, as in `EngineFacts`.
    """
    wanted = _AUTO[device] if compression == "auto" else compression
    if wanted == "none":
        return RAW
    if wanted == "tiles" and content.dtype == "bfloat16":
        return TILES
    if wanted == "tiles" and device == "cuda":
        return RAW  # which a GPU reads as fast
    return chain_for_element_bytes(content.element_bytes)


def _geometry(name: str, layer: torch.Tensor) -> LayerGeometry:
    """Where a layer's bytes are; `[blocks, heads, tokens, channels]`, or with kernel blocks in dimension 1."""
    if layer.dim() not in (4, 5) or layer.stride(-1) != 1:
        raise InvalidRequest("unknown cache layout", layer=name, shape=tuple(layer.shape), stride=layer.stride())
    size = layer.element_size()
    parts, part_stride = (layer.shape[1], layer.stride(1) * size) if layer.dim() == 5 else (1, 0)
    heads, tokens, channels = layer.shape[-3:]
    return LayerGeometry(
        parts=parts,
        part_stride=part_stride,
        heads=heads,
        head_stride=layer.stride(-3) * size,
        tokens=tokens,
        token_stride=layer.stride(-2) * size,
        content_bytes=channels * size,
    )


def _compare(name: str, geometry: LayerGeometry, layer: torch.Tensor, group: GroupFacts, engine: EngineFacts) -> None:
    """Compare the tensor with vLLM's spec; raises `InvalidRequest` if they differ."""
    content = group.content
    seen = (geometry.heads, geometry.parts * geometry.tokens, geometry.content_bytes)
    if isinstance(content, StateFacts):
        expected = (1, 1, content.num_bytes)
    else:
        expected = (content.rank_heads, group.block_tokens, content.token_bytes)
    if seen != expected:
        raise InvalidRequest("the cache does not hold what its spec says", layer=name, expected=expected, seen=seen)
    if layer.shape[0] != engine.num_blocks:
        raise InvalidRequest("unknown number of blocks", layer=name, expected=engine.num_blocks, seen=layer.shape[0])
    blocked = isinstance(content, CellFacts) and not isinstance(group.kind, Latent) and engine.device == "cpu"
    if blocked and geometry.token_stride != geometry.content_bytes:
        # the CPU backend rearranges bytes within a head of a block
        raise InvalidRequest("a head's bytes do not stand together", layer=name, stride=layer.stride())


def check_bytes(groups: Sequence[GroupShape], page_tokens: int) -> int:
    """Host memory that the check of each of these groups needs."""
    return max(group.facts.rank_block_bytes * _checked_blocks(group, page_tokens) for group in groups) + _GAPS_BYTES


def _checked_blocks(group: GroupShape, page_tokens: int) -> int:
    """Two, where a page has as many: nothing on the device has room for more than a page."""
    return 1 if group.is_state else min(_CHECKED_BLOCKS, page_tokens // group.facts.block_tokens)


@torch.inference_mode()
def check_round_trip(
    group: RankGroup, layers: Sequence[torch.Tensor], device: Device, pages: HostPages, *, page_tokens: int
) -> None:
    """Copy some blocks to others through host pages, compare, and restore the old content.

    Args:
        layers: Its cache tensors, dimension 0 = blocks, whose content is not used yet.
        pages: Host memory of that device, at least `check_bytes`.

    Raises:
        InvalidRequest: The copies are not equal; the group must not be cached.
    """
    num_blocks = _checked_blocks(group.shape, page_tokens)
    feeds = group.shape.facts.feeds
    low, high = _disjoint_tables(1 + max(feeds), num_blocks, layers[0].shape[0])
    caches = [(layer.view(torch.uint8), feed) for layer, feed in zip(layers, feeds, strict=True)]
    kept = [cache[low[feed] + high[feed]] for cache, feed in caches]  # indexing with a list copies
    equal = True
    # both ways, with different content: leftovers of the first copy cannot make the second one look right
    for seed, (sources, targets) in enumerate([(low, high), (high, low)]):
        generator = torch.Generator().manual_seed(seed)
        for cache, feed in caches:
            noise = torch.randint(0, 256, cache[sources[feed]].shape, dtype=torch.uint8, generator=generator)
            cache[sources[feed]] = noise.to(cache.device)
        _copy(group, device, pages, sources, targets)
        equal &= all(torch.equal(cache[sources[feed]], cache[targets[feed]]) for cache, feed in caches)
    for (cache, feed), content in zip(caches, kept, strict=True):
        cache[low[feed] + high[feed]] = content
    if not equal:
        raise InvalidRequest("a copy through host memory changes bytes", layer=group.shape.facts.layer_names[0])


def _disjoint_tables(num_tables: int, num_blocks: int, cache_blocks: int) -> tuple[list[list[int]], list[list[int]]]:
    """Tables of the cache's first and last blocks, all disjoint, since layers of different tables may share memory."""
    if 2 * num_tables * num_blocks >= cache_blocks:
        raise InvalidRequest("the cache is too small", blocks=cache_blocks, needed=2 * num_tables * num_blocks + 1)
    starts = range(0, num_tables * num_blocks, num_blocks)
    low = [list(range(1 + start, 1 + start + num_blocks)) for start in starts]
    high = [list(range(cache_blocks - 1 - start, cache_blocks - 1 - start - num_blocks, -1)) for start in starts]
    return low, high


def _copy(
    group: RankGroup, device: Device, host: HostPages, sources: list[list[int]], targets: list[list[int]]
) -> None:
    num_blocks = len(sources[0])
    page_bytes = group.plan.decoded_bytes(num_blocks)
    pages = []
    for slice_index in group.held:
        memory = host.take(page_bytes)
        assert memory is not None, "the host has no room for a page"
        pages.append(PageGather(group.plan.runs(slice_index, num_blocks), sources, memory))
    for page, ticket in zip(pages, group.copier.gather_all(pages), strict=True):
        if ticket is None:
            raise InvalidRequest("the device has no room for a page", page_bytes=page.target.numel())
        ticket.wait()
    after = device.fence()
    for page in pages:
        group.copier.scatter_all([PageScatter(page.runs, targets, page.target)], after)
        host.put(page.target)
