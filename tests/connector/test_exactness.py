"""What a fresh engine restores is, bit for bit, what an engine without connector resumes from its own cache."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.format.header_v1 import HEADER_BYTES
from kvstore.format.names import parse_name
from kvstore.format.record import read_record
from kvstore.testing.engine import Answer, EngineProcess, EngineSpec
from tests.connector.conftest import RESTORED, ask_each

pytestmark = pytest.mark.engine

Start = Callable[[EngineSpec], EngineProcess]


def spec(llama: Path, cache: Path, **changes: object) -> EngineSpec:
    values: dict[str, object] = {
        "checkpoint": llama,
        "connector": {"url": "embedded:", "memory_bytes": "256MiB", "disk_bytes": "1GiB"},
        "environment": {"XDG_CACHE_HOME": str(cache)},
    }
    return EngineSpec(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_restored_runs_equal_local_hits(
    runner: str,
    llama: Path,
    prompts: list[tuple[int, ...]],
    references: Callable[[str], list[Answer]],
    engine: Start,
    tmp_path: Path,
) -> None:
    """A multi-process engine saves three prompts; fresh engines of both forms resume them with equal logprobs."""
    saving = engine(spec(llama, tmp_path, runner=runner, multiprocess=True))
    computed = ask_each(saving, prompts)
    assert [answer.num_cached_tokens for answer in computed] == [0, 0, 0]
    saving.stop()
    for multiprocess in (False, True):
        fresh = engine(spec(llama, tmp_path, runner=runner, multiprocess=multiprocess))
        restored = ask_each(fresh, prompts)
        fresh.stop()
        assert [answer.num_cached_tokens for answer in restored] == list(RESTORED)
        differences = [mine.difference(local) for mine, local in zip(restored, references(runner), strict=True)]
        assert differences == [0.0, 0.0, 0.0], (runner, multiprocess)
        assert all(mine.tokens == cold.tokens for mine, cold in zip(restored, computed, strict=True))
