"""Records on their way to the slower tiers, and the pending entry that each needs meanwhile.

The invariant: while a record is in the hot tier and may not be evicted there, the log has a pending entry for it. So
the entry is written before the record, and removed after the cold tier has the record and the hot tier may evict it.
Without a hot tier the entry only says that a write to the cold tier has begun.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from kvstore.catalog.pending import PendingEntry, PendingLog, PendingTotals
from kvstore.errors import Closed, KVStoreError, Unavailable
from kvstore.format.record import Record
from kvstore.model.keys import RecordKey
from kvstore.runtime.background import Background
from kvstore.runtime.clock import Clock
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters
from kvstore.runtime.shared_calls import Batches
from kvstore.store.limits import StoreLimits
from kvstore.tiers.base import PutOutcome, Tier

__all__ = ["Journeys", "Noted"]

_log = logging.getLogger(__name__)

_RENEWED_TOGETHER = 512
_HELP_S = 3.0
"""How long a write to the cold tier, which can go on without an entry, waits for one. Long enough for a busy Redis: if
this service is killed, nobody tells the catalog of a record without an entry."""
_LEFT_ALONE_S = 5.0
"""How long a log that did not answer is not asked for entries that a write can do without."""


class Noted(Enum):
    """Whether a record may be written."""

    YES = "yes"
    FULL = "full"
    """The log has no room."""
    BUSY = "busy"
    """Too much is pending; a later try may succeed."""


@dataclass(eq=False, slots=True)
class _Journey:
    """What is under way with one record.

    Attributes:
        entry: The pending entry.
        is_short: The record is not meant to reach the cold tier.
        num_open: Writes that wait or run. Zero, and not settling: the log did not answer when the entry was to end, and
            is asked again.
        noted_at_s: When the entry's lease was last renewed; `None`: the log may have no entry.
        touched: The log may have an entry.
        in_hot: The hot tier has the record, or may have it.
        is_ours: We were the first to put it into the hot tier: nobody else was promised that it stays there.
        in_cold: The cold tier has it.
        is_unsure: A write to the cold tier ended without an answer: the record may be there, unknown to the catalog.
        settling: The task that ends the entry.
    """

    entry: PendingEntry
    is_short: bool = False
    num_open: int = 0
    noted_at_s: float | None = None
    touched: bool = False
    in_hot: bool = False
    is_ours: bool = False
    in_cold: bool = False
    is_unsure: bool = False
    settling: asyncio.Task[None] | None = None


class Journeys:
    """Keeps the log in step with records on their way. Without a log it does nothing.

    For each write of a record to a tier: `begin`, then `note` before the write, `confirm` after it, `end`.

    Args:
        log: The pending entries; `None`: nobody could finish what this process leaves.
        hot: The shared tier that records reach first, if there is one.
        background: Owns tasks.
        meters: Where to count.
        limits: Bounds and times.
        clock: For leases.
    """

    def __init__(
        self,
        log: PendingLog | None,
        hot: Tier | None,
        *,
        background: Background,
        meters: Meters,
        limits: StoreLimits,
        clock: Clock,
    ) -> None:
        self._log = log
        self._hot = hot
        self._background = background
        self._meters = meters
        self._limits = limits
        self._clock = clock
        self._journeys: dict[RecordKey, _Journey] = {}
        self._renewer: asyncio.Task[None] | None = None
        self._pending_bytes = 0
        self._left_alone_until_s = 0.0
        self._adds = Batches(self._add, background)
        self._holds = Batches(self._hold, background)
        self._ends = Batches(self._end_all, background)

    def __len__(self) -> int:
        """Records under way."""
        return len(self._journeys)

    def __contains__(self, key: RecordKey) -> bool:
        return key in self._journeys

    @property
    def is_over_limit(self) -> bool:
        """More is pending, over all services, than the limit allows: new writes should not begin."""
        return self._log is not None and self._pending_bytes > self._limits.pending_bytes

    def learned(self, totals: PendingTotals) -> None:
        """Note what is pending over all services; until the next call our own new entries are added to it."""
        self._pending_bytes = totals.num_bytes

    def begin(self, record: Record, *, is_short: bool = False, in_cold: bool = False, is_promise: bool = False) -> None:
        """Announce a write of `record` to one tier.

        Args:
            record: The record.
            is_short: It is not meant to reach the cold tier.
            in_cold: The cold tier has it.
            is_promise: A caller will be promised that the hot tier keeps it until the cold tier has it. What is known
                of the cold tier no longer counts then: it may have evicted the record since.
        """
        if self._log is None:
            return
        journey = self._journeys.get(record.key)
        if journey is None:
            entry = PendingEntry(record.key, record.num_bytes, record.header.span.stop)
            journey = self._journeys[record.key] = _Journey(entry, is_short)
        journey.is_short = journey.is_short and is_short
        journey.in_cold = in_cold or (journey.in_cold and not is_promise)
        journey.num_open += 1

    async def note(self, key: RecordKey, deadline: Deadline, *, is_hot: bool) -> Noted:
        """Write the entry, unless it is there. If there is a hot tier, a write to the cold one may go on without an
        entry when the log does not answer: all it costs is that the catalog may miss the record after a crash.

        Raises:
            Unavailable: The log cannot be written now.

        If cancelled, the entry may be there; `end` takes care of it.
        """
        journey = self._journeys.get(key)
        if self._log is None or journey is None or (journey.settling is None and self._is_fresh(journey)):
            return Noted.YES
        if self._hot is not None and not is_hot:
            if not self.is_over_limit and self._clock.monotonic_s() >= self._left_alone_until_s:
                try:
                    await self._note_settled(journey, deadline.earlier(_HELP_S))
                except Unavailable:
                    self._meters.add("pending_failures", step="note")
            return Noted.YES
        if self.is_over_limit:
            return Noted.BUSY
        return await self._note_settled(journey, deadline)

    async def _note_settled(self, journey: _Journey, deadline: Deadline) -> Noted:
        if journey.settling is not None:  # else it could remove the entry that we are about to write
            await asyncio.wait({journey.settling}, timeout=deadline.remaining_s)
            if journey.settling is not None:
                raise Unavailable("an earlier pending entry did not end in time", key=journey.entry.key)
        return await self._note(journey, deadline)

    async def _note(self, journey: _Journey, deadline: Deadline) -> Noted:
        assert self._log is not None
        journey.touched, asked_at_s = True, self._clock.monotonic_s()
        try:
            has_room = await self._adds.run(journey.entry, deadline)
        except Unavailable:
            self._left_alone_until_s = self._clock.monotonic_s() + _LEFT_ALONE_S
            raise
        if not has_room:
            return Noted.FULL
        journey.noted_at_s = asked_at_s
        self._pending_bytes += journey.entry.num_bytes
        if self._renewer is None or self._renewer.done():
            self._renewer = self._background.spawn(self._renew(self._log), "renewing pending entries")
        return Noted.YES

    async def confirm(self, key: RecordKey, outcome: PutOutcome, deadline: Deadline) -> None:
        """Note that the hot tier has the record. If another service claimed its entry meanwhile, it may have ended the
        entry before the record arrived: then the entry is written again."""
        journey = self._journeys.get(key)
        if self._log is None or journey is None:
            return
        journey.in_hot = True
        journey.is_ours |= outcome is PutOutcome.STORED
        if journey.noted_at_s is None or key not in await self._holds.run(key, deadline):
            await self._note(journey, deadline)

    def _is_fresh(self, journey: _Journey) -> bool:
        """Whether its entry is certain to be ours still. Once the lease has expired, another service may have finished
        the entry, because it found the record nowhere yet."""
        assert self._log is not None
        at_s = journey.noted_at_s
        return at_s is not None and self._clock.monotonic_s() - at_s <= self._log.lease_s / 2

    def end(self, key: RecordKey, *, in_hot: bool = False, in_cold: bool = False, maybe_in_cold: bool = False) -> None:
        """Note that a write that `begin` announced has ended, or will not be made.

        Args:
            key: The record's key.
            in_hot: The hot tier may have the record now.
            in_cold: The cold tier has it now.
            maybe_in_cold: The cold tier may have it now: its entry is left to whoever looks, and tells the catalog.
        """
        journey = self._journeys.get(key)
        if journey is None:
            return
        journey.in_hot |= in_hot
        journey.in_cold |= in_cold
        journey.is_unsure |= maybe_in_cold
        journey.num_open -= 1
        if journey.num_open == 0 and journey.settling is None:
            self._settle(journey)

    def _settle(self, journey: _Journey) -> None:
        if not journey.touched:
            del self._journeys[journey.entry.key]
            return
        with suppress(Closed):  # then `aclose` releases the entry at once
            journey.settling = self._background.spawn(self._settled(journey), "pending entry")

    async def _settled(self, journey: _Journey) -> None:
        try:
            # without a deadline: a call that we gave up on could later end the entry of the next write
            await self._ends.run(journey, None)
            journey.in_hot = False
        except KVStoreError:
            # Our entry is still in the log, perhaps for a record in the hot tier. If we forgot that, a later write that
            # fails would remove the entry. All else we know of the record may be changed by others meanwhile.
            self._meters.add("pending_failures", step="end")
        journey.settling, journey.noted_at_s = None, None
        journey.touched = journey.in_hot
        journey.is_ours = journey.in_cold = journey.is_unsure = False
        if journey.num_open == 0 and not journey.touched:
            self._journeys.pop(journey.entry.key, None)

    async def _add(self, entries: Sequence[PendingEntry]) -> bool:
        assert self._log is not None
        return await self._log.add(entries, deadline=self._step_deadline())

    async def _end_all(self, journeys: Sequence[_Journey]) -> None:
        """End entries by where their records are now."""
        assert self._log is not None
        deadline = self._step_deadline()
        done = [
            journey
            for journey in journeys
            if journey.in_cold or not (journey.in_hot or journey.is_unsure) or (journey.is_short and journey.is_ours)
        ]
        # once a record is in the cold tier the hot one may evict it, whoever wrote it there
        may_go = [journey.entry.key for journey in done if journey.in_cold]
        short = [journey.entry.key for journey in done if journey.in_hot and not journey.in_cold]
        if short:  # another owner of an entry, or one who claimed it, may have been promised that the record stays
            may_go += [key for key, num_owners in (await self._hold(short)).items() if num_owners == 1]
        left = [journey.entry.key for journey in journeys if journey not in done]
        if may_go and self._hot is not None:
            await self._hot.allow_eviction(may_go, deadline=deadline)
        if done:
            await self._log.finish([journey.entry.key for journey in done], deadline=deadline)
        if left:  # not in the cold tier as far as we know: any service that has time finishes them
            self._meters.add("pending_left", len(left))
            await self._log.release(left, deadline=deadline)

    async def _hold(self, keys: Sequence[RecordKey]) -> dict[RecordKey, int]:
        """Renew the leases of entries; returns those that are ours, with the number of owners of each."""
        assert self._log is not None
        owners = await self._log.renew(keys, deadline=self._step_deadline())
        return {key: num_owners for key, num_owners in zip(keys, owners, strict=True) if num_owners}

    async def _renew(self, log: PendingLog) -> None:
        """Renew the leases of what is under way, since an outage may outlast them, and retry ends that failed."""
        while self._journeys:
            await asyncio.sleep(log.lease_s / 3)
            for journey in list(self._journeys.values()):
                if journey.num_open == 0 and journey.settling is None:
                    self._settle(journey)
            noted = [journey for journey in self._journeys.values() if journey.noted_at_s is not None]
            for start in range(0, len(noted), _RENEWED_TOGETHER):
                some = [journey for journey in noted[start : start + _RENEWED_TOGETHER] if journey.settling is None]
                now_s = self._clock.monotonic_s()
                keys = [journey.entry.key for journey in some]
                try:
                    owners = await log.renew(keys, deadline=self._step_deadline())
                except Unavailable:
                    self._meters.add("pending_failures", step="renew")
                    break
                for journey, num_owners in zip(some, owners, strict=True):
                    if not num_owners:  # another service claimed it and may end it: the next write needs a new one
                        journey.noted_at_s = None
                    elif journey.noted_at_s is not None:
                        journey.noted_at_s = max(journey.noted_at_s, now_s)

    def _step_deadline(self) -> Deadline:
        return Deadline.after(self._limits.write_back_timeout_s, self._clock)

    async def drain(self, deadline: Deadline) -> None:
        """Wait until the entries of all writes that have ended are settled, or until the deadline."""
        while not deadline.expired:
            settling = {journey.settling for journey in self._journeys.values() if journey.settling is not None}
            if not settling:
                return
            await asyncio.wait(settling, timeout=deadline.remaining_s)

    async def aclose(self, deadline: Deadline) -> None:
        """Release what is not finished, so that another service need not wait for the leases to expire. The background
        tasks have ended before."""
        keys = [journey.entry.key for journey in self._journeys.values() if journey.touched]
        self._journeys.clear()
        if self._log is not None and keys:
            try:
                await self._log.release(keys, deadline=deadline)
            except KVStoreError as error:
                _log.warning("pending entries stay until their leases expire records=%d reason=%s", len(keys), error)
