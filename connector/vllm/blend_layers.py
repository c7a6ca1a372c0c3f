"""vLLM's own modules of a model, called layer by layer outside of its forward: Llama, Qwen2, Qwen3 and Mistral.

Projections, norms, rotation and the rest of a layer are the engine's modules. So is the attention of tokens in a row,
over blocks that are made for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.distributed import get_tp_group, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata

from connector.blend.consent import refuse_rope
from connector.blend.recompute import Exchange, LayerStates
from connector.blend.rotation import Angles


class VllmLayers:
    """A `LayeredModel` over the modules of an engine's model.

    vLLM's layers pass on two tensors, what a layer adds and the sum before it: their norms add the two without rounding
    the sum first. Here both stand side by side in one tensor of hidden states, [num_tokens, 2 * hidden_size].

    The embedding and the row-parallel modules sum over the ranks of a tensor-parallel engine as the last thing that
    they do. So if one raises, this rank has not entered its sum.

    Args:
        model: As the engine's model runner has it.

    Attributes:
        num_exchanges: The exchanges with other ranks that this rank has come through.

    Raises:
        AttributeError: It is built differently from the models that are known.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._decoder = model.model
        self._layers = list(self._decoder.layers)
        for layer in self._layers:  # what is used later is missing now
            _ = layer.input_layernorm, layer.post_attention_layernorm, layer.mlp.down_proj
            attention = layer.self_attn
            _ = attention.qkv_proj, attention.o_proj, attention.rotary_emb, attention.attn.impl.do_kv_cache_update
            _ = attention.q_size, attention.kv_size, attention.head_dim, attention.scaling
        self.num_exchanges = 0
        self._ranks = get_tp_group()

    def refusal(self) -> str | None:
        """Why this model cannot be blended, or `None`."""
        if type(self._decoder.embed_tokens) is not VocabParallelEmbedding:
            return f"embedding {type(self._decoder.embed_tokens).__name__}"
        for layer in self._layers:
            attention = layer.self_attn
            for module in (attention.o_proj, layer.mlp.down_proj):
                if type(module) is not RowParallelLinear:
                    return f"linear layers {type(module).__name__}"
            if type(attention.attn.impl) is not CPUAttentionBackendImpl:
                return f"attention backend {type(attention.attn.impl).__name__}"
            if getattr(attention.attn, "sliding_window", None) is not None:
                return "sliding window: only full attention is blended"
            if getattr(layer, "ada_rms_norm_t_cond", None) is not None:
                return "layers that are conditioned on time"
            rope = type(attention.rotary_emb).__name__
            reason = refuse_rope(rope, scales_by_position=bool(getattr(attention, "do_llama_4_scaling", False)))
            if reason is not None:
                return reason
        return None

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self._decoder.embed_tokens(tokens)
        self.num_exchanges += 1
        return torch.cat((embedded, torch.zeros_like(embedded)), -1)

    def project(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        module = self._layers[layer]
        attention = module.self_attn
        added, before = _halves(hidden)
        normed = module.input_layernorm(added) if layer == 0 else module.input_layernorm(added, before)[0]
        projected, _ = attention.qkv_proj(normed)
        sizes = [attention.q_size, attention.kv_size, attention.kv_size]
        queries, keys, values = projected.split(sizes, dim=-1)
        if hasattr(attention, "q_norm"):
            queries = attention.q_norm(_heads(queries, attention.head_dim)).view(queries.shape)
            keys = attention.k_norm(_heads(keys, attention.head_dim)).view(keys.shape)
        queries, keys = attention.rotary_emb(positions, queries, keys)
        return tuple(_heads(one, attention.head_dim) for one in (queries, keys, values))

    def finish(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        module = self._layers[layer]
        found, _ = module.self_attn.o_proj(attended.reshape(len(hidden), -1))
        self.num_exchanges += 1
        added, before = _halves(hidden)
        normed, residual = module.post_attention_layernorm(found, added + before)
        computed = module.mlp(normed)
        self.num_exchanges += 1
        return torch.cat((computed, residual), -1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found = self._model.compute_logits(self._decoder.norm(*_halves(hidden))[0])
        self.num_exchanges += 1
        return found

    @property
    def num_ranks(self) -> int:
        return int(self._ranks.world_size)

    def sum_over_ranks(self, part: torch.Tensor) -> torch.Tensor:
        if self.num_ranks > 1:
            total, first, group = part.clone(), self._ranks.ranks[0], self._ranks.cpu_group
            # summed on one rank and sent to the others: sums that each made itself might be rounded otherwise
            torch.distributed.reduce(total, first, group=group)
            torch.distributed.broadcast(total, first, group=group)
            part = total
        self.num_exchanges += 1
        return part

    def follow(self, exchanges: Sequence[Exchange]) -> None:
        if self.num_ranks == 1:
            return
        weight = self._decoder.embed_tokens.weight
        for exchange in exchanges:
            if exchange.kind == "differences":
                self.sum_over_ranks(torch.zeros(exchange.num_tokens))
                continue
            zeros = torch.zeros((exchange.num_tokens, weight.shape[1]), dtype=weight.dtype)
            if exchange.kind == "hidden":
                tensor_model_parallel_all_reduce(zeros)
            else:
                self._model.compute_logits(zeros)

    def angles(self, positions: torch.Tensor) -> Angles:
        rotary = self._layers[0].self_attn.rotary_emb
        cos, sin = rotary.cos_sin_cache[positions].to(torch.float32).chunk(2, dim=-1)
        return Angles(cos, sin, bool(rotary.is_neox_style))

    def attention_scale(self, layer: int) -> float:
        return float(self._layers[layer].self_attn.scaling)

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        attention = self._layers[layer].self_attn.attn
        implementation, cache = attention.impl, attention.kv_cache
        num_queries, num_tokens, block_tokens = len(queries), len(keys), cache.shape[2]
        num_blocks = -(-num_tokens // block_tokens)
        blocks = torch.zeros((num_blocks, *cache.shape[1:]), dtype=cache.dtype)
        slots = torch.arange(num_tokens)
        implementation.do_kv_cache_update(attention, keys.contiguous(), values.contiguous(), blocks, slots)
        starts = torch.tensor([0, num_queries], dtype=torch.int32)
        lengths = torch.tensor([num_tokens], dtype=torch.int32)
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1,
            num_heads=implementation.num_heads,
            num_kv_heads=implementation.num_kv_heads,
            head_dim=implementation.head_size,
            seq_lens=lengths,
            dtype=queries.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=attention.isa,
            enable_kv_split=False,
            kv_cache_dtype=implementation.kv_cache_dtype,
        )
        metadata = CPUAttentionMetadata(
            num_actual_tokens=num_queries,
            max_query_len=num_queries,
            query_start_loc=starts,
            max_seq_len=num_tokens,
            seq_lens=lengths,
            block_table=torch.arange(num_blocks, dtype=torch.int32)[None],
            slot_mapping=slots[-num_queries:],
            scheduler_metadata=plan,
        )
        found = torch.empty_like(queries, memory_format=torch.contiguous_format)
        return implementation.forward(attention, queries.contiguous(), keys, values, blocks, metadata, output=found)

    def write(self, states: LayerStates, start: int, stop: int, block_ids: Sequence[int], block_tokens: int) -> None:
        """As the engine's attention writes them."""
        at = torch.arange(start, stop)
        slots = torch.tensor(block_ids)[at // block_tokens] * block_tokens + at % block_tokens
        for layer, keys, values in zip(self._layers, states.keys, states.values, strict=True):
            attention = layer.self_attn.attn
            rows = keys[start:stop].contiguous(), values[start:stop].contiguous()
            attention.impl.do_kv_cache_update(attention, *rows, attention.kv_cache, slots)


def _halves(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies: a norm of two tensors writes to both."""
    added, before = (half.clone(memory_format=torch.contiguous_format) for half in hidden.chunk(2, -1))
    return added, before


def _heads(states: torch.Tensor, head_dim: int) -> torch.Tensor:
    return states.reshape(*states.shape[:-1], states.shape[-1] // head_dim, head_dim)
