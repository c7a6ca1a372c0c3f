"""The engine's side: `python -m kvstore.testing.engine.main ANSWERS_FD PARENT_PID SPEC` takes requests on stdin."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import IO, Any

import numpy as np

from kvstore.testing.engine.spec import SOUND_RATE, EngineSpec
from kvstore.testing.engine.traffic import answer_of, run_traffic, take_census
from kvstore.testing.forking import tie_to_parent


def main() -> None:
    answers_fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    tie_to_parent(parent_pid)
    os.set_inheritable(answers_fd, False)
    spec = json.loads(sys.argv[3])
    with os.fdopen(answers_fd, "w", buffering=1) as answers:
        serve(spec, answers)


def serve(spec: dict[str, Any], answers: IO[str]) -> None:
    for module in spec["preload"]:
        importlib.import_module(module)
    from vllm import LLM

    llm = LLM(**EngineSpec(**spec).engine_arguments())
    calls: dict[str, Callable[..., Any]] = {
        "generate": generate,
        "metrics": metrics,
        "connector_counters": connector_counters,
        "reset_prefix_cache": LLM.reset_prefix_cache,
        "traffic": run_traffic,
        "census": take_census,
        "evaluate": lambda llm, expression: eval(expression, {"llm": llm}),
    }
    say(answers, event="ready")
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            say(answers, event="value", value=calls[name](llm, **arguments))
        except BaseException:
            say(answers, event="failed", error=traceback.format_exc())
            raise
    llm.llm_engine.engine_core.shutdown()


def generate(llm: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run requests together, stepping the engine ourselves so that the first token's time is what a user would see."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    started_s: dict[str, float] = {}
    first_s: dict[str, float] = {}
    answers: dict[str, dict[str, Any]] = {}
    for index, request in enumerate(requests):
        prompt = prompt_of(request)
        if request["cache_salt"] is not None:
            prompt["cache_salt"] = request["cache_salt"]
        params = SamplingParams(
            temperature=0.0,
            max_tokens=request["max_tokens"],
            logprobs=request["logprobs"],
            prompt_logprobs=request["prompt_logprobs"],
            detokenize=False,
            ignore_eos=True,
            extra_args={"kv_transfer_params": told} if (told := request["kv_transfer_params"]) is not None else None,
        )
        name = f"{time.monotonic_ns()}-{index}"
        started_s[name] = time.monotonic()
        engine.add_request(name, prompt, params, lora_request=adapter_of(request))
    while engine.has_unfinished_requests():
        for output in engine.step():
            now_s = time.monotonic()
            if output.outputs[0].token_ids:
                first_s.setdefault(output.request_id, now_s)
            if output.finished:
                ttft_s = first_s[output.request_id] - started_s[output.request_id]
                total_s = now_s - started_s[output.request_id]
                answers[output.request_id] = answer_of(output, ttft_s=ttft_s, total_s=total_s)
    return [answers[name] for name in started_s]


def prompt_of(request: dict[str, Any]) -> dict[str, Any]:
    if request["embeddings"] is not None:
        import torch

        return {"prompt_embeds": torch.load(request["embeddings"], weights_only=True)}
    prompt: dict[str, Any] = {"prompt_token_ids": request["prompt"]}
    if request["sounds"]:
        prompt["multi_modal_data"] = {"audio": [(np.load(file), SOUND_RATE) for file in request["sounds"]]}
    return prompt


def adapter_of(request: dict[str, Any]) -> Any:
    if request["adapter"] is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(*request["adapter"])


def metrics(llm: Any) -> dict[str, float]:
    values: dict[str, float] = {}
    for metric in llm.get_metrics():
        value = getattr(metric, "value", None)
        if value is not None:
            values[metric.name] = values.get(metric.name, 0.0) + value
    return values


def connector_counters(llm: Any) -> dict[str, float]:
    """What the connector counted on both of its sides; only an in-process engine can be looked into."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is None or not has_kv_transfer_group():
        return {}
    sides = (
        getattr(core.scheduler.connector, "scheduler_side", None),
        getattr(get_kv_transfer_group(), "worker_side", None),
    )
    return {name: value for side in sides if side is not None for name, value in side.meters.snapshot().items()}


def say(to: IO[str], /, **message: Any) -> None:
    to.write(json.dumps(message) + "\n")
    to.flush()


if __name__ == "__main__":
    main()
