"""An engine of pipeline stages resumes what one of equal stages saved: each stage keeps its own layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.testing.checkpoints import write_checkpoint
from kvstore.testing.engine import Answer, EngineSpec, Request, seeded_prompt
from tests.connector.support.runs import start_together
from tests.connector.support.service import DirectoryService
from tests.connector.support.stores import PATIENT, wait_for_engine

pytestmark = pytest.mark.engine

PROMPTS = [seeded_prompt(seed, 1300) for seed in (601, 602)]
RESTORED = {"llama": 1280, "gemma3": 1280, "qwen3next-demo": 1280, "deepseek": 1296}
NUM_GENERATED = 8
STAGES = 2
NOISE = 1e-3
"""Largest difference of a log probability between ranks that sum in another order."""


def spec(model: str, work: Path, service: DirectoryService, ranks: int = 1) -> EngineSpec:
    """An engine of two stages of `ranks` each. It is on the V2 runner: vLLM 0.32's V1 fails on a CPU's second stage."""
    cores = [str(rank % 2) for rank in range(STAGES * ranks)]
    return EngineSpec(
        checkpoint=write_checkpoint(model, work / "checkpoints"),
        multiprocess=True,
        runner="v2",
        block_size=640 if model.startswith("qwen3next") else None,
        connector={"url": service.url, **PATIENT},
        arguments={"pipeline_parallel_size": STAGES, "tensor_parallel_size": ranks},
        environment={"VLLM_CPU_OMP_THREADS_BIND": "|".join(cores)},
    )


def ask(model: str, work: Path, service: DirectoryService, *, times: int = 1, ranks: int = 1) -> list[list[Answer]]:
    """A fresh engine's answers to the prompts, as often as asked; it ends with them."""
    name = f"pipeline-{model}-{ranks}"
    with start_together({name: spec(model, work, service, ranks)}, work=work) as (engine,):
        wait_for_engine(service.url, ranks=STAGES * ranks)
        answers = [
            [engine.generate([Request(prompt, max_tokens=NUM_GENERATED)])[0] for prompt in PROMPTS]
            for _ in range(times)
        ]
        engine.stop()
    service.settle()
    return answers


@pytest.mark.parametrize(
    "model", ["llama", *(pytest.param(model, marks=pytest.mark.full) for model in list(RESTORED)[1:])]
)
def test_stages_resume_what_they_saved(model: str, work: Path, service: DirectoryService) -> None:
    """A fresh engine's restored answers are those of the first one from its own cache, bit for bit."""
    computed, local = ask(model, work, service, times=2)
    (restored,) = ask(model, work, service)
    assert [answer.num_cached_tokens for answer in computed] == [0, 0]
    for answers in (local, restored):
        assert [answer.num_cached_tokens for answer in answers] == [RESTORED[model]] * len(PROMPTS)
    assert [answer.difference(own) for answer, own in zip(restored, local, strict=True)] == [0.0, 0.0]


@pytest.mark.full
def test_ranks_of_a_stage_may_differ(work: Path, service: DirectoryService) -> None:
    """Two ranks a stage resume what one rank a stage saved: a stage's slices are shared out as an engine's are."""
    (computed,) = ask("llama", work, service)
    (restored,) = ask("llama", work, service, ranks=2)
    assert [answer.num_cached_tokens for answer in restored] == [RESTORED["llama"]] * len(PROMPTS)
    for answer, own in zip(restored, computed, strict=True):
        assert answer.tokens == own.tokens
        assert answer.difference(own) < NOISE


@pytest.mark.full
def test_unlike_stages_run_uncached(work: Path, service: DirectoryService) -> None:
    """With two layers of six the first stage has windows only: the engine says so and answers."""
    engine_spec = spec("gemma3", work, service)
    engine_spec = replace(engine_spec, environment={**engine_spec.environment, "VLLM_PP_LAYER_PARTITION": "2,4"})
    with start_together({"pipeline-unlike": engine_spec}, work=work) as (engine,):
        answers = [engine.generate([Request(PROMPTS[0], max_tokens=NUM_GENERATED)])[0] for _ in range(2)]
        engine.stop()
    assert len(answers[1].tokens) == NUM_GENERATED
    assert service.status()["namespaces"] == 0
    reason = "this engine is not cached: pipeline stages 0 and 1 do not hold layers of the same kinds"
    assert engine.log_text().count(reason) == 1
