"""What the connector needs to know of an engine, as plain values without vLLM's types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["AttentionFacts", "EngineFacts"]


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """The one group of a model with full attention only.

    Attributes:
        layer_names: In the order that the group lists them.
        block_tokens: Tokens of a block.
        rank_heads: KV heads in this rank's blocks.
        total_heads: KV heads of the whole model.
        head_size: Channels of a key.
        head_size_v: Channels of a value.
        element_bytes: Bytes of one cache element.
        dtype: Its type in words.
    """

    layer_names: tuple[str, ...]
    block_tokens: int
    rank_heads: int
    total_heads: int
    head_size: int
    head_size_v: int
    element_bytes: int
    dtype: str

    @property
    def cell_bytes(self) -> int:
        """One head in one block, keys and values."""
        return self.block_tokens * (self.head_size + self.head_size_v) * self.element_bytes

    @property
    def head_token_bytes(self) -> int:
        """One token of one head in all layers."""
        return len(self.layer_names) * (self.head_size + self.head_size_v) * self.element_bytes


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One engine, as far as the connector cares.

    Attributes:
        vllm_version: e.g. `0.32.0`.
        model_path: Folder or name given to the engine.
        architecture: The model class.
        model_config: The model's configuration as plain JSON, floats as text.
        compute_dtype: Type of the activations.
        quantization: vLLM's name of the weight quantisation, or `none`.
        cache_dtype: vLLM's name of the cache type.
        device: `cpu` or `cuda`.
        packing: What the bytes inside a cell depend on, e.g. backend and instruction set.
        scheduler_block_tokens: Hits end on multiples of this.
        num_blocks: Blocks of the engine's cache.
        tp_rank: This rank (0 on the scheduler side).
        tp_size: Tensor-parallel size.
        attention: The group, or `None` when the model is not supported.
        unsupported: Why the connector stays out of the way, or `None`.
        load_failure_policy: vLLM's `kv_load_failure_policy`.
    """

    vllm_version: str
    model_path: str
    architecture: str
    model_config: Mapping[str, Any]
    compute_dtype: str
    quantization: str
    cache_dtype: str
    device: str
    packing: Mapping[str, str | int]
    scheduler_block_tokens: int
    num_blocks: int
    tp_rank: int
    tp_size: int
    attention: AttentionFacts | None
    unsupported: str | None
    load_failure_policy: str
