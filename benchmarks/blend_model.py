"""The model of `benchmarks.blend`: `python -m benchmarks.blend_model` trains it in minutes, and writes its weights.

A Llama of four layers. It starts with heads that attend to the token before, and heads that look for it, since training
takes hours to find these and minutes for the rest.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.blend_task import NO_LABEL, VOCABULARY, Batch, draw
from connector.blend.recompute import Blended, LayerStates, attend, behind, blend_by_layer, document_of
from connector.blend.rotation import Angles
from kvstore.model.layout import Span

FOLDER = Path(__file__).parent / "blend_weights"

_HIDDEN, _HEADS, _HEAD_DIM, _LAYERS = 128, 4, 32, 4
_THETA = 10_000.0
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": _HIDDEN,
    "intermediate_size": 2 * _HIDDEN,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "head_dim": _HEAD_DIM,
    "max_position_embeddings": 4096,
    "rope_theta": _THETA,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "initializer_range": 0.02,
    "dtype": "float32",
}
_SEED = 22
_STAGES = (
    # steps, prompts in a step, what of the task
    (100, 64, {"codes": 4, "names": 4, "questions": 4, "others": 1}),
    (80, 32, {"others": 1}),
    (120, 24, {"others": 6}),
)
_RATE, _WARM_STEPS = 1e-3, 50


class TransformersLayers:
    """A `LayeredModel` over transformers' modules of Llama, Qwen2 and Qwen3: the arithmetic without an engine.

    Attributes:
        model: As transformers loads it.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._decoder = model.model

    @property
    def num_layers(self) -> int:
        return len(self._decoder.layers)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._decoder.embed_tokens(tokens)

    def project(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        module = self._decoder.layers[layer]
        attention, normed = module.self_attn, module.input_layernorm(hidden)
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        queries, keys, values = (one(normed).view(len(hidden), -1, attention.head_dim) for one in projections)
        if hasattr(attention, "q_norm"):
            queries, keys = attention.q_norm(queries), attention.k_norm(keys)
        cos, sin = (one[0][:, None] for one in self._decoder.rotary_emb(hidden[None], positions[None]))
        return _rotated(queries, cos, sin), _rotated(keys, cos, sin), values

    def finish(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        module = self._decoder.layers[layer]
        hidden = hidden + module.self_attn.o_proj(attended.reshape(len(hidden), -1))
        return hidden + module.mlp(module.post_attention_layernorm(hidden))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Behind tokens whose hidden states behind the last layer these are."""
        return self.model.lm_head(self._decoder.norm(hidden))

    def angles(self, positions: torch.Tensor) -> Angles:
        example = self._decoder.embed_tokens.weight[:1]
        cos, sin = (one[0].to(torch.float32) for one in self._decoder.rotary_emb(example, positions[None]))
        half = cos.shape[-1] // 2  # transformers has each angle twice
        return Angles(cos[:, :half], sin[:, :half])

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if len(queries) < len(keys):
            rows = torch.arange(len(keys) - len(queries), len(keys))
            return attend(queries, keys, values, rows, scale=self.attention_scale(layer))
        shared = queries.shape[1] // keys.shape[1]
        asked, scale = queries.transpose(0, 1)[None], self.attention_scale(layer)
        all_keys, all_values = (one.repeat_interleave(shared, 1).transpose(0, 1)[None] for one in (keys, values))
        found = scaled_dot_product_attention(asked, all_keys, all_values, is_causal=True, scale=scale)
        return found[0].transpose(0, 1)

    def attention_scale(self, layer: int) -> float:
        return float(self._decoder.layers[layer].self_attn.scaling)

    def sum_over_ranks(self, part: torch.Tensor) -> torch.Tensor:
        return part


def load_layers(folder: Path) -> TransformersLayers:
    """A checkpoint of any of these architectures, in its own type."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
    return TransformersLayers(model.eval())


def blend(
    model: TransformersLayers, tokens: torch.Tensor, documents: Sequence[tuple[Span, LayerStates]], **choices: Any
) -> Blended:
    """`blend_by_layer`, all layers at once."""
    *_, made = blend_by_layer(model, tokens, documents, **choices)
    assert made is not None
    return made


def compute_document(model: TransformersLayers, first_token: int, tokens: torch.Tensor) -> LayerStates:
    """Keys and values of a document, computed alone behind the first token of a prompt."""
    return document_of(blend(model, behind(first_token, tokens), (), ratio=1.0))


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print progress, and write the weights."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.blend_model", description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to write config.json and model.safetensors")
    folder = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_CONFIG, indent=1) + "\n")
    torch.manual_seed(_SEED)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    _start_circuits(model)
    _train(model)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(_CONFIG, indent=1) + "\n")  # the library adds fields of its own
    for name in ("generation_config.json",):
        (folder / name).unlink(missing_ok=True)
    return 0


def _train(model: Any) -> None:
    random = np.random.default_rng(_SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    total = sum(steps for steps, _, _ in _STAGES)
    started_s, step = time.monotonic(), 0
    for steps, prompts, shape in _STAGES:
        for _ in range(steps):
            rate = _RATE * min(1.0, (step + 1) / _WARM_STEPS, (total - step) / (0.3 * total))
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss, right = _loss(model, draw(random, prompts, **shape))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 20 == 0 or step == total - 1:
                seconds = time.monotonic() - started_s
                print(f"{seconds:6.0f} s  step {step}  loss {float(loss):.4f}  right {right:.3f}", flush=True)
            step += 1


def _loss(model: Any, batch: Batch) -> tuple[torch.Tensor, float]:
    tokens, labels = torch.from_numpy(batch.tokens), torch.from_numpy(batch.labels)
    is_asked = labels != NO_LABEL
    logits = model.lm_head(model.model(tokens).last_hidden_state[is_asked])
    wanted = labels[is_asked]
    return cross_entropy(logits, wanted), float((logits.argmax(-1) == wanted).float().mean())


def _start_circuits(model: Any) -> None:
    """`_write_circuits` without gradients."""
    with torch.no_grad():
        _write_circuits(model)


def _write_circuits(model: Any) -> None:
    """Start with the circuit of associative recall: in the first layer two heads copy the token before, in the others
    all heads look for a token whose token before is theirs, and copy it. The rest is small noise.

    Channel 0 of an embedding is the same for all tokens, 1 to 63 name the token, 64 to 127 are for the token before.
    """
    half, named = _HEAD_DIM // 2, _HIDDEN // 2
    embedding = model.model.embed_tokens.weight
    embedding[:, 1:named].normal_(0, 0.5)
    embedding[:, 0] = 0.5
    angle = _THETA ** (-torch.arange(half) / half)
    first = model.model.layers[0].self_attn
    for head in range(2):
        rows = slice(_HEAD_DIM * head, _HEAD_DIM * (head + 1))
        queries, keys = first.q_proj.weight[rows], first.k_proj.weight[rows]
        for part in (queries, keys, first.v_proj.weight[rows], first.o_proj.weight[:, rows]):
            part.zero_()
        pairs = torch.arange(5)  # the fastest angles, which tell neighbours apart
        keys[pairs, 0] = 7.0
        queries[pairs, 0] = 7.0 * angle[pairs].cos()
        queries[pairs + half, 0] = -7.0 * angle[pairs].sin()
        channels = torch.arange(min(_HEAD_DIM, named - 1 - _HEAD_DIM * head))
        first.v_proj.weight[rows][channels, 1 + _HEAD_DIM * head + channels] = 0.5
        first.o_proj.weight[:, rows][named + 1 + _HEAD_DIM * head + channels, channels] = 1.0
    for layer in model.model.layers[1:]:
        attention = layer.self_attn
        for head in range(_HEADS):
            slow = torch.arange(8, half) + _HEAD_DIM * head  # angles that hardly change within a prompt
            slow = torch.cat((slow, slow + half))
            look = torch.randn(len(slow), named - 1) / (named - 1) ** 0.5 * 1.2
            attention.q_proj.weight[slow, 1:named] += look
            attention.k_proj.weight[slow, named + 1 :] += look
            channels = torch.arange(min(16, named - 1 - 16 * head))
            attention.v_proj.weight[_HEAD_DIM * head + channels, 1 + 16 * head + channels] += 0.5
            attention.o_proj.weight[1 + 16 * head + channels, _HEAD_DIM * head + channels] += 0.7


def _rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = states.chunk(2, -1)
    return states * cos + torch.cat((-second, first), -1) * sin


if __name__ == "__main__":
    raise SystemExit(main())
