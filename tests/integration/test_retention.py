"""A real service's store with a bound on its cold tier, and the leases of owners, on a real Redis."""

from __future__ import annotations

import asyncio
import gc
import warnings
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError

from kvstore.api import Ack
from kvstore.catalog.entry import BoundaryEntry, Level
from kvstore.catalog.redis.catalog import RedisCatalog
from kvstore.catalog.redis.coordination import RedisOwnership
from kvstore.compose import open_catalog, open_store, open_tier
from kvstore.errors import Unavailable
from kvstore.format.record import Record
from kvstore.model.keys import PrefixHash
from kvstore.settings import load_settings
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import HYBRID, Prompt
from kvstore.testing.servers import RedisServer
from kvstore.testing.waiting import soon, until

pytestmark = pytest.mark.servers


async def test_a_lease_has_one_owner_and_ends_by_itself(client: Redis) -> None:
    """The second owner gets it when the first gives it back, or falls silent."""
    first, second = RedisOwnership(client, lease_s=0.3), RedisOwnership(client, lease_s=0.3)
    assert await first.hold("a", deadline=soon())
    assert await first.hold("a", deadline=soon())
    assert not await second.hold("a", deadline=soon())
    assert await second.hold("b", deadline=soon())
    await second.release("a", deadline=soon())  # not its own: nothing happens
    assert not await second.hold("a", deadline=soon())
    await first.release("a", deadline=soon())
    assert await second.hold("a", deadline=soon())
    await asyncio.sleep(0.4)
    assert await first.hold("a", deadline=soon())


async def test_an_owner_has_the_word(client: Redis) -> None:
    """Others hear what the owner said last, also after it renewed its lease without a word; it ends with its lease."""
    first, second = RedisOwnership(client, lease_s=30.0), RedisOwnership(client, lease_s=30.0)
    assert await first.hold("a", deadline=soon())
    assert await second.agree("a", "all", deadline=soon()) == ""
    assert await first.agree("a", "second_sight", deadline=soon()) == "second_sight"
    assert await first.hold("a", deadline=soon())
    assert not await second.hold("a", deadline=soon())
    assert await second.agree("a", "all", deadline=soon()) == "second_sight"
    await second.release("a", deadline=soon())  # not its own: nothing happens
    assert await second.agree("a", "all", deadline=soon()) == "second_sight"
    await first.release("a", deadline=soon())
    assert await second.agree("a", "all", deadline=soon()) == "all"
    assert await first.agree("a", "second_sight", deadline=soon()) == "all"


async def test_a_full_redis_tells_its_epoch(client: Redis) -> None:
    """Also when the catalog was marked incomplete just before: every round of retention asks for the epoch, and
    evictions are what makes room for entries.
    """
    catalog = RedisCatalog(client)
    memory = await client.info("memory")
    await client.config_set("maxmemory", memory["used_memory"] // 2)
    try:
        await catalog.mark_incomplete(deadline=soon())
        with pytest.raises(OutOfMemoryError):
            await client.set("more", "x")
        epoch = await catalog.epoch(deadline=soon())
        assert await catalog.epoch(deadline=soon()) == epoch
        assert await catalog.mark_complete(epoch, deadline=soon())
    finally:
        await client.config_set("maxmemory", 0)


async def test_a_redis_that_is_not_there_is_unavailable() -> None:
    """Nobody owns anything then."""
    client = Redis(host="127.0.0.1", port=1)
    with pytest.raises(Unavailable, match="lease"):
        await RedisOwnership(client, lease_s=1.0).hold("a", deadline=soon())
    await client.aclose()


def test_no_command_is_made_that_is_not_sent() -> None:
    """A lease asked for where no loop runs any more, as when a process ends: nothing is left behind that warns."""
    asking = RedisOwnership(Redis(host="127.0.0.1", port=1), lease_s=1.0).hold("a", deadline=soon())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match="event loop"):
            asking.send(None)
        del asking
        gc.collect()
    assert [str(warning.message) for warning in seen] == []


async def save(store: TieredStore, record: Record) -> None:
    """Save it to the cold tier; again where its boundary is just being deleted, as the store asks for."""
    await until(lambda: store.save(record, ack=Ack.COLD, deadline=soon()), 20, despite=Unavailable)


async def test_ten_times_the_budget_is_written_and_the_budget_holds(
    client: Redis, shared_redis: RedisServer, tmp_path: Path
) -> None:
    """The cold tier ends within its budget, catalog and a scan agree, what was pinned is there, and every prefix that
    is left is whole within a minute: no boundary without one of its records or the boundary below.
    """
    prompts = [Prompt(HYBRID, f"prompt {number}", 300) for number in range(30)]
    prompt_bytes = sum(record.num_bytes for record in prompts[0].records())
    budget = 3 * prompt_bytes
    settings = load_settings(
        {
            **{"memory_bytes": "64MiB", "hot": shared_redis.url, "cold": f"file://{tmp_path}/records"},
            **{"disk_bytes": "1GiB", "cold_bytes": budget},
        }
    )
    namespace = prompts[0].namespace
    async with open_store(settings) as store, open_catalog(settings) as catalog:
        description = prompts[0].description
        await catalog.register(namespace, description.layout(), description.tenant, deadline=soon())
        for prompt in prompts:
            await store.open_namespace(prompt.description, deadline=soon())
            await store.lookup(prompt.query(), deadline=soon())
            for record in prompt.records():
                await save(store, record)
            if prompt is prompts[0]:
                last = PrefixHash(prompt.query().boundaries[-1].prefix)
                assert await catalog.pin(namespace, [last], 1 << 31, deadline=soon()) == 1

        async def used() -> int:
            return (await catalog.totals(deadline=soon()))[namespace].levels[Level.COLD].num_bytes

        async def stored() -> int:
            async with open_tier(settings.cold, settings) as tier:  # a directory is read when it is opened
                return sum([entry.num_bytes async for entry in tier.scan()])

        async def cold() -> dict[bytes, BoundaryEntry]:
            entries = {entry.prefix: entry async for entry in catalog.iterate(namespace)}
            return {prefix: entry for prefix, entry in entries.items() if entry.num_bytes(Level.COLD)}

        def is_whole(left: dict[bytes, BoundaryEntry]) -> bool:
            num_records = left[last].num_records(Level.COLD)
            return all(
                entry.num_records(Level.COLD) == num_records and (entry.parent is None or entry.parent in left)
                for entry in left.values()
            )

        async with asyncio.timeout(150):  # eviction goes on for a moment; what lost its start leaves after a minute
            while not (await stored() == await used() <= budget and is_whole(left := await cold())):
                await asyncio.sleep(0.1)
    assert last in left
