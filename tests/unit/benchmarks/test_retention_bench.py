"""The retention benchmark's output, on few bytes; no figure is judged."""

from __future__ import annotations

import json

import pytest

from benchmarks.retention import main


def test_a_directory(capsys: pytest.CaptureFixture[str]) -> None:
    """A row with rates, their ratio, and how much of the budget was held; nothing is refused."""
    tiny = ["--budget", "2MiB", "--times", "2", "--payload", "8KiB", "--repetitions", "1"]
    assert main(["--only", "directory", *tiny]) == 0
    word, _, line = capsys.readouterr().out.splitlines()[-1].partition(" ")
    (row,) = json.loads(line)
    assert word == "BENCH"
    assert (row["what"], row["budget_bytes"], row["refused"]) == ("directory", 2 << 20, 0)
    assert row["written_bytes"] >= 4 << 20
    assert row["gb_s"] > 0 and row["unbounded_gb_s"] > 0 and row["ratio"] > 0
    assert 0 < row["usage"] <= 1.05


def test_a_place_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the places that there are."""
    with pytest.raises(SystemExit) as refused:
        main(["--only", "tape"])
    assert refused.value.code == 2
    assert "directory" in capsys.readouterr().err
