"""The keeper of a catalog: when it rebuilds, and which of several services does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvstore.catalog.coordination import Ownership
from kvstore.catalog.entry import Level
from kvstore.errors import Unavailable
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.store.upkeep.catalog_keeper import LEASE_S, CatalogKeeper
from kvstore.store.upkeep.reindexing import LOST_MORE, Progress, ReindexReport, Reports
from kvstore.testing.dict_catalog import CatalogBooks, DictCatalog
from kvstore.testing.waiting import soon

pytestmark = pytest.mark.virtual_time

WALK_S = 3 * LEASE_S
POLL_S = 5.0


class Leases:
    """Who holds the only lease, and until when."""

    def __init__(self) -> None:
        self.owner: object = None
        self.until_s = 0.0

    def hold(self, owner: object) -> bool:
        now_s = asyncio.get_running_loop().time()
        if self.owner not in (None, owner) and now_s < self.until_s:
            return False
        self.owner, self.until_s = owner, now_s + LEASE_S
        return True


class Holder(Ownership):
    """One service's view of it."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases

    async def hold(self, name: str, *, deadline: Deadline) -> bool:
        return self._leases.hold(self)

    async def agree(self, name: str, word: str, *, deadline: Deadline) -> str:
        raise NotImplementedError

    async def release(self, name: str, *, deadline: Deadline) -> None:
        if self._leases.owner is self:
            self._leases.owner = None


class World:
    """Services that share a catalog; their rebuilds take a while."""

    def __init__(self) -> None:
        self.books = CatalogBooks()
        self.leases = Leases()
        self.walks: list[str] = []
        self.num_ended = 0
        self.error: Unavailable | None = None
        self.num_unknown = 0
        self.calls_refused = 0

    @asynccontextmanager
    async def keeper(self, name: str) -> AsyncIterator[CatalogKeeper]:
        catalog = _Catalog(self)

        async def walk(progress: Progress) -> Reports:
            self.walks.append(name)
            epoch = await catalog.epoch(deadline=soon())
            try:
                for second in range(int(WALK_S)):
                    await asyncio.sleep(1)
                    progress(Level.COLD, ReindexReport(num_records=second, num_skipped=3))
            finally:
                self.num_ended += 1
            if self.error is not None:
                raise self.error
            if not await catalog.mark_complete(epoch, deadline=soon()):
                raise Unavailable(LOST_MORE)
            return {Level.COLD: ReindexReport(num_records=7, num_skipped=3, num_unknown=self.num_unknown)}

        keeper = CatalogKeeper(catalog, walk, Holder(self.leases), Instruments(), poll_s=POLL_S)
        keeper.start()
        try:
            yield keeper
        finally:
            await keeper.aclose()


class _Catalog(DictCatalog):
    """The catalog, which may refuse the calls of rebuilds for a while."""

    def __init__(self, world: World) -> None:
        super().__init__(world.books)
        self._world = world

    async def epoch(self, *, deadline: Deadline) -> bytes:
        if self._world.calls_refused:
            self._world.calls_refused -= 1
            raise Unavailable("Redis does not answer")
        return await super().epoch(deadline=deadline)


async def test_one_of_the_services_rebuilds(caplog: pytest.LogCaptureFixture) -> None:
    """For as long as it takes: its lease is renewed, and no other one begins. Then it is complete, and all rest."""
    caplog.set_level(logging.INFO, "kvstore.store")
    world = World()
    async with world.keeper("a"), world.keeper("b"), world.keeper("c"):
        await asyncio.sleep(2 * POLL_S + WALK_S + 1)
        assert world.books.complete and len(world.walks) == 1
        assert caplog.messages[-2:] == [
            "adding records to the catalog: 59 of the cold tier are listed, 56 of them were added",
            "the catalog is complete again records=7 added=4",
        ]
        await asyncio.sleep(10 * WALK_S)
        assert len(world.walks) == 1
        await DictCatalog(world.books).mark_incomplete(deadline=soon())
        await asyncio.sleep(2 * POLL_S + WALK_S + 1)
        assert world.books.complete and len(world.walks) == 2
        await DictCatalog(world.books).mark_incomplete(deadline=soon())
        await asyncio.sleep(2 * WALK_S)
        assert len(world.walks) == 2  # they rest after each
        await asyncio.sleep(3 * WALK_S)
        assert world.books.complete and len(world.walks) == 3


async def test_what_is_lost_during_a_rebuild_needs_another_one(caplog: pytest.LogCaptureFixture) -> None:
    """The walk may have been past it, so it is ended soon. The log says so once, however often it happens."""
    world = World()
    async with world.keeper("a"):
        for num_walks in range(1, 4):
            while len(world.walks) < num_walks:
                await asyncio.sleep(1)
            world.books.lose_everything()
            await asyncio.sleep(LEASE_S)
            assert not world.books.complete and world.num_ended == num_walks
        assert sum("lost more" in text for text in caplog.messages) == 1
        await asyncio.sleep(5 * WALK_S)
        assert world.books.complete and len(world.walks) == 4


async def test_a_catalog_that_is_away_for_a_moment_ends_no_rebuild() -> None:
    """A rebuild may have taken hours, and rests three times as long."""
    world = World()
    async with world.keeper("a"):
        await asyncio.sleep(2 * POLL_S + 1)
        world.calls_refused = 2
        await asyncio.sleep(WALK_S - 5)
        assert not world.calls_refused and len(world.walks) == 1 and not world.num_ended
        await asyncio.sleep(10)
        assert len(world.walks) == 1 and world.books.complete


async def test_records_that_no_rebuild_can_add_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """A namespace without a description has no layout, and so no entries."""
    world = World()
    world.num_unknown = 4
    async with world.keeper("a"):
        await asyncio.sleep(2 * POLL_S + WALK_S + 1)
        assert world.books.complete and caplog.messages == [
            "4 stored records are not in the catalog: no readable description of a namespace has such ones"
        ]


async def test_another_service_goes_on_for_one_that_has_ended() -> None:
    """Stopped in the middle of the rebuild: its lease is given back, and another service begins at once."""
    world = World()
    async with world.keeper("a"):
        await asyncio.sleep(2 * POLL_S + 1)
        async with world.keeper("b"):
            await asyncio.sleep(2 * POLL_S + 1)
            assert world.walks == ["a"]
    async with world.keeper("b"):
        await asyncio.sleep(2 * POLL_S + WALK_S + 1)
        assert world.walks == ["a", "b"] and world.books.complete


async def test_a_tier_that_does_not_answer_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """The log has one line for the first attempt and one for the reason, however long it lasts."""
    caplog.set_level(logging.INFO, "kvstore.store")
    world = World()
    world.error = Unavailable("S3 does not answer: check its address", url="http://a")
    async with world.keeper("a"):
        await asyncio.sleep(6 * WALK_S)
        assert len(world.walks) > 1 and not world.books.complete
        assert [text for text in caplog.messages if not text.startswith("adding records")] == [
            "the catalog may lack records that are stored: adding them from the tiers, beside requests",
            "the catalog cannot be rebuilt now, which is tried again: S3 does not answer: check its address "
            "url=http://a",
        ]
        world.error = None
        await asyncio.sleep(6 * WALK_S)
        assert world.books.complete
