"""vLLM's own specs of small groups, and the facts of an engine with such groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from connector.facts import EngineFacts
from connector.vllm.engine_facts import read_facts

HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
MAMBA: dict[str, Any] = {
    "block_size": 128,
    "shapes": ((3, 8), (4, 16, 16)),
    "dtypes": (torch.bfloat16, torch.float32),
    "mamba_cache_mode": "align",
}


def full(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**{"block_size": 128, **HEADS, **changes})


def window(tokens: int = 512, **changes: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(**{"block_size": 128, "sliding_window": tokens, **HEADS, **changes})


def mla(**changes: Any) -> MLAAttentionSpec:
    values = {"block_size": 16, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
    return MLAAttentionSpec(**{**values, **changes})


def group(spec: KVCacheSpec, *numbers: int, **changes: Any) -> KVCacheGroupSpec:
    return KVCacheGroupSpec([f"model.layers.{number}.attn" for number in numbers], spec, **changes)


def facts(*groups: KVCacheGroupSpec, ranks: int = 1, total_heads: int = 2, **changes: Any) -> EngineFacts:
    """What is read of an engine with these groups."""
    parallel = {
        "rank": 0,
        "tensor_parallel_size": ranks,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "local_world_size": ranks,
        "data_parallel_size": 1,
        "data_parallel_size_local": 1,
        "worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker",
    }
    cache = {
        "cache_dtype": "auto",
        "calculate_kv_scales": False,
        "block_size": 128,
        "prefix_match_unit": None,
        "enable_prefix_caching": True,
        "prefix_cache_retention_interval": 0,
    }
    parallel.update({name: changes.pop(name) for name in list(changes) if name in parallel})
    cache.update({name: changes.pop(name) for name in list(changes) if name in cache})
    is_diffusion, code = changes.pop("is_diffusion", False), changes.pop("code", "")
    returns_experts, text_config = changes.pop("returns_experts", False), changes.pop("text_config", {})
    transfer, may_change = changes.pop("weight_transfer", None), changes.pop("weights_may_change", False)
    cascades = changes.pop("cascades", False)
    drafts, resumes = changes.pop("drafts", None), changes.pop("pooling_resumes", None)
    assert not changes
    model = SimpleNamespace(
        model="/models/a",
        architectures=["Some"],
        hf_config=SimpleNamespace(
            to_dict=lambda: {"hidden_size": 64, "eps": 1e-5, **({"auto_map": {"AutoModel": code}} if code else {})}
        ),
        hf_text_config=SimpleNamespace(num_attention_heads=8, to_dict=lambda: text_config),
        dtype=torch.bfloat16,
        quantization=None,
        quantization_config=None,
        model_class_overrides={},
        multimodal_config=None,
        revision=None,
        max_model_len=4096,
        is_diffusion=is_diffusion,
        disable_cascade_attn=not cascades,
        pooler_config=None if resumes is None else object(),
        is_prefix_caching_supported=resumes is not False,
        trust_remote_code=bool(code),
        get_total_num_kv_heads=lambda: total_heads,
    )
    config = SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(**cache),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute"),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        device_config=SimpleNamespace(),
        speculative_config=drafts,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
        lora_config=None,
        weight_transfer_config=transfer,
        aux_output_config=SimpleNamespace(enabled=returns_experts),
    )
    blocks = [block.kv_cache_spec.block_size for block in groups]
    kv = KVCacheConfig(num_blocks=100, kv_cache_tensors=[], kv_cache_groups=list(groups))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("connector.vllm.engine_facts.resolve_kv_cache_block_sizes", lambda *_: (max(blocks), min(blocks)))
        return read_facts(config, kv, weights_may_change=may_change)
