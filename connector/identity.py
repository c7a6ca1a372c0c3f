"""Which namespace an engine belongs to: everything that its page bytes depend on, in words."""

from __future__ import annotations

from dataclasses import dataclass

from connector.canonical.attention import page_tokens_for
from connector.canonical.slices import HeadGrid, head_grid
from connector.facts import AttentionFacts, EngineFacts
from connector.prefix_hash import LINK_TOKENS
from kvstore.model.kinds import FullAttention
from kvstore.model.layout import GroupLayout, Layout
from kvstore.model.namespace import NamespaceDescription, describe_layout

__all__ = ["CacheShape", "describe_namespace", "read_shape"]

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The canonical shape of a model's cache, the same on all ranks and on the scheduler side.

    Attributes:
        layout: Groups and slices.
        grid: The KV heads behind the slices.
        block_tokens: Tokens of a block; every boundary is a multiple of it.
    """

    layout: Layout
    grid: HeadGrid
    block_tokens: int


def read_shape(attention: AttentionFacts) -> CacheShape | str:
    """The shape, or in words why this model's cache has none."""
    grid = head_grid(attention.total_heads)
    token_bytes = attention.head_token_bytes * grid.heads_per_slice
    page_tokens = page_tokens_for(token_bytes, attention.element_bytes, attention.block_tokens)
    if attention.block_tokens % LINK_TOKENS:
        return f"the block size must be a multiple of {LINK_TOKENS} tokens, seen {attention.block_tokens}"
    if attention.total_heads % attention.rank_heads or grid.num_slices % (
        attention.total_heads // attention.rank_heads
    ):
        return f"the tensor-parallel size must divide the {grid.num_slices} shares of the KV heads"
    layout = Layout(page_tokens, (GroupLayout(FullAttention(), grid.num_slices),))
    return CacheShape(layout, grid, attention.block_tokens)


def describe_namespace(facts: EngineFacts, shape: CacheShape, weights_id: str) -> NamespaceDescription:
    """The description that the service turns into a namespace.

    What is in it must be equal for pages to be interchangeable; what is not (tensor-parallel size, paths, hash
    algorithm of vLLM, cache size) must not matter.
    """
    attention = facts.attention
    assert attention is not None
    note = {
        "layers": list(attention.layer_names),
        "heads": attention.total_heads,
        "head_size": attention.head_size,
        "head_size_v": attention.head_size_v,
        "dtype": attention.dtype,
        "packing": dict(facts.packing),
    }
    return NamespaceDescription.from_fields(
        {
            "format": _FORMAT,
            "architecture": facts.architecture,
            "model_config": facts.model_config,
            "weights_id": weights_id,
            "compute_dtype": facts.compute_dtype,
            "quantization": facts.quantization,
            "cache_dtype": facts.cache_dtype,
            "layout": describe_layout(shape.layout, (note,)),
        }
    )
