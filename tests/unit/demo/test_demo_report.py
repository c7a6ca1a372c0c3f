"""What the demo tells, and when it fails."""

from __future__ import annotations

import dataclasses
import json

import pytest

from demo.report import Row, as_line, failures
from demo.runs import _grown

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
    word, _, text = as_line([GOOD]).partition(" ")
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
    assert len(failures([dataclasses.replace(GOOD, **change)])) == found  # type: ignore[arg-type]


def test_no_rows_are_a_failure() -> None:
    """A demo that compared nothing has shown nothing."""
    assert failures([]) != []


def test_only_what_the_prompt_added_counts() -> None:
    """Counters that stood before the prompt, other counters, and tiers that did not move are left out."""
    before = {'served_records{tier="redis"}': 3.0, "saves": 1.0}
    after = {'served_records{tier="redis"}': 8.0, 'served_records{tier="s3"}': 0.0, "saves": 9.0}
    assert _grown(before, after, "served_records") == {"redis": 5.0}
