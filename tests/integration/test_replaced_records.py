"""A record in Redis that was replaced by something of another size than the catalog tells: right bytes or a miss."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from redis.asyncio import Redis

from kvstore.api import Ack
from kvstore.catalog.entry import Level
from kvstore.compose import open_catalog, open_store, open_tier
from kvstore.format.names import format_name
from kvstore.format.record import Record
from kvstore.settings import Settings, load_settings
from kvstore.store.upkeep.reindexing import reindex_level
from kvstore.testing.prompts import HYBRID, Prompt
from kvstore.testing.servers import RedisServer
from kvstore.testing.waiting import soon
from kvstore.tiers.base import PutOutcome
from kvstore.tiers.redis import RedisTier
from tests.virtual_time import ShiftedClock

pytestmark = pytest.mark.servers

PROMPT = Prompt(HYBRID, "replaced", 192, payload_bytes=50_000)
VICTIM = PROMPT.record(128)


def of_size(payload_bytes: int) -> Record:
    """A record of the same name that another writer might have stored."""
    return Prompt(HYBRID, "replaced", 192, payload_bytes=payload_bytes).record(128, seed=1)


async def replace(client: Redis, server: RedisServer, by: str) -> bytes | None:
    """Put something else in the place of `VICTIM`; returns its bytes if they are a record of that name."""
    name = format_name(VICTIM.key)
    await client.delete(name)
    whole = {"larger": 3 << 20, "smaller": 100, "in stripes": 9 << 20}
    if by in whole:
        record = of_size(whole[by])
        tier = RedisTier(server.url)
        await tier.put(record, deadline=soon())
        await tier.aclose()
        return bytes(record.data)
    if by == "a list":
        await client.rpush(name, b"x")
    elif by != "nothing":
        data = bytes(VICTIM.data)
        values = {
            "its header": data[:192],
            "its half": data[:25_000],
            "more than it": data + b"x" * 5000,
            "header of a large one": bytes(of_size(9 << 20).data)[:192],
            "another's": bytes(PROMPT.record(64).data),
            "forty megabytes": os.urandom(40 << 20),
            "no bytes": b"",
        }
        await client.set(name, values[by])
    return None


@pytest.mark.parametrize("has_cold", [True, False])
@pytest.mark.parametrize(
    "by",
    [
        *("larger", "smaller", "in stripes", "nothing", "no bytes", "its header", "its half", "more than it"),
        *("header of a large one", "another's", "a list", "forty megabytes"),
    ],
)
async def test_right_bytes_or_a_miss(
    by: str, has_cold: bool, client: Redis, shared_redis: RedisServer, tmp_path: Path
) -> None:
    """The next service believes the catalog and reads: what is a record of that name is served as it is, anything else
    comes from the directory, or ends the hit before it; a second look knows.
    """
    cold = f"file://{tmp_path}" if has_cold else "memory:"
    sizes = {"memory_bytes": "64MiB", "disk_bytes": "256MiB"}
    patient = {"stall_timeout_ms": 5000}  # whatever else the machine does
    settings = load_settings({"hot": shared_redis.url, "cold": cold, **sizes, **patient})
    await save(settings)
    replaced = await replace(client, shared_redis, by)
    expected = {record.key: bytes(record.data) for record in PROMPT.records()}
    if replaced is not None:
        expected[VICTIM.key] = replaced
    is_whole = has_cold or replaced is not None
    for number in range(2):
        async with open_store(settings) as store:
            await store.open_namespace(PROMPT.description, deadline=soon())
            if number == 1 and not is_whole:
                found = await store.lookup(PROMPT.query(), deadline=soon())
                assert found.resume_tokens == 64
            async with asyncio.timeout(10):
                staged = await store.stage(PROMPT.query(), deadline=soon())
            assert staged.resume_tokens == (192 if is_whole else 64)
            assert staged.lease is not None
            for key in staged.keys:
                assert (await store.load(staged.lease, key, deadline=soon())).data == expected[key]
            assert await store.drain(soon()) == 0


@pytest.mark.parametrize("payload_bytes", [50_000, 9 << 20])
async def test_a_put_gets_past_an_empty_value(payload_bytes: int, client: Redis, shared_redis: RedisServer) -> None:
    """It stands in the record's place and is none: whoever puts the record there is not refused for ever."""
    record = of_size(payload_bytes)
    await client.set(format_name(record.key), b"")
    tier = RedisTier(shared_redis.url)
    try:
        assert await tier.put(record, deadline=soon()) is PutOutcome.STORED
        found = await tier.get(record.key, deadline=soon())
        assert found is not None and found.data == record.data
    finally:
        await tier.aclose()


@pytest.mark.parametrize("by", ["larger", "smaller", "in stripes", "nothing"])
async def test_a_reindex_sets_bytes_right(by: str, client: Redis, shared_redis: RedisServer) -> None:
    """Totals equal a count again, also where a group lost one slice and another one was replaced."""
    settings = load_settings({"memory_bytes": "64MiB", "hot": shared_redis.url, "cold": "memory:"})
    await save(settings)
    await replace(client, shared_redis, by)
    if by == "larger":
        await client.delete(format_name(PROMPT.key(128, 0, 1)))
    async with open_catalog(settings) as catalog, open_tier(settings.hot, settings) as tier:
        report = await reindex_level(catalog, tier, Level.HOT, clock=ShiftedClock(date_ahead_s=2.0))
        totals = (await catalog.totals(deadline=soon()))[PROMPT.namespace].levels[Level.HOT]
        sizes = [entry.num_bytes async for entry in tier.scan()]
    assert (totals.num_records, totals.num_bytes) == (len(sizes), sum(sizes))
    assert (report.num_resized, report.num_stale) == (int(by != "nothing"), int(by in {"larger", "nothing"}))


async def save(settings: Settings) -> None:
    async with open_store(settings) as store:
        await store.open_namespace(PROMPT.description, deadline=soon())
        for record in PROMPT.records():
            await store.save(record, ack=Ack.HOT, deadline=soon())
        assert await store.drain(soon()) == 0
