"""A walk over a tier: it counts, names what is bad and why, keeps its rate, and tells a dead tier from a bad record."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.format.names import format_name
from kvstore.model.keys import NamespaceId
from kvstore.store.upkeep.verification import ByteRate, Findings, count_records, verify_tier
from kvstore.testing.faults import FaultyTier
from kvstore.testing.records import NAMESPACE, make_key, make_record
from kvstore.testing.waiting import soon
from kvstore.tiers.filesystem import FilesystemTier
from kvstore.tiers.memory import MemoryTier

NUM_RECORDS = 40
OTHER = NamespaceId(bytes(range(16)))


async def filled_directory(root: Path) -> FilesystemTier:
    tier = await FilesystemTier.open(root, budget_bytes=1 << 30)
    for number in range(NUM_RECORDS):
        await tier.put(make_record(number, 5000), deadline=soon())
    return tier


async def test_bad_records_are_found_named_and_quarantined(tmp_path: Path) -> None:
    """Of forty records three are damaged in three ways: these are told with a reason, the others are whole."""
    owner = await filled_directory(tmp_path)
    paths = [tmp_path / format_name(make_key(number)) for number in range(3)]
    damaged = bytearray(paths[0].read_bytes())
    damaged[1000] ^= 1
    paths[0].write_bytes(damaged)
    paths[1].write_bytes(paths[1].read_bytes()[:-7])
    paths[2].write_bytes(bytes(make_record(7, 5000).data))
    seen: list[int] = []
    beside = await FilesystemTier.open_beside(tmp_path)
    assert await count_records(beside) == (NUM_RECORDS, 5192 * NUM_RECORDS - 7)
    findings = await verify_tier(beside, progress=lambda so_far: seen.append(so_far.num_records))
    await beside.aclose()
    assert seen == list(range(1, NUM_RECORDS + 1))
    counts = (findings.num_records, findings.num_whole, findings.num_bad, findings.num_gone, findings.num_unread)
    assert counts == (NUM_RECORDS, NUM_RECORDS - 3, 3, 0, 0)
    assert findings.num_bytes == 5192 * (NUM_RECORDS - 3)
    reasons = {bad.name: bad.reason for bad in findings.bad}
    assert "payload checksum" in reasons[format_name(make_key(0))]
    assert "wrong size" in reasons[format_name(make_key(1))]
    assert "another record stands under this name" in reasons[format_name(make_key(2))]
    assert not any(path.exists() for path in paths)
    # the owner goes on: what was quarantined is a miss for it, and may be put anew
    assert await owner.get(make_key(0), deadline=soon()) is None
    await owner.put(make_record(0, 5000), deadline=soon())
    assert await owner.get(make_key(0), deadline=soon()) is not None
    await owner.aclose()


async def test_one_namespace_only() -> None:
    """Records of other namespaces are not read."""
    tier = MemoryTier(1 << 20)
    for number in range(3):
        await tier.put(make_record(number), deadline=soon())
    await tier.put(make_record(make_key(9, namespace=OTHER)), deadline=soon())
    assert (await verify_tier(tier, namespace=OTHER)).num_records == 1
    assert (await verify_tier(tier, namespace=NAMESPACE)).num_records == 3
    assert (await verify_tier(MemoryTier(1 << 20))) == Findings()


async def test_what_is_gone_meanwhile_is_not_bad() -> None:
    """A record that was evicted between the listing and its turn is counted as gone."""
    tier = FaultyTier(MemoryTier(1 << 20))
    for number in range(3):
        await tier.put(make_record(number), deadline=soon())
    tier.lost.add(make_key(1))
    findings = await verify_tier(tier)
    assert (findings.num_whole, findings.num_gone, findings.num_bad) == (2, 1, 0)


@pytest.mark.virtual_time
async def test_a_dead_tier_ends_the_walk() -> None:
    """A tier that does not answer is no proof against any record: after ten of them the walk says so and ends."""
    tier = FaultyTier(MemoryTier(1 << 20))
    for number in range(30):
        await tier.put(make_record(number), deadline=soon())
    tier.down = True
    with pytest.raises(Unavailable, match="10 records in a row could not be read"):
        await verify_tier(tier)
    assert tier.num_quarantined == 0
    assert 30 <= tier.calls["get"] <= 45


@pytest.mark.virtual_time
async def test_a_tier_that_freezes_midway_ends_the_walk_within_a_minute() -> None:
    """Each of its reads waits for its deadline: the walk does not wait for ten records, three times each."""
    tier = FaultyTier(MemoryTier(1 << 20))
    for number in range(30):
        await tier.put(make_record(number), deadline=soon())
    tier.get_limit = 7
    started_s = asyncio.get_running_loop().time()
    with pytest.raises(Unavailable, match="no record could be read for 30 s"):
        await verify_tier(tier)
    assert asyncio.get_running_loop().time() - started_s < 60


async def test_the_rate_is_kept() -> None:
    """Half a megabyte at a megabyte a second takes half a second, however quick the tier is."""
    tier = MemoryTier(4 << 20)
    for number in range(10):
        await tier.put(make_record(number, 50_000 - 192), deadline=soon())
    started_s = time.monotonic()
    await verify_tier(tier, rate=ByteRate(1_000_000))
    assert 0.4 < time.monotonic() - started_s < 30
    with pytest.raises(InvalidRequest, match="must be positive"):
        ByteRate(0)
