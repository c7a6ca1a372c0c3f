"""The restart benchmark's output, on few records; no figure is judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.restart import main


def test_three_openings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without an index, after a clean end and after a kill, all records are found; nothing is left behind."""
    assert main(["--records", "700", "--folder", str(tmp_path)]) == 0
    word, _, line = capsys.readouterr().out.splitlines()[-1].partition(" ")
    rows = json.loads(line)
    assert word == "BENCH"
    assert [row["what"] for row in rows] == ["without an index", "after a clean end", "after a kill"]
    assert all(row["records"] == 700 and row["seconds"] > 0 for row in rows)
    assert list(tmp_path.iterdir()) == []
