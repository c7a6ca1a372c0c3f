"""Records on their way to the slower tiers, and the pending entry that each needs meanwhile.

The rule: whenever a record stands in the hot tier and may not be evicted there, a pending entry stands in the log. So
the entry is written before the record, and ends after the cold tier has the record and the hot tier was told that it
may go. Without a hot tier the entry says of each write to the cold tier that it has begun.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from kvstore.catalog.pending_base import PendingEntry, PendingLog, PendingTotals
from kvstore.errors import Closed, KVStoreError, Unavailable
from kvstore.format.record import Record
from kvstore.model.keys import RecordKey
from kvstore.runtime.background import Background
from kvstore.runtime.batches import Batches
from kvstore.runtime.clock import Clock
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters
from kvstore.store.limits import StoreLimits
from kvstore.tiers.base import PutOutcome, Tier

__all__ = ["Journeys", "Noted"]

_log = logging.getLogger(__name__)

_RENEWED_TOGETHER = 512
_HELP_S = 3.0
"""For the entry of a write to the cold tier that goes on without one: a busy Redis must not count as one that is away,
since of a record without entry nobody tells the catalog when this service is killed."""
_LEFT_ALONE_S = 5.0
"""A log that did not answer is not waited for by whoever can do without it."""


class Noted(Enum):
    """Whether a record may be written."""

    YES = "yes"
    FULL = "full"
    """The log has no room."""
    BUSY = "busy"
    """Too much is pending: later records may be taken."""


@dataclass(eq=False, slots=True)
class _Journey:
    """What is under way with one record.

    Attributes:
        entry: What the log is told.
        is_short: It is not meant to reach the cold tier.
        num_open: Writes that wait or run. None, and not settling either: the log did not answer when it was told of the
            end, and is told again.
        noted_at_s: When its lease began last; `None`: no entry is certain to be in the log.
        touched: An entry may be in the log.
        in_hot: The hot tier has it, or may have it.
        is_ours: The hot tier has it from us, and from nobody before: nobody else was promised that it stays.
        in_cold: The cold tier has it.
        settling: Ends the entry.
    """

    entry: PendingEntry
    is_short: bool = False
    num_open: int = 0
    noted_at_s: float | None = None
    touched: bool = False
    in_hot: bool = False
    is_ours: bool = False
    in_cold: bool = False
    settling: asyncio.Task[None] | None = None


class Journeys:
    """Keeps the log right while records travel. Without a log it does nothing.

    For each write of a record to a tier: `begin`, then `note` before the write, `confirm` after it, `end`.

    Args:
        log: Where entries stand; `None`: there is nothing that could finish what we begin.
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
        """More is pending, over all services, than the limit allows: what is not begun yet should not be."""
        return self._log is not None and self._pending_bytes > self._limits.pending_bytes

    def learned(self, totals: PendingTotals) -> None:
        """What is pending over all services; between two such messages own entries are added up."""
        self._pending_bytes = totals.num_bytes

    def begin(self, record: Record, *, is_short: bool = False, in_cold: bool = False, is_promise: bool = False) -> None:
        """A write of this record to one tier is going to be made.

        Args:
            record: Which.
            is_short: It is not meant to reach the cold tier.
            in_cold: The cold tier has it.
            is_promise: Somebody will be told that the hot tier keeps it until the cold one has it: that the cold tier
                had it before says nothing, it may have been evicted there since.
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
        """Write the entry, unless it is there. Where there is a hot tier, the write to the cold one goes on without it
        when the log does not answer: it is a help to the catalog then, which may miss a record that a crash cuts off.

        Raises:
            Unavailable: The log cannot be written now.

        If cancelled, the entry may be there; `end` sees to it.
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
        if journey.settling is not None:  # else its end could take away what we are about to write
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
        """The record was written to the hot tier, or is there: if somebody has claimed its entry meanwhile, and so
        may have ended it before the record was there, the entry is written again."""
        journey = self._journeys.get(key)
        if self._log is None or journey is None:
            return
        journey.in_hot = True
        journey.is_ours |= outcome is PutOutcome.STORED
        if journey.noted_at_s is None or key not in await self._holds.run(key, deadline):
            await self._note(journey, deadline)

    def _is_fresh(self, journey: _Journey) -> bool:
        """Whether its entry is certain to be ours; one whose lease has ended may have been finished by another service,
        which found its record nowhere yet."""
        assert self._log is not None
        at_s = journey.noted_at_s
        return at_s is not None and self._clock.monotonic_s() - at_s <= self._log.lease_s / 2

    def end(self, key: RecordKey, *, in_hot: bool = False, in_cold: bool = False) -> None:
        """A write that was begun has ended, or is not made.

        Args:
            key: Of the record.
            in_hot: The hot tier may have it now.
            in_cold: The cold tier has it now.
        """
        journey = self._journeys.get(key)
        if journey is None:
            return
        journey.in_hot |= in_hot
        journey.in_cold |= in_cold
        journey.num_open -= 1
        if journey.num_open == 0 and journey.settling is None:
            self._settle(journey)

    def _settle(self, journey: _Journey) -> None:
        if not journey.touched:
            del self._journeys[journey.entry.key]
            return
        with suppress(Closed):  # then the lease is given back at once by `aclose`
            journey.settling = self._background.spawn(self._settled(journey), "pending entry")

    async def _settled(self, journey: _Journey) -> None:
        try:
            # until its call has ended, however long that takes: it could end the entry of a write that did not wait
            await self._ends.run(journey, None)
            journey.in_hot = False
        except KVStoreError:
            # Our entry stands, and perhaps for a record in the hot tier: were that forgotten, the end of a later write,
            # one that failed, would take the entry away. What else is known of the record others may change meanwhile.
            self._meters.add("pending_failures", step="end")
        journey.settling, journey.noted_at_s = None, None
        journey.touched = journey.in_hot
        journey.is_ours = journey.in_cold = False
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
            if journey.in_cold or not journey.in_hot or (journey.is_short and journey.is_ours)
        ]
        # what is in the cold tier may go, whoever wrote it to the hot one: the entry that said so ends here
        may_go = [journey.entry.key for journey in done if journey.in_cold]
        short = [journey.entry.key for journey in done if journey.in_hot and not journey.in_cold]
        if short:  # whoever else owns an entry, or has claimed it, may have been told that the record stays
            may_go += [key for key, num_owners in (await self._hold(short)).items() if num_owners == 1]
        left = [journey.entry.key for journey in journeys if journey not in done]
        if may_go and self._hot is not None:
            await self._hot.allow_eviction(may_go, deadline=deadline)
        if done:
            await self._log.finish([journey.entry.key for journey in done], deadline=deadline)
        if left:  # the hot tier has them and the cold tier does not: any service that has time takes them from there
            self._meters.add("pending_left", len(left))
            await self._log.release(left, deadline=deadline)

    async def _hold(self, keys: Sequence[RecordKey]) -> dict[RecordKey, int]:
        """Those whose entries are ours, and how many own each; their leases begin anew."""
        assert self._log is not None
        owners = await self._log.renew(keys, deadline=self._step_deadline())
        return {key: num_owners for key, num_owners in zip(keys, owners, strict=True) if num_owners}

    async def _renew(self, log: PendingLog) -> None:
        """Keep the leases of what is under way: an outage may be longer than they are. Tell again of what has ended."""
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
                    if not num_owners:  # somebody claimed it, and may end it: the next write needs one of its own
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
        """Give back what is not finished, so that another service need not wait for the leases to end. The background
        tasks have ended before."""
        keys = [journey.entry.key for journey in self._journeys.values() if journey.touched]
        self._journeys.clear()
        if self._log is not None and keys:
            try:
                await self._log.release(keys, deadline=deadline)
            except KVStoreError as error:
                _log.warning("pending entries wait for their leases to end records=%d reason=%s", len(keys), error)
