"""A catalog that stands in the same simulated Redis as the hot records, with what the real `Reconciler` asks of one."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.catalog.base import Addition, LeaveReason, Removal
from kvstore.catalog.entry import Level
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.runtime.clock import Clock
from kvstore.runtime.deadline import Deadline
from kvstore.testing.dict_catalog import Ask, CatalogBooks, DictCatalog
from kvstore.testing.dict_pending import LeaseBooks
from tests.simulation.media import Medium


class SimulatedRedisCatalog(DictCatalog):
    """As `RedisCatalog`, where it is more than a `Catalog`."""

    def __init__(self, books: CatalogBooks, medium: Medium, leases: LeaseBooks, *, clock: Clock, ask: Ask) -> None:
        super().__init__(books, clock=clock, ask=ask)
        self._medium = medium
        self._leases = leases

    async def info(self, section: str, *, deadline: Deadline) -> list[dict[str, str]]:
        medium = self._medium
        facts = {"run_id": medium.name, "evicted_keys": "0", "expired_keys": "0"}
        return await self._run("info", lambda: [{**facts, "evicted_keys": str(medium.num_evicted)}], deadline)

    async def take_lease(self, name: str, token: str, lease_s: int, *, deadline: Deadline) -> bool:
        def work() -> bool:
            now_s = self._clock.monotonic_s()
            owner, end_s = self._leases.held.get(f"lease/{name}", (token, 0.0))
            if owner != token and end_s > now_s:
                return False
            self._leases.held[f"lease/{name}"] = (token, now_s + lease_s)
            return True

        return await self._run("take_lease", work, deadline)

    def registered(self) -> list[NamespaceId]:
        return list(self._shapes)

    async def observe_hot(self, namespace: NamespaceId, prefixes: Sequence[PrefixHash], *, deadline: Deadline) -> int:
        shape = self._shape(namespace)

        def work() -> int:
            lost = 0
            for prefix in prefixes:
                edit = self._edit(shape, namespace, prefix)
                if edit is None or edit.leaves(Level.HOT):
                    continue
                for group, num_slices in enumerate(shape.num_slices):
                    for slice_ in range(num_slices):
                        key = RecordKey(namespace, prefix, group, slice_)
                        byte_at, bit = shape.bit_at(Level.HOT, group, slice_)
                        is_told = bool(edit.data[byte_at] >> bit & 1)
                        data = self._medium.records.get(key)
                        if is_told and data is None:
                            self._remove(Removal(key, Level.HOT, None, LeaveReason.LOST))
                            lost += 1
                        elif data is not None and not is_told and (namespace, prefix) in self._books.entries:
                            self._add(Addition(key, Level.HOT, len(data), 0))
            return lost

        return await self._run("observe_hot", work, deadline)
