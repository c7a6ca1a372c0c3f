"""Tells the catalog what was stored, deleted and read: in order, in batches, with retries."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from kvstore.api import PrefixQuery
from kvstore.catalog.base import Addition, Catalog, LeaveReason, Removal, Use
from kvstore.catalog.entry import Level
from kvstore.errors import Closed, CorruptRecord, InvalidRequest, Unavailable
from kvstore.format.record import Record
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.model.layout import Layout
from kvstore.runtime.background import Background
from kvstore.runtime.clock import Clock
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters
from kvstore.store.retention.backpressure import BudgetGate
from kvstore.tiers.base import Concern, Entry, PutOutcome, Tier, TierUsage

__all__ = ["CataloguedTier", "Recorder"]

_BATCH = 512
_WAITING_MAX = 65_536
"""Changes that may wait for a catalog that does not answer, some 30 MiB; beyond, the catalog is marked incomplete."""
_CALL_S = 5.0
_PAUSE_S_MAX = 5.0
_CLOSE_S = 1.0
_AGAIN_S = 1.0
"""So long after a boundary that is being deleted has refused a record it is told of it again."""
_USE_S = 5.0
"""How often reads are reported: they are many, and nobody needs them sooner."""
_QUERIES_KEPT = 64
_QUERY_BOUNDARIES_KEPT = 131_072
"""Boundaries of all queries that are kept, but for the last one: they are indexed in one go, in some 30 ms."""
_PARENTS_KEPT = 200_000


@dataclass(eq=False, slots=True)
class _Told:
    """A change on its way to the catalog.

    Attributes:
        change: What happened.
        done: Whether the catalog took the change, once it has answered; true at once when it can only be told later.
        is_new: The record was stored just now: it must be told of, however long that takes.
    """

    change: Addition | Removal
    done: asyncio.Future[bool]
    is_new: bool = False


class Recorder:
    """The way from the store to its catalog. What cannot be told now is told later, in the same order; when too much
    waits, the catalog is marked incomplete, so that until a reindex nobody takes what it lacks for absent.

    Args:
        catalog: Whom to tell; stays the caller's.
        meters: Where to count.
        clock: For deadlines and pauses.

    Attributes:
        num_refused: Additions to boundaries that were being deleted.
    """

    def __init__(self, catalog: Catalog, meters: Meters, clock: Clock) -> None:
        self.catalog = catalog
        self.num_refused = 0
        self._meters = meters
        self._clock = clock
        self._background = Background("catalog recorder")
        self._waiting: deque[_Told] = deque()
        self._uses: dict[tuple[NamespaceId, PrefixHash], Use] = {}
        self._flusher: asyncio.Task[None] | None = None
        self._teller: asyncio.Task[None] | None = None
        self._lost = False
        self._queries: deque[tuple[PrefixQuery, int]] = deque(maxlen=_QUERIES_KEPT)
        self._layouts: dict[NamespaceId, tuple[Layout, str]] = {}
        self._registered: set[NamespaceId] = set()
        self._parents: dict[PrefixHash, PrefixHash] = {}

    def __len__(self) -> int:
        """Changes that wait."""
        return len(self._waiting)

    def knows(self, namespace: NamespaceId) -> bool:
        """Whether the namespace was registered here: the catalog refuses changes of any other."""
        return namespace in self._layouts

    def register(self, namespace: NamespaceId, layout: Layout, tenant: str) -> None:
        """Make a namespace known. Never waits: a catalog that does not answer learns of it before the next change."""
        if namespace not in self._layouts:
            self._layouts[namespace] = (layout, tenant)
            self._background.spawn(self._register(namespace), "namespace")

    async def _register(self, namespace: NamespaceId) -> None:
        try:
            deadline = Deadline.after(_CALL_S, self._clock)
            await self.catalog.register(namespace, *self._layouts[namespace], deadline=deadline)
        except (Unavailable, Closed, InvalidRequest):
            self._meters.add("catalog_failures", call="register")
        else:
            self._registered.add(namespace)

    async def added(self, record: Record, level: Level, *, deadline: Deadline) -> bool:
        """Tell that a level holds `record` now. False: its boundary is being deleted there, it must be put again.

        Returns once the catalog knows. If it cannot be reached, or not before the deadline, it is told later.
        """
        key, tokens = record.key, record.header.span.stop
        addition = Addition(key, level, record.num_bytes, tokens, self.below(key.prefix))
        return await self._tell(addition, deadline, is_new=True)

    async def sized(self, key: RecordKey, level: Level, num_bytes: int, tokens: int, *, deadline: Deadline) -> bool:
        """As `added`, for a record that another process stored."""
        return await self._tell(Addition(key, level, num_bytes, tokens, self.below(key.prefix)), deadline)

    async def removed(
        self, key: RecordKey, level: Level, reason: LeaveReason, num_bytes: int | None = None, *, deadline: Deadline
    ) -> None:
        """Tell that a level no longer holds a record. Returns when `added` would."""
        await self._tell(Removal(key, level, num_bytes, reason), deadline)

    def dropped(self, keys: Sequence[RecordKey], level: Level, tier: str) -> None:
        """Tell that a tier evicted records by itself. Never waits."""
        self._meters.add("tier_evicted_records", len(keys), tier=tier)
        for key in keys:
            change = Removal(key, level, None, LeaveReason.EVICTED)
            self._queue(_Told(change, asyncio.get_running_loop().create_future()))

    def used(self, namespace: NamespaceId, boundaries: Iterable[tuple[PrefixHash, int]]) -> None:
        """Tell, within seconds, that boundaries (prefix, tokens) were read. Never waits."""
        for prefix, tokens in boundaries:
            before = self._uses.get((namespace, prefix))
            hits = 1 + (before.hits if before is not None else 0)
            if before is not None or len(self._uses) < _WAITING_MAX:
                self._uses[namespace, prefix] = Use(prefix, hits, tokens, self.below(prefix))
        if self._uses and (self._teller is None or self._teller.done()):
            self._teller = self._background.spawn(self._tell_uses(), "uses")

    def learn(self, query: PrefixQuery, layout: Layout) -> None:
        """Remember a prompt's boundaries: what is saved next is likely to be one of them, and has a parent."""
        self._queries.append((query, layout.page_tokens))
        num_kept = 0
        for number, (kept, _) in enumerate(reversed(self._queries)):
            num_kept += len(kept.boundaries)
            if number and num_kept > _QUERY_BOUNDARIES_KEPT:
                while len(self._queries) > number:
                    self._queries.popleft()
                return

    def below(self, prefix: PrefixHash) -> PrefixHash | None:
        """The boundary that a prompt has before this one; `None`: it is the first, or not known here."""
        if prefix not in self._parents:
            while self._queries:
                self._index(*self._queries.pop())
        return self._parents.get(prefix)

    def _index(self, query: PrefixQuery, page_tokens: int) -> None:
        if len(self._parents) > _PARENTS_KEPT:
            self._parents.clear()
        parent: PrefixHash | None = None
        for boundary in query.boundaries:
            if parent is not None:
                self._parents[boundary.prefix] = parent
            if boundary.tokens % page_tokens == 0:
                parent = boundary.prefix

    async def _tell(self, change: Addition | Removal, deadline: Deadline, *, is_new: bool = False) -> bool:
        told = _Told(change, asyncio.get_running_loop().create_future(), is_new)
        if not self._queue(told):
            return True
        try:
            await asyncio.wait({told.done}, timeout=deadline.remaining_s)
        finally:
            _resolve(told, True)
        return told.done.result()

    def _queue(self, told: _Told) -> bool:
        """Queue a change. False: too much waits, the catalog will never learn of it."""
        if len(self._waiting) >= _WAITING_MAX:
            self._lost = True
            self._meters.add("catalog_changes_lost")
            return False
        self._waiting.append(told)
        if self._flusher is None or self._flusher.done():
            self._flusher = self._background.spawn(self._flush(), "changes")
        return True

    async def _flush(self) -> None:
        """Send what waits, in order, until the queue is empty."""
        failures = 0
        while self._waiting:
            batch = [self._waiting[index] for index in range(min(_BATCH, len(self._waiting)))]
            first = type(batch[0].change)
            batch = next(list(group) for _, group in groupby(batch, key=lambda told: type(told.change) is first))
            try:
                taken = await self._send(batch)
            except (InvalidRequest, CorruptRecord):  # will never be taken
                self._meters.add("catalog_failures", call="refused")
                taken, self._lost = [True] * len(batch), True
            except (Unavailable, Closed):
                self._meters.add("catalog_failures", call="change")
                for told in self._waiting:
                    _resolve(told, True)
                failures += 1
                await asyncio.sleep(min(_PAUSE_S_MAX, 0.1 * 2 ** min(failures, 10)))
                continue
            failures = 0
            self.num_refused += taken.count(False)
            for told, answer in zip(batch, taken, strict=True):
                self._waiting.popleft()
                if not answer and told.is_new and told.done.done():  # nobody waits any more who would put it again
                    self._background.spawn(self._tell_again(told), "change that was refused")
                _resolve(told, answer)
            await self._confess()

    async def _tell_again(self, told: _Told) -> None:
        """Tell of a record that its boundary, which was being deleted, had no place for: it was not deleted with it."""
        await asyncio.sleep(_AGAIN_S)
        self._queue(told)

    async def _send(self, batch: list[_Told]) -> list[bool]:
        deadline = Deadline.after(_CALL_S, self._clock)
        for namespace in {told.change.key.namespace for told in batch}.difference(self._registered):
            if namespace in self._layouts:
                await self.catalog.register(namespace, *self._layouts[namespace], deadline=deadline)
                self._registered.add(namespace)
        additions = [told.change for told in batch if isinstance(told.change, Addition)]
        if additions:
            return await self.catalog.add(additions, deadline=deadline)
        removals = [told.change for told in batch if isinstance(told.change, Removal)]
        await self.catalog.remove(removals, deadline=deadline)
        return [True] * len(batch)

    async def _confess(self) -> None:
        """Mark the catalog incomplete if changes were lost: what it lacks may be stored all the same."""
        if self._lost:
            try:
                await self.catalog.set_complete(False, deadline=Deadline.after(_CALL_S, self._clock))
            except (Unavailable, Closed):
                return
            self._lost = False

    async def _tell_uses(self) -> None:
        while self._uses:
            await asyncio.sleep(_USE_S)
            await self.tell_uses_now()

    async def tell_uses_now(self) -> None:
        """Report what was read since the last report; what cannot be reported is forgotten, counted."""
        uses, self._uses = self._uses, {}
        by_namespace: dict[NamespaceId, list[Use]] = {}
        for (namespace, _), use in uses.items():
            by_namespace.setdefault(namespace, []).append(use)
        for namespace, listed in by_namespace.items():
            try:
                await self.catalog.use(namespace, listed, deadline=Deadline.after(_CALL_S, self._clock))
            except (Unavailable, Closed, InvalidRequest, CorruptRecord):
                self._meters.add("catalog_failures", call="use")

    async def drain(self, deadline: Deadline) -> int:
        """Wait until everything is told, or until the deadline; returns how many changes are left."""
        if self._uses and not deadline.expired:
            await self.tell_uses_now()
        if self._flusher is not None and not self._flusher.done():
            await asyncio.wait({self._flusher}, timeout=deadline.remaining_s)
        return len(self._waiting)

    async def aclose(self) -> None:
        """Drain for a moment, then stop. Idempotent."""
        await self.drain(Deadline.after(_CLOSE_S, self._clock))
        await self._background.aclose()
        for told in self._waiting:
            _resolve(told, True)


def _resolve(told: _Told, answer: bool) -> None:
    if not told.done.done():
        told.done.set_result(answer)


class CataloguedTier(Tier):
    """Passes calls on to `inner`, and reports what they changed to the catalog.

    A put returns once the catalog knows of the record, or could not be reached in time and will be told later. Nothing
    about the catalog makes a call fail, except a put into a boundary that is being deleted.

    Args:
        inner: The tier; owned from now on. Retention deletes from it directly, since it tells the catalog itself.
        level: The catalog's name for the tier.
        recorder: The way to the catalog; stays the caller's.
        budget_gate: Where puts wait for eviction; `None`: the level has no budget.
    """

    def __init__(self, inner: Tier, level: Level, recorder: Recorder, budget_gate: BudgetGate | None = None) -> None:
        self.name = inner.name
        self.inner = inner
        self._level = level
        self._recorder = recorder
        self._gate = budget_gate
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
        if self._gate is None:
            return await self._put(record, deadline)
        cost_bytes = self.inner.cost_bytes(record.num_bytes)
        if not await self._gate.take(record.key, cost_bytes, deadline):
            return PutOutcome.FULL
        is_stored = False
        try:
            outcome = await self._put(record, deadline)
            # one that existed may be missing from the totals: count it until they are read again
            is_stored = outcome is not PutOutcome.FULL
        finally:
            self._gate.end(record.key, cost_bytes, is_stored=is_stored)
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
        gate = self._gate
        if gate is None or (usage.limit_bytes is not None and usage.limit_bytes <= gate.budget_bytes):
            return usage
        used_bytes = usage.used_bytes if usage.used_bytes is not None else gate.held_bytes
        return replace(usage, used_bytes=used_bytes, limit_bytes=gate.budget_bytes, limit_name="cold_bytes")

    async def aclose(self) -> None:
        await self.inner.aclose()
