"""One canonical group on one rank: its layout proven against the tensors, and the copier for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from connector.canonical.attention import AttentionPages
from connector.canonical.latent import latent_pages
from connector.canonical.recurrent import StatePages
from connector.canonical.runs import LayerGeometry, PagePlan
from connector.canonical.tiling import prove_tiling
from connector.device.base import BlockCopier, Device
from connector.facts import CellFacts, EngineFacts, GroupFacts, StateFacts
from connector.identity import GroupShape
from kvstore.codec import chain_for_element_bytes
from kvstore.errors import InvalidRequest
from kvstore.model.kinds import Latent
from kvstore.model.layout import GroupLayout

__all__ = ["RankGroup", "prove_group"]


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A group that this rank can save and load.

    Attributes:
        layout: The group as the store sees it.
        plan: Its pages on this rank.
        copier: Copies between its blocks and pages.
        held: The slices that this rank holds, and loads.
        shape: How the ranks share it.
        rank: This rank.
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
    shape: GroupShape, layout: GroupLayout, layers: Sequence[torch.Tensor], engine: EngineFacts, device: Device
) -> RankGroup:
    """Make the plan for these tensors and prove it.

    Args:
        shape: The group.
        layout: The group as the store sees it.
        layers: The cache tensors, dimension 0 = the manager's blocks, in the order of the group's layers.
        engine: This rank.
        device: The device of the tensors.

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
    element_bytes = shape.facts.content.element_bytes
    return RankGroup(
        layout=layout,
        plan=plan,
        copier=device.copier(layers, shape.facts.feeds, element_bytes),
        held=held,
        shape=shape,
        rank=engine.tp_rank,
        chain=chain_for_element_bytes(element_bytes),
    )


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
