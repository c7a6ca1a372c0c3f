"""The catalog of a real service's store: what is in it, lost with its Redis, and made anew from the records."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from redis.asyncio import Redis

from kvstore.api import Ack
from kvstore.catalog.base import Catalog, NamespaceTotals
from kvstore.catalog.entry import Level
from kvstore.catalog.redis import RedisCatalog
from kvstore.catalog.redis_reconcile import Reconciler
from kvstore.cli.main import main
from kvstore.compose import open_catalog, open_store, open_tier
from kvstore.model.keys import NamespaceId
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters
from kvstore.settings import Settings, load_settings
from kvstore.testing.prompts import HYBRID, Prompt
from kvstore.testing.servers import RedisServer, redis_server

pytestmark = pytest.mark.servers


def soon() -> Deadline:
    return Deadline.after(20.0)


def settings_for(redis: RedisServer, folder: Path) -> Settings:
    return load_settings(
        {"memory_bytes": "64MiB", "hot": redis.url, "cold": f"file://{folder}/records", "disk_bytes": "256MiB"}
    )


async def _totals(settings: Settings, namespace: NamespaceId) -> NamespaceTotals:
    async with open_catalog(settings) as catalog:
        return (await catalog.totals(deadline=soon()))[namespace]


async def _scanned(settings: Settings, level: Level) -> tuple[int, int]:
    location = settings.hot if level is Level.HOT else settings.cold
    async with open_tier(location, settings) as tier:
        sizes = [entry.num_bytes async for entry in tier.scan()]
    return len(sizes), sum(sizes)


async def _save(settings: Settings, prompts: list[Prompt]) -> None:
    async with open_store(settings) as store:
        for prompt in prompts:
            await store.open_namespace(prompt.description, deadline=soon())
            for record in prompt.records():
                await store.save(record, ack=Ack.HOT, deadline=soon())
        assert await store.drain(soon()) == 0


def _reindex(redis: RedisServer, folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    for name, value in {"HOT": redis.url, "COLD": f"file://{folder}/records", "DISK_BYTES": "256MiB"}.items():
        monkeypatch.setenv(f"KVSTORE_{name}", value)
    return main(["reindex", "--json", "--state", str(folder / "state"), *flags])


def test_what_redis_forgot_is_found_again(
    shared_redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """FLUSHALL: lookups go on by asking the tiers; after a reindex the totals of the cold tier equal those before and a
    full scan, and the hits are those before.
    """
    prompts = [Prompt(HYBRID, name, 300) for name in "abc"]
    settings, namespace = settings_for(shared_redis, tmp_path), prompts[0].namespace

    async def before() -> NamespaceTotals:
        client = Redis(host=shared_redis.host, port=shared_redis.port)
        await client.flushall()
        await _save(settings, prompts)
        totals = await _totals(settings, namespace)
        for level in Level:
            told = totals.levels[level]
            assert (told.num_records, told.num_bytes) == await _scanned(settings, level)
            assert told.num_records == sum(len(prompt.records()) for prompt in prompts)
        async with open_catalog(settings) as catalog:
            assert await catalog.is_complete(deadline=soon())
        await client.flushall()
        await client.aclose()
        return totals

    async def looked_up() -> list[int]:
        async with open_store(settings) as store:
            await store.open_namespace(prompts[0].description, deadline=soon())
            found = [await store.lookup(prompt.query(), deadline=soon()) for prompt in prompts]
            return [one.resume_tokens for one in found]

    totals = asyncio.run(before())
    assert asyncio.run(looked_up()) == [288, 288, 288]
    assert _reindex(shared_redis, tmp_path, monkeypatch) == 0
    reports = json.loads(capsys.readouterr().out)
    cold = reports[str(settings.cold)]
    assert (cold["num_records"], cold["num_stale"]) == (totals.levels[Level.COLD].num_records, 0)
    again = asyncio.run(_totals(settings, namespace))
    assert again.levels[Level.COLD] == totals.levels[Level.COLD]
    assert again.levels[Level.HOT].num_records == 0
    assert asyncio.run(looked_up()) == [288, 288, 288]


def test_what_is_not_there_is_taken_off(
    shared_redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records deleted behind the catalog's back: a reindex takes them off, and the totals are exact again."""
    prompt = Prompt(HYBRID, "gone", 300, model="another")
    settings = settings_for(shared_redis, tmp_path)

    async def damage() -> None:
        client = Redis(host=shared_redis.host, port=shared_redis.port)
        await client.flushall()
        await client.aclose()
        await _save(settings, [prompt])
        async with open_tier(settings.hot, settings) as tier:
            for record in prompt.records()[3:9]:
                assert await tier.delete(record.key, deadline=soon())
        await asyncio.sleep(1.1)  # what was used in this second is left alone

    asyncio.run(damage())
    assert _reindex(shared_redis, tmp_path, monkeypatch) == 0
    reports = json.loads(capsys.readouterr().out)
    assert reports[str(settings.hot)]["num_stale"] == 6
    told = asyncio.run(_totals(settings, prompt.namespace)).levels[Level.HOT]
    assert (told.num_records, told.num_bytes) == asyncio.run(_scanned(settings, Level.HOT))


async def test_what_redis_evicted_is_seen(shared_redis: RedisServer, tmp_path: Path) -> None:
    """Redis let some records go by itself: one look at the boundary sets bits and bytes right, exactly."""
    prompt = Prompt(HYBRID, "evicted", 300, model="third")
    settings = settings_for(shared_redis, tmp_path)
    client = Redis(host=shared_redis.host, port=shared_redis.port)
    await client.flushall()
    await _save(settings, [prompt])
    async with open_tier(settings.hot, settings) as tier:
        for record in prompt.records()[::3]:
            assert await tier.delete(record.key, deadline=soon())
    await client.aclose()
    async with open_catalog(settings) as catalog:
        await _look(catalog, prompt)
    told = (await _totals(settings, prompt.namespace)).levels[Level.HOT]
    assert (told.num_records, told.num_bytes) == await _scanned(settings, Level.HOT)


async def _look(catalog: Catalog, prompt: Prompt) -> None:
    assert isinstance(catalog, RedisCatalog)
    await catalog.register(prompt.namespace, prompt.layout, "", deadline=soon())
    prefixes = [entry.prefix async for entry in catalog.iterate(prompt.namespace)]
    lost = await catalog.observe_hot(prompt.namespace, prefixes, deadline=soon())
    assert lost == len(prompt.records()[::3])
    assert await catalog.observe_hot(prompt.namespace, prefixes, deadline=soon()) == 0


async def test_the_reconciler_looks_when_something_is_gone(tmp_path: Path) -> None:
    """A Redis under a limit lets go by itself what the cold tier has: one service looks, and the totals are exact."""
    prompt = Prompt(HYBRID, "pressure", 1024, model="fourth", payload_bytes=20_000)
    with redis_server(arguments=("--maxmemory-policy", "volatile-lru")) as server:
        settings = settings_for(server, tmp_path)
        await _save(settings, [prompt])
        client = Redis(host=server.host, port=server.port)
        async with open_catalog(settings) as catalog, open_catalog(settings) as other:
            assert isinstance(catalog, RedisCatalog) and isinstance(other, RedisCatalog)
            for one in (catalog, other):
                await one.register(prompt.namespace, prompt.layout, "", deadline=soon())
            await client.delete("c1/lease/reconcile")  # of the store that has just ended
            first, second = Reconciler(catalog, Meters()), Reconciler(other, Meters())
            assert await first.look() == await second.look() == 0
            used = (await client.info("memory"))["used_memory"]
            await client.config_set("maxmemory", used - 300_000)
            await client.set("something", "else")
            assert int((await client.info("stats"))["evicted_keys"]) > 0
            await client.config_set("maxmemory", 0)
            # the lease may be among what was evicted: then the other one looks too, and finds nothing
            assert sum([await first.look(), await second.look()]) > 0
            assert await first.look() == 0
        told = (await _totals(settings, prompt.namespace)).levels[Level.HOT]
        assert (told.num_records, told.num_bytes) == await _scanned(settings, Level.HOT)
        await client.aclose()
