"""What the demos report, when they fail, and how long the prompt is."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import cast

import pytest

from demo import pd
from demo.runs import Row, affordable, grown, prompt_of, report
from kvstore.testing.engine import Answer, EngineProcess, Request

GOOD = Row(
    model="m",
    run="c",
    prompt_tokens=8192,
    external_tokens=8064,
    recompute_ttft_s=14.0,
    restored_ttft_s=0.5,
    raw_bytes=1000,
    stored_bytes=600,
    outputs_equal=True,
    logprob_difference=0.0,
    tiers={"filesystem": 64},
)


def test_the_last_line_has_the_named_fields() -> None:
    """A program finds every field it was promised in the `DEMO` line."""
    word, _, text = report([GOOD], None)[0].partition(" ")
    (row,) = json.loads(text)["rows"]
    assert word == "DEMO"
    assert list(row) == [
        *("model", "run", "prompt_tokens", "external_tokens", "recompute_ttft_s", "restored_ttft_s", "speedup"),
        *("raw_bytes", "stored_bytes", "outputs_equal", "tiers"),
    ]
    assert row["speedup"] == 28.0


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, 0),
        ({"outputs_equal": False}, 1),
        ({"external_tokens": 0}, 1),
        ({"restored_ttft_s": 60.0}, 0),
        ({"run": "d", "tiers": {"s3": 64}}, 0),
        ({"run": "d", "tiers": {"redis": 1, "s3": 63}}, 1),
    ],
)
def test_the_demo_fails_for_wrong_output_not_for_slowness(change: dict[str, object], found: int) -> None:
    """Other tokens, nothing restored, or a page from where none may be are failures; a slow machine is not."""
    _, failures = report([dataclasses.replace(GOOD, **change)], None)  # type: ignore[arg-type]
    assert len(failures) == found


def test_no_rows_are_a_failure() -> None:
    """A demo that compared nothing has shown nothing."""
    assert report([], None)[1] != [] and pd.report([], None)[1] != []


def test_only_what_the_prompt_added_counts() -> None:
    """Counters that stood before the prompt, other counters, and tiers that did not move are left out."""
    before = {'served_records{tier="redis"}': 3.0, "saves": 1.0}
    after = {'served_records{tier="redis"}': 8.0, 'served_records{tier="s3"}': 0.0, "saves": 9.0}
    assert grown(before, after, "served_records") == {"redis": 5.0}


GOOD_PD = pd.Row(
    model="llama",
    prompt_tokens=2500,
    prefill_computed_tokens=2500,
    external_tokens=2432,
    outputs_equal=True,
    total_s=1.23456,
)


def test_the_last_line_of_disaggregated_prefill() -> None:
    """A program finds every field it was promised in the `DEMO-PD` line."""
    word, _, text = pd.report([GOOD_PD], None)[0].partition(" ")
    (row,) = json.loads(text)["rows"]
    assert word == "DEMO-PD"
    assert row == {
        "model": "llama",
        "prompt_tokens": 2500,
        "prefill_computed_tokens": 2500,
        "external_tokens": 2432,
        "outputs_equal": True,
        "total_s": 1.235,
    }


@pytest.mark.parametrize(
    ("change", "found"),
    [({}, 0), ({"outputs_equal": False}, 1), ({"external_tokens": 0}, 1), ({"total_s": 500.0}, 0)],
)
def test_disaggregated_prefill_fails_for_wrong_output(change: dict[str, object], found: int) -> None:
    """A slow machine is no failure."""
    _, failures = pd.report([dataclasses.replace(GOOD_PD, **change)], None)  # type: ignore[arg-type]
    assert len(failures) == found


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
    cut = affordable(prompt, cast(EngineProcess, Engine(tokens_per_s)), said.append)
    assert cut.tokens == prompt.tokens[:expected] and len(cut.tokens) == expected
    assert [f"{expected:,} tokens" in line for line in said] == [True] * (expected < len(prompt.tokens))
