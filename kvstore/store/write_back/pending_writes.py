"""Records on their way to the slower tiers, and the pending entry that each needs until then.

The invariant: while a record is in the hot tier and may not be evicted there, the log has a pending entry for it. So
the entry is written before the record, and removed after the cold tier has the record and the hot tier may evict it.
Without a hot tier the entry only says that a write to the cold tier has begun.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvstore.catalog.pending import PendingEntry, PendingLog, PendingTotals
from kvstore.errors import Closed, KVStoreError, Unavailable
from kvstore.format.record import Record
from kvstore.model.keys import RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.shared_calls import Batches
from kvstore.runtime.turns import with_pauses
from kvstore.store.context import StoreContext, StorePart
from kvstore.tiers.base import PutOutcome, Tier

_log = logging.getLogger(__name__)

_RENEWED_TOGETHER = 512
_SETTLED_TOGETHER = 256
"""Ends that are tried again before the event loop gets a turn."""
_OPTIONAL_ENTRY_S = 3.0
"""How long a write to the cold tier, which can do without an entry, waits for one. Long enough for a busy Redis: if
this service is killed, a record without an entry may stay missing from the catalog."""
BELIEVED_S = 0.2
"""How long it is believed that the cold tier has a record, once it has said so: others may delete it there."""
_LOG_PAUSE_S = 5.0
"""How long a log that did not answer is not used for entries that a write can do without."""


@dataclass(eq=False, slots=True)
class TierWrite:
    """The write of a record to one tier, tried once or more often: from `PendingWrites.begin` until `end`."""

    record: Record
    tier: Tier
    is_there: bool = False
    """The tier has said that it has the record."""
    may_be_there: bool = False
    """The tier may have it: a try has begun, and did not end with the answer that there is no room."""


@dataclass(eq=False, slots=True)
class _Pending:
    """What is under way with one record, to any tier."""

    entry: PendingEntry
    is_short: bool = False
    """The record is not to be written to the cold tier."""
    num_putting: int = 0
    """Writes to the hot tier that run."""
    num_open: int = 0
    """Writes that wait or run. Zero, and not settling: the log did not answer when the entry was to end; it is tried
    again."""
    renewed_at_s: float | None = None
    """When the entry's lease was last renewed; `None`: the log may have no entry."""
    touched: bool = False
    """The log may have an entry."""
    in_hot: bool = False
    """The hot tier has the record, or may have it."""
    is_confirmed: bool = False
    """The hot tier has said that it has the record."""
    is_promised: bool = False
    """A caller relies on the hot tier until the cold tier has the record."""
    is_ours: bool = False
    """We were the first to put it into the hot tier: no other service relies on it there."""
    in_cold_s: float | None = None
    """When it was learned that the cold tier has it, `-inf`: before the write; `None`: it may not have it."""
    is_unsure: bool = False
    """A write to the cold tier ended without an answer: the record may be there, unknown to the catalog."""
    settling: asyncio.Task[None] | None = None
    """The task that ends the entry."""

    @property
    def key(self) -> RecordKey:
        return self.entry.key

    def is_known_in_cold(self, now_s: float) -> bool:
        """Whether the cold tier has said just now that it has the record."""
        return self.in_cold_s is not None and now_s - self.in_cold_s <= BELIEVED_S

    @property
    def may_be_claimed(self) -> bool:
        """Whether a finisher may look for the record now. A write to the hot tier that has not answered may arrive
        after a finisher has found nothing and ended the entry: so the lease expires first."""
        return not self.num_putting and (self.is_confirmed or not self.in_hot)

    def needs_owners(self, now_s: float) -> bool:
        """Whether the hot tier may evict the record only if no other service relies on it there."""
        if self.in_cold_s is not None:
            return not self.is_promised and not self.is_known_in_cold(now_s)
        return self.is_short and self.is_ours


class PendingWrites(StorePart):
    """Writes records to the slower tiers, and keeps the log in step with that. Without a log it only writes them.

    For each write of a record to a tier: `begin`, then `put` until it is done or given up, then `end`.

    Args:
        log: The pending entries; `None`: other services cannot finish what this process leaves.
        on_end: Called with a record, and True: the cold tier has it, or any service copies it there from the hot one.
            False: no write of it is under way any more.
    """

    def __init__(
        self,
        log: PendingLog | None,
        context: StoreContext,
        on_end: Callable[[RecordKey, bool], object] = lambda *_: None,
    ) -> None:
        super().__init__(context)
        self._log = log
        # a second owner, for entries that must outlive our next write of their record
        self._late = log.other_owner() if log is not None else None
        self._on_end = on_end
        self._records: dict[RecordKey, _Pending] = {}
        self._renewer: asyncio.Task[None] | None = None
        self._pending_bytes = 0
        self._log_unused_until_s = 0.0
        self._adds = Batches(self._add, context.background)
        self._renewals = Batches(self._renew, context.background)
        self._ends = Batches(self._end_all, context.background)

    def __len__(self) -> int:
        """Records under way."""
        return len(self._records)

    def __contains__(self, key: RecordKey) -> bool:
        return key in self._records

    @property
    def is_over_limit(self) -> bool:
        """More is pending, over all services, than the limit allows: new writes should not begin."""
        return self._log is not None and self._pending_bytes > self._limits.pending_bytes

    def set_totals(self, totals: PendingTotals) -> None:
        """Note what is pending over all services; until the next call our own new entries are added to it."""
        self._pending_bytes = totals.num_bytes

    def begin(
        self,
        record: Record,
        tier: Tier,
        *,
        is_short: bool = False,
        in_cold: bool = False,
        is_promise: bool = False,
    ) -> TierWrite:
        """Announce a write of a record to a tier.

        Args:
            is_short: The record is not to be written to the cold tier.
            in_cold: The cold tier has it, as far as is known.
            is_promise: A caller will rely on the hot tier until the cold tier has the record. What was heard of the
                cold tier does not count then: it may have evicted the record since.
        """
        if self._log is not None:
            pending = self._records.get(record.key)
            if pending is None:
                entry = PendingEntry(record.key, record.num_bytes, record.header.span.stop)
                pending = self._records[record.key] = _Pending(entry, is_short)
            pending.is_short = pending.is_short and is_short
            if is_promise:
                pending.is_promised, pending.in_cold_s = True, None
            elif in_cold and not pending.is_promised:
                pending.in_cold_s = -math.inf
            pending.num_open += 1
        return TierWrite(record, tier)

    async def put(self, write: TierWrite, deadline: Deadline) -> PutOutcome | None:
        """Write the entry, unless it is there, then the record to its tier.

        Returns:
            `FULL`: the tier has no room, or the log. `None`: too much is pending, and nothing was written; a later try
            may succeed.

        If there is a hot tier, a write to the cold one continues without an entry when the log does not answer: then
        the catalog may miss the record after a crash.

        Raises:
            Unavailable: The log, or the tier, cannot be written now.
            KVStoreError: As of `Tier.put`.

        If it fails or is cancelled, the entry and the record may be there; `end` takes care of them.
        """
        pending, is_hot = self._records.get(write.record.key), write.tier is self._hot
        if pending is not None and not (pending.settling is None and self._is_fresh(pending)):
            if self._hot is not None and not is_hot:
                await self._add_if_possible(pending, deadline)
            elif self.is_over_limit:
                return None
            elif not await self._add_once_settled(pending, deadline):
                return PutOutcome.FULL
        was_maybe_there, write.may_be_there = write.may_be_there, True
        if pending is not None:
            pending.num_putting += is_hot
        try:
            outcome = await write.tier.put(write.record, deadline=deadline)
        except BaseException:
            if pending is not None:
                pending.in_hot |= is_hot  # it may still arrive
            raise
        finally:
            if pending is not None:
                pending.num_putting -= is_hot
        write.is_there = outcome is not PutOutcome.FULL
        write.may_be_there = was_maybe_there or write.is_there
        if pending is not None and is_hot and write.is_there:
            await self._confirm(pending, outcome, deadline)
        return outcome

    async def _add_if_possible(self, pending: _Pending, deadline: Deadline) -> None:
        if not self.is_over_limit and self._clock.monotonic_s() >= self._log_unused_until_s:
            try:
                await self._add_once_settled(pending, deadline.earlier(_OPTIONAL_ENTRY_S))
            except Unavailable:
                self._meters.add("pending_failures", step="note")

    async def _add_once_settled(self, pending: _Pending, deadline: Deadline) -> bool:
        if pending.settling is not None:  # else it could remove the entry that we are about to write
            await asyncio.wait({pending.settling}, timeout=deadline.remaining_s)
            if pending.settling is not None:
                raise Unavailable("an earlier pending entry did not end in time", key=pending.key)
        return await self._add_entry(pending, deadline)

    async def _add_entry(self, pending: _Pending, deadline: Deadline) -> bool:
        """Write the entry. False: the log has no room."""
        assert self._log is not None
        pending.touched, started_s = True, self._clock.monotonic_s()
        try:
            has_room = await self._adds.run(pending.entry, deadline)
        except Unavailable:
            self._log_unused_until_s = self._clock.monotonic_s() + _LOG_PAUSE_S
            raise
        if has_room:
            if pending.renewed_at_s is None:
                self._pending_bytes += pending.entry.num_bytes
            pending.renewed_at_s = started_s
            if self._renewer is None or self._renewer.done():
                self._renewer = self._background.spawn(self._renew_regularly(self._log), "renewing pending entries")
        return has_room

    async def _confirm(self, pending: _Pending, outcome: PutOutcome, deadline: Deadline) -> None:
        """Note that the hot tier has the record. If another service claimed its entry during the write, it may have
        ended the entry before the record arrived: then the entry is written again."""
        pending.in_hot = pending.is_confirmed = True
        pending.is_ours |= outcome is PutOutcome.STORED
        if pending.renewed_at_s is None or pending.key not in await self._renewals.run(pending.key, deadline):
            await self._add_entry(pending, deadline)

    def _is_fresh(self, pending: _Pending) -> bool:
        """Whether its entry is certain to be ours still. Once the lease has expired, another service may have finished
        the entry, because it found the record nowhere yet."""
        assert self._log is not None
        at_s = pending.renewed_at_s
        return at_s is not None and self._clock.monotonic_s() - at_s <= self._log.lease_s / 2

    def end(self, write: TierWrite) -> None:
        """Note that a write has ended, or will not be made. If the cold tier may have the record without having said
        so, its entry is left for a finisher, which reports the record to the catalog if it is there.
        """
        pending = self._records.get(write.record.key)
        if pending is None:
            return
        if write.tier is self._hot:
            pending.in_hot |= write.may_be_there
        else:
            if write.is_there:
                pending.in_cold_s = self._clock.monotonic_s()
            pending.is_unsure |= write.may_be_there
        pending.num_open -= 1
        if pending.num_open == 0 and pending.settling is None:
            self._settle(pending)

    def _settle(self, pending: _Pending) -> None:
        if not pending.touched:
            del self._records[pending.key]
            self._on_end(pending.key, False)
            return
        with suppress(Closed):  # then `aclose` releases the entry at once
            pending.settling = self._background.spawn(self._settled(pending), "pending entry")

    async def _settled(self, pending: _Pending) -> None:
        try:
            # without a deadline: a call that timed out here could later end the entry of the next write
            await self._ends.run(pending, None)
            pending.in_hot = False
        except KVStoreError:
            # Our entry is still in the log, maybe for a record in the hot tier. If we forgot that, a later write that
            # fails would remove the entry. Everything else may be changed by other services in between.
            self._meters.add("pending_failures", step="end")
        pending.settling, pending.renewed_at_s = None, None
        pending.touched = pending.in_hot
        pending.is_confirmed &= pending.touched
        pending.is_promised &= pending.num_open > 0  # of a save that came in the meantime
        pending.is_ours = pending.is_unsure = False
        pending.in_cold_s = None
        if pending.num_open == 0 and not pending.touched:
            self._records.pop(pending.key, None)
            self._on_end(pending.key, False)

    async def _add(self, entries: Sequence[PendingEntry]) -> bool:
        assert self._log is not None
        return await self._log.add(entries, deadline=self._deadline())

    async def _end_all(self, several: Sequence[_Pending]) -> None:
        """End entries by where their records are now."""
        assert self._log is not None
        deadline, now_s = self._deadline(), self._clock.monotonic_s()
        shared = [one.key for one in several if one.needs_owners(now_s)]
        num_owners = await self._renew(shared) if shared else {}
        now_s = self._clock.monotonic_s()  # what is no longer certain by now is left to a finisher
        done, evictable, left = list[_Pending](), list[RecordKey](), list[_Pending]()
        for one in several:
            is_sole = num_owners.get(one.key) == 1
            if one.is_known_in_cold(now_s):
                may_go = is_done = True  # no matter which service wrote it to the hot tier
            elif one.in_cold_s is not None or (one.is_short and one.is_ours):
                may_go = is_done = is_sole
            else:
                may_go, is_done = False, not (one.in_hot or one.is_unsure)
            if may_go:
                evictable.append(one.key)
            (done if is_done else left).append(one)
        if evictable and self._hot is not None:
            await self._hot.allow_eviction(evictable, deadline=deadline)
        if done:
            await self._log.finish([one.key for one in done], deadline=deadline)
            num_bytes = sum(one.entry.num_bytes for one in done if one.renewed_at_s is not None)
            self._pending_bytes = max(0, self._pending_bytes - num_bytes)
        if left:  # any service that has time looks whether they are in the cold tier, and else copies them
            self._meters.add("pending_left", len(left))
            # another service may have ended the entry of a record that reached the hot tier afterwards
            again = [one.entry for one in left if one.in_hot and not self._is_fresh(one)]
            if again and not await self._log.add(again, deadline=deadline):
                raise Unavailable("the log of pending entries has no room")
            # Our share of an entry would end with the next write of the record, although this one may still arrive: so
            # another owner has the entry as well, whose lease is not renewed.
            late = [one.entry for one in left if not one.may_be_claimed]
            if late and self._late is not None and not await self._late.add(late, deadline=deadline):
                raise Unavailable("the log of pending entries has no room")
            await self._log.release([one.key for one in left if one.may_be_claimed], deadline=deadline)
        for one in left:
            if one.is_confirmed:
                self._on_end(one.key, True)
        for one in several:
            if one.in_cold_s is not None and math.isfinite(one.in_cold_s):
                self._on_end(one.key, True)

    async def _renew(self, keys: Sequence[RecordKey]) -> dict[RecordKey, int]:
        """Renew the leases of entries; returns those that are ours, with the number of owners of each. A service that
        has claimed one of the others will end it."""
        assert self._log is not None
        owners = await self._log.renew(keys, deadline=self._deadline())
        return {key: num_owners for key, num_owners in zip(keys, owners, strict=True) if num_owners}

    async def _renew_regularly(self, log: PendingLog) -> None:
        """Renew the leases of what is under way, since an outage may outlast them, and retry ends that failed."""
        while self._records:
            await asyncio.sleep(log.lease_s / 3)
            async for pending in with_pauses(list(self._records.values()), _SETTLED_TOGETHER):
                if pending.num_open == 0 and pending.settling is None and pending.key in self._records:
                    self._settle(pending)
            renewable = [one for one in self._records.values() if one.renewed_at_s is not None]
            for start in range(0, len(renewable), _RENEWED_TOGETHER):
                some = [one for one in renewable[start : start + _RENEWED_TOGETHER] if one.settling is None]
                now_s = self._clock.monotonic_s()
                try:
                    ours = await self._renew([one.key for one in some])
                except KVStoreError:
                    self._meters.add("pending_failures", step="renew")
                    break
                for pending in some:
                    if pending.key not in ours:  # another service claimed it: the next write needs a new entry
                        pending.renewed_at_s = None
                    elif pending.renewed_at_s is not None:
                        pending.renewed_at_s = max(pending.renewed_at_s, now_s)

    def _deadline(self) -> Deadline:
        return Deadline.after(self._limits.write_back_timeout_s, self._clock)

    async def drain(self, deadline: Deadline) -> None:
        """Wait until the entries of all writes that have ended are settled, or until the deadline."""
        while not deadline.expired:
            settling = {one.settling for one in self._records.values() if one.settling is not None}
            if not settling:
                return
            await asyncio.wait(settling, timeout=deadline.remaining_s)

    async def aclose(self, deadline: Deadline) -> None:
        """Release what is not finished, so that another service need not wait for the leases to expire. The background
        tasks have ended before."""
        keys = [one.key for one in self._records.values() if one.touched and one.may_be_claimed]
        self._records.clear()
        if self._log is not None and keys:
            try:
                await self._log.release(keys, deadline=deadline)
            except KVStoreError as error:
                _log.warning("pending entries stay until their leases expire records=%d reason=%s", len(keys), error)
