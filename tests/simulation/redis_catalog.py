"""What the simulated Redis keeps, and a catalog that stands there, with what the real `Reconciler` asks of one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvstore.catalog.base import Addition, LeaveReason, Removal, Tombstone
from kvstore.catalog.coordination import Ownership
from kvstore.catalog.entry import Level, entry_of
from kvstore.catalog.redis.counters import ServerCounters
from kvstore.format.names import format_name
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.runtime.clock import Clock
from kvstore.runtime.deadline import Deadline
from kvstore.testing.dict_catalog import Ask, CatalogBooks, DictCatalog
from kvstore.testing.dict_pending import DictOwnership, LeaseBooks, PendingBooks
from tests.simulation.media import Medium

_NAMES_MAX = 256
"""A step of a scan is shorter than was asked for, so that a small cluster takes several."""


class Loss(Enum):
    """What a Redis may lose."""

    RECORDS = "its records"
    """And manifests, as when somebody deletes their names: the catalog goes on telling of them."""
    CATALOG = "its catalog"
    """And the counters of its servers: records and pending entries stay."""
    EVERYTHING = "everything"
    """As by FLUSHALL."""
    ITS_RUN = "everything, and is another server"
    """As when it is started anew without a copy on disk."""


@dataclass
class RedisBooks:
    """All that one Redis keeps.

    Attributes:
        records: And manifests.
        catalog: Entries, totals, namespaces, tombstones, whether it is complete.
        counters: Of its servers, as a service last noted them for the others; `None`: none has.
        pending: Entries of write-backs.
        leases: On names.
        num_starts: Of the server: each is a run of its own.
    """

    records: Medium
    catalog: CatalogBooks = field(default_factory=CatalogBooks)
    counters: list[ServerCounters] | None = None
    pending: PendingBooks = field(default_factory=PendingBooks)
    leases: LeaseBooks = field(default_factory=LeaseBooks)
    num_starts: int = 1
    _evicted_before: int = 0

    @property
    def num_evicted(self) -> int:
        """Since it was started."""
        return self.records.num_evicted - self._evicted_before

    def lose(self, loss: Loss) -> None:
        if loss is not Loss.CATALOG:
            self.records.flush()
        if loss is not Loss.RECORDS:
            self.catalog.lose_everything()
            self.counters = None
        if loss in {Loss.EVERYTHING, Loss.ITS_RUN}:
            self.pending.entries.clear()
            self.leases.held.clear()
        if loss is Loss.ITS_RUN:
            self.num_starts += 1
            self._evicted_before = self.records.num_evicted

    def names(self) -> list[str]:
        """Of entries and records, as they stand in one keyspace; sorted."""
        entries = [f"c1/{namespace.hex()}/{{{prefix.hex()}}}" for namespace, prefix in self.catalog.entries]
        return sorted([*entries, *map(format_name, self.records.records)])


class SimulatedRedisCatalog(DictCatalog):
    """As `RedisCatalog`, also where it is more than a `Catalog`."""

    def __init__(self, books: RedisBooks, *, clock: Clock, ask: Ask) -> None:
        super().__init__(books.catalog, clock=clock, ask=ask)
        self._redis = books
        self._cursor = ""

    async def register_again(self, *, deadline: Deadline) -> None:
        found, tenants = await self.namespaces(deadline=deadline), self._books.tenants
        for namespace, tenant in list(self._tenants.items()):  # others are opened during the calls
            if namespace not in found:
                await self._run("register", lambda at=namespace, of=tenant: tenants.__setitem__(at, of), deadline)

    async def manifest(self, namespace: NamespaceId, *, deadline: Deadline) -> bytes | None:
        return await self._run("manifest", lambda: self._redis.records.manifests.get(namespace), deadline)

    async def next_names(self, count: int, *, deadline: Deadline) -> list[bytes]:
        def work() -> list[str]:
            names = self._redis.names()
            start = bisect_right(names, self._cursor)
            return names[start : start + min(count, _NAMES_MAX)]

        names = await self._run("scan", work, deadline)
        self._cursor = names[-1] if len(names) == min(count, _NAMES_MAX) else ""
        return [name.encode() for name in names]

    async def lack_totals(self, namespace: NamespaceId, prefixes: Sequence[PrefixHash], *, deadline: Deadline) -> bool:
        return False  # no fault of the simulation takes totals alone

    async def are_stored(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> list[bool]:
        records = self._redis.records.records
        return await self._run("exists", lambda: [key in records for key in keys], deadline) if keys else []

    async def observe_hot(self, namespace: NamespaceId, prefixes: Sequence[PrefixHash], *, deadline: Deadline) -> int:
        self._shape(namespace)
        return await self._run(
            "observe", lambda: sum(self._observe(namespace, prefix) for prefix in prefixes), deadline
        )

    def _observe(self, namespace: NamespaceId, prefix: PrefixHash) -> int:
        """Make one entry's hot bits and bytes what the server holds; returns how many records were lost."""
        shape, records = self._shapes[namespace], self._redis.records.records
        edit = self._edit(namespace, prefix)
        if edit is None or edit.leaves(Level.HOT):
            return 0
        places = [(group, slice_) for group, count in enumerate(shape.num_slices) for slice_ in range(count)]
        keys = [RecordKey(namespace, prefix, group, slice_) for group, slice_ in places]
        held = {key: len(records[key]) for key in keys if key in records}
        before = entry_of(shape, namespace, prefix, bytes(edit.data))
        told = before.keys(Level.HOT)
        for key in told:
            edit.remove(Removal(key, Level.HOT, None, LeaveReason.LOST))
        for key, num_bytes in held.items():
            edit.add(Addition(key, Level.HOT, num_bytes, 0))
        lost = [key for key in told if key not in held]
        now_s = self._now_s()
        for key in lost:
            self._add_tombstone(
                Tombstone(namespace, prefix, Level.HOT, key.group, key.slice, 0, LeaveReason.LOST, now_s)
            )
        more_bytes = sum(held.values()) - before.num_bytes(Level.HOT)
        self._books.count(namespace, Level.HOT, bool(held) - bool(told), len(held) - len(told), more_bytes)
        self._write_or_drop(namespace, prefix, edit)
        return len(lost)

    async def write_counters(self, counters: list[ServerCounters], *, deadline: Deadline) -> None:
        def work() -> None:
            self._redis.counters = counters

        await self._run("note", work, deadline)

    async def read_counters(self, *, deadline: Deadline) -> list[ServerCounters] | None:
        return await self._run("noted", lambda: self._redis.counters, deadline)

    def ownership(self, lease_s: float) -> Ownership:
        return DictOwnership(self._redis.leases, lease_s=lease_s, clock=self._clock, ask=self._ask)

    async def info(self, section: str, *, deadline: Deadline) -> list[dict[str, str]]:
        def work() -> dict[str, str]:
            if section == "server":
                return {"run_id": f"run {self._redis.num_starts}"}
            return {"evicted_keys": str(self._redis.num_evicted), "expired_keys": "0"}

        return [await self._run("info", work, deadline)]
