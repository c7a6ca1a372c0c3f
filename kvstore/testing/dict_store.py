"""The smallest honest `PageStore`: dictionaries, no tiers, no limits; for tests of what stands in front of one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import count

from kvstore.api import Ack, LeaseId, Lookup, PageStore, PrefixQuery, Progress, Retention, SaveOutcome, Staged
from kvstore.errors import Closed, InvalidRequest, Unavailable
from kvstore.format.record import Record, verify_payload
from kvstore.model.coverage import longest_resumable, records_to_resume
from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.model.layout import Layout
from kvstore.model.namespace import NamespaceDescription, NamespaceNotOpen
from kvstore.runtime.deadline import Deadline


class DictStore(PageStore):
    """Keeps everything in dictionaries.

    Attributes:
        gate: Cleared, every call but `release` waits for it until its deadline, as a slow store would.
        leases: What is leased.
        records: What is stored.
        cancelled: Names of calls that were cancelled while they waited.
    """

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.leases: dict[LeaseId, dict[RecordKey, Record]] = {}
        self.records: dict[RecordKey, Record] = {}
        self.cancelled: list[str] = []
        self.progress_steps: list[int] = []
        self._layouts: dict[NamespaceId, Layout] = {}
        self._ids = count(1)
        self._closed = False

    async def open_namespace(self, description: NamespaceDescription, *, deadline: Deadline) -> NamespaceId:
        await self._pass("open_namespace", deadline)
        self._layouts[description.id] = description.layout()
        return description.id

    async def lookup(self, query: PrefixQuery, *, deadline: Deadline) -> Lookup:
        await self._pass("lookup", deadline)
        present, resume = self._coverage(query)
        return Lookup(resume, present)

    async def stage(self, query: PrefixQuery, *, deadline: Deadline, progress: Progress | None = None) -> Staged:
        for step in self.progress_steps:
            await asyncio.sleep(0.05)
            if progress is not None:
                progress(step)
        await self._pass("stage", deadline)
        layout = self._layout(query.namespace)
        present, resume = self._coverage(query)
        if resume <= query.local_tokens:
            return Staged(None, query.local_tokens)
        tokens = [boundary.tokens for boundary in query.boundaries]
        needed = records_to_resume(layout, tokens, present, resume_tokens=resume, local_tokens=query.local_tokens)
        prefixes = {boundary.tokens: boundary.prefix for boundary in query.boundaries}
        keys = [
            RecordKey(query.namespace, prefixes[record.tokens], record.group, slice_)
            for record in needed
            for slice_ in range(layout.groups[record.group].num_slices)
        ]
        held = {key: self.records[key] for key in keys}
        lease = LeaseId(next(self._ids).to_bytes(16, "big"))
        self.leases[lease] = held
        return Staged(
            lease=lease,
            resume_tokens=resume,
            keys=tuple(held),
            spans=tuple((record.header.span.start, record.header.span.stop) for record in held.values()),
            sources={"dict": len(held)},
            num_bytes=sum(record.num_bytes for record in held.values()),
            lease_s=60.0,
        )

    async def renew(self, lease: LeaseId, *, deadline: Deadline) -> bool:
        await self._pass("renew", deadline)
        return lease in self.leases

    async def load(
        self,
        lease: LeaseId,
        key: RecordKey,
        *,
        deadline: Deadline,
        allocate: Callable[[int], memoryview] | None = None,
    ) -> Record:
        await self._pass("load", deadline)
        record = self.leases.get(lease, {}).get(key)
        if record is None:
            raise Unavailable("the lease has ended or does not hold this record", key=key)
        return record

    async def save(
        self,
        record: Record,
        *,
        ack: Ack = Ack.MEMORY,
        retention: Retention = Retention.NORMAL,
        deadline: Deadline,
    ) -> SaveOutcome:
        await self._pass("save", deadline)
        if ack is not Ack.MEMORY:
            raise InvalidRequest("this store has memory only", ack=ack.value)
        self._layout(record.key.namespace)
        verify_payload(record)
        if record.key in self.records:
            return SaveOutcome.EXISTS
        self.records[record.key] = record
        return SaveOutcome.STORED

    async def release(self, lease: LeaseId) -> None:
        self.leases.pop(lease, None)

    async def discard(self, key: RecordKey, reason: str, *, deadline: Deadline) -> None:
        await self._pass("discard", deadline)
        self.records.pop(key, None)

    async def status(self, *, deadline: Deadline, tenant: str = "") -> Mapping[str, object]:
        await self._pass("status", deadline)
        return {"records": len(self.records), "leases": len(self.leases)}

    async def aclose(self) -> None:
        self._closed = True

    async def _pass(self, call: str, deadline: Deadline) -> None:
        if self._closed:
            raise Closed("the store is closed")
        try:
            async with deadline.scope(call):
                await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(call)
            raise

    def _layout(self, namespace: NamespaceId) -> Layout:
        if namespace not in self._layouts:
            raise NamespaceNotOpen("the namespace was not opened: call open_namespace first", namespace=namespace.hex())
        return self._layouts[namespace]

    def _coverage(self, query: PrefixQuery) -> tuple[tuple[int, ...], int]:
        layout = self._layout(query.namespace)
        present = tuple(
            sum(
                1 << index
                for index, group in enumerate(layout.groups)
                if all(
                    RecordKey(query.namespace, boundary.prefix, index, slice_) in self.records
                    for slice_ in range(group.num_slices)
                )
            )
            for boundary in query.boundaries
        )
        resume = longest_resumable(
            layout,
            [boundary.tokens for boundary in query.boundaries],
            present,
            local_tokens=query.local_tokens,
            cap_tokens=query.cap_tokens,
            step_tokens=query.step_tokens,
        )
        return present, resume
