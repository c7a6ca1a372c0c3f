"""A reindex of one level: what the walk meets, and what it does not meet any more."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import AsyncIterator, Sequence

import pytest
from store_harness import fill, slow_tier

from kvstore.catalog.base import Addition, LeaveReason, Leaving
from kvstore.catalog.entry import Level
from kvstore.format.manifest import pack_manifest
from kvstore.format.names import format_name, parse_name
from kvstore.format.record import Record
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.model.kinds import FullAttention
from kvstore.model.layout import GroupLayout, Layout
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline
from kvstore.store.upkeep.reindexing import ReindexReport, reindex_level
from kvstore.testing.dict_catalog import CatalogBooks, DictCatalog
from kvstore.testing.faults import FaultyTier
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.waiting import soon
from kvstore.tiers.base import Entry, Tier
from kvstore.tiers.memory import MemoryTier
from tests.virtual_time import ShiftedClock

PROMPT = Prompt(ATTENTION, "a", 640)


async def reindex(books: CatalogBooks, tier: Tier, *manifests: Tier) -> ReindexReport:
    """By a catalog that has been told of no namespace, as a process of its own."""
    return await reindex_level(DictCatalog(books), tier, Level.HOT, clock=SYSTEM_CLOCK, manifests=manifests)


async def described() -> FaultyTier:
    """A tier that has the manifest and nothing else."""
    tier = slow_tier("s3")
    await tier.put_manifest(PROMPT.description.id, pack_manifest(PROMPT.description), deadline=soon())
    return tier


async def test_a_manifest_may_stand_in_another_tier() -> None:
    """Redis was flushed and got records again, but no manifest yet: they are told of by the cold tier's."""
    books, hot = CatalogBooks(), slow_tier("redis")
    await fill(hot, PROMPT)
    assert (await reindex(books, hot)).num_unknown == len(PROMPT.records())
    report = await reindex(books, hot, await described())
    assert (report.num_records, report.num_unknown) == (len(PROMPT.records()), 0)
    assert books.totals[PROMPT.namespace, Level.HOT][1] == len(PROMPT.records())


async def test_a_namespace_that_lost_everything_is_taken_off() -> None:
    """Every record of a namespace is gone, and so is its manifest there: the catalog tells of none afterwards."""
    books, hot, cold = CatalogBooks(), slow_tier("redis"), await described()
    await fill(hot, PROMPT)
    await reindex(books, hot, cold)
    report = await reindex(books, slow_tier("redis"), cold)
    assert report.num_records == 0
    assert report.num_stale == len(PROMPT.records())
    assert not books.entries


class Busy(FaultyTier):
    """Another service puts the rest of the prompt, and tells of it, once the walk has listed what was there."""

    def __init__(self, books: CatalogBooks, ahead_s: int) -> None:
        super().__init__(MemoryTier(16 << 20, name="redis"))
        self._catalog = DictCatalog(books, clock=ShiftedClock(date_ahead_s=ahead_s))

    async def tell(self, records: Sequence[Record]) -> None:
        await self._catalog.register(PROMPT.namespace, PROMPT.layout, "", deadline=soon())
        for one in records:
            added = Addition(one.key, Level.HOT, one.num_bytes, one.header.span.stop)
            await self._catalog.add([added], deadline=soon())

    async def scan(self, namespace: NamespaceId | None = None) -> AsyncIterator[Entry]:
        async for entry in self.inner.scan(namespace):
            yield entry
        for record in PROMPT.records()[6:]:
            await self.inner.put(record, deadline=soon())
        await self.tell(PROMPT.records()[6:])


@pytest.mark.parametrize("ahead_s", [-3600, 0, 3600])
async def test_clocks_that_differ(ahead_s: int) -> None:
    """The clock of the service that puts records goes an hour behind ours, or ahead. What it puts during the walk
    stays in the catalog, and what is not there although it told of it just now is taken off.
    """
    books = CatalogBooks()
    hot = Busy(books, ahead_s)
    records = PROMPT.records()
    await hot.tell(records[:6])
    for record in records[:4]:
        await hot.inner.put(record, deadline=soon())
    report = await reindex(books, hot, await described())
    assert report.num_stale == 2
    kept = [*records[:4], *records[6:]]
    assert books.totals[PROMPT.namespace, Level.HOT][1:] == (len(kept), sum(record.num_bytes for record in kept))
    entry = await hot._catalog.get(PROMPT.namespace, records[4].key.prefix, deadline=soon())
    assert entry is None


class Listing(MemoryTier):
    """Lists a record of each of some boundaries, by their names, and has none of them."""

    def __init__(self, prompt: Prompt, num_boundaries: int) -> None:
        super().__init__(1 << 20)
        self._prompt = prompt
        self._num_boundaries = num_boundaries

    async def scan(self, namespace: NamespaceId | None = None) -> AsyncIterator[Entry]:
        for number in range(self._num_boundaries):
            prefix = PrefixHash(hashlib.sha256(number.to_bytes(4, "little")).digest())
            yield Entry(parse_name(format_name(RecordKey(self._prompt.namespace, prefix, 0, 0))), 2_000_000)


class Forgetful(DictCatalog):
    """Keeps nothing of what it is told, so that nothing but the walk takes memory."""

    async def add(self, additions: Sequence[Addition], *, deadline: Deadline) -> None:
        pass


class Evicting(FaultyTier):
    """Another service evicts a boundary once the walk has listed it."""

    def __init__(self, catalog: DictCatalog) -> None:
        super().__init__(MemoryTier(16 << 20, name="s3"))
        self._catalog = catalog

    async def scan(self, namespace: NamespaceId | None = None) -> AsyncIterator[Entry]:
        async for entry in super().scan(namespace):
            yield entry
        gone = PROMPT.boundary(640).prefix
        leaving = [Leaving(PROMPT.namespace, gone)]
        (hidden,) = await self._catalog.start_leaving(leaving, Level.COLD, deadline=soon())
        assert hidden is not None
        await self.delete_all(hidden.keys(Level.COLD), deadline=soon())
        await self._catalog.finish_leaving([(hidden, LeaveReason.EVICTED)], Level.COLD, deadline=soon())


@pytest.mark.parametrize("only_adds", [False, True])
async def test_what_is_evicted_after_it_was_listed_is_not_added(*, only_adds: bool) -> None:
    """Nor does the catalog have it afterwards, so that retention counts what is stored."""
    books = CatalogBooks()
    catalog = DictCatalog(books)
    tier = Evicting(catalog)
    await tier.put_manifest(PROMPT.namespace, pack_manifest(PROMPT.description), deadline=soon())
    await fill(tier, PROMPT)
    await catalog.register(PROMPT.namespace, PROMPT.layout, "", deadline=soon())
    known = [Addition(record.key, Level.COLD, record.num_bytes, 640) for record in PROMPT.records([640])]
    await catalog.add(known, deadline=soon())
    report = await reindex_level(DictCatalog(books), tier, Level.COLD, clock=SYSTEM_CLOCK, only_adds=only_adds)
    stored = [entry async for entry in FaultyTier.scan(tier)]
    assert len(stored) == len(PROMPT.records()) - 2
    assert report.num_stale == 2
    assert books.totals[PROMPT.namespace, Level.COLD][1:] == (len(stored), sum(one.num_bytes for one in stored))


async def test_memory_that_a_walk_takes() -> None:
    """At most 600 bytes for each boundary of a model with one cache group (docs/catalog.md): of two walks the longer
    takes so much more, so that what does not grow with them is left out.
    """
    prompt = Prompt(Layout(64, (GroupLayout(FullAttention(), 1),)), "a", 64)

    async def peak_bytes(num_boundaries: int) -> int:
        tier = Listing(prompt, num_boundaries)
        await tier.put_manifest(prompt.namespace, pack_manifest(prompt.description), deadline=soon())
        tracemalloc.start()
        try:
            await reindex_level(Forgetful(CatalogBooks()), tier, Level.COLD, clock=SYSTEM_CLOCK)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    few, many = 2500, 11_000  # at either, the dict of all of them has just grown
    taken_bytes = (await peak_bytes(many) - await peak_bytes(few)) / (many - few)
    print(f"{taken_bytes:.0f} bytes of memory for each boundary")
    assert 400 < taken_bytes < 600


class WithStrayNames(FaultyTier):
    """Lists two more records of a known namespace: of a group, and of a slice, that its layout does not have."""

    async def scan(self, namespace: NamespaceId | None = None) -> AsyncIterator[Entry]:
        key = PROMPT.records()[0].key
        yield Entry(RecordKey(key.namespace, key.prefix, 7, 0), 100)
        yield Entry(RecordKey(key.namespace, key.prefix, 0, 300), 100)
        async for entry in self.inner.scan(namespace):
            yield entry


@pytest.mark.parametrize("only_adds", [False, True])
async def test_a_name_that_no_record_can_have_ends_no_rebuild(only_adds: bool) -> None:
    """Something else was stored under such names, or another layout's records: they are counted, and left out."""
    books, hot = CatalogBooks(), WithStrayNames(MemoryTier(16 << 20, name="redis"))
    await fill(hot, PROMPT)
    report = await reindex_level(
        DictCatalog(books), hot, Level.HOT, clock=SYSTEM_CLOCK, manifests=[await described()], only_adds=only_adds
    )
    assert (report.num_added, report.num_unknown) == (len(PROMPT.records()), 2)
    assert books.totals[PROMPT.namespace, Level.HOT][1] == len(PROMPT.records())
