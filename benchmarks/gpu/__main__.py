"""`python -m benchmarks.gpu --out FILE`: what the connector does on a GPU, checked and measured stage by stage.

Needs Python, torch with CUDA and numpy; stage `service` also what the service is made with. Each stage is a process of
its own, so that neither an error that a GPU remembers nor one that hangs costs the stages after it. FILE is written
again with every result: a run that is cut short still tells. Without a GPU everything runs on host memory in small
sizes, to try the kit; such figures mean nothing. See benchmarks/gpu/README.md.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

__all__ = ["STAGES", "main"]

STAGES = {
    "ceilings": 70.0,
    "contract": 80.0,
    "order": 50.0,
    "copies": 80.0,
    "service": 110.0,
    "exactness": 240.0,
    "first_token": 200.0,
}
"""Each stage's module, and the seconds after which it is ended."""

_ERROR_LINES = 30
_WORD = "GPU-KIT"
_ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages; 0 unless one failed for another reason than a machine that lacks something."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the JSON goes (otherwise to stdout at the end)")
    parser.add_argument("--stages", default=",".join(STAGES), help=f"which, with commas between: {','.join(STAGES)}")
    parser.add_argument("--limit-s", type=float, default=800.0, help="ends what is not done by then (800)")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)  # this process is one stage
    chosen = parser.parse_args(arguments)
    if chosen.stage:
        return _be_stage(chosen.stage)
    wanted = chosen.stages.split(",")
    if unknown := set(wanted) - set(STAGES):
        parser.error(f"unknown stages: {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    try:
        report = Report(chosen.out, wanted)
    except (OSError, ValueError) as error:
        parser.error(f"--out: cannot write {chosen.out}: {error}")
    end_s = time.monotonic() + chosen.limit_s
    try:
        _run_stages(wanted, end_s, report)
    except KeyboardInterrupt:
        print("gpu kit: interrupted; what was measured until then is kept", file=sys.stderr)
        return 130
    finally:
        if chosen.out is None:
            print(json.dumps(report.values, indent=1))
    return 1 if any(stage["status"] == "failed" for stage in report.values["stages"].values()) else 0


def _run_stages(wanted: Sequence[str], end_s: float, report: Report) -> None:
    for name in wanted:
        limit_s = min(STAGES[name], end_s - time.monotonic())
        if limit_s <= 0:
            report.ended(name, "not run: no time was left", 0.0)
            continue
        started_s = time.monotonic()
        try:
            status, error = _run_stage(name, limit_s, partial(report.result, name))
        except KeyboardInterrupt:
            report.ended(name, "interrupted", time.monotonic() - started_s)
            raise
        report.ended(name, status, time.monotonic() - started_s, error)


class Report:
    """What is known so far, in a file that is written again each time.

    Args:
        path: The file; `None`: nowhere.
        stages: What will run.

    Attributes:
        values: What the file holds.
    """

    def __init__(self, path: Path | None, stages: Sequence[str]) -> None:
        self._path = path
        self.values: dict[str, Any] = {
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": _commit(),
            "machine": None,
            "stages": {name: {"status": "not run", "seconds": 0.0, "results": []} for name in stages},
        }
        self._write()

    def result(self, stage: str, result: dict[str, Any]) -> None:
        """Add one result of a stage that runs."""
        if result["name"] == "machine":
            self.values["machine"] = result
        else:
            self.values["stages"][stage]["status"] = "running"
            self.values["stages"][stage]["results"].append(result)
        self._write()

    def ended(self, stage: str, status: str, seconds: float, error: str = "") -> None:
        """Say how a stage ended."""
        self.values["stages"][stage] |= {"status": status, "seconds": round(seconds, 2)}
        if error:
            self.values["stages"][stage]["error"] = error
        print(f"gpu kit: {stage}: {status}, {seconds:.1f} s", file=sys.stderr, flush=True)
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            if self._path.is_dir():
                raise IsADirectoryError(f"{self._path} is a directory: name a file")
            beside = self._path.with_name(self._path.name + ".part")
            beside.write_text(json.dumps(self.values, indent=1) + "\n")
            beside.replace(self._path)


def _run_stage(name: str, limit_s: float, on_result: Callable[[dict[str, Any]], None]) -> tuple[str, str]:
    """Its status, and the end of what it wrote if it failed."""
    status, last = "failed", deque[str](maxlen=_ERROR_LINES)
    command = [sys.executable, "-m", "benchmarks.gpu", "--stage", name]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=_ROOT, env=env
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        errors = process.stderr

        def pass_on() -> None:
            for line in errors:
                last.append(line)
                sys.stderr.write(line)
                sys.stderr.flush()

        watcher = threading.Thread(target=pass_on, daemon=True)
        watcher.start()
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(limit_s, end)
        timer.daemon = True
        timer.start()
        try:
            for line in process.stdout:
                word, _, text = line.partition(" ")
                if word == _WORD:
                    told = json.loads(text)
                    if "status" in told:
                        status = told["status"]
                    else:
                        on_result(told)
            process.wait()
        except BaseException:
            process.kill()
            raise
        finally:
            timer.cancel()
        watcher.join()
    if is_late.is_set():
        return "failed", f"ended after {limit_s:.0f} s\n{''.join(last)}"
    return status, "".join(last) if status == "failed" else ""


def _be_stage(name: str) -> int:
    """Run one stage in this process; an error ends it with a traceback, which is the report."""
    try:
        kit_module = importlib.import_module("benchmarks.gpu.kit")
        kit = kit_module.Kit(name)
        kit.tell("machine", **kit.machine())
        importlib.import_module(f"benchmarks.gpu.{name}").run(kit)
    except ModuleNotFoundError as missing:
        print(_WORD, json.dumps({"status": f"needs {missing.name}"}), flush=True)
        return 0
    print(_WORD, json.dumps({"status": "ok" if kit.is_gpu else "ok, no GPU"}), flush=True)
    return 0


def _commit() -> str | None:
    """Of the source tree, where it is a clone and git is there."""
    try:
        done = subprocess.run(
            ["git", "-C", str(_ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
