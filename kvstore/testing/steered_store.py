"""A store whose calls a test holds up, makes fail, or changes: for tests of what stands in front of one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

from kvstore.api import Ack, LeaseId, Lookup, Outcome, PageStore, PrefixQuery, Progress, Retention, SaveOutcome, Staged
from kvstore.format.record import Record
from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.model.namespace import NamespaceDescription
from kvstore.runtime.deadline import Deadline
from kvstore.store.limits import StoreLimits
from kvstore.store.tiered import TieredStore
from kvstore.tiers.memory import MemoryTier


class SteeredStore(PageStore):
    """A store whose calls can be held up, made to fail, or hooked; by default a `TieredStore` over memory.

    Attributes:
        calls: Number of calls by name.
        held: Names of calls that wait until they are taken out of this set, or until their deadline.
        held_keys: Records whose load waits until they are taken out of this set, or until its deadline.
        errors: By name what a call raises instead.
        outcome: What every save answers instead of keeping the record.
        after_stage: Called on the loop's thread when a stage is about to return.
        on_load: Changes the record that a load returns.
        on_stage: Changes what a stage answers.
        cancelled: Names of calls that were cancelled.
    """

    def __init__(self, inner: PageStore | None = None) -> None:
        self.inner: PageStore = inner or TieredStore(MemoryTier(64 << 20), limits=StoreLimits(stage_bytes=32 << 20))
        self.calls: Counter[str] = Counter()
        self.held: set[str] = set()
        self.held_keys: set[RecordKey] = set()
        self.errors: dict[str, Exception] = {}
        self.outcome: SaveOutcome | None = None
        self.after_stage: Callable[[], None] = lambda: None
        self.on_load: Callable[[Record], Record] = lambda record: record
        self.on_stage: Callable[[Staged], Staged] = lambda staged: staged
        self.cancelled: list[str] = []

    @property
    def num_leases(self) -> int:
        """Leases that have not ended."""
        assert isinstance(self.inner, TieredStore)
        return len(self.inner.leases)

    async def _pass(self, name: str, deadline: Deadline, key: RecordKey | None = None) -> None:
        self.calls[name] += 1
        try:
            async with deadline.scope(name):
                while name in self.held or (name == "load" and key in self.held_keys):
                    await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        if name in self.errors:
            raise self.errors[name]

    async def open_namespace(self, description: NamespaceDescription, *, deadline: Deadline) -> NamespaceId:
        await self._pass("open_namespace", deadline)
        return await self.inner.open_namespace(description, deadline=deadline)

    async def lookup(self, query: PrefixQuery, *, deadline: Deadline) -> Lookup:
        await self._pass("lookup", deadline)
        return await self.inner.lookup(query, deadline=deadline)

    async def stage(self, query: PrefixQuery, *, deadline: Deadline, progress: Progress | None = None) -> Staged:
        await self._pass("stage", deadline)
        staged = await self.inner.stage(query, deadline=deadline, progress=progress)
        self.after_stage()
        return self.on_stage(staged)

    async def renew(self, lease: LeaseId, *, deadline: Deadline) -> bool:
        await self._pass("renew", deadline)
        return await self.inner.renew(lease, deadline=deadline)

    async def load(
        self,
        lease: LeaseId,
        key: RecordKey,
        *,
        deadline: Deadline,
        allocate: Callable[[int], memoryview] | None = None,
    ) -> Record:
        await self._pass("load", deadline, key)
        return self.on_load(await self.inner.load(lease, key, deadline=deadline, allocate=allocate))

    async def save(
        self,
        record: Record,
        *,
        ack: Ack = Ack.MEMORY,
        retention: Retention = Retention.NORMAL,
        deadline: Deadline,
    ) -> SaveOutcome:
        await self._pass("save", deadline)
        return self.outcome or await self.inner.save(record, ack=ack, retention=retention, deadline=deadline)

    async def release(self, lease: LeaseId) -> None:
        self.calls["release"] += 1
        await self.inner.release(lease)

    async def discard(self, key: RecordKey, reason: str, *, deadline: Deadline) -> None:
        await self._pass("discard", deadline)
        await self.inner.discard(key, reason, deadline=deadline)

    def report(self, outcome: Outcome) -> None:
        self.calls["tell"] += 1
        self.inner.report(outcome)

    async def explain(self, request: str, *, deadline: Deadline, tenant: str | None = "") -> Mapping[str, object]:
        return await self.inner.explain(request, deadline=deadline, tenant=tenant)

    async def status(self, *, deadline: Deadline, tenant: str = "") -> Mapping[str, object]:
        await self._pass("status", deadline)
        return await self.inner.status(deadline=deadline, tenant=tenant)

    async def aclose(self) -> None:
        await self.inner.aclose()
