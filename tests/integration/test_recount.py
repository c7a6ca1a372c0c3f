"""Totals of the catalog that were lost, or are wrong, are counted again from its entries, while services run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.asyncio import RedisCluster as ClusterClient

from kvstore.catalog.base import Addition, Catalog, LeaveReason, Leaving, LevelTotals, Removal
from kvstore.catalog.entry import Level
from kvstore.catalog.redis.catalog import RedisCatalog
from kvstore.catalog.redis.reconcile import Reconciler
from kvstore.format.manifest import pack_manifest
from kvstore.model.keys import NamespaceId
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.meters import Meters
from kvstore.store.upkeep.reindexing import reindex_store
from kvstore.testing.prompts import ATTENTION, HYBRID, Prompt
from kvstore.testing.servers import RedisCluster, RedisServer
from kvstore.testing.waiting import soon
from kvstore.tiers.redis import RedisTier

pytestmark = pytest.mark.servers

PROMPTS = [Prompt(layout, f"prompt {number}", 600) for layout in (HYBRID, ATTENTION) for number in range(8)]
Totals = dict[NamespaceId, tuple[int, tuple[LevelTotals, ...]]]


@pytest.fixture(params=["redis", "cluster"])
def server(request: pytest.FixtureRequest) -> RedisServer | RedisCluster:
    server: RedisServer | RedisCluster = request.getfixturevalue(f"shared_{request.param}")
    server.flush()
    return server


@asynccontextmanager
async def catalog_of(server: RedisServer | RedisCluster) -> AsyncIterator[tuple[RedisCatalog, Any]]:
    client: Any
    if isinstance(server, RedisCluster):
        client = ClusterClient(host="127.0.0.1", port=server.servers[0].port)
    else:
        client = Redis(host=server.host, port=server.port)
    async with client:
        catalog = RedisCatalog(client)
        for prompt in PROMPTS:
            await catalog.register(prompt.namespace, prompt.layout, "", deadline=soon())
        yield catalog, client


async def told(catalog: Catalog) -> Totals:
    totals = await catalog.totals(deadline=soon())
    return {namespace: (of.num_boundaries, tuple(of.levels)) for namespace, of in totals.items()}


async def summed(catalog: Catalog) -> Totals:
    """The sums of the entries as they are."""
    found: Totals = {}
    for namespace in {prompt.namespace for prompt in PROMPTS}:
        entries = {entry.prefix: entry async for entry in catalog.iterate(namespace)}
        levels = [
            LevelTotals(
                sum(any(entry.slices[level]) for entry in entries.values()),
                sum(entry.num_records(level) for entry in entries.values()),
                sum(entry.num_bytes(level) for entry in entries.values()),
            )
            for level in Level
        ]
        found[namespace] = (len(entries), tuple(levels))
    return found


async def add_all(catalog: Catalog) -> None:
    for prompt in PROMPTS:
        changes = [Addition(key, level, 1000 + key.slice, 0) for key in prompt.record_keys() for level in Level]
        assert all(await catalog.add(changes, deadline=soon()))


async def names(client: Any, pattern: str) -> list[bytes]:
    return [name async for name in client.scan_iter(match=pattern, count=1000)]


async def lose_totals(client: Any) -> None:
    for name in await names(client, "c1t/*"):
        await client.delete(name)


async def spoil_totals(client: Any) -> None:
    for name in await names(client, "c1t/*"):
        for field in await client.hkeys(name):
            await client.hset(name, field, bytes(range(42)))


async def damage_totals(client: Any) -> None:
    """What the next change removes."""
    for name in await names(client, "c1t/*"):
        for field in await client.hkeys(name):
            await client.hset(name, field, b"damaged")


async def lose_entries(client: Any) -> None:
    for name in (await names(client, "c1/*/{*"))[::3]:
        await client.delete(name)


@pytest.mark.parametrize("damage", [lose_totals, spoil_totals, damage_totals, lose_entries])
async def test_a_recount_corrects_them(server: RedisServer | RedisCluster, damage: Any) -> None:
    """Once it has corrected them, another one finds nothing, and changes count as ever."""
    async with catalog_of(server) as (catalog, client):
        await add_all(catalog)
        right = await summed(catalog)
        assert await told(catalog) == right
        assert await catalog.recount() == 0
        await damage(client)
        assert await told(catalog) != await summed(catalog)
        assert await catalog.recount() > 0
        assert await told(catalog) == await summed(catalog)
        assert await catalog.recount() == 0
        await add_all(catalog)
        assert await told(catalog) == await summed(catalog) == right


async def test_it_is_exact_while_the_catalog_changes(server: RedisServer | RedisCluster) -> None:
    """Records come and go, boundaries leave, and a second recount begins before the first has ended."""
    numbers, stopped, counting, num_changes = random.Random(7), False, 0, 0

    async def change(catalog: Catalog) -> None:
        nonlocal num_changes
        while not stopped:
            num_changes += counting
            prompt, level = numbers.choice(PROMPTS), numbers.choice(list(Level))
            keys = numbers.sample(prompt.record_keys(), 5)
            await catalog.add([Addition(key, level, numbers.randrange(1, 9999), 0) for key in keys], deadline=soon())
            keys = numbers.sample(prompt.record_keys(), 5)
            await catalog.remove([Removal(key, level, None, LeaveReason.LOST) for key in keys], deadline=soon())
            leaving = [Leaving(prompt.namespace, keys[0].prefix, 1 << 31)]
            if (entry := (await catalog.start_leaving(leaving, level, deadline=soon()))[0]) is not None:
                await catalog.finish_leaving([(entry, LeaveReason.EVICTED)], level, deadline=soon())

    async with catalog_of(server) as (catalog, client), catalog_of(server) as (other, _):
        await add_all(catalog)
        changing = [asyncio.ensure_future(change(one)) for one in (catalog, catalog, other, other)]
        for _ in range(3):
            await spoil_totals(client)
            counting = 1
            await asyncio.gather(catalog.recount(), other.recount())
            await catalog.recount()
            counting = 0
        stopped = True
        await asyncio.gather(*changing)
        assert num_changes > 5
        assert await told(catalog) == await summed(catalog)
        for name in await names(client, "c1t/*"):
            assert all(len(field) == 16 for field in await client.hkeys(name))


async def test_lost_totals_are_noticed_and_a_reindex_counts_again(shared_redis: RedisServer) -> None:
    """One look at the catalog marks it incomplete, so that a service makes it anew."""
    shared_redis.flush()
    tier = RedisTier(shared_redis.url)
    async with catalog_of(shared_redis) as (catalog, client):
        for prompt in PROMPTS:
            await tier.put_manifest(prompt.namespace, pack_manifest(prompt.description), deadline=soon())
            for record in prompt.records():
                await tier.put(record, deadline=soon())
        await reindex_store(catalog, {Level.HOT: tier}, clock=SYSTEM_CLOCK)
        right = await told(catalog)
        assert right == await summed(catalog)
        reconciler = Reconciler(catalog, Meters())
        await reconciler.check()
        assert await catalog.is_complete(deadline=soon())
        await lose_totals(client)
        await reconciler.check()
        assert not await catalog.is_complete(deadline=soon())
        await reindex_store(catalog, {Level.HOT: tier}, clock=SYSTEM_CLOCK, only_adds=True)
        assert await told(catalog) == right
        assert await catalog.is_complete(deadline=soon())
    await tier.aclose()
