"""What an engine is started with, and what travels between a test and the engine's process."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

SOUND_RATE = 16_000
"""Samples a second."""
_TRITON_ON_CPU = Path(__file__).parent / "triton_on_cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine.

    Attributes:
        checkpoint: Folder with config and weights.
        connector: Extra config of `KVStoreConnector`; `None`: no connector at all.
        kv_transfer: A whole `kv_transfer_config` instead, for another connector or role.
        runner: vLLM's model runner.
        multiprocess: EngineCore in a process of its own, as in production, or in the process that asks.
        async_scheduling: vLLM's setting; `None`: its default.
        block_size: Tokens of a block; `None`: vLLM's choice.
        dtype: `None`: what the checkpoint says (vLLM's own `auto` would make bfloat16 of float32).
        max_model_len: Tokens of prompt and output together.
        max_num_batched_tokens: Tokens of a step; `None`: vLLM's default.
        device: What vLLM was built for. On a GPU a checkpoint in float32 is computed in bfloat16, as its kernels want.
        kv_cache_bytes: Memory for blocks, which an engine fills with zeros at its start.
        arguments: Any further engine argument.
        environment: Any further environment variable.
        preload: Modules imported before the engine starts; they see an in-process engine's whole life.
    """

    checkpoint: Path
    connector: Mapping[str, Any] | None = None
    kv_transfer: Mapping[str, Any] | None = None
    runner: Literal["v1", "v2"] = "v1"
    multiprocess: bool = False
    async_scheduling: bool | None = None
    block_size: int | None = None
    dtype: str | None = None
    max_model_len: int = 16384
    max_num_batched_tokens: int | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    kv_cache_bytes: int = 256 << 20
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = ()

    def engine_arguments(self) -> dict[str, Any]:
        """What vLLM's `LLM` is called with."""
        config = json.loads((Path(self.checkpoint) / "config.json").read_text())
        on_gpu = self.device == "cuda"
        dtype = self.dtype or ("bfloat16" if on_gpu else config["dtype"])
        # where a processor has AMX vLLM would choose the kernels for it, which take no float32
        needs_reference = "kv_lora_rank" in config and dtype == "float32" and not on_gpu
        arguments: dict[str, Any] = {
            "model": str(self.checkpoint),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "dtype": dtype,
            "max_model_len": self.max_model_len,
            "async_scheduling": self.async_scheduling,
            "block_size": self.block_size,
            "attention_backend": "CPU_MLA" if needs_reference else None,
            # vLLM's own choice where a processor has AVX-512 for bfloat16 only; a hybrid's block size follows from it
            "mamba_ssm_cache_dtype": "float32",
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "kv_cache_memory_bytes": self.kv_cache_bytes,
            "kv_transfer_config": self.kv_transfer or connector_config(self.connector),
        }
        if on_gpu:  # several engines share one GPU, so none measures what is free
            arguments["gpu_memory_utilization"] = 0.02
        arguments |= self.arguments
        return {name: value for name, value in arguments.items() if value is not None}


def connector_config(extra: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The `kv_transfer_config` that users write for our connector."""
    if extra is None:
        return None
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(extra),
    }


def engine_environment(spec: EngineSpec, work: Path) -> dict[str, str]:
    """The whole environment.

    Args:
        spec: The engine.
        work: Folder for what vLLM compiles: one folder for all engines, so that the first one's work is not repeated.
    """
    env = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if spec.multiprocess else "0",
        "VLLM_CACHE_ROOT": str(work / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if spec.multiprocess:
        # vLLM sets one core aside, and one more where there is a connector: engines with and without one would then
        # compute with different numbers of threads, whose sums differ in the last bits
        env["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "1"
    env.pop("TRITON_ON_CPU", None)  # the V1 runner does not start with it
    env.pop("TRITON_INTERPRET", None)
    env.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would replace `kv_cache_bytes`
    env["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if spec.runner == "v2" and spec.device == "cuda":
        env["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    elif spec.runner == "v2":
        path = [str(_TRITON_ON_CPU), *filter(None, [env.get("PYTHONPATH")])]
        env |= {"PYTHONPATH": os.pathsep.join(path), "TRITON_ON_CPU": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    return {**env, **spec.environment}


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, answered greedily.

    Attributes:
        prompt: Token ids.
        max_tokens: Tokens to generate, no fewer: the end-of-text token is ignored.
        logprobs: How many of the most likely tokens to report at each position.
        cache_salt: vLLM's own: equal prompts under different salts share nothing.
        kv_transfer_params: For the connectors.
        adapter: Name, number and folder of a LoRA adapter.
        embeddings: File with a tensor of embeddings that are given instead of the prompt's ids.
        sounds: NumPy files with sounds of `SOUND_RATE` samples a second, in the order of their places in the prompt.
        prompt_logprobs: How many of the most likely tokens to compute for each token of the prompt; not reported.
    """

    prompt: tuple[int, ...]
    max_tokens: int = 8
    logprobs: int | None = 20
    cache_salt: str | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    adapter: tuple[str, int, str] | None = None
    embeddings: str | None = None
    sounds: tuple[str, ...] = ()
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine made of a request.

    Attributes:
        tokens: Generated token ids.
        logprobs: For each of them the most likely tokens with their exact log probabilities.
        num_cached_tokens: Prompt tokens that were not computed: from the engine's own cache and from the connector.
        ttft_s: Seconds from handing the request over to its first token.
        total_s: Seconds to its last token.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    num_cached_tokens: int
    ttft_s: float
    total_s: float

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Answer:
        logprobs = tuple({int(token): number for token, number in position.items()} for position in value["logprobs"])
        return cls(tuple(value["tokens"]), logprobs, value["num_cached_tokens"], value["ttft_s"], value["total_s"])

    def difference(self, other: Answer) -> float:
        """The largest difference of any reported log probability; infinite when tokens differ, listed ones included."""
        if self.tokens != other.tokens or len(self.logprobs) != len(other.logprobs):
            return float("inf")
        largest = 0.0
        for mine, theirs in zip(self.logprobs, other.logprobs, strict=True):
            if mine.keys() != theirs.keys():
                return float("inf")
            largest = max([largest, *(abs(mine[token] - theirs[token]) for token in mine)])
        return largest


@dataclass(frozen=True, slots=True)
class TrafficRequest:
    """One of many requests that are in the engine at once, and when to abort it.

    Attributes:
        prompt: Token ids.
        max_tokens: Tokens to generate.
        abort_state: Abort it when it is seen in this state: `queued`, `asking`, `staging`, `loading`, `prefilling`,
            `decoding`, or `any`; `None`: let it finish. One that finishes before is answered.
        abort_after_steps: How many steps it may be seen there before.
        cache_salt: As of `Request`.
        kv_transfer_params: As of `Request`.
    """

    prompt: tuple[int, ...]
    max_tokens: int = 16
    abort_state: str | None = None
    abort_after_steps: int = 0
    cache_salt: str | None = None
    kv_transfer_params: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TrafficReport:
    """What became of many requests.

    Attributes:
        answers: For each request its answer; `None` when it was aborted.
        aborted: By index of an aborted request the state that it was in.
        counts: Preemptions, steps, steps of the idle engine, resets done and refused.
    """

    answers: tuple[Answer | None, ...]
    aborted: Mapping[int, str]
    counts: Mapping[str, int]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TrafficReport:
        answers = tuple(None if answer is None else Answer.from_json(answer) for answer in value["answers"])
        aborted = {int(index): state for index, state in value["aborted"].items()}
        counts = {name: count for name, count in value.items() if name not in ("answers", "aborted")}
        return cls(answers, aborted, counts)


def seeded_prompt(seed: int, num_tokens: int, *, vocabulary: int = 1024) -> tuple[int, ...]:
    """Token ids that depend on the seed alone; two lengths of one seed share their prefix."""
    low = 3  # below are the checkpoints' special tokens
    return tuple(int(token) for token in np.random.default_rng(seed).integers(low, vocabulary, num_tokens))
