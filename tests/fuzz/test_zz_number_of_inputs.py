"""The number of inputs, counted after the fuzz itself."""

from __future__ import annotations

from tests.fuzz import inputs, test_fuzz_records, test_fuzz_wire


def test_at_least_two_hundred_thousand() -> None:
    """`make test-full` runs at least 200,000 inputs; whatever was run here was run in the number that was planned."""
    assert test_fuzz_records and test_fuzz_wire
    assert sum(inputs.PLANNED.values()) >= 200_000
    for name, num_run in inputs.RUN.items():
        assert num_run >= inputs.PLANNED[name] // (1 if inputs.FULL else inputs.SHARE), name
