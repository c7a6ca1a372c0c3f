"""The quick benchmark's output, on sizes that take no time; no figure is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.quick import SECTIONS, main

ROOT = Path(__file__).resolve().parents[3]
TINY = ["--sizes", "4KiB,8KiB", "--total-bytes", "32KiB", "--repetitions", "2"]
COLUMNS = {"what", "size_bytes", "in_flight", "gb_s", "ceiling", "ceiling_gb_s", "ratio", "cpu_s_per_gb"}


def rows_of(output: str) -> list[dict[str, object]]:
    word, _, line = output.splitlines()[-1].partition(" ")
    assert word == "BENCH"
    return json.loads(line)


def check(rows: list[dict[str, object]]) -> None:
    assert [row["what"] for row in rows] == ["codec encode", "codec decode", "verify"]
    for row in rows:
        assert set(row) == COLUMNS
        assert row["ceiling"] == "memcpy"
        assert row["in_flight"] == 1
        gb_s, ceiling_gb_s, ratio = row["gb_s"], row["ceiling_gb_s"], row["ratio"]
        assert isinstance(gb_s, float) and isinstance(ceiling_gb_s, float) and isinstance(ratio, float)
        assert gb_s > 0 and ceiling_gb_s > 0
        # both figures and their ratio are rounded to four places
        assert ratio == pytest.approx(gb_s / ceiling_gb_s, rel=0.02, abs=2e-4)
    assert [row["size_bytes"] for row in rows] == [8192, 8192, 8192 - 64]


def test_json_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """With `--json` the BENCH line is all there is on stdout, and it has every column."""
    assert main(["--only", "codec", "--json", *TINY]) == 0
    output = capsys.readouterr().out
    assert len(output.splitlines()) == 1
    check(rows_of(output))


def test_table_comes_before_the_line() -> None:
    """As people call it, a table is printed first and the BENCH line is the last."""
    command = [sys.executable, "-m", "benchmarks.quick", "--only", "codec", *TINY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    table = done.stdout.partition("BENCH ")[0]
    assert all(what in table for what in ("codec encode", "codec decode", "verify"))
    check(rows_of(done.stdout))


@pytest.mark.parametrize("arguments", [["--only", "tape"], ["--sizes", "12"], ["--repetitions", "0"]])
def test_wrong_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A section that does not exist, records smaller than their header and no repetitions at all are usage errors."""
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_section_that_fails_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where one server cannot be had the other sections are still measured, and the exit status tells."""

    def fails(plan: object, say: object) -> list[object]:
        raise OSError("no room for a server")

    monkeypatch.setitem(SECTIONS, "s3", fails)
    assert main(["--only", "s3,codec", "--json", *TINY]) == 1
    captured = capsys.readouterr()
    assert "s3: no room for a server" in captured.err
    check(rows_of(captured.out))
