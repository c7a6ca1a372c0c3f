"""Ends expired leases even when nobody uses the table: the bytes that they pin are needed."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from kvstore.errors import Closed
from kvstore.runtime.background import Background
from kvstore.runtime.meters import Meters
from kvstore.store.leases import LeaseTable

__all__ = ["LeaseSweep"]

_SWEEP_S = 1.0


class LeaseSweep:
    """Sweeps a lease table every second while it has leases.

    Args:
        leases: The table.
        background: Owns the task; once it is closed nothing is swept.
        meters: Counts `leases_expired`, `stage_refused{reason="leases"}`.
    """

    def __init__(self, leases: LeaseTable, background: Background, meters: Meters) -> None:
        self._leases = leases
        self._background = background
        self._meters = meters
        self._task: asyncio.Task[None] | None = None

    def is_full(self, tenant: str, num_records: int = 0) -> bool:
        """Whether a tenant can have no lease of so many records now, and its stage must be refused. Counts the
        refusal."""
        self._leases.sweep()
        is_full = self._leases.is_full(tenant, num_records)
        if is_full:
            self._meters.add("stage_refused", reason="leases")
        return is_full

    def go_on(self) -> None:
        """Keep sweeping: a lease was granted."""
        if self._task is None or self._task.done():
            with suppress(Closed):
                self._task = self._background.spawn(self._run(), "lease sweep")

    async def _run(self) -> None:
        while len(self._leases):
            await asyncio.sleep(min(_SWEEP_S, self._leases.lease_s))
            self._meters.add("leases_expired", self._leases.sweep())
