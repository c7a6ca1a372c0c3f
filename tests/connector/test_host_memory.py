"""A hybrid whose pages of one step fill the ranks' host memory: its states are saved all the same.

A recurrent state is offered in one step only, and such a prompt cannot be resumed without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.checkpoints import write_checkpoint
from kvstore.testing.engine import EngineProcess, EngineSpec, Request, seeded_prompt
from tests.connector.support.stores import PATIENT, EmbeddedStore, wait_for_engine

pytestmark = pytest.mark.engine

Start = Callable[[EngineSpec], EngineProcess]

STEP_TOKENS = 2048
LENGTHS = (2500, 2560)
RESTORED = 2432
"""The last boundary of blocks of 128 tokens that leaves a token to compute, of both."""

_FULL = os.environ.get("KVSTORE_TEST_FULL") == "1"
NUM_OF_EACH = 2 if _FULL else 1
"""Prompts that end after several tokens, and that end with their first one. A processor without AVX-512 needs a minute
for each."""
NUM_AT_ONCE = 4 if _FULL else 3
"""Prompts. Because of preemption vLLM computes parts of them more than once."""

SMALL = {"pinned_bytes": "128MiB"}


def prompts(first_seed: int, count: int = len(LENGTHS)) -> list[tuple[int, ...]]:
    return [seeded_prompt(first_seed + index, LENGTHS[index % len(LENGTHS)]) for index in range(count)]


def spec(work: Path, store: EmbeddedStore, settings: Mapping[str, Any], **changes: Any) -> EngineSpec:
    return EngineSpec(
        checkpoint=write_checkpoint("qwen3next-wide", work / "checkpoints"),
        max_num_batched_tokens=STEP_TOKENS,
        connector={**store.connector, **PATIENT, **settings},
        environment=store.environment,
        kv_cache_bytes=2 << 30,
        **changes,
    )


def cached(engine: EngineProcess, asked: list[tuple[int, ...]], max_tokens: int = 4) -> list[int]:
    """Tokens of each prompt that were not computed, one prompt after the other."""
    return [engine.generate([Request(prompt, max_tokens=max_tokens)])[0].num_cached_tokens for prompt in asked]


def finish_saves(engine: EngineProcess) -> None:
    """An in-process engine makes no steps by itself, in which what waits would get its room."""
    for _ in range(100):
        if not engine.census()["saves_in_flight"]:
            return
        cached(engine, [(3, 4, 5)], max_tokens=1)  # fills no block, so saves nothing
    raise AssertionError("saves do not end")


@pytest.mark.parametrize(
    "settings", [pytest.param({}, id="default", marks=pytest.mark.full), pytest.param(SMALL, id="128MiB")]
)
def test_states_beside_a_step_s_pages(settings: Mapping[str, Any], work: Path, tmp_path: Path, engine: Start) -> None:
    """Prompts one after the other, each longer than a step; one that ends with its first token is saved whole, too."""
    store = EmbeddedStore(tmp_path)
    saving = engine(spec(work, store, settings))
    wait_for_engine(store.url)
    asked = prompts(701, count=2 * NUM_OF_EACH)
    several, one_token = asked[:NUM_OF_EACH], asked[NUM_OF_EACH:]
    assert cached(saving, several) == [0] * NUM_OF_EACH
    assert cached(saving, one_token, max_tokens=1) == [0] * NUM_OF_EACH
    finish_saves(saving)
    saving.stop()
    store.forget()
    restoring = engine(spec(work, store, settings))
    wait_for_engine(store.url)
    assert cached(restoring, several) == [RESTORED] * NUM_OF_EACH
    assert cached(restoring, one_token) == [RESTORED] * NUM_OF_EACH
    assert "pinned_bytes is" in restoring.log.read_text()


def test_prompts_at_once_in_a_small_cache(work: Path, tmp_path: Path, engine: Start) -> None:
    """Three prompts at once, or four, in a cache that holds two, so that vLLM preempts: room is short everywhere, and
    yet every one of them can be resumed."""
    store = EmbeddedStore(tmp_path)
    arguments = {"num_gpu_blocks_override": 50}
    saving = engine(spec(work, store, SMALL, arguments=arguments, max_model_len=3072))
    wait_for_engine(store.url)
    together = prompts(711, count=NUM_AT_ONCE)
    # minutes on a processor without AVX-512, which is slow at bfloat16
    saving.generate([Request(prompt, max_tokens=8) for prompt in together], timeout_s=900)
    assert saving.metrics()["vllm:num_preemptions"] > 0
    finish_saves(saving)
    saving.stop()
    store.forget()
    restoring = engine(spec(work, store, SMALL))
    wait_for_engine(store.url)
    assert cached(restoring, together) == [RESTORED] * NUM_AT_ONCE
