"""A reindex of one level: what the walk meets, and what it does not meet any more."""

from __future__ import annotations

import time

from store_world import fill, slow_tier, soon

from kvstore.catalog.entry import Level
from kvstore.format.manifest import pack_manifest
from kvstore.store.reindexing import ReindexReport, reindex_level
from kvstore.testing.dict_catalog import CatalogBooks, DictCatalog
from kvstore.testing.faults import FaultyTier
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.tiers.base import Tier

PROMPT = Prompt(ATTENTION, "a", 640)


class Later:
    """A minute from now: what is used in the second of a walk is not taken off."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_ms(self) -> int:
        return int(time.time() * 1000) + 60_000


async def reindex(books: CatalogBooks, tier: Tier, *manifests: Tier) -> ReindexReport:
    """By a catalog that has been told of no namespace, as a process of its own."""
    return await reindex_level(DictCatalog(books), tier, Level.HOT, clock=Later(), manifests=manifests)


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
