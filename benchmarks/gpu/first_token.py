"""Stage 7: the first token of a long prompt, computed, restored from the service's memory, and from the own cache.

The models have real sizes and weights that vLLM draws: their output means nothing, see stage `exactness` for that.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.engines import ANSWER_S, arguments_of, environment, need_vllm, reported, start_engines
from benchmarks.gpu.kit import GB, Kit

if TYPE_CHECKING:
    from benchmarks.node import Node
    from benchmarks.timeline import Mark
    from kvstore.testing.engine import EngineProcess, EngineSpec

__all__ = ["run"]

_SETTLE_S, _STEP_S = 60.0, 0.01
_TAKE_MARKS = "__import__('sys').modules['benchmarks.marks'].take()"


@dataclass(frozen=True, slots=True)
class Timed:
    """A model of a real size, with weights that vLLM draws, and how long its prompts are."""

    name: str
    config: Mapping[str, Any]
    prompt_tokens: int
    kv_cache_gib: int
    dummy: bool = True


_LLAMA = Timed(
    "Llama of 8B",
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 65_536,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    },
    prompt_tokens=30_001,
    kv_cache_gib=12,
)
_HYBRID = Timed(
    "Qwen3-Next with 64 of 512 experts",
    {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "vocab_size": 32_000,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 64,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 12,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "rope_theta": 10_000_000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 65_536,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    },
    prompt_tokens=30_001,
    kv_cache_gib=8,
)
_SMALL = Timed("small", {}, prompt_tokens=2_501, kv_cache_gib=1, dummy=False)


def run(kit: Kit) -> None:
    """Both engines are there from the start; one computes at a time.

    Raises:
        AssertionError: An engine failed.
    """
    need_vllm()
    from benchmarks.node import Node, temporary_folder

    failures: dict[str, str] = {}
    models = {model.name: model for model in kit.sized((_LLAMA, _HYBRID), (_SMALL,))}
    with (
        temporary_folder() as folder,
        Node(folder, "service", memory_bytes=kit.sized(32 << 30, 1 << 30)) as node,
        start_engines(
            kit, {name: _spec(kit, model, node, folder) for name, model in models.items()}, failures
        ) as found,
    ):
        for name, engine in found.items():
            with reported(kit, name, failures):
                _time(kit, models[name], engine, node)
    if failures:
        raise AssertionError(f"failed: {', '.join(failures)}")


def _spec(kit: Kit, model: Timed, node: Node, folder: Path) -> EngineSpec:
    from benchmarks.node import WORK
    from kvstore.testing.checkpoints import write_checkpoint
    from kvstore.testing.engine import EngineSpec

    if model.dummy:
        checkpoint = folder / model.config["model_type"]
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text(json.dumps({**model.config, "dtype": "bfloat16"}))
    else:
        checkpoint = write_checkpoint("llama", WORK / "checkpoints")
    return EngineSpec(
        checkpoint=checkpoint,
        device="cuda" if kit.is_gpu else "cpu",
        max_model_len=model.prompt_tokens + 100,
        max_num_batched_tokens=8192,
        kv_cache_bytes=model.kv_cache_gib << 30,
        connector={"url": node.url, "weights_id": model.name},
        arguments={**arguments_of(kit, checkpoint.name), **({"load_format": "dummy"} if model.dummy else {})},
        environment=environment(),
        preload=("benchmarks.marks",),
    )


def _time(kit: Kit, model: Timed, engine: EngineProcess, node: Node) -> None:
    """The engine computes a prompt and saves it, forgets its own cache, and is asked again, twice."""
    from benchmarks.timeline import Mark
    from kvstore.testing.engine import Request, seeded_prompt

    for seed, num_tokens in ((7, model.prompt_tokens), (8, model.prompt_tokens // 3)):  # kernels are compiled at first
        engine.generate([Request(seeded_prompt(seed, num_tokens), max_tokens=2)], timeout_s=ANSWER_S)
    _settle(engine, node)
    times: dict[str, list[float]] = {"computed": [], "restored": [], "own cache": []}
    for seed in range(3):
        asked = Request(seeded_prompt(1000 + seed, model.prompt_tokens), max_tokens=2)
        times["computed"].append(engine.generate([asked], timeout_s=ANSWER_S)[0].ttft_s)
        save_s = _settle(engine, node)
        _forget(engine)
        loaded = engine.connector_counters().get("connector_loaded_bytes", 0)
        engine.evaluate(_TAKE_MARKS)
        answer = engine.generate([asked], timeout_s=ANSWER_S)[0]
        marks = [Mark(*values) for values in engine.evaluate(_TAKE_MARKS)]
        loaded = engine.connector_counters().get("connector_loaded_bytes", 0) - loaded
        times["restored"].append(answer.ttft_s)
        times["own cache"].append(engine.generate([asked], timeout_s=ANSWER_S)[0].ttft_s)
        _settle(engine, node)  # what could not be loaded is saved again, and would take room from the next prompt
        kit.tell(
            f"{model.name}: prompt {seed + 1}",
            tokens=model.prompt_tokens,
            restored_tokens=answer.num_cached_tokens,
            loaded_gb=loaded / GB,
            saves_settled_after_s=save_s,
            **{f"{name} ms": values[-1] * 1e3 for name, values in times.items()},
            parts_ms=_parts(marks, answer.ttft_s) if loaded else {},
        )
    median = {name: statistics.median(values) for name, values in times.items()}
    kit.tell(
        f"{model.name}: first token",
        ratio=median["computed"] / median["restored"],
        **{f"{name} ms": value * 1e3 for name, value in median.items()},
        counters={name: value for name, value in engine.connector_counters().items() if value},
        log=[line for line in engine.log_text().splitlines() if "kvstore:" in line][-20:],
    )


def _parts(marks: list[Mark], ttft_s: float) -> dict[str, float]:
    from benchmarks.timeline import parts_of

    return {name: round(value * 1e3, 2) for name, value in parts_of(marks, ttft_s).items() if name != "faults"}


def _settle(engine: EngineProcess, node: Node) -> float:
    """Seconds until all pages are saved. Some wait for host memory, and get it in a step: an engine in the process of
    its caller makes one for requests only.

    Raises:
        AssertionError: It takes over a minute.
    """
    from kvstore.testing.engine import Request

    started_s = time.perf_counter()
    while engine.connector_counters().get("connector_saves_in_flight"):
        if time.perf_counter() - started_s > _SETTLE_S:
            raise AssertionError("pages are still being saved")
        engine.generate([Request((5, 6, 7), max_tokens=1)], timeout_s=ANSWER_S)
        time.sleep(_STEP_S)
    node.wait_idle()
    return time.perf_counter() - started_s


def _forget(engine: EngineProcess) -> None:
    """Empty an engine's own cache. A save on its way holds its blocks until the next step."""
    from kvstore.testing.engine import Request

    for _ in range(100):
        if engine.reset_prefix_cache():
            return
        engine.generate([Request((5, 6, 7), max_tokens=1)], timeout_s=ANSWER_S)
    raise AssertionError("blocks are held for good")
