"""The catalog of a real service's store: what is in it, lost with its Redis, and made anew from the records."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from redis.asyncio import Redis

from kvstore.api import Ack
from kvstore.catalog.base import Addition, Catalog, NamespaceTotals
from kvstore.catalog.entry import Level
from kvstore.catalog.redis.catalog import RedisCatalog
from kvstore.catalog.redis.reconcile import Reconciler
from kvstore.cli.main import main
from kvstore.compose import open_catalog, open_store, open_tier
from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.model.kinds import FullAttention
from kvstore.model.layout import GroupLayout, Layout
from kvstore.runtime.instruments import Instruments
from kvstore.runtime.meters import Meters
from kvstore.settings import Settings, load_settings
from kvstore.testing.prompts import HYBRID, Prompt
from kvstore.testing.servers import CephRgw, RedisServer, redis_server
from kvstore.testing.waiting import soon, until

pytestmark = pytest.mark.servers


def settings_for(redis: RedisServer, cold: Path | str) -> Settings:
    cold = cold if isinstance(cold, str) else f"file://{cold}/records"
    patient = {"stall_timeout_ms": 5000}  # whatever else the machine does
    return load_settings({"memory_bytes": "64MiB", "hot": redis.url, "cold": cold, "disk_bytes": "256MiB", **patient})


@pytest.fixture(params=["directory", "s3"])
def cold(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where records end up: the setting."""
    if request.param == "directory":
        return f"file://{tmp_path}/records"
    rgw: CephRgw = request.getfixturevalue("shared_rgw")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", rgw.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", rgw.secret_key)
    bucket = f"reindex-{secrets.token_hex(4)}"
    rgw.create_bucket(bucket)
    return f"s3://{bucket}/records?endpoint_url={rgw.endpoint_url}&region={rgw.region}"


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


ALONE = {"KVSTORE_ADMIN_LISTEN": "off"}
"""A service of another test that listens where one does by default is not asked."""


def _variables(redis: RedisServer, cold: str) -> dict[str, str]:
    return {"KVSTORE_HOT": redis.url, "KVSTORE_COLD": cold, "KVSTORE_DISK_BYTES": "256MiB", **ALONE}


def _reindex(redis: RedisServer, cold: str, monkeypatch: pytest.MonkeyPatch) -> int:
    for name, value in _variables(redis, cold).items():
        monkeypatch.setenv(name, value)
    return main(["reindex", "--json"])


async def _stage_all(settings: Settings, prompts: list[Prompt]) -> list[int]:
    """Resume every prompt with a service whose memory is empty; each record is bit for bit what was saved, and was in
    the cold tier.
    """
    resumed = []
    async with open_store(settings) as store:
        for prompt in prompts:
            await store.open_namespace(prompt.description, deadline=soon())
            found = await store.lookup(prompt.query(), deadline=soon())
            staged = await store.stage(prompt.query(), deadline=soon())
            assert staged.resume_tokens == found.resume_tokens
            assert staged.lease is not None and staged.sources.keys() == {store.slower[-1].name}
            expected = {record.key: record for record in prompt.records()}
            for key in staged.keys:
                assert (await store.load(staged.lease, key, deadline=soon())).data == expected[key].data
            resumed.append(staged.resume_tokens)
    return resumed


def test_what_redis_forgot_is_found_again(
    shared_redis: RedisServer,
    cold: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """FLUSHALL: lookups go on by asking the tiers; after a reindex the totals of the cold tier equal those before and a
    full scan, the catalog is believed again, and hits are those before, bit for bit from the cold tier.
    """
    prompts = [Prompt(HYBRID, name, 300) for name in "abc"]
    settings, namespace = settings_for(shared_redis, cold), prompts[0].namespace

    async def before() -> NamespaceTotals:
        shared_redis.flush()
        await _save(settings, prompts)
        totals = await _totals(settings, namespace)
        for level in Level:
            told = totals.levels[level]
            assert (told.num_records, told.num_bytes) == await _scanned(settings, level)
            assert told.num_records == sum(len(prompt.records()) for prompt in prompts)
        async with open_catalog(settings) as catalog:
            assert await catalog.is_complete(deadline=soon())
        return totals

    async def looked_up() -> list[int]:
        async with open_store(settings) as store:
            await store.open_namespace(prompts[0].description, deadline=soon())
            found = [await store.lookup(prompt.query(), deadline=soon()) for prompt in prompts]
            return [one.resume_tokens for one in found]

    async def is_complete() -> bool:
        async with open_catalog(settings) as catalog:
            return await catalog.is_complete(deadline=soon())

    totals = asyncio.run(before())
    hits = asyncio.run(looked_up())
    assert hits == [288, 288, 288]
    shared_redis.flush()
    assert asyncio.run(looked_up()) == hits
    assert not asyncio.run(is_complete())
    assert _reindex(shared_redis, cold, monkeypatch) == 0
    reports = json.loads(capsys.readouterr().out)
    report = reports[str(settings.cold)]
    assert (report["num_records"], report["num_stale"]) == (totals.levels[Level.COLD].num_records, 0)
    again = asyncio.run(_totals(settings, namespace))
    assert again.levels[Level.COLD] == totals.levels[Level.COLD]
    assert again.levels[Level.HOT].num_records == 0
    assert asyncio.run(is_complete())
    assert asyncio.run(looked_up()) == asyncio.run(_stage_all(settings, prompts)) == hits


async def test_services_rebuild_it_by_themselves(
    shared_redis: RedisServer, cold: str, caplog: pytest.LogCaptureFixture
) -> None:
    """FLUSHALL under two services: one of them adds what is stored, and no operator is needed. The totals of the cold
    tier are those before, and a lookup asks no tier any more."""
    caplog.set_level(logging.INFO, "kvstore.store.upkeep")
    prompts = [Prompt(HYBRID, name, 300, model="sixth") for name in "abc"]
    settings = settings_for(shared_redis, cold).model_copy(update={"catalog_look_s": 0.2})
    shared_redis.flush()
    await _save(settings, prompts)
    before = await _totals(settings, prompts[0].namespace)
    meters = Meters()
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(settings, Instruments(meters=meters)))
        if cold.startswith("s3"):  # a directory belongs to one service
            await stack.enter_async_context(open_store(settings))
        await store.open_namespace(prompts[0].description, deadline=soon())
        async with open_catalog(settings) as catalog:
            shared_redis.flush()
            assert not await catalog.is_complete(deadline=soon())
            await until(lambda: catalog.is_complete(deadline=soon()))
        again = await _totals(settings, prompts[0].namespace)
        assert again.levels[Level.COLD] == before.levels[Level.COLD]
        assert sum("is complete again" in text for text in caplog.messages) == 1
        async with asyncio.timeout(30):
            while not meters.get("catalog_lookups", complete="true"):
                found = await store.lookup(prompts[0].query(), deadline=soon())
                assert found.resume_tokens == 288
                await asyncio.sleep(0.2)


KILLED = """
import os, signal, sys
import kvstore.store.upkeep.reindexing as reindexing
from kvstore.cli.main import main

reindexing._BATCH = 50
flush = reindexing._Walk.flush

async def flush_and_die(self):
    await flush(self)
    if self.report.num_records == 100 and self._level.name == os.environ["DIE_IN"]:
        os.kill(os.getpid(), signal.SIGKILL)

reindexing._Walk.flush = flush_and_die
sys.exit(main(sys.argv[1:]))
"""
"""The command, which is killed when the catalog knows of 100 records of the level that `DIE_IN` names."""


def test_a_killed_reindex_is_repeated(
    shared_redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Killed in the middle of Redis, then of the directory: what was added stays, and the third run ends with the
    totals of a full scan, having told nothing twice.
    """
    prompts = [Prompt(HYBRID, f"killed {number}", 300, model="fifth", payload_bytes=100) for number in range(6)]
    settings, cold = settings_for(shared_redis, tmp_path), f"file://{tmp_path}/records"
    num_records = sum(len(prompt.records()) for prompt in prompts)

    async def prepare() -> None:
        shared_redis.flush()
        async with Redis(host=shared_redis.host, port=shared_redis.port) as client:
            await _save(settings, prompts)
            for pattern in ("c1/*", "c1t/*"):
                await client.delete(*[name async for name in client.scan_iter(match=pattern)])

    asyncio.run(prepare())
    for die_in in ("HOT", "COLD"):
        command = [sys.executable, "-c", KILLED, "reindex", "--json"]
        environment = {**os.environ, **_variables(shared_redis, cold), "DIE_IN": die_in}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert _reindex(shared_redis, cold, monkeypatch) == 0
    reports = json.loads(capfd.readouterr().out)
    for location, num_skipped in ((settings.hot, num_records), (settings.cold, 100)):
        report = reports[str(location)]
        assert (report["num_records"], report["num_skipped"], report["num_stale"]) == (num_records, num_skipped, 0)
    totals = asyncio.run(_totals(settings, prompts[0].namespace))
    for level in Level:
        counted = asyncio.run(_scanned(settings, level))
        assert (totals.levels[level].num_records, totals.levels[level].num_bytes) == counted
        assert counted[0] == num_records


def test_what_is_not_there_is_taken_off(
    shared_redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records deleted behind the catalog's back: a reindex takes them off, and the totals are exact again."""
    prompt = Prompt(HYBRID, "gone", 300, model="another")
    settings = settings_for(shared_redis, tmp_path)

    async def damage() -> None:
        shared_redis.flush()
        await _save(settings, [prompt])
        async with open_tier(settings.hot, settings) as tier:
            for record in prompt.records()[3:9]:
                assert await tier.delete(record.key, deadline=soon())

    asyncio.run(damage())
    assert _reindex(shared_redis, f"file://{tmp_path}/records", monkeypatch) == 0
    reports = json.loads(capsys.readouterr().out)
    assert reports[str(settings.hot)]["num_stale"] == 6
    told = asyncio.run(_totals(settings, prompt.namespace)).levels[Level.HOT]
    assert (told.num_records, told.num_bytes) == asyncio.run(_scanned(settings, Level.HOT))


async def test_what_redis_evicted_is_seen(shared_redis: RedisServer, tmp_path: Path) -> None:
    """Redis let some records go by itself: one look at the boundary sets bits and bytes right, exactly."""
    prompt = Prompt(HYBRID, "evicted", 300, model="third")
    settings = settings_for(shared_redis, tmp_path)
    shared_redis.flush()
    await _save(settings, [prompt])
    async with open_tier(settings.hot, settings) as tier:
        for record in prompt.records()[::3]:
            assert await tier.delete(record.key, deadline=soon())
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


async def test_a_look_at_wide_boundaries_delays_no_other_client(shared_redis: RedisServer) -> None:
    """Redis serves others between scripts that each look for thousands of records."""
    layout = Layout(64, tuple(GroupLayout(FullAttention(), 32) for _ in range(64)))
    prompt = Prompt(layout, "wide", 1280, model="wide")
    prefixes = [boundary.prefix for boundary in prompt.query().boundaries]
    clients = [Redis(host=shared_redis.host, port=shared_redis.port) for _ in range(2)]
    catalog, answered = RedisCatalog(clients[0]), 0
    await catalog.register(prompt.namespace, layout, "", deadline=soon())
    keys = [RecordKey(prompt.namespace, prefix, 0, 0) for prefix in prefixes]
    await catalog.add([Addition(key, Level.HOT, 100, 0) for key in keys], deadline=soon())
    # the first call of a script also loads it, which takes a round trip for each boundary
    assert await catalog.observe_hot(prompt.namespace, prefixes[:1], deadline=soon()) == 1
    looking = asyncio.ensure_future(catalog.observe_hot(prompt.namespace, prefixes[1:], deadline=soon()))
    while not looking.done():
        await clients[1].ping()
        answered += 1
    assert await looking == len(prefixes) - 1  # none of the records was ever stored
    assert answered > len(prefixes) // 2
    for client in clients:
        await client.aclose()


async def test_the_reconciler_looks_when_something_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
            first, second = Reconciler(catalog, Meters()), Reconciler(other, Meters())
            assert await first.check() == await second.check() == 0
            used = (await client.info("memory"))["used_memory"]
            await client.config_set("maxmemory", used - 300_000)
            await client.set("something", "else")
            assert int((await client.info("stats"))["evicted_keys"]) > 0
            await client.config_set("maxmemory", 0)
            # the lease may be among what was evicted: then both look, and the second finds nothing
            assert sum([await first.check(), await second.check()]) > 0
            assert await first.check() == await second.check() == 0

            async def walk() -> int:
                raise AssertionError("nothing is gone that nobody has looked at")

            third = Reconciler(other, Meters())
            monkeypatch.setattr(third, "compare", walk)
            assert await third.check() == 0
        told = (await _totals(settings, prompt.namespace)).levels[Level.HOT]
        assert (told.num_records, told.num_bytes) == await _scanned(settings, Level.HOT)
        await client.aclose()
