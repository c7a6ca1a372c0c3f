"""The GPU kit, tried on a machine without a GPU: every stage runs, wherever it is copied to; no figure is judged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import contract
from benchmarks.gpu.__main__ import STAGES
from benchmarks.gpu.kit import Kit
from benchmarks.gpu.layouts import RECORDED
from connector.device import copy

ROOT = Path(__file__).resolve().parents[3]
HAS_GPU = torch.cuda.is_available()

BARE = """
import sys

class Blocked:
    names = {"vllm", "pytest", "hypothesis", "msgpack", "zstandard", "xxhash", "uvloop"}
    names |= {"pydantic", "rich", "typer", "redis", "transformers"}
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)

sys.meta_path.insert(0, Blocked())
"""


def run_kit(folder: Path, *arguments: str, path: Path | None = None) -> tuple[int, dict[str, Any], str]:
    """Exit status, the file, and what was written on the way."""
    out = folder / "gpu.json"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [path or ROOT, ROOT]))}
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(out.read_text()), done.stderr


def results(report: dict[str, Any], stage: str) -> dict[str, dict[str, Any]]:
    return {result["name"]: result for result in report["stages"][stage]["results"]}


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU: run the kit itself")
def test_a_bare_machine(tmp_path: Path) -> None:
    """With torch and numpy alone four stages run and tell, the fifth says what it needs; nothing failed."""
    (tmp_path / "sitecustomize.py").write_text(BARE)
    status, report, log = run_kit(tmp_path, path=tmp_path)
    assert status == 0, log
    seen = {name: stage["status"] for name, stage in report["stages"].items()}
    assert seen == {**dict.fromkeys(STAGES, "ok, no GPU"), "service": "needs msgpack"}
    assert report["machine"]["gpu"] is None
    skipped = [
        result["name"]
        for stage in report["stages"].values()
        for result in stage["results"]
        if result.get("skipped") == "no GPU"
    ]
    assert len(skipped) == 4 + 1 + 1  # memory files; orders left out; beside a matmul
    assert results(report, "ceilings")["both at once"]["gb_s"] > 0
    layouts = results(report, "contract")
    assert {name for name in layouts if layouts[name]["equal"]} >= {
        layout.name for layout in RECORDED if "hybrid" not in layout.name
    }
    assert len(layouts) == len(RECORDED)  # two of which are checked together, and a large one
    assert results(report, "order")["no wrong bytes"]["loaded"] > 0
    lanes = [result["lanes"] for result in report["stages"]["copies"]["results"] if "lanes" in result]
    assert lanes == [1, 2, 4, 8, 16] * 2


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU: run the kit itself")
def test_whole_ranks(tmp_path: Path) -> None:
    """Both models are saved through a service process and loaded from it, equal bit for bit, beside a ceiling."""
    status, report, log = run_kit(tmp_path, "--stages", "service")
    assert (status, list(report["stages"])) == (0, ["service"]), log
    found = results(report, "service")
    for model in ("hybrid of 27B", "Llama 70B, one rank of 8"):
        assert found[f"{model}: save"]["bytes"] == found[f"{model}: load"]["bytes"] > 0
        assert found[f"{model}: load"]["share"] > 0


@pytest.mark.parametrize("whole_group", [False, True])
def test_interrupted(tmp_path: Path, whole_group: bool) -> None:
    """Ctrl-C ends the kit and its stage at once, also if only the kit's own process gets it; the file says how far it
    came."""
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(out), "--stages", "order,copies"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True) as kit:
        assert kit.stderr is not None
        kit.stderr.readline()  # the stage runs
        (os.killpg if whole_group else os.kill)(kit.pid, signal.SIGINT)
        _, log = kit.communicate(timeout=60)
        assert kit.returncode == 130 and "interrupted" in log
    stages = json.loads(out.read_text())["stages"]
    assert (stages["order"]["status"], stages["copies"]["status"]) == ("interrupted", "not run")


@pytest.mark.parametrize("out", [".", "", "no such folder/gpu.json"])
def test_a_file_that_cannot_be_written(tmp_path: Path, out: str) -> None:
    """One line says so, before anything runs."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", out]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "--out: cannot write" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_stage_that_does_not_end(tmp_path: Path) -> None:
    """It is ended at its limit and told as failed; later ones are told as not run, and the file is whole."""
    status, report, log = run_kit(tmp_path, "--stages", "order,copies", "--limit-s", "0.3")
    assert status == 1, log
    assert report["stages"]["order"]["status"] == "failed"
    assert "ended after 0 s" in report["stages"]["order"]["error"]
    assert report["stages"]["copies"]["status"] == "not run: no time was left"


def test_a_stage_that_is_not_known(tmp_path: Path) -> None:
    """The command line names what there is."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--stages", "order,speed"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unknown stages: speed; there are ceilings, contract, order, copies, service" in done.stderr


@pytest.mark.parametrize("broken", ["gather_rows", "scatter_rows", "split_planes"])
def test_wrong_copies_are_found(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """A kernel that does nothing shows in the check of a layout."""
    layouts = [RECORDED[1]]
    assert contract.check(Kit("contract"), layouts, seed=1)
    monkeypatch.setattr(copy, broken, lambda *_: None)
    assert not contract.check(Kit("contract"), layouts, seed=2)
