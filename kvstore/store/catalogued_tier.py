"""`CataloguedTier`: a tier that reports to the catalog what its calls changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvstore.catalog.base import LeaveReason
from kvstore.catalog.entry import Level
from kvstore.errors import Unavailable
from kvstore.format.record import Record
from kvstore.model.keys import RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.store.recorder import Recorder
from kvstore.store.retention.backpressure import BudgetGate
from kvstore.store.write_back.pending_writes import BELIEVED_S
from kvstore.tiers.base import PutOutcome, Tier, TierUsage, TierWrapper

_LEFT = "the record has just left the tier: put it again"


class CataloguedTier(TierWrapper):
    """Passes calls on to `inner`, and reports to the catalog what they changed.

    A put returns once the catalog has the record, or could not be reached in time and gets the report later. No fault
    of the catalog makes a call fail, except a put into a boundary that is being deleted.

    Args:
        inner: The tier; owned from now on. Retention deletes from it directly, and changes the catalog itself.
        recorder: The way to the catalog; stays the caller's.
        budget_gate: Where puts wait for eviction; `None`: the level has no budget.
    """

    def __init__(self, inner: Tier, level: Level, recorder: Recorder, budget_gate: BudgetGate | None = None) -> None:
        super().__init__(inner)
        self._level = level
        self._recorder = recorder
        self._gate = budget_gate
        self._bad: set[RecordKey] = set()  # just quarantined, by a call that has yet to report it

    async def get(
        self, key: RecordKey, *, deadline: Deadline, allocate: Callable[[int], memoryview] | None = None
    ) -> Record | None:
        """As `Tier.get`; reports to the catalog when the record is not there, or was just quarantined."""
        try:
            record = await self.inner.get(key, deadline=deadline, allocate=allocate)
            if record is not None:
                return record
            (size,) = await self.inner.head([key], deadline=deadline)
            if size is not None:
                return None
            reason = LeaveReason.CORRUPT if key in self._bad else LeaveReason.LOST
            return await self._report_removal(key, reason, None, deadline, allocate)
        finally:
            self._bad.discard(key)  # not before: another read that misses it may report it first

    async def _report_removal(
        self,
        key: RecordKey,
        reason: LeaveReason,
        num_bytes: int | None,
        deadline: Deadline,
        allocate: Callable[[int], memoryview] | None = None,
    ) -> Record | None:
        """Report that a record was removed, and report it as stored if it is there again: its writer may have reported
        it before this call did. Returns it then; it is read for its size.
        """
        await self._recorder.removed(key, self._level, reason, num_bytes, deadline=deadline)
        (size,) = await self.inner.head([key], deadline=deadline)
        if size is None:
            return None
        record = await self.inner.get(key, deadline=deadline, allocate=allocate)
        if record is not None:
            tokens = record.header.span.stop
            await self._recorder.sized(key, self._level, record.num_bytes, tokens, deadline=deadline)
        return record

    async def put(self, record: Record, *, deadline: Deadline) -> PutOutcome:
        """As `Tier.put`; `FULL` also when eviction frees too little in time."""
        if self._gate is None:
            return await self._reported(record, await self.inner.put(record, deadline=deadline), deadline)
        cost_bytes = self.inner.cost_bytes(record.num_bytes)
        if not await self._gate.take(record.key, cost_bytes, deadline):
            return PutOutcome.FULL
        is_stored = False
        try:
            outcome = await self._reported(record, await self.inner.put(record, deadline=deadline), deadline)
            # one that existed may be missing from the totals: count it until they are read again
            is_stored = outcome is not PutOutcome.FULL
        finally:
            self._gate.end(record.key, cost_bytes, is_stored=is_stored)
        return outcome

    async def put_evictable(self, record: Record, *, deadline: Deadline) -> PutOutcome:
        """As `Tier.put_evictable`. Passes no gate: it differs from `put` only in tiers that evict by themselves."""
        return await self._reported(record, await self.inner.put_evictable(record, deadline=deadline), deadline)

    async def _reported(self, record: Record, outcome: PutOutcome, deadline: Deadline) -> PutOutcome:
        """The outcome of a put, once the record is reported to the catalog.

        Raises:
            Unavailable: The record has left the tier since, or its boundary is being deleted.
        """
        left_s = deadline.remaining_s
        if outcome is PutOutcome.STORED:
            is_taken = await self._recorder.added(record, self._level, deadline=deadline)
        elif outcome is PutOutcome.EXISTS:
            # a service that died before its report may have stored it, with another size
            (size,) = await self.inner.head([record.key], deadline=deadline)
            if size is None:  # a caller that gets EXISTS relies on the record
                raise Unavailable(_LEFT, key=record.key, tier=self.name)
            is_taken = await self._recorder.sized(
                record.key, self._level, size or record.num_bytes, record.header.span.stop, deadline=deadline
            )
        else:
            return outcome
        if not is_taken:
            raise Unavailable("the record's boundary is being deleted: put it again", key=record.key, tier=self.name)
        is_late = left_s - deadline.remaining_s > BELIEVED_S and not deadline.expired
        if is_late and await self.inner.head([record.key], deadline=deadline) == [None]:
            # another service deleted it while the catalog was slow, and the caller lets the hot tier evict its copy
            raise Unavailable(_LEFT, key=record.key, tier=self.name)
        return outcome

    async def delete(self, key: RecordKey, *, deadline: Deadline) -> bool:
        (size,) = await self.inner.head([key], deadline=deadline)
        deleted = await self.inner.delete(key, deadline=deadline)
        await self._recorder.removed(key, self._level, LeaveReason.REMOVED, size or None, deadline=deadline)
        return deleted

    async def quarantine(self, key: RecordKey, reason: str, *, seen: Record | None = None, deadline: Deadline) -> bool:
        (size,) = await self.inner.head([key], deadline=deadline)
        try:
            is_quarantined = await self.inner.quarantine(key, reason, seen=seen, deadline=deadline)
            if is_quarantined:
                await self._report_removal(key, LeaveReason.CORRUPT, size or None, deadline)
        finally:
            self._bad.discard(key)
        return is_quarantined

    def _inner_quarantined(self, key: RecordKey, reason: str) -> None:
        self._bad.add(key)
        super()._inner_quarantined(key, reason)

    def _inner_dropped(self, keys: Sequence[RecordKey]) -> None:
        self._recorder.dropped(keys, self._level, self.name)

    async def usage(self, *, deadline: Deadline) -> TierUsage:
        """As `Tier.usage`, against the budget of the level where that is the smaller bound."""
        return self.bounded(await self.inner.usage(deadline=deadline))

    def bounded(self, usage: TierUsage) -> TierUsage:
        """A usage of `inner`, against the budget of the level where that is the smaller bound. Where a tier does not
        count its bytes, the catalog's last totals are used."""
        gate = self._gate
        if gate is None or (usage.limit_bytes is not None and usage.limit_bytes <= gate.budget_bytes):
            return usage
        used_bytes = usage.used_bytes if usage.used_bytes is not None else gate.held_bytes
        return replace(usage, used_bytes=used_bytes, limit_bytes=gate.budget_bytes, limit_name="cold_bytes")
