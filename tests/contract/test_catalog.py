"""The catalog's contract in dictionaries, on SQLite and on real servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from kvstore.catalog.base import Catalog
from kvstore.catalog.redis.catalog import RedisCatalog
from kvstore.catalog.sqlite.catalog import SqliteCatalog
from kvstore.testing.catalog_contract import CatalogContract
from kvstore.testing.dict_catalog import CatalogBooks, DictCatalog
from kvstore.testing.servers import RedisCluster, RedisServer
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
