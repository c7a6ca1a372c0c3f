"""The recorded layouts are those that vLLM makes, and the kit's check of them finds what is wrong."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    compute_layout_strides,
    create_kv_cache_views,
    group_kernel_blocks,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from benchmarks.gpu.contract import NUM_BLOCKS, NUM_LAYERS, RECORDED, Recorded

HEADS, HEAD_SIZE = 4, 64


def recorded(name: str, spec: Any, layout: KVCacheLayout, kernel_tokens: int | None = None) -> Recorded:
    """How vLLM lays the layers of a group out in one allocation."""
    layer_stride, block_stride, *_ = compute_layout_strides(spec, NUM_BLOCKS, NUM_LAYERS, layout)
    size = NUM_LAYERS * NUM_BLOCKS * spec.page_size_bytes
    placed = KVCacheTensor(
        size=size,
        layers=[f"layer.{number}" for number in range(NUM_LAYERS)],
        layer_stride=layer_stride,
        block_stride=block_stride,
    )
    raw = torch.zeros(size, dtype=torch.int8)
    made = create_kv_cache_views(raw, spec, NUM_BLOCKS, layout, placed, kernel_tokens)
    views = [group_kernel_blocks(view, NUM_BLOCKS) for view in made]
    assert len({(view.shape, view.stride()) for view in views}) == 1
    return Recorded(
        name=name,
        element_bytes=views[0].element_size(),
        allocation_bytes=size,
        starts=tuple(view.storage_offset() * view.element_size() for view in views),
        shape=tuple(views[0].shape),
        stride=tuple(views[0].stride()),
    )


def attention(block_tokens: int, dtype: torch.dtype = torch.bfloat16) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_tokens, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=dtype)


def latent(block_tokens: int, dtype: torch.dtype) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=block_tokens, num_kv_heads=1, head_size=576, dtype=dtype)


def made_by_vllm() -> tuple[Recorded, ...]:
    bf16, fp8 = torch.bfloat16, torch.uint8
    layouts = KVCacheLayout
    state = MambaSpec(
        block_size=32, shapes=((3, 96), (4, 32, 48)), dtypes=(bf16, torch.float32),
        page_size_padded=attention(32).page_size_bytes, mamba_cache_mode="align",
    )  # fmt: skip
    return (
        *(recorded(f"attention {layout.name} 16", attention(16), layout) for layout in layouts),
        *(recorded(f"attention {layout.name} 16 fp8", attention(16, fp8), layout) for layout in layouts),
        recorded("attention LBNHC 64", attention(64), layouts.LBNHC),
        recorded("attention LBNHC 64 in kernel blocks of 16", attention(64), layouts.LBNHC, 16),
        recorded("attention LBHNC 64 in kernel blocks of 16", attention(64), layouts.LBHNC, 16),
        recorded("latent 576 LBNHC 64", latent(64, bf16), layouts.LBNHC),
        recorded("latent 576 BLNHC 64", latent(64, bf16), layouts.BLNHC),
        recorded("latent 576 LBNHC 64 fp8", latent(64, fp8), layouts.LBNHC),
        recorded("hybrid attention LBNHC 32", attention(32), layouts.LBNHC),
        recorded("hybrid state LBNHC 32", state, layouts.LBNHC),
    )


def test_layouts_are_those_of_vllm() -> None:
    """Each recorded tensor is placed, shaped and strided as vLLM's own view of such a cache."""
    assert made_by_vllm() == RECORDED
