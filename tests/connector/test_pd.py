"""Disaggregated prefill through the store, as `make demo-pd` shows it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from demo.pd import LENGTHS
from kvstore.testing.engine import EngineSpec
from tests.connector.support.matrix import Combination
from tests.connector.support.runs import PROMPTS, RESTORED, ask_each, spec_of, start_together
from tests.connector.support.stores import EmbeddedStore, wait_for_engine

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 128


def test_a_decode_server_restores_what_a_prefill_server_computed(work: Path) -> None:
    """Two vLLM servers and the proxy: every prompt is computed by one and restored by the other, up to its last block.

    The generated tokens equal those of an engine without a connector.
    """
    command = [sys.executable, "-m", "demo.pd", "--work", str(work)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr
    word, _, text = done.stdout.strip().splitlines()[-1].partition(" ")
    assert word == "DEMO-PD"
    rows = json.loads(text)["rows"]
    assert [row["prompt_tokens"] for row in rows] == list(LENGTHS)
    assert [row["prefill_computed_tokens"] for row in rows] == list(LENGTHS)
    assert [row["external_tokens"] for row in rows] == [(length - 1) // BLOCK * BLOCK for length in LENGTHS]
    assert all(row["outputs_equal"] for row in rows)


@pytest.mark.parametrize("model", ["qwen3next", pytest.param("gemma3", marks=pytest.mark.full)])
def test_an_engine_that_only_saves_misses_no_state(model: str, work: Path, tmp_path: Path) -> None:
    """A prefill engine looks nothing up, and computes each of these prompts in one step, right when it comes.

    Its recurrent states are offered in that step only, and its windows pass after it: all of it is stored nevertheless.
    """
    store = EmbeddedStore(tmp_path)
    base = spec_of(Combination(model, False, "embedded", "v1", async_scheduling=False, ngram=False), work, store)
    with start_together({f"pd-{model}-saving": _only(base, "save")}, work=work) as (saving,):
        wait_for_engine(store.url)
        computed = ask_each(saving, PROMPTS)
        assert saving.connector_counters().get('connector_saves{outcome="window_passed"}', 0) == 0
        saving.stop()
    with start_together({f"pd-{model}-loading": _only(base, "load")}, work=work) as (loading,):
        wait_for_engine(store.url)
        restored = ask_each(loading, PROMPTS)
    assert [answer.num_cached_tokens for answer in computed] == [0] * len(PROMPTS)
    assert tuple(answer.num_cached_tokens for answer in restored) == RESTORED[model]


def _only(spec: EngineSpec, mode: str) -> EngineSpec:
    assert spec.connector is not None
    return replace(spec, connector={**spec.connector, "mode": mode})
