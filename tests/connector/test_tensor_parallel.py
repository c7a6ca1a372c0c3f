"""An engine of one tensor-parallel size resumes what another saved, with hits as long as at equal size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.testing.engine import Answer, EngineSpec, Request, seeded_prompt
from tests.connector.support.matrix import Combination
from tests.connector.support.runs import spec_of, start_together
from tests.connector.support.service import DirectoryService
from tests.connector.support.stores import PATIENT, wait_for_engine

pytestmark = pytest.mark.engine

PROMPTS = [seeded_prompt(seed, 1300) for seed in (501, 502)]
NUM_GENERATED = 8
"""Too few to fill a block: what is saved depends on the prompts alone."""

RESTORED = {"llama": 1280, "gemma3": 1280, "mimo": 1280, "qwen3next": 1280, "deepseek": 1296}
NOISE = 1e-3
"""Largest difference of a log probability between ranks that sum in another order (seen: some 1e-5)."""


def spec(model: str, work: Path, service: DirectoryService, size: int) -> EngineSpec:
    """An engine of `size` ranks, each on a core of its own, also where there is one rank."""
    combination = Combination(model, True, "shared", "v1", async_scheduling=False, ngram=False)
    base = spec_of(combination, work)
    return replace(
        base,
        connector={"url": service.url, **PATIENT},
        arguments={**base.arguments, "tensor_parallel_size": size},
        environment={**base.environment, "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(size)))},
    )


def ask(model: str, work: Path, service: DirectoryService, size: int, prompts: list[tuple[int, ...]]) -> list[Answer]:
    """Answers of a fresh engine that ends with them."""
    with start_together({f"tensor-parallel-{model}-{size}": spec(model, work, service, size)}, work=work) as (engine,):
        wait_for_engine(service.url, ranks=size)
        answers = [engine.generate([Request(prompt, max_tokens=NUM_GENERATED)])[0] for prompt in prompts]
        engine.stop()
    service.settle()
    return answers


def cached(answers: list[Answer]) -> list[int]:
    return [answer.num_cached_tokens for answer in answers]


@pytest.mark.parametrize("model", ["llama", pytest.param("gemma3", marks=pytest.mark.full)])
def test_sizes_share_what_they_save(model: str, work: Path, service: DirectoryService) -> None:
    """Saved at 2, resumed at 1; saved at 1, resumed at 2; and resumed at 2 what was saved at 2: equally long hits."""
    first, second = PROMPTS
    (at_two,) = ask(model, work, service, 2, [first])
    one = ask(model, work, service, 1, [first, second])
    assert cached([at_two, *one]) == [0, RESTORED[model], 0]
    two = ask(model, work, service, 2, [first, second])
    assert cached(two) == [RESTORED[model]] * 2
    for restored, computed in ((one[0], at_two), (two[0], at_two), (two[1], one[1])):
        assert restored.tokens == computed.tokens
        assert restored.difference(computed) < NOISE


def test_replicated_records_are_stored_once(work: Path, service: DirectoryService) -> None:
    """Both ranks of latent attention hold all of it: they store what one rank stores, and each resumes from it."""
    first, second = PROMPTS
    (at_two,) = ask("deepseek", work, service, 2, [first])
    stored_at_two = saves(service, "stored")
    one = ask("deepseek", work, service, 1, [first, second])
    assert cached([at_two, *one]) == [0, RESTORED["deepseek"], 0]
    assert saves(service, "stored") - stored_at_two == stored_at_two > 0
    assert saves(service, "exists") == 0
    two = ask("deepseek", work, service, 2, [first, second])
    assert cached(two) == [RESTORED["deepseek"]] * 2


def saves(service: DirectoryService, outcome: str) -> int:
    """How many saves of a record ended like this."""
    return int(service.status()["counters"].get(f'saves{{outcome="{outcome}"}}', 0))


@pytest.mark.full
def test_states_are_resumed_at_equal_size(work: Path, service: DirectoryService) -> None:
    """A recurrent state's share of a rank is a share of that size: two ranks resume what two ranks saved."""
    (computed,) = ask("qwen3next", work, service, 2, PROMPTS[:1])
    (restored,) = ask("qwen3next", work, service, 2, PROMPTS[:1])
    assert cached([computed, restored]) == [0, RESTORED["qwen3next"]]
    assert restored.difference(computed) == 0.0


def test_layers_with_other_numbers_of_heads(work: Path, service: DirectoryService) -> None:
    """Two ranks with one KV head each hold copies of it in some layers, and different ones in the others."""
    saved, found = (ask("mimo", work, service, 2, PROMPTS[:1])[0] for _ in range(2))
    assert cached([saved, found]) == [0, RESTORED["mimo"]]
    assert found.difference(saved) < NOISE
