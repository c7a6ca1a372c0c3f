"""Records on their way to the slower tiers, and the pending entry that each needs until then.

The invariant: while a record is in the hot tier and may not be evicted there, the log has a pending entry for it. So
the entry is written before the record, and removed after the cold tier has the record and the hot tier may evict it.
Without a hot tier the entry only says that a write to the cold tier has begun.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from kvstore.catalog.pending import PendingEntry, PendingLog, PendingTotals
from kvstore.errors import Closed, KVStoreError, Unavailable
from kvstore.format.record import Record
from kvstore.model.keys import RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.shared_calls import Batches
from kvstore.store.context import StoreContext
from kvstore.tiers.base import PutOutcome

_log = logging.getLogger(__name__)

_RENEWED_TOGETHER = 512
_OPTIONAL_ENTRY_S = 3.0
"""How long a write to the cold tier, which can do without an entry, waits for one. Long enough for a busy Redis: if
this service is killed, a record without an entry may stay missing from the catalog."""
_LOG_PAUSE_S = 5.0
"""How long a log that did not answer is not used for entries that a write can do without."""


class EntryResult(Enum):
    """Whether a record may be written."""

    WRITTEN = "written"
    """Its entry was written, or it needs none."""
    FULL = "full"
    """The log has no room."""
    BUSY = "busy"
    """Too much is pending; a later try may succeed."""


@dataclass(eq=False, slots=True)
class _PendingWrite:
    """What is under way with one record."""

    entry: PendingEntry
    is_short: bool = False
    """The record is not to be written to the cold tier."""
    num_open: int = 0
    """Writes that wait or run. Zero, and not settling: the log did not answer when the entry was to end; it is tried
    again."""
    renewed_at_s: float | None = None
    """When the entry's lease was last renewed; `None`: the log may have no entry."""
    touched: bool = False
    """The log may have an entry."""
    in_hot: bool = False
    """The hot tier has the record, or may have it."""
    is_ours: bool = False
    """We were the first to put it into the hot tier: no other service relies on it there."""
    in_cold: bool = False
    was_in_cold: bool = False
    """That it is in the cold tier was said before the write: it may have been evicted there since."""
    is_unsure: bool = False
    """A write to the cold tier ended without an answer: the record may be there, unknown to the catalog."""
    settling: asyncio.Task[None] | None = None
    """The task that ends the entry."""


class PendingWrites:
    """Keeps the log in step with records on their way. Without a log it does nothing.

    For each write of a record to a tier: `begin`, then `write_entry` before the write, `confirm` after it, `end`.

    Args:
        log: The pending entries; `None`: other services cannot finish what this process leaves.
        on_left: Called for a record that the hot tier has, and that any service will copy from there to the cold one.
    """

    def __init__(
        self, log: PendingLog | None, context: StoreContext, on_left: Callable[[RecordKey], object] = lambda _: None
    ) -> None:
        self._log = log
        self._on_left = on_left
        self._hot = context.hot
        self._background = context.background
        self._meters = context.meters
        self._limits = context.limits
        self._clock = context.clock
        self._writes: dict[RecordKey, _PendingWrite] = {}
        self._renewer: asyncio.Task[None] | None = None
        self._pending_bytes = 0
        self._log_unused_until_s = 0.0
        self._adds = Batches(self._add, context.background)
        self._renewals = Batches(self._renew, context.background)
        self._ends = Batches(self._end_all, context.background)

    def __len__(self) -> int:
        """Records under way."""
        return len(self._writes)

    def __contains__(self, key: RecordKey) -> bool:
        return key in self._writes

    @property
    def is_over_limit(self) -> bool:
        """More is pending, over all services, than the limit allows: new writes should not begin."""
        return self._log is not None and self._pending_bytes > self._limits.pending_bytes

    def set_totals(self, totals: PendingTotals) -> None:
        """Note what is pending over all services; until the next call our own new entries are added to it."""
        self._pending_bytes = totals.num_bytes

    def begin(self, record: Record, *, is_short: bool = False, in_cold: bool = False, is_promise: bool = False) -> None:
        """Announce a write of `record` to one tier.

        Args:
            is_short: The record is not to be written to the cold tier.
            in_cold: The cold tier has it.
            is_promise: A caller will rely on the hot tier until the cold tier has the record. An earlier report that
                the cold tier has it no longer counts then: it may have evicted the record since.
        """
        if self._log is None:
            return
        write = self._writes.get(record.key)
        if write is None:
            entry = PendingEntry(record.key, record.num_bytes, record.header.span.stop)
            write = self._writes[record.key] = _PendingWrite(entry, is_short)
        write.is_short = write.is_short and is_short
        write.in_cold = in_cold or (write.in_cold and not is_promise)
        write.was_in_cold = in_cold or (write.was_in_cold and write.in_cold)
        write.num_open += 1

    async def write_entry(self, key: RecordKey, deadline: Deadline, *, is_hot: bool) -> EntryResult:
        """Write the entry, unless it is there. If there is a hot tier, a write to the cold one may continue without an
        entry when the log does not answer: then the catalog may miss the record after a crash.

        Raises:
            Unavailable: The log cannot be written now.

        If cancelled, the entry may be there; `end` takes care of it.
        """
        write = self._writes.get(key)
        if self._log is None or write is None or (write.settling is None and self._is_fresh(write)):
            return EntryResult.WRITTEN
        if self._hot is not None and not is_hot:
            if not self.is_over_limit and self._clock.monotonic_s() >= self._log_unused_until_s:
                try:
                    await self._write_once_settled(write, deadline.earlier(_OPTIONAL_ENTRY_S))
                except Unavailable:
                    self._meters.add("pending_failures", step="note")
            return EntryResult.WRITTEN
        if self.is_over_limit:
            return EntryResult.BUSY
        return await self._write_once_settled(write, deadline)

    async def _write_once_settled(self, write: _PendingWrite, deadline: Deadline) -> EntryResult:
        if write.settling is not None:  # else it could remove the entry that we are about to write
            await asyncio.wait({write.settling}, timeout=deadline.remaining_s)
            if write.settling is not None:
                raise Unavailable("an earlier pending entry did not end in time", key=write.entry.key)
        return await self._write(write, deadline)

    async def _write(self, write: _PendingWrite, deadline: Deadline) -> EntryResult:
        assert self._log is not None
        write.touched, started_s = True, self._clock.monotonic_s()
        try:
            has_room = await self._adds.run(write.entry, deadline)
        except Unavailable:
            self._log_unused_until_s = self._clock.monotonic_s() + _LOG_PAUSE_S
            raise
        if not has_room:
            return EntryResult.FULL
        write.renewed_at_s = started_s
        self._pending_bytes += write.entry.num_bytes
        if self._renewer is None or self._renewer.done():
            self._renewer = self._background.spawn(self._renew_regularly(self._log), "renewing pending entries")
        return EntryResult.WRITTEN

    async def confirm(self, key: RecordKey, outcome: PutOutcome, deadline: Deadline) -> None:
        """Note that the hot tier has the record. If another service claimed its entry during the write, it may have
        ended the entry before the record arrived: then the entry is written again."""
        write = self._writes.get(key)
        if self._log is None or write is None:
            return
        write.in_hot = True
        write.is_ours |= outcome is PutOutcome.STORED
        if write.renewed_at_s is None or key not in await self._renewals.run(key, deadline):
            await self._write(write, deadline)

    def _is_fresh(self, write: _PendingWrite) -> bool:
        """Whether its entry is certain to be ours still. Once the lease has expired, another service may have finished
        the entry, because it found the record nowhere yet."""
        assert self._log is not None
        at_s = write.renewed_at_s
        return at_s is not None and self._clock.monotonic_s() - at_s <= self._log.lease_s / 2

    def end(self, key: RecordKey, *, in_hot: bool = False, in_cold: bool = False, maybe_in_cold: bool = False) -> None:
        """Note that a write that `begin` announced has ended, or will not be made.

        Args:
            in_hot: The hot tier may have the record now.
            in_cold: The cold tier has it now.
            maybe_in_cold: The cold tier may have it now: its entry is left for a finisher, which reports the record to
                the catalog if it is there.
        """
        write = self._writes.get(key)
        if write is None:
            return
        write.in_hot |= in_hot
        write.in_cold |= in_cold
        write.was_in_cold &= not in_cold
        write.is_unsure |= maybe_in_cold
        write.num_open -= 1
        if write.num_open == 0 and write.settling is None:
            self._settle(write)

    def _settle(self, write: _PendingWrite) -> None:
        if not write.touched:
            del self._writes[write.entry.key]
            return
        with suppress(Closed):  # then `aclose` releases the entry at once
            write.settling = self._background.spawn(self._settled(write), "pending entry")

    async def _settled(self, write: _PendingWrite) -> None:
        try:
            # without a deadline: a call that timed out here could later end the entry of the next write
            await self._ends.run(write, None)
            write.in_hot = False
        except KVStoreError:
            # Our entry is still in the log, maybe for a record in the hot tier. If we forgot that, a later write that
            # fails would remove the entry. Everything else may be changed by other services in between.
            self._meters.add("pending_failures", step="end")
        write.settling, write.renewed_at_s = None, None
        write.touched = write.in_hot
        write.is_ours = write.in_cold = write.was_in_cold = write.is_unsure = False
        if write.num_open == 0 and not write.touched:
            self._writes.pop(write.entry.key, None)

    async def _add(self, entries: Sequence[PendingEntry]) -> bool:
        assert self._log is not None
        return await self._log.add(entries, deadline=self._step_deadline())

    async def _end_all(self, writes: Sequence[_PendingWrite]) -> None:
        """End entries by where their records are now."""
        assert self._log is not None
        deadline = self._step_deadline()
        done = [
            write
            for write in writes
            if write.in_cold or not (write.in_hot or write.is_unsure) or (write.is_short and write.is_ours)
        ]
        # once a record is in the cold tier the hot one may evict it, no matter which service wrote it there
        evictable = [write.entry.key for write in done if write.in_cold and not write.was_in_cold]
        # of another owner of an entry, or a service that claimed it, which may rely on the record
        shared = [write.entry.key for write in done if write.was_in_cold or (write.in_hot and not write.in_cold)]
        if shared:
            evictable += [key for key, num_owners in (await self._renew(shared)).items() if num_owners == 1]
        left = [write for write in writes if write not in done]
        if evictable and self._hot is not None:
            await self._hot.allow_eviction(evictable, deadline=deadline)
        if done:
            await self._log.finish([write.entry.key for write in done], deadline=deadline)
        if left:  # not known to be in the cold tier: any service that has time finishes them
            self._meters.add("pending_left", len(left))
            await self._log.release([write.entry.key for write in left], deadline=deadline)
            for write in left:
                if write.in_hot:
                    self._on_left(write.entry.key)

    async def _renew(self, keys: Sequence[RecordKey]) -> dict[RecordKey, int]:
        """Renew the leases of entries; returns those that are ours, with the number of owners of each."""
        assert self._log is not None
        owners = await self._log.renew(keys, deadline=self._step_deadline())
        return {key: num_owners for key, num_owners in zip(keys, owners, strict=True) if num_owners}

    async def _renew_regularly(self, log: PendingLog) -> None:
        """Renew the leases of what is under way, since an outage may outlast them, and retry ends that failed."""
        while self._writes:
            await asyncio.sleep(log.lease_s / 3)
            for write in list(self._writes.values()):
                if write.num_open == 0 and write.settling is None:
                    self._settle(write)
            renewable = [write for write in self._writes.values() if write.renewed_at_s is not None]
            for start in range(0, len(renewable), _RENEWED_TOGETHER):
                some = [write for write in renewable[start : start + _RENEWED_TOGETHER] if write.settling is None]
                now_s = self._clock.monotonic_s()
                try:
                    ours = await self._renew([write.entry.key for write in some])
                except Unavailable:
                    self._meters.add("pending_failures", step="renew")
                    break
                for write in some:
                    if write.entry.key not in ours:  # another service claimed it: the next write needs a new entry
                        write.renewed_at_s = None
                    elif write.renewed_at_s is not None:
                        write.renewed_at_s = max(write.renewed_at_s, now_s)

    def _step_deadline(self) -> Deadline:
        return Deadline.after(self._limits.write_back_timeout_s, self._clock)

    async def drain(self, deadline: Deadline) -> None:
        """Wait until the entries of all writes that have ended are settled, or until the deadline."""
        while not deadline.expired:
            settling = {write.settling for write in self._writes.values() if write.settling is not None}
            if not settling:
                return
            await asyncio.wait(settling, timeout=deadline.remaining_s)

    async def aclose(self, deadline: Deadline) -> None:
        """Release what is not finished, so that another service need not wait for the leases to expire. The background
        tasks have ended before."""
        keys = [write.entry.key for write in self._writes.values() if write.touched]
        self._writes.clear()
        if self._log is not None and keys:
            try:
                await self._log.release(keys, deadline=deadline)
            except KVStoreError as error:
                _log.warning("pending entries stay until their leases expire records=%d reason=%s", len(keys), error)
