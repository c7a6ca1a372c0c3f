"""Two services share a Redis and an S3 and are killed while they save: what was acknowledged is there, bit for bit."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis.asyncio

from kvstore.catalog.entry import Level
from kvstore.catalog.pending import PendingTotals
from kvstore.catalog.redis.pending import RedisPendingLog
from kvstore.client import connect
from kvstore.compose import open_catalog
from kvstore.settings import load_settings
from kvstore.testing.servers import CephRgw, RedisServer, redis_server
from kvstore.testing.waiting import soon
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.s3 import S3Tier
from tests.integration.killed_services import PENDING_LEASE_S, Node, Promises, places, prompt_named, service

pytestmark = pytest.mark.servers

_FINISHED_S = 90.0


@pytest.fixture
async def hot() -> AsyncIterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.mark.parametrize("io_threads", [1, 2])
@pytest.mark.parametrize("kills", [6, pytest.param(200, marks=pytest.mark.full)])
async def test_what_was_acknowledged_survives_kills(
    kills: int, io_threads: int, tmp_path: Path, hot: RedisServer, shared_rgw: CephRgw
) -> None:
    """Each service is killed half of the times, at random moments. In the end one of them starts again: within seconds
    nothing is pending, S3 has every record that was acknowledged, and a service with empty memory serves each."""
    bucket = f"kills-{secrets.token_hex(4)}"
    shared_rgw.create_bucket(bucket)
    seed = secrets.randbits(32)
    print(f"seed={seed}")  # of the choices; what the kernel does with them is its own
    numbers, promises = random.Random(seed), Promises()
    nodes = [
        Node(
            service(tmp_path, name, hot, shared_rgw, bucket, io_threads),
            f"unix:{tmp_path / name}.sock",
            promises,
            numbers,
        )
        for name in ("one", "two")
    ]
    try:
        started_s = time.monotonic()
        await asyncio.gather(*(node.live_and_die(kills // 2) for node in nodes))
        assert not any(node.process.running for node in nodes)
        killed_s = time.monotonic() - started_s
        left = await pending(hot, bucket)
        await nodes[0].start()
        started_s = time.monotonic()
        while (totals := await pending(hot, bucket)) != PendingTotals(0, 0):
            assert time.monotonic() - started_s < _FINISHED_S, f"still pending: {totals}"
            await asyncio.sleep(0.1)
        finished_s = time.monotonic() - started_s
        nodes[0].process.kill9()
        print(
            f"kills={kills} in {killed_s:.1f} s, with a save in flight={sum(n.num_kills_in_flight for n in nodes)},"
            f" acknowledged={ {level.value: count for level, count in promises.num_acknowledged.items()} },"
            f" left pending={left.num_records}, finished after {finished_s:.1f} s"
        )
        await everything_is_in_s3(promises, shared_rgw, bucket)
        await the_catalog_equals_a_scan(hot, shared_rgw, bucket)
        assert await records_that_may_not_be_evicted(hot) == []
        await nodes[1].start()
        await everything_is_served(promises, f"unix:{tmp_path / 'two'}.sock")
    finally:
        for node in nodes:
            node.process.kill9()
    assert promises.num_acknowledged.keys() == {level for level, count in promises.num_acknowledged.items() if count}
    assert sum(node.num_kills_in_flight for node in nodes) > kills // 2


async def pending(hot: RedisServer, bucket: str) -> PendingTotals:
    async with redis.asyncio.Redis.from_url(hot.url) as client:
        log = RedisPendingLog(client, f"s3://{bucket}/kills", lease_s=PENDING_LEASE_S)
        return await log.totals(deadline=soon())


@asynccontextmanager
async def in_s3(rgw: CephRgw, bucket: str) -> AsyncIterator[S3Tier]:
    tier = await S3Tier.open(rgw.location(bucket, "kills"), credentials=rgw.credentials)
    try:
        yield tier
    finally:
        await tier.aclose()


async def the_catalog_equals_a_scan(hot: RedisServer, rgw: CephRgw, bucket: str) -> None:
    """Records and bytes of each tier, counted one by one, are what the catalog says."""
    found: dict[tuple[bytes, Level], tuple[int, int]] = {}
    hot_tier = RedisTier(hot.url)
    async with in_s3(rgw, bucket) as cold_tier:
        for level, tier in ((Level.HOT, hot_tier), (Level.COLD, cold_tier)):
            async for entry in tier.scan():
                num_records, num_bytes = found.get((entry.key.namespace, level), (0, 0))
                found[entry.key.namespace, level] = (num_records + 1, num_bytes + entry.num_bytes)
    await hot_tier.aclose()
    settings = load_settings({"hot": hot.url, "cold": f"s3://{bucket}/kills"})
    async with open_catalog(settings) as catalog:
        totals = await catalog.totals(deadline=soon())
        told = {
            (namespace, level): (of.levels[level].num_records, of.levels[level].num_bytes)
            for namespace, of in totals.items()
            for level in Level
        }
        assert told == found
        assert await catalog.is_complete(deadline=soon())


async def everything_is_in_s3(promises: Promises, rgw: CephRgw, bucket: str) -> None:
    async with in_s3(rgw, bucket) as tier:
        for expected in promises.records():
            stored = await tier.get(expected.key, deadline=soon())
            assert stored is not None, expected.key
            assert stored.data == expected.data, expected.key


async def records_that_may_not_be_evicted(hot: RedisServer) -> list[str]:
    """Names of records in Redis that have no expiry, though S3 has them."""
    kept = []
    async with redis.asyncio.Redis.from_url(hot.url) as client:
        async for name in client.scan_iter(match="v1/*{*", count=1000):
            if await client.ttl(name) == -1:
                kept.append(name.decode())
    return kept


async def everything_is_served(promises: Promises, url: str) -> None:
    """Stage and load whatever was promised of each prompt, as an engine would."""
    store = connect(url)
    try:
        for name, promised in promises.by_prompt.items():
            prompt = prompt_named(name)
            whole = []  # a prefix ends before the first page that was not promised in full
            for tokens, slice_ in places(prompt):
                if prompt.key(tokens, 0, slice_) not in promised:
                    break
                whole.append((tokens, slice_))
            num_pages = len(whole) // prompt.layout.groups[0].num_slices
            await store.open_namespace(prompt.description, deadline=soon())
            staged = await store.stage(prompt.query(), deadline=soon())
            assert staged.resume_tokens >= num_pages * prompt.layout.page_tokens, name
            if staged.lease is None:
                continue
            expected = {prompt.key(*place[:1], 0, place[1]): place for place in places(prompt)}
            for key in staged.keys:
                record = await store.load(staged.lease, key, deadline=soon())
                tokens, slice_ = expected[key]
                assert record.data == prompt.record(tokens, 0, slice_).data
            await store.release(staged.lease)
    finally:
        await store.aclose()
