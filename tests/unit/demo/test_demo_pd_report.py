"""What the demo of disaggregated prefill tells, and when it fails."""

from __future__ import annotations

import dataclasses
import json

import pytest

from demo.pd import Row, as_line, failures

GOOD = Row(
    model="llama",
    prompt_tokens=2500,
    prefill_computed_tokens=2500,
    external_tokens=2432,
    outputs_equal=True,
    total_s=1.23456,
)


def test_the_last_line_has_the_named_fields() -> None:
    """A program finds every field it was promised in the `DEMO-PD` line."""
    word, _, text = as_line([GOOD]).partition(" ")
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
def test_it_fails_for_wrong_output_and_for_nothing_restored(change: dict[str, object], found: int) -> None:
    """A slow machine is no failure."""
    assert len(failures([dataclasses.replace(GOOD, **change)])) == found  # type: ignore[arg-type]


def test_no_rows_are_a_failure() -> None:
    """A demo that compared nothing has shown nothing."""
    assert failures([]) != []
