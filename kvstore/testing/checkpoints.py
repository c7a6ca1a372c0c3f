"""Small seeded checkpoints whose output depends on the whole prompt, one per kind of KV cache, and a larger one.

vLLM's own dummy weights repeat one token for ever, which hides a wrong page; these do not. Needs torch and
transformers.
"""

from __future__ import annotations

import fcntl
import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VOCABULARY = 1024
"""Token ids of every checkpoint are below this; 0 to 2 are special."""

_SEED = 1234
_MADE = "made.json"
_LAYOUT_VERSION = 2
"""Raise it when weights or configs change, so that a kept folder is written again."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A kind of checkpoint.

    Attributes:
        config: What is written to `config.json`, beside the fields that all kinds share.
        dtype: Of the weights.
        unit_norm: Norm weights lie around one; else the architecture adds the one itself and they lie around zero.
        embedding_scale: Standard deviation of the embedding.
    """

    config: Mapping[str, Any]
    dtype: str = "float32"
    unit_norm: bool = True
    embedding_scale: float = 1.0
    shared: Mapping[str, Any] = field(default_factory=lambda: _SHARED)

    def full_config(self) -> dict[str, Any]:
        return {**self.shared, "dtype": self.dtype, **self.config}


_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}

_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
_QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "layer_types": [_LINEAR, _LINEAR, _LINEAR, _FULL],
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "rope_theta": 1e4,
}

CHECKPOINTS: dict[str, Checkpoint] = {
    # full attention, one group
    "llama": Checkpoint(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "rope_theta": 10000.0,
        }
    ),
    # as llama, with norms of queries and keys
    "qwen3": Checkpoint(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "rope_theta": 1e6,
        }
    ),
    # as llama, with biases of queries, keys and values
    "qwen2": Checkpoint(
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "rope_theta": 1e6,
        }
    ),
    # as llama, by name
    "mistral": Checkpoint(
        {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "rope_theta": 1e6,
            "sliding_window": None,
        }
    ),
    # two groups of sliding windows and one of full attention
    "gemma3": Checkpoint(
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "sliding_window": 512,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 32,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": [_SLIDING, _SLIDING, _FULL] * 2,
            "tie_word_embeddings": True,
        },
        unit_norm=False,
        embedding_scale=1 / 16,
    ),
    # a sliding window and full attention, with other numbers of KV heads
    "mimo": Checkpoint(
        {
            "architectures": ["MiMoV2FlashForCausalLM"],
            "model_type": "mimo_v2_flash",
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "v_head_dim": 32,
            "swa_num_attention_heads": 8,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 32,
            "swa_v_head_dim": 32,
            "sliding_window": 256,
            "sliding_window_size": 256,
            "hybrid_layer_pattern": [1, 0] * 2,
            "layer_types": [_SLIDING, _FULL] * 2,
            "mlp_layer_types": ["dense"] * 4,
            "moe_layer_freq": [0] * 4,
            "n_routed_experts": 4,
            "attention_bias": False,
            "attention_value_scale": None,
            "layernorm_epsilon": 1e-5,
            "add_swa_attention_sink_bias": False,
            "rope_theta": 1e4,
            "swa_rope_theta": 1e4,
        }
    ),
    # a sliding window and full attention, with attention sinks
    "gptoss": Checkpoint(
        {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "sliding_window": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": [_SLIDING, _FULL] * 2,
        }
    ),
    # three recurrent groups (Gated DeltaNet) and full attention; vLLM runs it in bfloat16 only
    "qwen3next": Checkpoint(_QWEN3_NEXT, dtype="bfloat16", unit_norm=False),
    # Large next to its weights, like the hybrids of users: 32 KiB of KV per token in one layer, 3.1 MiB of states in
    # three. So a step of 2,048 tokens fills 64 MiB of host memory with pages before its prompt's state is made. No more
    # of recurrent layers, which vLLM computes slowly on a processor without AVX-512.
    "qwen3next-wide": Checkpoint(
        {
            **_QWEN3_NEXT,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "head_dim": 256,
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 16,
        },
        dtype="bfloat16",
        unit_norm=False,
    ),
    # multi-head latent attention
    "deepseek": Checkpoint(
        {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "scoring_func": "softmax",
            "rope_theta": 1e4,
            "head_dim": 32,
        }
    ),
    # large enough that computing a prompt takes seconds: 32 KiB of KV per token, 256 MiB for 8,192
    "llama-demo": Checkpoint(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rope_theta": 10000.0,
        },
        dtype="bfloat16",
    ),
    # a hybrid of that weight: a repeat restores pages of four layers and states of twelve
    "qwen3next-demo": Checkpoint(
        {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "hidden_size": 1024,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 2048,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "layer_types": [_LINEAR, _LINEAR, _LINEAR, _FULL] * 4,
            "partial_rotary_factor": 0.25,
            "full_attention_interval": 4,
            "rope_theta": 1e4,
        },
        dtype="bfloat16",
        unit_norm=False,
    ),
}


def write_checkpoint(kind: str, parent: Path) -> Path:
    """Write a checkpoint into its folder under `parent`, or keep the one that an earlier call wrote there.

    Equal on every machine with the same torch. Several processes may ask for one at once.

    Returns:
        The folder.

    Raises:
        KeyError: There is no such kind.
    """
    checkpoint = CHECKPOINTS[kind]
    return keep(parent / kind, checkpoint.full_config(), lambda folder: _write(checkpoint, folder))


def keep(target: Path, config: Mapping[str, Any], write: Callable[[Path], None]) -> Path:
    """Have a checkpoint written into the folder `target`, or keep one with this config; returns the folder. Several
    processes may ask for one at once.
    """
    made = {"version": _LAYOUT_VERSION, "config": config}
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (target / _MADE).exists() and json.loads((target / _MADE).read_text()) == made:
            return target
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        write(target)
        (target / _MADE).write_text(json.dumps(made))
    return target


def _write(checkpoint: Checkpoint, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    text = json.dumps(checkpoint.full_config(), indent=1)
    (folder / "config.json").write_text(text)
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):  # every weight is drawn below, so the architecture's own drawing would be lost work
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(draw(name, parameter.shape, checkpoint, generator))
    model.to(getattr(torch, checkpoint.dtype)).save_pretrained(folder)
    (folder / "config.json").write_text(text)  # as written above: the library adds fields of its own


def draw(name: str, shape: torch.Size, checkpoint: Checkpoint, generator: torch.Generator) -> torch.Tensor:
    """One weight, scaled so that every token of the prompt still shows in the output after all layers."""
    import torch

    normal = torch.randn(shape, generator=generator, dtype=torch.float32)
    last = name.rpartition(".")[2]
    if "norm" in name:
        around_one = checkpoint.unit_norm or "linear_attn.norm" in name
        return normal * 0.05 + (1.0 if around_one else 0.0)
    if "embed_tokens" in name:
        return normal * checkpoint.embedding_scale
    if "lm_head" in name:
        return normal * 3.0 / math.sqrt(shape[-1])
    if last == "A_log":  # slow decay: a recurrent state that remembers the first tokens
        return torch.log(torch.rand(shape, generator=generator) * 0.5 + 0.01)
    if last == "dt_bias":
        return normal * 0.5 - 3.0
    if "sinks" in name or "bias" in last:
        return normal * 0.1
    if "conv1d" in name:
        return normal * 0.5
    if len(shape) < 2:
        return normal * 0.1
    fan_in = shape[1] if len(shape) == 3 and "experts" in name else shape[-1]
    sharp = any(part in name for part in ("q_proj", "k_proj", "q_a", "q_b", "kv_a", "kv_b", "qkvz"))
    return normal * (2.0 if sharp else 1.3) / math.sqrt(fan_in)
