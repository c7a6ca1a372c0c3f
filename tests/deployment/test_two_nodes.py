"""`deploy/two_nodes.py` without engines: what it asks of which service, and what it makes of the answers."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from demo.runs import Prompt, Reference, Run
from kvstore.testing.engine import Answer
from tests.deployment.files import DEPLOY, compose_service


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("two_nodes", DEPLOY / "two_nodes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "two_nodes", module)
    spec.loader.exec_module(module)
    return module


def answer(ttft_s: float, cached: int) -> Answer:
    return Answer(tokens=(1, 2), logprobs=(), num_cached_tokens=cached, ttft_s=ttft_s, total_s=2.0)


def test_one_saves_and_the_other_resumes(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first engine is given one service and the second the other, after all has reached the shared tiers."""
    seen: list[tuple[str, str]] = []

    def connected(name: str, prompt: Prompt, *, connector: Mapping[str, Any], **_: Any) -> Run:
        seen.append((name, connector["url"]))
        return Run(answer(0.1, len(prompt.tokens) - 16), {"connector_loaded_bytes": 7}, {"redis": 8}, 5)

    def saved(ask: Callable[[], Mapping[str, Any]]) -> None:
        seen.append(("wait", ask()["url"]))

    monkeypatch.setattr(script, "write_checkpoint", lambda *_: tmp_path)
    monkeypatch.setattr(script, "run_reference", lambda prompt, *_: Reference(prompt, answer(1.0, 0), answer(0.05, 64)))
    monkeypatch.setattr(script, "run_connected", connected)
    monkeypatch.setattr(script, "status", lambda url: {"url": url})
    monkeypatch.setattr(script, "wait_saved", saved)
    (row,) = script.run("unix:/a", "unix:/b", 80, tmp_path, lambda _: None)
    assert seen == [("b", "unix:/a"), ("wait", "unix:/a"), ("c", "unix:/b")]
    assert (row.prompt_tokens, row.external_tokens, row.tiers) == (80, 64, {"redis": 8})
    assert row.outputs_equal and row.speedup == pytest.approx(10)


def test_it_waits_until_nothing_waits(script: ModuleType) -> None:
    """Every tier's queue must be empty."""
    states = [{"redis": {"records": 0}, "s3": {"records": 2}}, {"redis": {"records": 0}, "s3": {"records": 0}}]
    script.wait_saved(lambda: {"write_back": states.pop(0)})
    assert states == []


def test_the_compose_file_gives_options_that_it_has(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's command is one that the script takes."""
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(script, "run", lambda *given: asked.append(given) or [])
    monkeypatch.setattr(script, "run_program", lambda name, run, report: len(run(None)))
    monkeypatch.setattr(sys, "argv", ["two_nodes", *compose_service("demo")["command"]])
    assert script.main() == 0
    ((save, load, tokens, folder, _),) = asked
    assert (save, load) == ("unix:/run/kvstore-a/kvstore.sock", "unix:/run/kvstore-b/kvstore.sock")
    assert (tokens, folder) == (None, Path("/var/lib/kvstore"))
