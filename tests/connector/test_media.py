"""Prompts with media on real engines: restored with the same media, and only there."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kvstore.testing.engine import EngineSpec, start_engine
from tests.connector.support.service import DirectoryService
from tests.connector.support.sounds import hearing, write_hearing_checkpoint
from tests.connector.support.stores import PATIENT, wait_for_engine

pytestmark = pytest.mark.engine

BLOCK = 128
BEFORE, BETWEEN, AFTER = (1, 300), (2, 50), (3, 600)
"""Texts of prompts."""


@pytest.fixture
def spec(work: Path) -> EngineSpec:
    arguments = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"audio": 2}}
    return EngineSpec(
        checkpoint=write_hearing_checkpoint(work / "checkpoints"), max_model_len=4096, arguments=arguments
    )


@pytest.fixture
def saved_by(spec: EngineSpec, service: DirectoryService) -> EngineSpec:
    return replace(spec, connector={"url": service.url, **PATIENT, "trust_mm_uuids": True})


def whole(tokens: int) -> int:
    """Where a hit on a prompt of so many tokens ends."""
    return (tokens - 1) // BLOCK * BLOCK


def test_sounds_are_part_of_the_prompt(
    spec: EngineSpec, saved_by: EngineSpec, service: DirectoryService, work: Path, tmp_path: Path
) -> None:
    """In a fresh engine a prompt with the same sounds is restored; with other sounds, or in another order, what is
    before them. Outputs are those of an engine that never stored anything.
    """
    one, two = (BEFORE, 11, AFTER), (BEFORE, 11, BETWEEN, 12, AFTER)
    others = [(BEFORE, 12, AFTER), (BEFORE, 12, BETWEEN, 11, AFTER)]
    requests = [hearing(tmp_path, *parts) for parts in (one, two, *others)]
    with start_engine(spec, work=work, name="media-reference") as engine:
        expected = [engine.generate([request])[0] for request in requests]
    with start_engine(saved_by, work=work, name="media-save") as engine:
        wait_for_engine(service.url)
        for request in requests[:2]:
            engine.generate([request])
    service.settle()
    with start_engine(saved_by, work=work, name="media-load") as engine:
        wait_for_engine(service.url)
        answers = [engine.generate([request])[0] for request in requests]
    assert [(answer.tokens, answer.logprobs) for answer in answers] == [
        (answer.tokens, answer.logprobs) for answer in expected
    ]
    sound = 102  # with its marks
    sizes = [300 + sound + 600, 300 + sound + 50 + sound + 600]
    found = [answer.num_cached_tokens for answer in answers]
    assert found == [*map(whole, sizes), whole(300), whole(300 + sound + 50)]
    assert len({answer.tokens for answer in answers}) == len(answers)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_restored_prompt_that_is_lost_is_computed_with_its_sounds(
    saved_by: EngineSpec, service: DirectoryService, work: Path, tmp_path: Path, runner: str
) -> None:
    """The service dies and vLLM takes the blocks: the first runner could not compute a sound that was restored."""
    engine_spec = replace(saved_by, runner=runner)
    request = hearing(tmp_path, BEFORE, 11, AFTER, max_tokens=24)
    with start_engine(engine_spec, work=work, name="media-lost-save") as engine:
        wait_for_engine(service.url)
        (expected,) = engine.generate([request])
    service.settle()
    with start_engine(engine_spec, work=work, name="media-lost") as engine:
        wait_for_engine(service.url)
        found, tokens = engine.evaluate(
            "__import__('tests.connector.support.sounds', fromlist=['x'])"
            f".answer_across_a_loss(llm, {json.loads(json.dumps(asdict(request)))!r}, {service.pid})"
        )
    assert found == whole(300 + 102 + 600)
    assert tuple(tokens) == expected.tokens
