"""A damaged record of any group is found and costs a shorter hit; only verification stands before wrong output."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.testing.engine import Answer, EngineProcess, seeded_prompt
from tests.connector.support.damage import damaged, last_record_of_each_group
from tests.connector.support.matrix import MODELS, Combination
from tests.connector.support.runs import ask_each, forget_own_cache, spec_of, start_together
from tests.connector.support.service import DirectoryService
from tests.connector.support.stores import PATIENT, wait_for_engine

pytestmark = pytest.mark.engine

NUM_GROUPS = {"llama": 1, "gemma3": 2, "gptoss": 2, "qwen3next": 2, "deepseek": 1}
IN_EVERY_RUN = "qwen3next"
"""Pages and states, each verified by the same code as every other kind of group."""

RESTORED = {"llama": 1280, "gemma3": 1280, "gptoss": 1280, "qwen3next": 1280, "deepseek": 1296}
PROMPTS = [seeded_prompt(seed, 1300) for seed in (301, 302)]

VERIFY_NOTHING = "setattr(__import__('connector.worker.loader', fromlist=['loader']), 'verify_payload', lambda _: None)"


def models() -> list[object]:
    """One in every run, all in the full run."""
    return [pytest.param(model, marks=[] if model == IN_EVERY_RUN else [pytest.mark.full]) for model in MODELS]


@pytest.mark.parametrize("model", models())
def test_a_damaged_record_is_a_miss_and_would_be_wrong_output(model: str, work: Path, tmp_path: Path) -> None:
    """A damaged record of each group is as good as none; with verification off it changes the output.

    One prompt per group, whose last record of that group is taken away, and then damaged: hit and output are the same,
    bit for bit. The service finds it; if it does not, the engine does; without either the output is wrong.
    """
    prompts = PROMPTS[: NUM_GROUPS[model]]
    combination = Combination(model, False, "shared", "v1", async_scheduling=False, ngram=False)
    with DirectoryService(tmp_path) as service:
        spec = replace(spec_of(combination, work), connector={"url": service.url, **PATIENT})
        with start_together({f"corruption-{model}": spec}, work=work) as (engine,):
            wait_for_engine(service.url)
            files, computed = save_each(engine, service, prompts)
            right = ask_each(engine, prompts)
            service.stop()

            wrong_bytes = {file: damaged(file.read_bytes()) for file in files}
            for file in files:
                file.unlink()
            service.start()
            without = ask_afresh(engine, service, prompts)
            assert all(answer.num_cached_tokens < RESTORED[model] for answer in without)
            service.stop()

            write_all(wrong_bytes)
            service.start()
            shortened = ask_afresh(engine, service, prompts)
            assert cached(shortened) == cached(without)
            assert [mine.difference(other) for mine, other in zip(shortened, without, strict=True)] == [0.0] * len(
                prompts
            )
            assert service.status()["tiers"]["filesystem"]["num_quarantined"] == len(prompts)
            service.stop()

            write_all(wrong_bytes)
            with DirectoryService(tmp_path, verifies=False) as careless:
                recomputed = ask_afresh(engine, careless, prompts)
                assert [mine.tokens for mine in recomputed] == [other.tokens for other in computed]
                careless.stop()
                write_all(wrong_bytes)
                careless.start()
                engine.evaluate(VERIFY_NOTHING)
                fooled = ask_afresh(engine, careless, prompts)
            assert cached(fooled) == [RESTORED[model]] * len(prompts)
            assert all(wrong.difference(good) > 0.0 for wrong, good in zip(fooled, right, strict=True))


def save_each(
    engine: EngineProcess, service: DirectoryService, prompts: list[tuple[int, ...]]
) -> tuple[list[Path], list[Answer]]:
    """Compute prompts one by one.

    Returns:
        For prompt `n` the file of the last record of group `n`, and the answers.
    """
    files, computed, known = [], [], set[Path]()
    for group, prompt in enumerate(prompts):
        computed += ask_each(engine, [prompt])
        service.settle()
        found = set(service.records.rglob("*.g*.s*")) - known
        known |= found
        last = last_record_of_each_group(found, lambda file: str(file.relative_to(service.records)))
        assert set(last) == set(range(len(prompts)))
        files.append(last[group])
    assert cached(computed) == [0] * len(prompts)
    return files, computed


def ask_afresh(engine: EngineProcess, service: DirectoryService, prompts: list[tuple[int, ...]]) -> list[Answer]:
    """Answer prompts without the engine's own cache, once it is connected to the service that was just started."""
    wait_for_engine(service.url)
    forget_own_cache(engine)
    return ask_each(engine, prompts)


def cached(answers: list[Answer]) -> list[int]:
    return [answer.num_cached_tokens for answer in answers]


def write_all(files: dict[Path, bytes]) -> None:
    for file, content in files.items():
        file.write_bytes(content)
