"""The process that engines are forked from, where it cannot be had; real engines use it in tests/connector."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.testing.engine import EngineProcess, EngineSpec
from kvstore.testing.engine.forked import warm_starts
from kvstore.testing.engine.process import EngineFailed


def test_an_import_that_fails_is_told_by_every_start(tmp_path: Path) -> None:
    """The error ends with what the import said, of the first engine and of the next one."""
    (tmp_path / "vllm.py").write_text("raise ImportError('no vLLM today')")
    spec = EngineSpec(checkpoint=tmp_path, environment={"PYTHONPATH": str(tmp_path)})
    with warm_starts():
        for number in range(2):
            with pytest.raises(
                EngineFailed, match=r"the process that engines start from ended \(exit 1\)[^$]*no vLLM today"
            ):
                EngineProcess(spec, tmp_path / f"{number}.log", tmp_path)
