"""Quarantined records are bounded on every tier, and count: those that a tenant reports, and those with damaged
bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvstore.api import SaveOutcome
from kvstore.catalog.coordination import OPERATOR_RULES, FileTextStore
from kvstore.eviction.holdings import Quota
from kvstore.format.names import format_name
from kvstore.runtime.instruments import Instruments
from kvstore.store.limits import StoreLimits
from kvstore.store.retention import RetentionParts
from kvstore.store.retention.operator_rules import OperatorRules
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.records import make_record
from kvstore.testing.servers import RedisServer
from kvstore.testing.waiting import soon
from kvstore.tiers.base import Tier
from kvstore.tiers.filesystem import FilesystemTier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.redis import RedisTier

RECORD_BYTES = 200_000
QUOTA_BYTES = 2 << 20
BUDGET_BYTES = 8 << 20


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@asynccontextmanager
async def tier_of(place: str, folder: Path, server: RedisServer) -> AsyncIterator[Tier]:
    if place == "directory":
        tier: Tier = await FilesystemTier.open(folder / "records", budget_bytes=64 << 20)
    else:
        tier = RedisTier(server.url)
    try:
        yield tier
    finally:
        await tier.aclose()


@pytest.mark.servers
@pytest.mark.parametrize("place", ["directory", "redis"])
async def test_discarding_good_records_stores_nothing_past_the_quota(
    tmp_path: Path, shared_redis: RedisServer, place: str
) -> None:
    """A tenant with a quota of 2 MiB saves 80 records, 16 MB, and calls each of them bad: what is kept of them is
    little of its quota, and none is served any more."""
    operator_rules = OperatorRules(
        FileTextStore(tmp_path, OPERATOR_RULES), {"red": Quota(0, QUOTA_BYTES)}, Instruments()
    )
    async with tier_of(place, tmp_path, shared_redis) as cold:
        store = TieredStore(
            MemoryTier(64 << 20),
            None,
            cold,
            limits=StoreLimits(stage_bytes=32 << 20),
            retention=RetentionParts(operator_rules=operator_rules),
        )
        prompt = Prompt(
            ATTENTION, "mine", 40 * 64, payload_bytes=RECORD_BYTES, tenant="red", model=f"quarantine {place}"
        )
        await store.open_namespace(prompt.description, deadline=soon())
        records = prompt.records()
        assert len(records) == 80
        for record in records:
            assert await store.save(record, deadline=soon()) is SaveOutcome.STORED
        await store.drain(soon())
        for record in records:
            await store.discard(record.key, "I say so", deadline=soon())
        assert (await store.lookup(prompt.query(), deadline=soon())).resume_tokens == 0
        assert await cold.head([record.key for record in records], deadline=soon()) == [None] * 80
        await store.aclose()
    if place == "directory":
        assert folder_bytes(tmp_path) < QUOTA_BYTES / 8
    else:
        from redis import Redis

        with Redis.from_url(shared_redis.url) as client:
            names = list(client.scan_iter(f"quarantine:*{prompt.namespace.hex()}*", count=1000))
            kept = sum(int(client.strlen(name)) for name in names if client.ttl(name) > 60)  # type: ignore[arg-type]
        assert kept < QUOTA_BYTES / 8


async def test_damaged_files_count_and_are_bounded(tmp_path: Path) -> None:
    """A disk damages everything that is written: what is quarantined stays little, counts as used, and the directory
    never takes more than its budget; after a start it is the same."""
    tier = await FilesystemTier.open(tmp_path, budget_bytes=BUDGET_BYTES)
    most_bytes = 0
    for number in range(120):
        record = make_record(number, payload_bytes=90_000)
        await tier.put(record, deadline=soon())
        path = tmp_path / format_name(record.key)
        damaged = bytearray(path.read_bytes())
        damaged[-1] ^= 1
        path.write_bytes(damaged)
        assert await tier.get(record.key, deadline=soon()) is None
        most_bytes = max(most_bytes, folder_bytes(tmp_path / "quarantine"))
    assert tier.num_quarantined == 120
    quarantine_bytes = folder_bytes(tmp_path / "quarantine")
    assert 0 < quarantine_bytes <= most_bytes <= BUDGET_BYTES / 16
    assert (await tier.usage(deadline=soon())).used_bytes == quarantine_bytes
    while len([entry async for entry in tier.scan()]) < 80:
        number += 1
        await tier.put(make_record(number, payload_bytes=90_000), deadline=soon())
    for _ in range(20):
        number += 1
        await tier.put(make_record(number, payload_bytes=90_000), deadline=soon())
        used_bytes = (await tier.usage(deadline=soon())).used_bytes
        assert used_bytes is not None and used_bytes <= BUDGET_BYTES
    await tier.aclose()
    again = await FilesystemTier.open(tmp_path, budget_bytes=BUDGET_BYTES)
    usage = await again.usage(deadline=soon())
    assert usage.used_bytes is not None and quarantine_bytes < usage.used_bytes <= BUDGET_BYTES
    await again.aclose()
