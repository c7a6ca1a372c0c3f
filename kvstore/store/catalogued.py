"""A tier wrapper that reports every change to the catalog."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from kvstore.catalog.base import LeaveReason
from kvstore.catalog.entry import Level
from kvstore.errors import Unavailable
from kvstore.format.record import Record
from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.store.recorder import Recorder
from kvstore.store.room import Room
from kvstore.tiers.base import Concern, Entry, PutOutcome, Tier, TierUsage

__all__ = ["CataloguedTier"]


class CataloguedTier(Tier):
    """Passes calls on to `inner`, and reports what they changed to the catalog.

    A put returns once the catalog knows of the record, or could not be reached in time and will be told later. Nothing
    about the catalog makes a call fail, except a put into a boundary that is being deleted.

    Args:
        inner: The tier; owned from now on. Retention deletes from it directly, since it tells the catalog itself.
        level: The catalog's name for the tier.
        recorder: The way to the catalog; stays the caller's.
        room: Where puts wait for eviction; `None`: the level has no budget.
    """

    def __init__(self, inner: Tier, level: Level, recorder: Recorder, room: Room | None = None) -> None:
        self.name = inner.name
        self.inner = inner
        self._level = level
        self._recorder = recorder
        self._room = room
        inner.on_quarantine = self._put_aside
        inner.on_drop = self._dropped

    @property
    def num_quarantined(self) -> int:
        return self.inner.num_quarantined

    async def head(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> list[int | None]:
        return await self.inner.head(keys, deadline=deadline)

    async def get(
        self, key: RecordKey, *, deadline: Deadline, allocate: Callable[[int], memoryview] | None = None
    ) -> Record | None:
        """As `Tier.get`; the catalog is told when the record is not there, or was just put aside."""
        quarantined = self.inner.num_quarantined
        record = await self.inner.get(key, deadline=deadline, allocate=allocate)
        if record is not None:
            return record
        (size,) = await self.inner.head([key], deadline=deadline)
        if size is not None:
            return None
        reason = LeaveReason.CORRUPT if self.inner.num_quarantined > quarantined else LeaveReason.LOST
        return await self._gone(key, reason, None, deadline, allocate)

    async def _gone(
        self,
        key: RecordKey,
        reason: LeaveReason,
        num_bytes: int | None,
        deadline: Deadline,
        allocate: Callable[[int], memoryview] | None = None,
    ) -> Record | None:
        """Tell that a record has left, and take it back if it is there again: whoever put it since our look may have
        told the catalog before us. Returns it then; it is read for its size.
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
        """As `Tier.put`; `FULL` also when eviction makes no room in time."""
        if self._room is None:
            return await self._put(record, deadline)
        cost_bytes = self.inner.cost_bytes(record.num_bytes)
        if not await self._room.take(record.key, cost_bytes, deadline):
            return PutOutcome.FULL
        is_stored = False
        try:
            outcome = await self._put(record, deadline)
            # one that existed may be missing from the totals: count it until they are read again
            is_stored = outcome is not PutOutcome.FULL
        finally:
            self._room.end(record.key, cost_bytes, is_stored=is_stored)
        return outcome

    async def put_evictable(self, record: Record, *, deadline: Deadline) -> PutOutcome:
        """As `Tier.put_evictable`. Takes no room: it differs from `put` only in tiers that evict by themselves."""
        return await self._told(record, await self.inner.put_evictable(record, deadline=deadline), deadline)

    async def _put(self, record: Record, deadline: Deadline) -> PutOutcome:
        return await self._told(record, await self.inner.put(record, deadline=deadline), deadline)

    async def _told(self, record: Record, outcome: PutOutcome, deadline: Deadline) -> PutOutcome:
        """The outcome of a put, once the catalog knows of the record."""
        if outcome is PutOutcome.STORED:
            taken = await self._recorder.added(record, self._level, deadline=deadline)
        elif outcome is PutOutcome.EXISTS:
            # perhaps stored, with another size, by a service that died before it told the catalog
            (size,) = await self.inner.head([record.key], deadline=deadline)
            if size is None:  # whoever is told that it exists relies on it
                raise Unavailable("the record has just left the tier: put it again", key=record.key, tier=self.name)
            taken = await self._recorder.sized(
                record.key, self._level, size or record.num_bytes, record.header.span.stop, deadline=deadline
            )
        else:
            return outcome
        if not taken:
            raise Unavailable("the record's boundary is being deleted: put it again", key=record.key, tier=self.name)
        return outcome

    async def delete(self, key: RecordKey, *, deadline: Deadline) -> bool:
        (size,) = await self.inner.head([key], deadline=deadline)
        deleted = await self.inner.delete(key, deadline=deadline)
        await self._recorder.removed(key, self._level, LeaveReason.REMOVED, size or None, deadline=deadline)
        return deleted

    async def quarantine(self, key: RecordKey, reason: str, *, seen: Record | None = None, deadline: Deadline) -> bool:
        (size,) = await self.inner.head([key], deadline=deadline)
        is_aside = await self.inner.quarantine(key, reason, seen=seen, deadline=deadline)
        if is_aside:
            await self._gone(key, LeaveReason.CORRUPT, size or None, deadline)
        return is_aside

    def _put_aside(self, key: RecordKey, reason: str) -> None:
        if self.on_quarantine is not None:
            self.on_quarantine(key, reason)

    def _dropped(self, keys: Sequence[RecordKey]) -> None:
        self._recorder.dropped(keys, self._level, self.name)

    def cost_bytes(self, num_bytes: int) -> int:
        return self.inner.cost_bytes(num_bytes)

    async def allow_eviction(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        await self.inner.allow_eviction(keys, deadline=deadline)

    async def concerns(self, *, deadline: Deadline) -> list[Concern]:
        return await self.inner.concerns(deadline=deadline)

    async def scan(self, namespace: NamespaceId | None = None) -> AsyncIterator[Entry]:
        async for entry in self.inner.scan(namespace):
            yield entry

    async def put_manifest(self, namespace: NamespaceId, manifest: bytes, *, deadline: Deadline) -> None:
        await self.inner.put_manifest(namespace, manifest, deadline=deadline)

    async def get_manifest(self, namespace: NamespaceId, *, deadline: Deadline) -> bytes | None:
        return await self.inner.get_manifest(namespace, deadline=deadline)

    async def usage(self, *, deadline: Deadline) -> TierUsage:
        """As `Tier.usage`, against the budget of the level where that is the smaller bound."""
        return self.bounded(await self.inner.usage(deadline=deadline))

    def bounded(self, usage: TierUsage) -> TierUsage:
        """A usage of `inner`, against the budget of the level where that is the smaller bound. What a tier does not
        count itself is told by the catalog, as of the last look."""
        room = self._room
        if room is None or (usage.limit_bytes is not None and usage.limit_bytes <= room.budget_bytes):
            return usage
        used_bytes = usage.used_bytes if usage.used_bytes is not None else room.held_bytes
        return replace(usage, used_bytes=used_bytes, limit_bytes=room.budget_bytes, limit_name="cold_bytes")

    async def aclose(self) -> None:
        await self.inner.aclose()
