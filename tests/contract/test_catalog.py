"""The catalog's contract in dictionaries, on SQLite and on real servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from kvstore.catalog.base import Addition, Catalog, LeaveReason, Leaving, Removal
from kvstore.catalog.entry import Level
from kvstore.catalog.redis.catalog import RedisCatalog
from kvstore.catalog.sqlite.catalog import SqliteCatalog
from kvstore.errors import Unavailable
from kvstore.runtime.deadline import Deadline
from kvstore.testing.catalog_contract import CatalogContract
from kvstore.testing.dict_catalog import CatalogBooks, DictCatalog
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.servers import RedisCluster, RedisServer, redis_server
from kvstore.tiers.locations import RedisLocation, parse_hot
from kvstore.tiers.redis import open_control


class TestDictionaries(CatalogContract):
    """Several views share one set of books, as services share a server."""

    @pytest.fixture
    def books(self) -> CatalogBooks:
        return CatalogBooks()

    @pytest.fixture
    async def catalog(self, books: CatalogBooks) -> Catalog:
        return DictCatalog(books)

    @pytest.fixture
    def other(self, books: CatalogBooks) -> Catalog:
        return DictCatalog(books)


class TestSqlite(CatalogContract):
    @pytest.fixture
    async def catalog(self, tmp_path: Path) -> AsyncIterator[Catalog]:
        catalog = SqliteCatalog(tmp_path / "catalog.sqlite")
        yield catalog
        await catalog.aclose()

    @pytest.fixture
    def other(self, catalog: Catalog) -> Catalog:
        return catalog


@pytest.mark.servers
class TestRedis(CatalogContract):
    @pytest.fixture
    async def catalog(self, shared_redis: RedisServer) -> AsyncIterator[Catalog]:
        client = Redis(host=shared_redis.host, port=shared_redis.port)
        await client.flushdb()
        yield RedisCatalog(client)
        await client.aclose()

    @pytest.fixture
    async def other(self, shared_redis: RedisServer) -> AsyncIterator[Catalog]:
        client = Redis(host=shared_redis.host, port=shared_redis.port)
        yield RedisCatalog(client)
        await client.aclose()


@pytest.mark.servers
async def test_a_full_server_takes_no_entry_but_ends_those_it_has() -> None:
    """At its memory limit Redis takes no record; boundaries leave, single records go, and leases are held."""
    with redis_server() as server:
        async with Redis(host=server.host, port=server.port) as client:
            catalog, prompt, deadline = RedisCatalog(client), Prompt(ATTENTION, "full", 256), Deadline.after(20.0)
            namespace = prompt.namespace
            await catalog.register(namespace, prompt.layout, "", deadline=deadline)
            first, second, third = (prompt.key(tokens) for tokens in (64, 128, 192))
            added = [Addition(key, Level.HOT, 100, 64, None) for key in (first, second)]
            assert await catalog.add(added, deadline=deadline) == [True, True]
            await client.config_set("maxmemory", 1)
            with pytest.raises(Unavailable, match="no room"):
                await catalog.add([Addition(third, Level.HOT, 100, 64, None)], deadline=deadline)
            (hidden,) = await catalog.start_leaving([Leaving(namespace, first.prefix)], Level.HOT, deadline=deadline)
            assert hidden is not None
            await catalog.stop_leaving(namespace, first.prefix, Level.HOT, deadline=deadline)
            (hidden,) = await catalog.start_leaving([Leaving(namespace, first.prefix)], Level.HOT, deadline=deadline)
            assert hidden is not None
            gone = [(hidden, LeaveReason.REMOVED)]
            assert await catalog.finish_leaving(gone, Level.HOT, deadline=deadline) == 100
            await catalog.remove([Removal(second, Level.HOT, 100, LeaveReason.EVICTED)], deadline=deadline)
            assert (await catalog.totals(deadline=deadline))[namespace].num_boundaries == 0
            assert await catalog.ownership(5.0).hold("work", deadline=deadline)


@pytest.mark.servers
class TestCluster(CatalogContract):
    """Entries, totals and tombstones of a boundary share a slot, and three nodes share the slots."""

    @pytest.fixture
    async def catalog(self, shared_cluster: RedisCluster) -> AsyncIterator[Catalog]:
        shared_cluster.flush()
        async with open_control(_location(shared_cluster)) as client:
            yield RedisCatalog(client)

    @pytest.fixture
    async def other(self, shared_cluster: RedisCluster) -> AsyncIterator[Catalog]:
        async with open_control(_location(shared_cluster)) as client:
            yield RedisCatalog(client)


def _location(cluster: RedisCluster) -> RedisLocation:
    location = parse_hot(cluster.url)
    assert isinstance(location, RedisLocation)
    return location
