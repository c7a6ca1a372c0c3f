"""Long deadlines, so that a busy machine fails no test that is not about time."""

from __future__ import annotations

import pytest

from kvstore.runtime.deadline import Deadline

_PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of the interface get a minute, except those that get no time at all."""
    from kvstore.service.admin.data_loop import DataLoop

    def soon(loop: DataLoop, within_s: float = _PATIENCE_S) -> Deadline:
        return Deadline.after(within_s and max(within_s, _PATIENCE_S))

    monkeypatch.setattr(DataLoop, "soon", soon)
