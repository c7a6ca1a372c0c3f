"""Leases: receipts that keep staged records in this node's memory until a deadline."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.api import LeaseId
from kvstore.format.record import Record
from kvstore.model.keys import RecordKey
from kvstore.runtime.budget import Shares
from kvstore.runtime.clock import Clock
from kvstore.tiers.memory import MemoryTier, Pin

__all__ = ["LEASE_ID_BYTES", "LeaseTable"]

LEASE_ID_BYTES = 16


@dataclass(eq=False, slots=True)
class _Lease:
    """One lease.

    Attributes:
        pins: What it holds; a discarded key is removed at once.
        owner: The peer whose end also ends the lease; empty: none.
        ends_s: When it expires, on the table's clock.
        tenant: Whose records they are.
        num_records: How many were leased.
    """

    pins: dict[RecordKey, Pin]
    owner: str
    ends_s: float
    tenant: str
    num_records: int


class LeaseTable:
    """Knows who holds which records. Never waits; all methods belong to one event loop's thread.

    An id is unguessable, so that one peer cannot end or read through another's lease. Leases, and the records in them,
    are shared among tenants.
    """

    def __init__(
        self, memory: MemoryTier, clock: Clock, *, lease_s: float, leases_max: int, records_max: int = sys.maxsize
    ) -> None:
        self.lease_s = lease_s
        self.num_expired = 0
        self._memory = memory
        self._clock = clock
        self._held = Shares(leases_max)
        self._records = Shares(records_max)
        self._leases: dict[LeaseId, _Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def is_full(self, tenant: str, num_records: int = 0) -> bool:
        """Whether a lease of so many records would be more than a tenant may have now."""
        return not self._held.left_for(tenant) or num_records > self._records.left_for(tenant)

    def grant(self, pins: Mapping[RecordKey, Pin], owner: str = "", tenant: str = "") -> LeaseId:
        """Take over `pins` and return the receipt for them."""
        lease = LeaseId(secrets.token_bytes(LEASE_ID_BYTES))
        ends_s = self._clock.monotonic_s() + self.lease_s
        self._leases[lease] = _Lease(dict(pins), owner, ends_s, tenant, len(pins))
        self._held.take(tenant, 1)
        self._records.take(tenant, len(pins))
        return lease

    def renew(self, lease: LeaseId) -> bool:
        """Start the lease's time again. False: it has ended."""
        held = self._live(lease)
        if held is None:
            return False
        held.ends_s = self._clock.monotonic_s() + self.lease_s
        return True

    def record(self, lease: LeaseId, key: RecordKey) -> Record | None:
        """A leased record; `None`: the lease has ended, never held `key`, or the record was discarded since."""
        held = self._live(lease)
        if held is None or (pin := held.pins.get(key)) is None:
            return None
        return pin.records[0]

    def release(self, lease: LeaseId) -> None:
        """End a lease. Unknown ones are ignored."""
        held = self._leases.pop(lease, None)
        if held is not None:
            self._held.give_back(held.tenant, 1)
            self._records.give_back(held.tenant, held.num_records)
            for pin in held.pins.values():
                self._memory.unpin(pin)

    def of_tenant(self, tenant: str) -> int:
        """How many leases a tenant holds."""
        return self._held.used_by(tenant)

    def release_owner(self, owner: str) -> int:
        """End all leases of an owner; returns how many."""
        leases = [lease for lease, held in self._leases.items() if held.owner == owner]
        for lease in leases:
            self.release(lease)
        return len(leases)

    def forget(self, key: RecordKey) -> list[Record]:
        """Remove a bad record from every lease: nobody may load it any more.

        Returns:
            What a reader who found it bad has seen, since readers name no bytes: what was leased under this name or,
            when that lease has ended, what is in memory. None: it has left, and what was put since is not told apart.
        """
        leased: dict[int, Record] = {}
        for held in self._leases.values():
            if (pin := held.pins.pop(key, None)) is not None:
                leased[id(pin.records[0])] = pin.records[0]
                self._memory.unpin(pin)
        in_memory = self._memory.peek(key)
        return list(leased.values()) or ([in_memory] if in_memory is not None else [])

    def sweep(self) -> int:
        """End all expired leases; returns how many."""
        now_s = self._clock.monotonic_s()
        ended = [lease for lease, held in self._leases.items() if held.ends_s <= now_s]
        for lease in ended:
            self.release(lease)
        self.num_expired += len(ended)
        return len(ended)

    def release_all(self) -> None:
        """End every lease."""
        for lease in list(self._leases):
            self.release(lease)

    def _live(self, lease: LeaseId) -> _Lease | None:
        """The lease, unless it has expired: then it ends now, not only at the next sweep."""
        held = self._leases.get(lease)
        if held is not None and held.ends_s <= self._clock.monotonic_s():
            self.release(lease)
            self.num_expired += 1
            return None
        return held
