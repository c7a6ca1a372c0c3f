"""Leases: receipts that keep staged records in this node's memory until a deadline."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from kvstore.api import LeaseId
from kvstore.errors import Closed
from kvstore.format.record import Record
from kvstore.model.keys import RecordKey
from kvstore.runtime.budget import Shares
from kvstore.store.context import StoreContext, StorePart
from kvstore.tiers.memory import Pin

_ID_BYTES = 16
_SWEEP_S = 1.0
_AT_ONCE = 1024
"""Records that are unpinned before the event loop gets a turn: a millisecond or two."""


class Unpinning(StorePart):
    """Gives back pins without waiting: a few at once, many piece by piece in the background. All pins of a long prompt
    in one go would hold the event loop for a tenth of a second.
    """

    def __init__(self, context: StoreContext) -> None:
        super().__init__(context)
        self._left: deque[dict[RecordKey, Pin]] = deque()
        self._task: asyncio.Task[None] | None = None

    def give_back(self, pins: dict[RecordKey, Pin]) -> None:
        """End pins. Empties `pins`, now or soon."""
        self._left.append(pins)
        if self._task is not None and not self._task.done():
            return
        if len(pins) > _AT_ONCE:
            with suppress(Closed):
                self._task = self._background.spawn(self._run(), "unpinning", is_shared=True)
                return
        self.finish()

    async def done(self) -> None:
        """Wait until all pins that were given back so far have ended. If cancelled, they end all the same."""
        if self._task is not None and not self._task.done():
            await asyncio.wait({self._task})

    def finish(self) -> None:
        """End all pins that were given back now, however many."""
        while self._left:
            self._unpin_some()

    async def _run(self) -> None:
        while self._left:
            self._unpin_some()
            await asyncio.sleep(0)

    def _unpin_some(self) -> None:
        pins = self._left[0]
        for key in list(islice(pins, _AT_ONCE)):
            self._memory.unpin(pins.pop(key))
        if not pins:
            self._left.popleft()


@dataclass(eq=False, slots=True)
class _Lease:
    """A lease while it lasts."""

    pins: dict[RecordKey, Pin]
    """What it holds; a discarded key is removed at once."""
    ends_s: float
    """When it expires, on the store's clock."""
    tenant: str
    num_records: int
    """How many records were leased at first."""


class LeaseTable(StorePart):
    """The leases of this node. Never waits; all methods belong to one event loop's thread.

    An id cannot be guessed, so a peer can neither end another's lease nor read through it. Leases, and records in
    them, are limited by `Shares`. While there are leases, expired ones are ended every second: the bytes that they pin
    are needed.

    Attributes:
        unpinning: Where pins go that end.
    """

    def __init__(self, context: StoreContext) -> None:
        super().__init__(context)
        self.lease_s = context.limits.lease_s
        self.num_expired = 0
        self.unpinning = Unpinning(context)
        self._held = Shares(context.limits.leases_max)
        self._records = Shares(context.limits.lease_records_max)
        self._leases: dict[LeaseId, _Lease] = {}
        self._sweeper: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._leases)

    def refuses(self, tenant: str, num_records: int = 0) -> bool:
        """Whether a lease of `num_records` would be more than a tenant may have now. Counts the refusal."""
        self.sweep()
        is_full = not self._held.left_for(tenant) or num_records > self._records.left_for(tenant)
        if is_full:
            self._meters.add("stage_refused", reason="leases")
        return is_full

    def grant(self, pins: Mapping[RecordKey, Pin], tenant: str = "") -> LeaseId:
        """Take over `pins` and return the receipt for them."""
        lease = LeaseId(secrets.token_bytes(_ID_BYTES))
        ends_s = self._clock.monotonic_s() + self.lease_s
        self._leases[lease] = _Lease(dict(pins), ends_s, tenant, len(pins))
        self._held.take(tenant, 1)
        self._records.take(tenant, len(pins))
        if self._sweeper is None or self._sweeper.done():
            with suppress(Closed):
                self._sweeper = self._background.spawn(self._sweep_regularly(), "lease sweep")
        return lease

    def renew(self, lease: LeaseId) -> bool:
        """Restart the lease's time. False: it has ended."""
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
        return pin.record

    def release(self, lease: LeaseId) -> None:
        """End a lease. Unknown ones are ignored."""
        held = self._leases.pop(lease, None)
        if held is not None:
            self._held.give_back(held.tenant, 1)
            self._records.give_back(held.tenant, held.num_records)
            self.unpinning.give_back(held.pins)

    def of_tenant(self, tenant: str) -> int:
        """How many leases a tenant holds."""
        return self._held.used_by(tenant)

    def forget(self, key: RecordKey) -> list[Record]:
        """Remove a bad record from every lease, so that it is loaded no more.

        Returns:
            The records that a reader may have found bad, since readers name a key and no bytes: what was leased under
            the key, or what is in memory if no lease holds it. Empty: neither.
        """
        leased: dict[int, Record] = {}
        for held in self._leases.values():
            if (pin := held.pins.pop(key, None)) is not None:
                leased[id(pin.record)] = pin.record
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
        self.unpinning.finish()

    async def _sweep_regularly(self) -> None:
        while self._leases:
            await asyncio.sleep(min(_SWEEP_S, self.lease_s))
            self.sweep()

    def _live(self, lease: LeaseId) -> _Lease | None:
        """The lease, unless it has expired: then it ends now, before the next sweep."""
        held = self._leases.get(lease)
        if held is not None and held.ends_s <= self._clock.monotonic_s():
            self.release(lease)
            self.num_expired += 1
            return None
        return held
