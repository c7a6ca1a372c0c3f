"""The GPU of this Python environment, as the connector tries it: in a process of its own, since torch is not imported
here."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any

from kvstore.doctor.check import Check, Criterion, Finding
from kvstore.runtime.deadline import Deadline

_LATER = "kvstore doctor --engine vllm --timeout 60: at first, kernels are compiled"
_FALLBACKS = {
    "in_place": (
        "records are copied in host memory first",
        "raise the memlock limit (docker run --ulimit memlock=-1)",
    ),
    "kernels": (
        "processors verify records and decode tiles",
        "install what Triton needs in the engine's image, usually gcc and Python's headers",
    ),
    "encoding": ("processors encode tiles", "keep compression: auto, or set planes"),
}
"""For each way that an engine can do without what it does instead, and what may mend it."""


def gpu_check() -> Check:
    """The check of which ways records can take on the GPU of an engine in this Python environment."""

    async def run(deadline: Deadline) -> AsyncIterator[Finding]:
        yield await asyncio.to_thread(_examine, deadline)

    return Check(("engine.gpu",), run, _LATER)


def judge_gpu(gpu: str | None, problems: Mapping[str, str]) -> Finding:
    """Judge a GPU, or `None`, and why each way does not work; empty if it does."""
    it = Criterion("engine.gpu", "the GPU reads records in the service's memory, verifies them and decodes tiles")
    if gpu is None:
        return it.skipped("torch sees no GPU here: processors copy, verify and decode")
    if problem := problems.get("pinned"):
        fix = "raise the memlock limit (docker run --ulimit memlock=-1)"
        return it.failed(f"{gpu}: no memory can be pinned, so its engine is not cached: {problem}", fix)
    missing = [name for name in _FALLBACKS if problems.get(name)]
    if missing:
        seen = "; ".join(f"{_FALLBACKS[name][0]}: {problems[name]}" for name in missing)
        return it.warning(f"{gpu}: {seen}", "; ".join(_FALLBACKS[name][1] for name in missing))
    return it.ok(gpu)


def _examine(deadline: Deadline) -> Finding:
    # the modules of this process, and none of the folder where it runs
    begin = f"import runpy, sys; sys.path[:] = {list(filter(None, sys.path))!r}; "
    command = [sys.executable, "-P", "-c", begin + "runpy.run_module('connector.device', run_name='__main__')"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline.remaining_s, check=True)
    except subprocess.TimeoutExpired:  # no failure: at first Triton compiles its kernels, and torch alone takes seconds
        return Criterion("engine.gpu", "an answer").warning("it was not tried in time", _LATER)
    except subprocess.CalledProcessError as error:
        return judge_failure(error.stderr)
    report: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return judge_gpu(report["gpu"], {path["name"]: path["problem"] for path in report["paths"]})


def judge_failure(said: str) -> Finding:
    """Judge what the process said that could not try anything."""
    last = next(reversed(said.strip().splitlines()), "no word")
    it = Criterion("engine.gpu", "torch and the connector can be imported")
    if "No module named 'torch'" in last:
        return it.skipped("torch is not installed in this Python: run this command in the engine's")
    return it.failed(last, "python -m connector.device")
