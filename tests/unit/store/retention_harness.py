"""A tier with its catalog, on which retention is tested."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvstore.catalog.base import Addition, LeaveReason, Removal
from kvstore.catalog.coordination import Ownership, SoleOwnership
from kvstore.catalog.entry import Level
from kvstore.catalog.sqlite.catalog import SqliteCatalog
from kvstore.eviction.candidates import Candidate
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.model.kinds import FullAttention, Recurrent
from kvstore.model.layout import GroupLayout, Layout
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.runtime.meters import Meters
from kvstore.store.recorder import Recorder
from kvstore.store.retention.backpressure import BudgetGate
from kvstore.store.retention.owner import RetentionOwner
from kvstore.store.retention.policy_choice import PolicyChoice
from kvstore.store.retention.rules import RetentionRules
from kvstore.testing.catalog_contract import mark_complete
from kvstore.testing.records import NAMESPACE, make_record
from kvstore.tiers.base import Tier
from kvstore.tiers.memory import MemoryTier

LAYOUT = Layout(16, (GroupLayout(FullAttention(), 2), GroupLayout(Recurrent(), 1)))
RECORDS = 3
RECORD_BYTES = 192 + 1000
BOUNDARY_BYTES = RECORDS * RECORD_BYTES
OTHER = NamespaceId(hashlib.sha256(b"another tenant's").digest()[:16])


class Clock:
    """The date is the test's, deadlines are real."""

    def __init__(self) -> None:
        self.now_s = 1_800_000_000

    def monotonic_s(self) -> float:
        return SYSTEM_CLOCK.monotonic_s()

    def wall_ms(self) -> int:
        return self.now_s * 1000


_SLICES = ((0, 0), (0, 1), (1, 0))


class RetainedTier:
    """A tier with its catalog; prompts of two groups, pages in two slices and states."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = Clock()
        self.tier: Tier = MemoryTier(1 << 26)
        self.catalog = SqliteCatalog(path, clock=self.clock)
        self.meters = Meters()

    @property
    def deadline(self) -> Deadline:
        return Deadline.after(5.0)

    def retention(
        self,
        ownership: Ownership | None = None,
        *,
        budget_gate: BudgetGate | None = None,
        hot: Tier | None = None,
        choice: PolicyChoice | None = None,
        **rules: object,
    ) -> RetentionOwner:
        instruments = Instruments(self.clock, self.meters)
        return RetentionOwner(
            self.tier,
            Recorder(self.catalog, instruments),
            ownership or SoleOwnership(),
            RetentionRules(**{"start_share": 0.97, "stop_share": 0.92, **rules}),  # type: ignore[arg-type]
            choice=choice or PolicyChoice([Candidate("lru")]),
            instruments=instruments,
            hot=hot,
            budget_gate=budget_gate,
        )

    async def save(self, prompt: str, num_pages: int, namespace: NamespaceId = NAMESPACE) -> list[PrefixHash]:
        path = [PrefixHash(hashlib.sha256(f"{prompt} {page}".encode()).digest()) for page in range(num_pages)]
        for page, prefix in enumerate(path):
            for group, slice_ in ((0, 0), (0, 1), (1, 0)):
                record = make_record(RecordKey(namespace, prefix, group, slice_))
                await self.tier.put(record, deadline=self.deadline)
                parent = path[page - 1] if page else None
                addition = Addition(record.key, Level.COLD, record.num_bytes, 16 * (page + 1), parent)
                assert await self.catalog.add([addition], deadline=self.deadline) == [True]
        self.clock.now_s += 1
        return path

    async def held(self, path: list[PrefixHash], namespace: NamespaceId = NAMESPACE) -> list[int]:
        """For each boundary how many of its records the tier has."""
        keys = [RecordKey(namespace, prefix, group, slice_) for prefix in path for group, slice_ in _SLICES]
        sizes = await self.tier.head(keys, deadline=self.deadline)
        return [sum(size is not None for size in sizes[at : at + RECORDS]) for at in range(0, len(sizes), RECORDS)]

    async def used_bytes(self) -> int:
        totals = await self.catalog.totals(deadline=self.deadline)
        return sum(total.levels[Level.COLD].num_bytes for total in totals.values())

    async def lose(self, prefix: PrefixHash, *, only: tuple[int, int] | None = None) -> None:
        """A boundary's records, or one of them, are gone, as if they had never come."""
        for group, slice_ in [only] if only is not None else _SLICES:
            key = RecordKey(NAMESPACE, prefix, group, slice_)
            await self.tier.delete(key, deadline=self.deadline)
            removal = Removal(key, Level.COLD, RECORD_BYTES, LeaveReason.LOST)
            await self.catalog.remove([removal], deadline=self.deadline)


@asynccontextmanager
async def open_retained(folder: Path) -> AsyncIterator[RetainedTier]:
    """An empty one, whose catalog is complete; two namespaces, the other one a tenant's."""
    world = RetainedTier(folder / "catalog.sqlite")
    await world.catalog.register(NAMESPACE, LAYOUT, "", deadline=world.deadline)
    await world.catalog.register(OTHER, LAYOUT, "paying", deadline=world.deadline)
    await mark_complete(world.catalog)
    yield world
    await world.catalog.aclose()
    await world.tier.aclose()
