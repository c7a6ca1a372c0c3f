"""How long the demo's prompt is."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from demo.runs import _affordable, prompt_of
from kvstore.testing.engine import Answer, EngineProcess, Request


class Engine:
    """Stands in for an engine of a processor of a given speed, which no test can choose."""

    def __init__(self, tokens_per_s: float) -> None:
        self._tokens_per_s = tokens_per_s

    def generate(self, requests: list[Request], *, timeout_s: float) -> list[Answer]:
        assert timeout_s > 0
        return [
            Answer((1,), (), num_cached_tokens=0, ttft_s=len(one.prompt) / self._tokens_per_s, total_s=1.0)
            for one in requests
        ]


@pytest.mark.parametrize(
    ("tokens_per_s", "chosen", "expected"),
    [(340, None, 8192), (100, None, 4096), (30, None, 2048), (1, None, 2048), (30, 8192, 8192), (30, 1500, 1500)],
)
def test_a_slow_processor_is_asked_for_less(tokens_per_s: float, chosen: int | None, expected: int) -> None:
    """What would take minutes is cut, and said; a length that somebody chose is kept."""
    said: list[str] = []
    prompt = prompt_of("llama-demo", Path("/checkpoint"), 1, chosen)
    cut = _affordable(prompt, cast(EngineProcess, Engine(tokens_per_s)), said.append)
    assert cut.tokens == prompt.tokens[:expected] and len(cut.tokens) == expected
    assert [f"{expected:,} tokens" in line for line in said] == [True] * (expected < len(prompt.tokens))
