"""A Redis that evicts by itself under two services: the catalog's totals are a count of what is stored again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from redis.asyncio import Redis

from kvstore.api import Ack, SaveOutcome
from kvstore.catalog.base import Catalog
from kvstore.catalog.entry import Level
from kvstore.catalog.redis.catalog import RedisCatalog
from kvstore.catalog.redis.counters import ServerCounters
from kvstore.catalog.redis.reconcile import Reconciler, Sample, Sampler
from kvstore.compose import open_catalog, open_store, open_tier
from kvstore.errors import Unavailable
from kvstore.format.names import format_name
from kvstore.model.keys import NamespaceId
from kvstore.runtime.meters import Meters
from kvstore.settings import Settings, load_settings
from kvstore.store.tiered import TieredStore
from kvstore.testing.catalog_contract import mark_complete
from kvstore.testing.faulty_proxy import FaultyProxy
from kvstore.testing.prompts import HYBRID, Prompt
from kvstore.testing.servers import RedisServer, redis_server
from kvstore.testing.waiting import soon, until
from kvstore.tiers.base import PutOutcome

pytestmark = pytest.mark.servers

Counts = dict[NamespaceId, tuple[int, int]]

WITHIN_S = 60.0
"""What docs/catalog.md promises."""


def settings_for(server: RedisServer, folder: Path, look_s: float) -> Settings:
    """Each service with a directory of its own, on one Redis."""
    return load_settings(
        {
            **{"memory_bytes": "32MiB", "disk_bytes": "1GiB", "catalog_look_s": look_s},
            **{"hot": server.url, "cold": f"file://{folder}/records"},
        }
    )


async def scanned(settings: Settings) -> Counts:
    """Records and bytes that Redis holds, counted one by one."""
    counts: Counts = {}
    async with open_tier(settings.hot, settings) as tier:
        async for entry in tier.scan():
            num_records, num_bytes = counts.get(entry.key.namespace, (0, 0))
            counts[entry.key.namespace] = (num_records + 1, num_bytes + entry.num_bytes)
    return counts


async def told(catalog: Catalog) -> Counts:
    """The same as the catalog has it."""
    totals = await catalog.totals(deadline=soon())
    counts = {namespace: of.levels[Level.HOT] for namespace, of in totals.items()}
    return {namespace: (of.num_records, of.num_bytes) for namespace, of in counts.items() if of.num_records}


async def save(store: TieredStore, prompts: Sequence[Prompt]) -> None:
    """Everything is in the cold tier, and in Redis as far as that took it."""
    for prompt in prompts:
        await store.open_namespace(prompt.description, deadline=soon())
        for record in prompt.records():
            assert await store.save(record, ack=Ack.COLD, deadline=soon()) is SaveOutcome.STORED
    assert await store.drain(soon()) == 0


def prompts_of(model: str, count: int) -> list[Prompt]:
    """1.2 MB each."""
    return [Prompt(HYBRID, f"{model} {number}", 256, model=model, payload_bytes=60_000) for number in range(count)]


@pytest.mark.parametrize("look_s", [0.2, pytest.param(15.0, marks=pytest.mark.full)])
async def test_totals_are_right_within_a_minute_of_an_eviction(look_s: float, tmp_path: Path) -> None:
    """Two services, each with a model of its own, and a third model that nobody uses any more; Redis lets go what it
    likes while it is written to. Its own count and the catalog's are one again, for all three.
    """
    abandoned = prompts_of("abandoned", 4)
    with redis_server(maxmemory_bytes=24 << 20, arguments=("--maxmemory-policy", "volatile-lru")) as server:
        settings = settings_for(server, tmp_path / "one", look_s)
        async with open_store(settings) as store:
            await save(store, abandoned)
        async with (
            open_store(settings) as first,
            open_store(settings_for(server, tmp_path / "two", look_s)) as second,
            open_catalog(settings) as catalog,
            Redis(host=server.host, port=server.port) as client,
        ):
            before = await told(catalog)
            assert before == await scanned(settings)
            await asyncio.gather(save(first, prompts_of("first", 12)), save(second, prompts_of("second", 12)))
            evicted = int((await client.info("stats"))["evicted_keys"])
            started_s = time.monotonic()
            async with asyncio.timeout(WITHIN_S):
                while (now := await told(catalog)) != await scanned(settings):
                    await asyncio.sleep(0.05)
            print(f"evicted={evicted} looked every {look_s} s, right after {time.monotonic() - started_s:.1f} s")
            assert evicted > 0
            assert now.get(abandoned[0].namespace, (0, 0)) < before[abandoned[0].namespace]
            assert await catalog.is_complete(deadline=soon())


async def test_a_redis_that_was_replaced_while_nobody_looked(shared_redis: RedisServer, tmp_path: Path) -> None:
    """Services note which server they have seen: the next one to start sees that it is another, and that the catalog
    may lack what was told to the one before.
    """
    settings = settings_for(shared_redis, tmp_path, 15.0)
    async with open_catalog(settings) as catalog:
        assert isinstance(catalog, RedisCatalog)
        await mark_complete(catalog)
        await catalog.write_counters([ServerCounters("a run that has ended", 0)], deadline=soon())
        await Reconciler(catalog, Meters()).check()
        assert not await catalog.is_complete(deadline=soon())
        await mark_complete(catalog)
        await Reconciler(catalog, Meters()).check()
        assert await catalog.is_complete(deadline=soon())


async def test_a_redis_that_is_used_again_after_another_one(tmp_path: Path) -> None:
    """An address moves to another Redis, back, and again there. Each catalog was complete, and was told nothing of what
    was stored since: one of two services marks it as incomplete, once.
    """
    with redis_server() as first, redis_server() as second, FaultyProxy(first.port) as proxy:
        settings = load_settings({"hot": f"redis://127.0.0.1:{proxy.port}", "cold": f"file://{tmp_path}/records"})
        async with open_catalog(settings) as catalog:
            assert isinstance(catalog, RedisCatalog)
            services = [Reconciler(catalog, Meters()) for _ in range(2)]
            for number, server in enumerate((first, second, first, second)):
                proxy.refuse()
                proxy.lead_to(server.port)
                proxy.heal()
                await until(lambda: catalog.epoch(deadline=soon()), despite=Unavailable)
                if number < 2:
                    await mark_complete(catalog)
                assert await catalog.is_complete(deadline=soon())
                for service in services:
                    await service.check()
                assert await catalog.is_complete(deadline=soon()) is (number == 0)
                await mark_complete(catalog)
                for service in services:
                    await service.check()
                assert await catalog.is_complete(deadline=soon())


async def test_a_redis_that_has_an_older_state_again(tmp_path: Path) -> None:
    """Restarted from a snapshot, with an older state of the catalog and its mark: until a service has seen that, what
    the catalog lacks is no reason to delete. The note of what was seen is written again if it is lost.
    """
    with redis_server() as server:
        async with open_catalog(settings_for(server, tmp_path, 15.0)) as catalog:
            assert isinstance(catalog, RedisCatalog)
            await mark_complete(catalog)
            assert await catalog.complete_epoch(deadline=soon()) is None  # no service has looked yet
            reconciler = Reconciler(catalog, Meters())
            await reconciler.check()
            epoch = await catalog.complete_epoch(deadline=soon())
            assert epoch is not None
            server.ask("DEL", "c1/reconciled")
            await reconciler.check()
            assert await catalog.complete_epoch(deadline=soon()) == epoch
            server.ask("SAVE")
            server.kill9()
            server.start()
            assert await catalog.is_complete(deadline=soon())
            assert await catalog.complete_epoch(deadline=soon()) is None
            await reconciler.check()
            assert not await catalog.is_complete(deadline=soon())
            await mark_complete(catalog)
            assert await catalog.complete_epoch(deadline=soon()) not in (None, epoch)


@pytest.mark.parametrize("share", [1.0, 0.1])
async def test_records_that_somebody_deleted(
    share: float, client: Redis, shared_redis: RedisServer, tmp_path: Path
) -> None:
    """Redis lost records without telling, and kept the catalog: a sample of the entries shows it, and all are looked
    at.
    """
    settings = settings_for(shared_redis, tmp_path, 15.0)
    async with open_store(settings) as store:
        await save(store, prompts_of("deleted", 3))
    async with open_catalog(settings) as catalog:
        assert isinstance(catalog, RedisCatalog)
        reconciler = Reconciler(catalog, Meters())
        assert await reconciler.check() == 0
        names = [name async for name in client.scan_iter(match="v1/*{*")]
        await client.unlink(*names[: round(share * len(names))])
        assert await reconciler.check() == round(share * len(names))
        assert await told(catalog) == await scanned(settings)


async def test_records_that_nobody_told_of(client: Redis, shared_redis: RedisServer, tmp_path: Path) -> None:
    """Somebody put records into Redis and did not tell the catalog, which was complete: it is not any more, until a
    reindex; those that were sampled are counted at once.
    """
    settings = settings_for(shared_redis, tmp_path, 15.0)
    known, foreign = prompts_of("foreign", 2)
    async with open_store(settings) as store:
        await save(store, [known])
    async with open_tier(settings.hot, settings) as tier:
        for record in foreign.records():
            assert await tier.put(record, deadline=soon()) is PutOutcome.STORED
    async with open_catalog(settings) as catalog:
        assert isinstance(catalog, RedisCatalog)
        assert await told(catalog) != await scanned(settings)
        assert await Sampler(catalog).check() == Sample(0, 0)  # whoever has put them may be about to tell
        reconciler = Reconciler(catalog, Meters(), grace_s=0.0)
        await reconciler.check()
        assert not await catalog.is_complete(deadline=soon())
        assert await told(catalog) == await scanned(settings)  # so small a Redis was sampled as a whole


async def test_what_a_rebuild_adds_does_not_end_it(client: Redis, shared_redis: RedisServer, tmp_path: Path) -> None:
    """Records that lost their entries, as by a failover, are found while a slow rebuild is still to come to them."""
    prompt = Prompt(HYBRID, "a", 256)
    async with open_catalog(settings_for(shared_redis, tmp_path, 15.0)) as catalog:
        assert isinstance(catalog, RedisCatalog)
        await catalog.register(prompt.namespace, prompt.layout, "", deadline=soon())
        for key, record in zip(prompt.record_keys(), prompt.records(), strict=True):
            await client.set(format_name(key), bytes(record.data))
        epoch = await catalog.epoch(deadline=soon())  # a rebuild begins
        meters = Meters()
        reconciler = Reconciler(catalog, meters, grace_s=0.0)
        for _ in range(3):
            await reconciler.check()
        assert meters.get("catalog_unknown_records") == len(prompt.record_keys())
        assert await catalog.mark_complete(epoch, deadline=soon())


async def test_a_fresh_store_is_not_called_incomplete(client: Redis, shared_redis: RedisServer, tmp_path: Path) -> None:
    """Nothing is stored: the first that is known of its catalog, long before the second check, is that it is whole."""
    async with open_store(settings_for(shared_redis, tmp_path, 600.0)) as store:
        await until(lambda: "catalog_complete" in store.meters.snapshot(), WITHIN_S)
        assert store.meters.get("catalog_complete") == 1


async def test_namespaces_that_are_opened_while_others_are_registered_again(client: Redis) -> None:
    """After FLUSHALL the lost ones are registered one by one; engines open others during that."""
    catalog = RedisCatalog(client)
    prompts = [Prompt(HYBRID, "a", 64, model=f"model {number}") for number in range(40)]

    async def open_all(some: list[Prompt]) -> None:
        for prompt in some:
            await catalog.register(prompt.namespace, prompt.layout, "", deadline=soon())

    await open_all(prompts[:20])
    await client.flushall()
    await asyncio.gather(catalog.register_again(deadline=soon()), open_all(prompts[20:]))
    assert set(await catalog.namespaces(deadline=soon())) == {prompt.namespace for prompt in prompts}


async def test_a_redis_that_was_flushed_under_a_service(
    client: Redis, shared_redis: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """FLUSHALL while it runs: it rebuilds the catalog, and what it saves is counted for its tenant again."""
    caplog.set_level(logging.INFO, "kvstore.store.upkeep")
    before, after = prompts_of("flushed", 2)
    settings = settings_for(shared_redis, tmp_path, 0.05)
    async with open_store(settings) as store, open_catalog(settings) as catalog:
        await save(store, [before])
        # what it has not seen it does not miss
        await until(lambda: store.meters.get("catalog_complete"), WITHIN_S)
        await client.flushall()
        await save(store, [after])
        await until(lambda: "the catalog is complete again" in caplog.text, WITHIN_S)
        assert await catalog.namespaces(deadline=soon()) == {after.namespace: ""}
        assert await told(catalog) == await scanned(settings)
