"""Records that are damaged where they lie, in each kind of tier: none is served, and none of the others is lost."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import redis.asyncio

from kvstore.format.names import format_name
from kvstore.format.record import Record
from kvstore.model.keys import RecordKey
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.records import DAMAGE
from kvstore.testing.servers import CephRgw, RedisServer
from kvstore.testing.waiting import soon
from kvstore.tiers.base import Tier
from kvstore.tiers.filesystem import FilesystemTier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.s3 import S3Tier
from tests.fuzz.inputs import mutated

pytestmark = pytest.mark.servers

_AT_ONCE = 32
_DAMAGED_SHARE = 0.7


class Place:
    """A tier, and a way to write under a record's name without its code.

    Attributes:
        rounds: Times that a stored record may be damaged, each time otherwise, and is read again.
    """

    rounds = 6

    def __init__(self, tier: Tier) -> None:
        self.tier = tier

    async def damage(self, key: RecordKey, data: bytes) -> None:
        """Store `data` under the name of a record that is there."""
        raise NotImplementedError


class DirectoryPlace(Place):
    rounds = 1  # its index forgets a damaged record

    def __init__(self, tier: Tier, root: Path) -> None:
        super().__init__(tier)
        self._root = root

    async def damage(self, key: RecordKey, data: bytes) -> None:
        (self._root / format_name(key)).write_bytes(data)


class RedisPlace(Place):
    def __init__(self, tier: Tier, client: redis.asyncio.Redis) -> None:
        super().__init__(tier)
        self._client = client

    async def damage(self, key: RecordKey, data: bytes) -> None:
        await self._client.set(format_name(key), data)


class S3Place(Place):
    def __init__(self, tier: Tier, server: CephRgw, bucket: str) -> None:
        super().__init__(tier)
        self._server, self._bucket = server, bucket

    async def damage(self, key: RecordKey, data: bytes) -> None:
        path = f"/{self._bucket}/{format_name(key)}"
        status, body = await asyncio.to_thread(self._server.request, "PUT", path, data)
        assert status == 200, body


@pytest.fixture(params=["directory", "redis", "s3"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    if request.param == "directory":
        tier: Tier = await FilesystemTier.open(tmp_path / "records", budget_bytes=1 << 32)
        yield DirectoryPlace(tier, tmp_path / "records")
    elif request.param == "redis":
        server: RedisServer = request.getfixturevalue("shared_redis")
        tier = RedisTier(server.url)
        async with redis.asyncio.Redis.from_url(server.url) as client:
            yield RedisPlace(tier, client)
            await client.flushall()
    else:
        rgw: CephRgw = request.getfixturevalue("shared_rgw")
        bucket = f"corrupted-{secrets.token_hex(4)}"
        rgw.create_bucket(bucket)
        tier = await S3Tier.open(rgw.location(bucket), credentials=rgw.credentials)
        yield S3Place(tier, rgw, bucket)
    await tier.aclose()


@pytest.mark.parametrize("num_damaged", [400, pytest.param(100_000, marks=pytest.mark.full)])
async def test_no_damaged_record_is_served(place: Place, num_damaged: int, tell: Callable[[str], None]) -> None:
    """Prompts are stored, most of their records are damaged in the tier, and a store with an empty memory restores what
    it can: what it serves is right bit for bit, and the tier itself returns each record whole or not at all."""
    seed = secrets.randbits(32)
    print(f"seed={seed}")
    choose, num_changed, served, whole = random.Random(seed), 0, 0, 0
    while num_changed < num_damaged:
        prompt = Prompt(ATTENTION, f"{seed}-{num_changed}", 64 * 32, payload_bytes=choose.choice((1, 600, 3000)))
        records = prompt.records()
        # the first pages stay whole, so that there is something to serve
        victims = [record for record in records[2 + choose.randrange(20) :] if choose.random() < _DAMAGED_SHARE]
        await in_parallel(place.tier.put(record, deadline=soon()) for record in records)
        for _ in range(place.rounds):
            lying = {record.key: damage(record, choose, records) for record in victims}
            await in_parallel(place.damage(key, data) for key, data in lying.items())
            got = await in_parallel(place.tier.get(record.key, deadline=soon()) for record in records)
            for record, found in zip(records, got, strict=True):
                if record.key in lying:
                    num_changed += 1
                    assert found is None, record.key
                else:
                    assert found is not None and found.data == record.data, record.key
                    whole += 1
        served += await restored(place.tier, prompt, records)
        await in_parallel(place.tier.delete(record.key, deadline=soon()) for record in records)
    assert served > 0 and whole > 0
    tell(f"{place.tier.name}: {num_changed:,} damaged records, 0 served; {served:,} good ones restored, {whole:,} read")


async def restored(tier: Tier, prompt: Prompt, records: list[Record]) -> int:
    """How many records a store with an empty memory serves of a prompt, all of them right."""
    store = TieredStore(MemoryTier(16 << 20), None, tier)
    await store.open_namespace(prompt.description, deadline=soon())
    staged = await store.stage(prompt.query(), deadline=soon())
    expected = {record.key: record.data for record in records}
    for key in staged.keys:
        assert staged.lease is not None
        record = await store.load(staged.lease, key, deadline=soon())
        assert record.data == expected[key], key
    await store.aclose()
    return len(staged.keys)


def damage(record: Record, choose: random.Random, others: list[Record]) -> bytes:
    """Other bytes for a record: a listed kind of damage, or random changes."""
    data = changed = bytes(record.data)
    while changed == data:
        if choose.random() < 0.5:
            changed = mutated(data, choose)
        else:
            other = choose.choice([one for one in others if one.key != record.key])
            kind = choose.choice([name for name in DAMAGE if len(data) > 800 or name != "payload bit"])
            changed = DAMAGE[kind](data, bytes(other.data))
    return changed


async def in_parallel(calls: object) -> list[object]:
    """The results of calls, of which a bounded number runs at a time."""
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(call: object) -> object:
        async with gate:
            return await call  # type: ignore[misc]

    return await asyncio.gather(*(one(call) for call in calls))  # type: ignore[attr-defined]
