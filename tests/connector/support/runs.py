"""Engines and prompts of the exactness tests: what a combination means to vLLM, and what answers are compared to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvstore.testing.checkpoints import write_checkpoint
from kvstore.testing.engine import Answer, EngineProcess, EngineSpec, Request, seeded_prompt
from tests.connector.support.matrix import Combination
from tests.connector.support.stores import TestedStore

__all__ = [
    "PROMPTS",
    "RESTORED",
    "ask_each",
    "forget_own_cache",
    "reference_spec",
    "saving_spec",
    "spec_of",
    "start_together",
]

PROMPTS = tuple(seeded_prompt(seed, length) for seed, length in enumerate((2500, 1300, 2560), 101))
"""One that ends inside a block, one inside the first page, one at a block's end."""

_ATTENTION = (2432, 1280, 2432)
RESTORED: Mapping[str, tuple[int, ...]] = {
    "llama": _ATTENTION,
    "gemma3": _ATTENTION,
    "gptoss": _ATTENTION,
    "qwen3next": (1920, 1280, 1920),
    "deepseek": (2496, 1296, 2544),
}
"""By model the tokens of each prompt that can be restored: the last block boundary that leaves a token to compute."""

_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
_SUPPORT = "tests.connector.support"
_HYBRID_BLOCK = 640


def spec_of(combination: Combination, work: Path, store: TestedStore | None = None) -> EngineSpec:
    """The engine of a combination, with our connector where there is a store."""
    arguments: dict[str, Any] = {"speculative_config": _NGRAM} if combination.ngram else {}
    environment = {} if store is None else dict(store.environment)
    if combination.ngram and combination.model == "qwen3next":
        arguments["worker_extension_cls"] = f"{_SUPPORT}.mamba_kernels.WorkerExtension"
        environment["TRITON_INTERPRET"] = "1"
    # vLLM 0.32 on a CPU forgets a hybrid's block size in a process of its own, unless told
    told = combination.multiprocess and combination.model == "qwen3next"
    return EngineSpec(
        checkpoint=write_checkpoint(combination.model, work / "checkpoints"),
        multiprocess=combination.multiprocess,
        runner=combination.runner,
        async_scheduling=combination.async_scheduling,
        block_size=_HYBRID_BLOCK if told else None,
        arguments=arguments,
        environment=environment,
        connector=None if store is None else store.connector,
    )


def reference_spec(combination: Combination, work: Path) -> EngineSpec:
    """The engine whose second answers are what a resumed engine must give, bit for bit."""
    spec = spec_of(combination, work)
    return _splitting(combination, spec) if combination.model == "deepseek" else spec


def saving_spec(combination: Combination, work: Path, store: TestedStore) -> EngineSpec:
    """The engine that saves. Latent attention's pages are rounded by how long a chunk was: they come from the same two
    chunks as the reference's, where the reference is compared with bit for bit."""
    spec = spec_of(combination, work, store)
    return _splitting(combination, spec) if combination.model == "deepseek" and combination.runner == "v1" else spec


def _splitting(combination: Combination, spec: EngineSpec) -> EngineSpec:
    scheduler = "AsyncSplittingScheduler" if combination.async_scheduling else "SplittingScheduler"
    return replace(spec, arguments={**spec.arguments, "scheduler_cls": f"{_SUPPORT}.splitting.{scheduler}"})


def ask_each(engine: EngineProcess, prompts: Sequence[tuple[int, ...]]) -> list[Answer]:
    """Answer prompts one after the other."""
    return [engine.generate([Request(prompt)])[0] for prompt in prompts]


def forget_own_cache(engine: EngineProcess) -> None:
    """Empty an engine's own cache, whatever it saves at that time."""
    assert engine.reset_prefix_cache()


@contextmanager
def start_together(specs: Mapping[str, EngineSpec], *, work: Path) -> Iterator[list[EngineProcess]]:
    """Run engines, by name, for the length of the block. They start at once: most of a start is one thread's work."""
    logs = work / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        engines = []
        for name, spec in specs.items():
            engine = EngineProcess(spec, logs / f"{name}.log", work)
            stack.callback(engine.kill)
            engines.append(engine)
        for engine in engines:
            engine.wait_ready(600.0)
        yield engines
