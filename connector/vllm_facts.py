"""What is read from vLLM's objects, as plain values: a vLLM upgrade touches this file and `connector.py` only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import FullAttentionSpec, group_kernel_blocks

from connector.facts import AttentionFacts, EngineFacts

__all__ = ["SUPPORTED_VLLM", "cache_layers", "read_facts"]

SUPPORTED_VLLM = ("0.32",)
_VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "_attn_implementation")


def read_facts(vllm_config: Any, kv_cache_config: Any) -> EngineFacts:
    """Read one engine's facts; never raises for a model that is merely not supported."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    scheduler_block, _ = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    unsupported = _why_unsupported(vllm_config, kv_cache_config)
    attention = None if unsupported else _read_attention(vllm_config, kv_cache_config)
    return EngineFacts(
        vllm_version=vllm.__version__,
        model_path=str(model.model),
        architecture=str((model.architectures or ["unknown"])[0]),
        model_config=_plain({k: v for k, v in model.hf_config.to_dict().items() if k not in _VOLATILE}),
        compute_dtype=str(model.dtype).removeprefix("torch."),
        quantization=str(model.quantization or "none"),
        cache_dtype=str(vllm_config.cache_config.cache_dtype),
        device=str(current_platform.device_type),
        packing=_packing(vllm_config, attention) if attention else {},
        scheduler_block_tokens=scheduler_block,
        num_blocks=kv_cache_config.num_blocks,
        tp_rank=parallel.rank % parallel.tensor_parallel_size,
        tp_size=parallel.tensor_parallel_size,
        attention=attention,
        unsupported=unsupported,
        load_failure_policy=str(vllm_config.kv_transfer_config.kv_load_failure_policy),
    )


def cache_layers(kv_caches: Mapping[str, torch.Tensor], names: tuple[str, ...], num_blocks: int) -> list[torch.Tensor]:
    """The group's cache tensors, dimension 0 = the manager's blocks, in the order of `names`."""
    return [group_kernel_blocks(kv_caches[name], num_blocks) for name in names]


def _why_unsupported(vllm_config: Any, kv_cache_config: Any) -> str | None:
    parallel = vllm_config.parallel_config
    if not vllm.__version__.startswith(SUPPORTED_VLLM):
        return f"vLLM {vllm.__version__} is not supported, only {', '.join(SUPPORTED_VLLM)}"
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"the model has {len(groups)} cache groups; only one full-attention group is supported yet"
    spec = groups[0].kv_cache_spec
    if type(spec) is not FullAttentionSpec:
        return f"caches of kind {type(spec).__name__} are not supported yet"
    if spec.sliding_window is not None or spec.attention_chunk_size is not None or spec.non_causal:
        return "windowed, chunked or non-causal attention is not supported yet"
    if spec.kv_quant_mode.value != 0 or spec.state_content_bytes is not None or spec.tokens_per_state != 1:
        return "quantised or packed cache cells are not supported yet"
    if groups[0].is_eagle_group or vllm_config.speculative_config is not None:
        return "speculative decoding is not supported yet"
    if parallel.pipeline_parallel_size * parallel.decode_context_parallel_size != 1:
        return "pipeline and decode-context parallelism are not supported yet"
    if parallel.prefill_context_parallel_size != 1:
        return "prefill-context parallelism is not supported yet"
    if kv_cache_config.kv_tp_replicas != 1 or spec.num_heads != spec.num_kv_heads:
        return "replicated KV heads are not supported yet"
    if current_platform.device_type != "cpu":
        return f"device {current_platform.device_type} is not supported yet"
    return None


def _read_attention(vllm_config: Any, kv_cache_config: Any) -> AttentionFacts:
    group = kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    return AttentionFacts(
        layer_names=tuple(group.layer_names),
        block_tokens=spec.block_size,
        rank_heads=spec.num_kv_heads,
        total_heads=spec.num_kv_heads * vllm_config.parallel_config.tensor_parallel_size,
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        element_bytes=spec.dtype.itemsize,
        dtype=str(spec.dtype).removeprefix("torch."),
    )


def _packing(vllm_config: Any, attention: AttentionFacts) -> dict[str, str | int]:
    """The CPU backend blocks keys by instruction set, in a way that may change with vLLM's release."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(
        getattr(torch, attention.dtype),
        attention.block_tokens,
        attention.head_size,
        vllm_config.cache_config.cache_dtype,
    )
    return {
        "backend": "CPU_ATTN",
        "isa": isa,
        "machine": current_platform.get_cpu_architecture().name,
        "block_tokens": attention.block_tokens,
        "vllm": vllm.__version__,
    }


def _plain(value: Any) -> Any:
    """JSON without floats: a description is compared byte by byte, and text of a float is exact (`repr`)."""
    if isinstance(value, float):
        return repr(value)
    if value is None or isinstance(value, str | int | bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)
