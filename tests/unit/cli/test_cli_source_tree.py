"""`kvstore demo` and `kvstore bench`: programs of the source tree, under the names that people look for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.cli import programs as cli_programs
from kvstore.cli.main import main
from kvstore.cli.programs import BENCHMARKS
from tests.architecture.sources import ROOT


@pytest.mark.parametrize(
    ("arguments", "option"), [(["demo", "--help"], "--backends"), (["bench", "store", "--help"], "--in-flight")]
)
def test_options_are_the_programs_own(arguments: list[str], option: str, tmp_path: Path) -> None:
    """From any folder, also from one with a program of that name."""
    (tmp_path / "demo.py").write_text("raise SystemExit('another one')")
    done = subprocess.run(
        [sys.executable, "-c", "from kvstore.cli.main import main; raise SystemExit(main())", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert option in done.stdout


def test_every_benchmark_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    """The list names programs that exist, and all of them but the parts of others."""
    programs = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    programs |= {path.parent.name for path in (ROOT / "benchmarks").glob("*/__main__.py")}
    assert {module for module, _ in BENCHMARKS.values()} == programs - {"peer"}
    assert main(["bench"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in BENCHMARKS)


def test_an_installed_package_says_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no tree around it."""
    monkeypatch.setattr(cli_programs, "_ROOT", tmp_path)
    assert main(["bench", "ttft"]) == 2
    assert "clone the repository" in capsys.readouterr().err
