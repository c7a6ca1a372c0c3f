"""The namespace of an engine: a description of everything on which the bytes of its pages depend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any

from connector.canonical.attention import LATENT_GRID, page_tokens_for, within_windows
from connector.canonical.recurrent import layer_bands
from connector.canonical.slices import HeadGrid, SliceGrid, head_grid, heads_on_ranks
from connector.facts import CellFacts, EngineFacts, GroupFacts, ModelFacts, StateFacts
from kvstore.codec import TILES
from kvstore.errors import InvalidRequest
from kvstore.model.keys import LINK_TOKENS
from kvstore.model.kinds import Latent
from kvstore.model.layout import GroupLayout, Layout
from kvstore.model.namespace import NamespaceDescription, describe_layout

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One canonical group and how this engine's ranks share it.

    Attributes:
        slices: The model's slices on this engine's ranks.
        heads: The KV heads of the slices; `None` for a recurrent group.
    """

    facts: GroupFacts
    slices: SliceGrid
    heads: HeadGrid | None

    @property
    def is_state(self) -> bool:
        return self.facts.kind.is_state


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The canonical shape of a model's cache, the same on all ranks and on the scheduler side.

    Attributes:
        layout: Groups and slices, as the store knows them.
        groups: The same groups, as this engine holds them.
        boundary_tokens: Resume points are multiples of this: the scheduler's block.
    """

    layout: Layout
    groups: tuple[GroupShape, ...]
    boundary_tokens: int


def read_shape(facts: EngineFacts) -> CacheShape | str:
    """The shape, or why this model's cache has none."""
    boundary = facts.scheduler_block_tokens
    if boundary % LINK_TOKENS:
        return f"the block size must be a multiple of {LINK_TOKENS} tokens, seen {boundary}"
    if boundary % lcm(*(group.block_tokens for group in facts.groups)):
        return f"blocks do not end at the scheduler's boundaries of {boundary} tokens"
    try:
        groups = tuple(_share_out(group, facts) for group in facts.groups)
    except InvalidRequest as error:
        return str(error)
    layout = Layout(
        _page_tokens(groups, boundary),
        tuple(GroupLayout(group.facts.kind, group.slices.num_slices) for group in groups),
    )
    return CacheShape(layout, groups, boundary)


def _share_out(group: GroupFacts, engine: EngineFacts) -> GroupShape:
    content, ranks, stages = group.content, engine.tp_size, len(group.stages)
    if isinstance(content, StateFacts):
        bands = layer_bands([len(names) for names in group.stages], content.num_bytes)
        # a rank's share cannot be divided for another number of ranks, so there are as many shares as ranks
        shares, replicas = (1, ranks) if content.replicated else (ranks, 1)
        return GroupShape(group, SliceGrid(bands * shares, replicas, stages), None)
    if isinstance(group.kind, Latent):
        return GroupShape(group, SliceGrid(1, ranks, stages), LATENT_GRID)
    heads = head_grid(content.total_heads)
    return GroupShape(group, heads_on_ranks(heads, content.rank_heads, ranks, stages), heads)


def _page_tokens(groups: tuple[GroupShape, ...], boundary: int) -> int:
    if any(group.is_state for group in groups):
        return boundary  # such a model can be resumed at boundaries only
    wanted = []
    for group in groups:
        content = group.facts.content
        assert isinstance(content, CellFacts) and group.heads is not None
        token_bytes = content.token_bytes * group.heads.heads_per_slice * group.facts.most_layers
        wanted.append(page_tokens_for(token_bytes, content.element_bytes, boundary))
    return within_windows(min(wanted), (group.facts.kind for group in groups), boundary)


def describe_namespace(facts: EngineFacts, shape: CacheShape, weights_id: str) -> NamespaceDescription:
    """The description that the service turns into a namespace.

    Two engines share pages if their descriptions are equal. It leaves out what does not change a page's bytes: paths,
    vLLM's hash algorithm, the cache's size, and the tensor-parallel size except for recurrent states. It includes a
    pipeline's stages, since a record holds the layers of one stage.

    On a GPU it includes the highest codec chain that a reader must know. Releases that do not know tiles have other
    namespaces there: what they would find and could not decode is a miss for them. Engines of this release decode all
    chains, so the setting `compression` is left out.
    """
    return NamespaceDescription.from_fields(
        {
            "format": _FORMAT,
            **({} if facts.device == "cpu" else {"codec_chain_max": TILES}),
            **describe_model(facts, weights_id),
            "layout": describe_layout(shape.layout, tuple(_note(group, facts.tp_size) for group in shape.groups)),
        }
    )


def describe_model(facts: ModelFacts, weights_id: str) -> dict[str, Any]:
    """The fields of a description that say what a model computes, however its cache is laid out."""
    return {
        "architecture": facts.architecture,
        "model_config": facts.model_config,
        "weights_id": weights_id,
        "compute_dtype": facts.compute_dtype,
        "quantization": facts.quantization,
        "cache_dtype": _cache_dtype(facts),
        **({"model_rules": facts.model_rules} if facts.model_rules else {}),
        **({"untested_release": facts.untested_release} if facts.untested_release else {}),
    }


def _cache_dtype(facts: ModelFacts) -> str:
    """One spelling for each type."""
    if facts.cache_dtype == facts.compute_dtype:
        return "auto"
    return "fp8_e4m3" if facts.cache_dtype == "fp8" else facts.cache_dtype


def _note(group: GroupShape, ranks: int) -> Mapping[str, Any]:
    facts, content = group.facts, group.facts.content
    layers = [name for names in facts.stages for name in names]
    note: dict[str, Any] = {"layers": layers, "packing": dict(facts.packing)}
    if len(facts.stages) > 1:
        note["pipeline_stages"] = [len(names) for names in facts.stages]
    if facts.drafts:
        note["drafts"] = True
    if isinstance(content, StateFacts):
        shares = 1 if content.replicated else ranks
        shapes = [list(shape) for shape in content.shapes]
        return {**note, "shapes": shapes, "dtypes": list(content.dtypes), "tensor_parallel_size": shares}
    return {
        **note,
        "heads": content.total_heads,
        "head_size": content.head_size,
        "head_size_v": content.head_size_v,
        "dtype": content.dtype,
    }
