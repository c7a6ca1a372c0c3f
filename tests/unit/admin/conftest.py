"""A service, and long deadlines, so that a busy machine fails no test that is not about time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.runtime.deadline import Deadline
from tests.unit.admin.service_harness import ServiceHarness, open_service

_PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of the interface get a minute, except those that get no time at all."""
    from kvstore.service.admin.data_loop import DataLoop

    def soon(loop: DataLoop, within_s: float = _PATIENCE_S) -> Deadline:
        return Deadline.after(within_s and max(within_s, _PATIENCE_S))

    monkeypatch.setattr(DataLoop, "soon", soon)


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[ServiceHarness]:
    """A service over memory and a directory."""
    async with open_service(tmp_path) as opened:
        yield opened
