"""Pages of generated tokens, behind those of a prompt that was computed in chunks: the next turn hits them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.engine import Answer, EngineProcess, EngineSpec, Request, seeded_prompt
from tests.connector.support.matrix import MODELS, Combination
from tests.connector.support.releases import IS_SUITES_OWN
from tests.connector.support.runs import spec_of, start_together
from tests.connector.support.stores import EmbeddedStore, wait_for_engine

pytestmark = pytest.mark.engine

PROMPT = seeded_prompt(401, 2500)
FURTHER = seeded_prompt(402, 50)
NUM_GENERATED = 200

ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    # a recurrent state, and a window, is kept at every block only where vLLM is asked to
    "gemma3": {"prefix_cache_retention_interval": 128},
    "gptoss": {"prefix_cache_retention_interval": 128},
    "qwen3next": {"prefix_cache_retention_interval": 640},
}
CHUNK = {"llama": 512, "gemma3": 512, "gptoss": 512, "qwen3next": 640}
"""Tokens of a step; the CPU computes latent attention's prompts at once, and a hybrid's blocks are 640 tokens."""

QUICK = ("gemma3",)
"""What `make test` runs: blocks that windows give back."""

RESTORED = {"llama": 2688, "gemma3": 2688, "gptoss": 2688, "qwen3next": 2560, "deepseek": 2688}


def spec(model: str, work: Path, store: EmbeddedStore | None = None) -> EngineSpec:
    combination = Combination(model, False, "embedded", "v1", async_scheduling=False, ngram=False)
    base = spec_of(combination, work, store)
    return replace(
        base,
        max_num_batched_tokens=CHUNK.get(model),
        arguments={**base.arguments, **ARGUMENTS.get(model, {})},
    )


def two_turns(engine: EngineProcess) -> tuple[Answer, Answer]:
    """A prompt, and the prompt with its answer and some further tokens."""
    (first,) = engine.generate([Request(PROMPT, max_tokens=NUM_GENERATED)])
    return first, second_turn(engine, first)


def second_turn(engine: EngineProcess, first: Answer) -> Answer:
    return engine.generate([Request((*PROMPT, *first.tokens, *FURTHER))])[0]


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=[] if model in QUICK else [pytest.mark.full]) for model in MODELS]
)
def test_the_next_turn_resumes_behind_generated_tokens(model: str, work: Path, tmp_path: Path) -> None:
    """2,500 tokens, computed in chunks, and 200 generated ones are saved; another engine continues their conversation.

    The other engine resumes at the last block that the first one filled, and answers, bit for bit, as an engine
    without connector that did all of it. Latent attention has none to compare with: vLLM does not reuse its cache on a
    CPU, and its kernels round differently for tokens that were generated.
    """
    store = EmbeddedStore(tmp_path)
    specs = {f"turns-{model}-saving": spec(model, work, store), f"turns-{model}-reference": spec(model, work)}
    with start_together(specs, work=work) as (saving, reference):
        first, local = two_turns(reference)
        reference.kill()
        wait_for_engine(store.url)
        (computed,) = saving.generate([Request(PROMPT, max_tokens=NUM_GENERATED)])
        # what a request's end leaves to save is saved in the next step, which an idle in-process engine does not make
        saving.generate([Request(FURTHER[:3], max_tokens=2)])
        saving.stop()
    assert computed.num_cached_tokens == 0
    assert computed.difference(first) == 0.0
    store.forget()
    with start_together({f"turns-{model}-restoring": spec(model, work, store)}, work=work) as (restoring,):
        wait_for_engine(store.url)
        restored = second_turn(restoring, computed)
    assert restored.num_cached_tokens == RESTORED[model] or not IS_SUITES_OWN
    if model != "deepseek":
        assert local.num_cached_tokens == restored.num_cached_tokens
        assert restored.difference(local) == 0.0
