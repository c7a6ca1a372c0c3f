"""Patience: whatever is not about time waits as long as it takes, however busy the machine is."""

from __future__ import annotations

import pytest

from kvstore.runtime.deadline import Deadline

_PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of the interface get a minute, except those that get no time at all."""
    from kvstore.service.admin.context import AdminContext

    def soon(context: AdminContext, seconds: float = _PATIENCE_S) -> Deadline:
        return Deadline.after(seconds and max(seconds, _PATIENCE_S), context.clock)

    monkeypatch.setattr(AdminContext, "soon", soon)
