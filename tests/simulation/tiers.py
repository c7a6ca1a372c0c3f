"""A tier on a simulated server: what a real one does beside moving bytes, done as the real ones do it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from kvstore.format.record import Record
from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.runtime.clock import Clock
from kvstore.runtime.deadline import Deadline
from kvstore.tiers.base import Entry, PutOutcome, Tier, TierUsage
from kvstore.tiers.verify import allocate_exactly, open_off_loop
from tests.simulation.media import Gone, Medium, mangled
from tests.simulation.servers import Link

_STEP_S = 10.0


class SimulatedTier(Tier):
    """One process's way to a medium.

    Args:
        name: As a tier's.
        medium: What the server keeps.
        link: The way there.
        clock: For scans.
        on_damage: Told of each read that came damaged.
    """

    def __init__(
        self, name: str, medium: Medium, link: Link, clock: Clock, on_damage: Callable[[RecordKey], None]
    ) -> None:
        self.name = name
        self._medium = medium
        self._link = link
        self._clock = clock
        self._on_damage = on_damage

    async def head(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> list[int | None]:
        self._check_open()
        records = self._medium.records

        def work() -> list[int | None]:
            return [len(records[key]) if key in records else None for key in keys]

        return await self._link("head", work, deadline) if keys else []

    async def get(
        self, key: RecordKey, *, deadline: Deadline, allocate: Callable[[int], memoryview] | None = None
    ) -> Record | None:
        self._check_open()
        stored, data = await self._link("get", lambda: self._read(key), deadline)
        if data is None:
            return None
        buffer = allocate_exactly(len(data), allocate)
        buffer[:] = data
        opened = await open_off_loop(buffer, key)
        if isinstance(opened, Record):
            return opened
        await self._quarantine(key, opened, lambda data: data is stored, deadline)
        return None

    def _read(self, key: RecordKey) -> tuple[bytes | None, bytes | None]:
        """What is stored, and what of it arrives."""
        data, server = self._medium.records.get(key), self._link.server
        stored = data
        if data is not None and server.numbers.random() < server.weather.mangling:
            self._on_damage(key)
            data = mangled(data, server.numbers, list(self._medium.records.values()))
        return stored, data

    async def put(self, record: Record, *, deadline: Deadline) -> PutOutcome:
        self._check_open()
        data = bytes(record.data)
        return await self._link("put", lambda: self._medium.put(record.key, data), deadline)

    async def put_evictable(self, record: Record, *, deadline: Deadline) -> PutOutcome:
        self._check_open()
        data = bytes(record.data)
        return await self._link("put", lambda: self._medium.put_evictable(record.key, data), deadline)

    async def delete(self, key: RecordKey, *, deadline: Deadline) -> bool:
        self._check_open()
        return await self._link("delete", lambda: self._medium.take(key, Gone.DELETED), deadline)

    async def allow_eviction(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        self._check_open()
        await self._link("allow_eviction", lambda: self._medium.allow_eviction(keys), deadline)

    async def quarantine(self, key: RecordKey, reason: str, *, seen: Record | None = None, deadline: Deadline) -> bool:
        self._check_open()
        return await self._quarantine(key, reason, lambda data: seen is None or data == seen.data, deadline)

    async def _quarantine(
        self, key: RecordKey, reason: str, is_seen: Callable[[bytes], bool], deadline: Deadline
    ) -> bool:
        def work() -> bool:
            data = self._medium.records.get(key)
            return data is not None and is_seen(data) and self._medium.take(key, Gone.QUARANTINED)

        is_quarantined = await self._link("quarantine", work, deadline)
        if is_quarantined:
            self._quarantined(key, reason)
        return is_quarantined

    async def scan(self, namespace: NamespaceId | None = None) -> AsyncIterator[Entry]:
        self._check_open()
        records = self._medium.records

        def work() -> list[Entry]:
            return [Entry(key, len(data)) for key, data in records.items() if namespace in (None, key.namespace)]

        for entry in await self._link("scan", work, Deadline.after(_STEP_S, self._clock)):
            yield entry

    async def put_manifest(self, namespace: NamespaceId, manifest: bytes, *, deadline: Deadline) -> None:
        self._check_open()
        kept = self._medium.manifests
        await self._link("put_manifest", lambda: kept.__setitem__(namespace, bytes(manifest)), deadline)

    async def get_manifest(self, namespace: NamespaceId, *, deadline: Deadline) -> bytes | None:
        self._check_open()
        return await self._link("get_manifest", lambda: self._medium.manifests.get(namespace), deadline)

    async def usage(self, *, deadline: Deadline) -> TierUsage:
        self._check_open()
        medium = self._medium

        def work() -> TierUsage:
            return TierUsage(len(medium.records), medium.used_bytes, medium.capacity_bytes, self._num_quarantined)

        return await self._link("usage", work, deadline)

    async def aclose(self) -> None:
        self._closed = True
