"""Engines of a vLLM that cannot be used, or was not tested: they start and answer, and log why they are not cached.

Releases that were never made stand for later ones. Real ones are tried by `make test-vllm VLLM=...`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from connector.scheduler.audits import TRIAL_POINTS
from connector.vllm.contract import TESTED_RELEASES
from kvstore.testing.engine import EngineProcess, EngineSpec, seeded_prompt
from tests.connector.support.releases import RELEASE, vllm_version
from tests.connector.support.runs import ask_each
from tests.connector.support.service import DirectoryService

pytestmark = pytest.mark.engine

LENGTH, RESTORED = 1300, 1280
PROMPTS = [seeded_prompt(seed, LENGTH) for seed in range(860, 861 + TRIAL_POINTS)]
SUPPORT = "tests.connector.support"
is_too_old = min(TESTED_RELEASES) > RELEASE


def warnings_of(engine: EngineProcess) -> list[str]:
    """What the connector warned of."""
    return [line for line in engine.log_text().splitlines() if "kvstore: " in line and "WARNING " in line]


@pytest.mark.skipif(not is_too_old, reason=f"vLLM {vllm_version()} has all that the connector uses")
@pytest.mark.parametrize("multiprocess", [False, True])
def test_an_old_release_runs_uncached(
    engine: Callable[..., EngineProcess], llama: Path, tmp_path: Path, multiprocess: bool
) -> None:
    """An unmodified engine starts with the connector configured, computes each time, and names what it lacks, once."""
    with DirectoryService(tmp_path) as service:
        running = engine(EngineSpec(checkpoint=llama, connector={"url": service.url}, multiprocess=multiprocess))
        first = ask_each(running, PROMPTS[:2])
        assert running.reset_prefix_cache()
        assert [answer.num_cached_tokens for answer in ask_each(running, PROMPTS[:2])] == [0, 0]
        assert all(answer.tokens for answer in first)
        (warning,) = warnings_of(running)
        assert "this engine is not cached" in warning and "KVConnectorBase_V1.get_transfer_results" in warning


@pytest.mark.skipif(is_too_old, reason="more than one hook is missing")
@pytest.mark.parametrize(
    ("made_up", "reason"),
    [
        ("without_a_hook", "KVConnectorBase_V1.wait_for_save"),
        ("release_0_34", "vLLM 0.34.0 was not tested"),
    ],
)
def test_a_release_that_was_never_made_runs_uncached(
    engine: Callable[..., EngineProcess], llama: Path, tmp_path: Path, made_up: str, reason: str
) -> None:
    """One that has dropped a hook, and one that changed nothing that can be seen: computed each time, one warning."""
    with DirectoryService(tmp_path) as service:
        spec = EngineSpec(checkpoint=llama, connector={"url": service.url}, preload=(f"{SUPPORT}.{made_up}",))
        running = engine(spec)
        ask_each(running, PROMPTS[:1])
        assert running.reset_prefix_cache()
        assert ask_each(running, PROMPTS[:1])[0].num_cached_tokens == 0
        (warning,) = warnings_of(running)
        assert "this engine is not cached" in warning and reason in warning


@pytest.mark.skipif(is_too_old, reason="what is missing cannot be permitted")
def test_an_untested_release_that_is_permitted(
    engine: Callable[..., EngineProcess], llama: Path, tmp_path: Path
) -> None:
    """A fresh engine computes the first stored prompts again, finds them equal, and resumes the next one.

    All in a namespace of its own: an engine of the release that it came from finds nothing of it.
    """
    with DirectoryService(tmp_path) as service:
        patient = {"url": service.url, "lookup_timeout_ms": 20_000}
        permitted = {**patient, "allow_untested_vllm": True}
        spec = EngineSpec(checkpoint=llama, connector=permitted, preload=(f"{SUPPORT}.release_0_34",))
        saving = engine(spec)
        computed = ask_each(saving, PROMPTS)
        saving.traffic([], in_flight=1)  # only this test steps an engine in this process
        saving.stop()
        service.settle()
        fresh = engine(spec)
        for prompt, before in zip(PROMPTS[:TRIAL_POINTS], computed, strict=False):
            (answer,) = ask_each(fresh, [prompt])
            assert (answer.num_cached_tokens, answer.tokens) == (0, before.tokens)
            fresh.traffic([], in_flight=1)
        (restored,) = ask_each(fresh, PROMPTS[-1:])
        assert (restored.num_cached_tokens, restored.tokens) == (RESTORED, computed[-1].tokens)
        assert f"{TRIAL_POINTS} resume points were computed again and are equal" in fresh.log_text()
        assert len([line for line in warnings_of(fresh) if "was not tested" in line]) == 1
        fresh.stop()
        tested = engine(EngineSpec(checkpoint=llama, connector=patient))
        assert ask_each(tested, PROMPTS[-1:])[0].num_cached_tokens == 0
