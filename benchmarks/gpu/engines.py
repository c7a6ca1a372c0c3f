"""Real vLLM engines for stages: several at once on one GPU. One that fails is reported, and the others go on."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.kit import Kit

if TYPE_CHECKING:
    from kvstore.testing.engine import EngineProcess, EngineSpec

__all__ = ["ANSWER_S", "arguments_of", "environment", "need_vllm", "reported", "start_engines"]

ANSWER_S = 120.0
_READY_S = 150.0
_LOG_CHARACTERS = 5000
_HAS_FLASHINFER = importlib.util.find_spec("flashinfer") is not None


def need_vllm() -> None:
    """Raise what the kit reports as a missing package, without the seconds of an import."""
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError("vllm is not installed", name="vllm")


def arguments_of(kit: Kit, model: str) -> dict[str, Any]:
    """Engine arguments that a model needs on this machine."""
    if kit.is_gpu and model.startswith("qwen3") and not _HAS_FLASHINFER:
        return {"gdn_prefill_backend": "triton"}  # vLLM 0.32 takes FlashInfer's kernel on Hopper, installed or not
    return {}


def environment() -> dict[str, str]:
    """Environment variables that an engine needs on this machine."""
    return {} if _HAS_FLASHINFER else {"VLLM_USE_FLASHINFER_SAMPLER": "0"}  # as above


@contextmanager
def start_engines(
    kit: Kit, specs: Mapping[str, EngineSpec], failures: dict[str, str]
) -> Iterator[dict[str, EngineProcess]]:
    """Those that start, for the length of the block."""
    from benchmarks.node import WORK
    from kvstore.testing.engine import EngineFailed, EngineProcess

    logs = WORK / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    with ExitStack() as stack:
        started = {}
        for name, spec in specs.items():
            started[name] = EngineProcess(spec, logs / f"gpu-{name.replace(' ', '-')}.log", WORK)
            stack.callback(started[name].kill)
        ready = {}
        for name, engine in started.items():
            try:
                engine.wait_ready(max(1.0, _READY_S - (time.monotonic() - started_s)))
                ready[name] = engine
            except EngineFailed as error:
                failures[name] = "did not start"
                kit.tell(f"{name}: did not start", error=str(error)[-_LOG_CHARACTERS:])
        kit.tell("start", engines=len(ready), seconds=time.monotonic() - started_s)
        yield ready


@contextmanager
def reported(kit: Kit, name: str, failures: dict[str, str]) -> Iterator[None]:
    """An engine that fails is reported, and the others go on."""
    from kvstore.testing.engine import EngineFailed

    try:
        yield
    except EngineFailed as error:
        failures[name] = "failed"
        kit.tell(f"{name}: failed", error=str(error)[-_LOG_CHARACTERS:])
