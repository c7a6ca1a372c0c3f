"""What must be true of a living service whenever time passes, and of one at rest."""

from __future__ import annotations

from kvstore.api import LeaseId
from tests.simulation.oracle import Oracle
from tests.simulation.service import Service

_SWEEP_S = 1.0 + 0.01
"""Leases that ended are swept so often."""


class ServiceWatch:
    """Looks into one service."""

    def __init__(self, service: Service, oracle: Oracle) -> None:
        self._service = service
        self._oracle = oracle
        self._ends_s: dict[LeaseId, float] = {}
        self._last_ends_s: dict[LeaseId, float] = {}

    def look(self, now_s: float) -> None:
        """Budgets hold, leases end."""
        store, limits = self._service.store, self._service.sizes.limits
        memory = self._service.memory
        for what, seen, limit in (
            ("memory", memory.used_bytes, memory.limit_bytes),
            ("staged bytes", memory.pinned_bytes, limits.stage_bytes),
            ("saves in flight", store._saver._in_flight.used_bytes, limits.save_bytes_in_flight),
            ("reads in flight", store._stager._in_flight.used_bytes, limits.stage_bytes_in_flight),
            ("leases", len(store.leases), limits.leases_max),
            *((name, queue.queued_bytes, limits.write_back_bytes) for name, queue in store._saver.queues.items()),
        ):
            if seen > limit:
                self._violate(f"{what}: {seen} are over the budget of {limit}")
        held = store.leases._leases
        for lease in [lease for lease in self._ends_s if lease not in held]:
            del self._ends_s[lease], self._last_ends_s[lease]
        for lease, entry in held.items():
            # by our own clock: from when it was seen first, or seen to be renewed
            if lease not in self._ends_s or entry.ends_s > self._last_ends_s[lease]:
                self._ends_s[lease], self._last_ends_s[lease] = now_s + limits.lease_s, entry.ends_s
            elif now_s > self._ends_s[lease] + _SWEEP_S:
                self._violate(f"a lease lives {now_s - self._ends_s[lease]:.3f} s after its end")
                return

    def look_at_rest(self) -> None:
        """Nothing is held for nobody: no lease, no byte, no place in a queue."""
        store = self._service.store
        held = {
            "leases": len(store.leases),
            "pinned bytes": self._service.memory.pinned_bytes,
            "bytes of saves": store._saver._in_flight.used_bytes,
            "bytes of reads": store._stager._in_flight.used_bytes,
            "stages": len(store._stager._runs),
            "flights": len(store._stager._flights),
            "records under way": len(store._saver._pending_writes),
            **{f"bytes for {name}": queue.num_bytes for name, queue in store._saver.queues.items()},
            **{f"reads of {name}": reads.num_running for name, reads in store._stager._reads.items()},
            "changes to tell": len(self._service.recorder),
        }
        for what, amount in held.items():
            if amount:
                self._violate(f"at rest it still holds {what}: {amount}")
        memory = self._service.memory
        cost = sum(slot.cost_bytes for slot in memory._slots.values())
        if cost != memory.used_bytes:
            self._violate(f"its memory holds {cost} bytes and counts {memory.used_bytes}")

    def _violate(self, text: str) -> None:
        self._oracle.violate(f"{self._service.name}: {text}")
