"""The demo leaves nothing running, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [pytest.mark.engine, pytest.mark.full]


def _descendants_by_environment(mark: str) -> list[int]:
    """Processes that carry a variable which only our demo, and what it started, has."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                environment = (folder / "environ").read_bytes()
            except OSError:
                continue
            if mark.encode() in environment.split(b"\0"):
                found.append(int(folder.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_ends_its_engine_and_its_service(number: signal.Signals, tmp_path: Path) -> None:
    """Interrupted while an engine and the private service run, the demo exits 130 and nothing of it is left."""
    # the second engine is up, and has its private service
    arguments = ("demo", "--models", "llama-demo", "--prompt-tokens", "1500")
    _interrupt(arguments, b"(b) asking", number=number, num_processes=3, log=tmp_path / "demo.log")


def test_an_interrupted_demo_of_disaggregated_prefill_ends_its_servers(tmp_path: Path) -> None:
    """Interrupted while two servers, their engines, the proxy and the private service run: nothing of it is left."""
    _interrupt(("demo.pd",), b"asking the proxy", number=signal.SIGTERM, num_processes=6, log=tmp_path / "demo.log")


def _interrupt(
    arguments: tuple[str, ...], moment: bytes, *, number: signal.Signals, num_processes: int, log: Path
) -> None:
    """Run a demo, send it a signal when its log says `moment`, and look for what it has left."""
    mark = f"DEMO_MARK={os.getpid()}-{arguments[0]}-{number}"
    name, _, value = mark.partition("=")
    env = {**os.environ, name: value, "PYTHONPATH": str(ROOT)}
    with log.open("wb") as output:
        demo = subprocess.Popen(
            [sys.executable, "-m", *arguments], cwd=ROOT, env=env, stdout=output, stderr=output, start_new_session=True
        )
    try:
        give_up_s = time.monotonic() + 600
        while moment not in log.read_bytes():
            assert demo.poll() is None, log.read_text()
            assert time.monotonic() < give_up_s, log.read_text()
            time.sleep(0.2)
        assert len(_descendants_by_environment(mark)) >= num_processes
        demo.send_signal(number)
        assert demo.wait(120) == 130, log.read_text()
        assert _descendants_by_environment(mark) == []
    finally:
        demo.kill()
        demo.wait()
        for pid in _descendants_by_environment(mark):
            os.kill(pid, signal.SIGKILL)
