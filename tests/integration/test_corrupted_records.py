"""Records that are damaged where they lie, in each kind of tier: none is served, and none of the others is lost."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Callable

import pytest

from kvstore.format.record import Record
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.records import DAMAGE
from kvstore.testing.tier_contract import RawMedium
from kvstore.testing.waiting import soon
from kvstore.tiers.base import Tier
from kvstore.tiers.memory import MemoryTier
from tests.contract.media import FilesystemMedium
from tests.fuzz.inputs import mutated

pytestmark = pytest.mark.servers

_AT_ONCE = 32
_DAMAGED_SHARE = 0.7


@pytest.fixture
async def tier(medium: RawMedium) -> AsyncIterator[Tier]:
    opened = await medium.open_tier()
    yield opened
    await opened.aclose()


@pytest.mark.parametrize("num_damaged", [400, pytest.param(100_000, marks=pytest.mark.full)])
async def test_no_damaged_record_is_served(
    medium: RawMedium, tier: Tier, num_damaged: int, tell: Callable[[str], None]
) -> None:
    """Prompts are stored, most of their records are damaged in the tier, and a store with an empty memory restores what
    it can: what it serves is right bit for bit, and the tier itself returns each record whole or not at all."""
    seed = secrets.randbits(32)
    print(f"seed={seed}")
    choose, num_changed, served, whole = random.Random(seed), 0, 0, 0
    rounds = 1 if isinstance(medium, FilesystemMedium) else 6  # a directory's index forgets a damaged record
    while num_changed < num_damaged:
        prompt = Prompt(ATTENTION, f"{seed}-{num_changed}", 64 * 32, payload_bytes=choose.choice((1, 600, 3000)))
        records = prompt.records()
        # the first pages stay whole, so that there is something to serve
        victims = [record for record in records[2 + choose.randrange(20) :] if choose.random() < _DAMAGED_SHARE]
        await in_parallel(tier.put(record, deadline=soon()) for record in records)
        for _ in range(rounds):
            lying = {record.key: damage(record, choose, records) for record in victims}
            await in_parallel(medium.write(key, data) for key, data in lying.items())
            got = await in_parallel(tier.get(record.key, deadline=soon()) for record in records)
            for record, found in zip(records, got, strict=True):
                if record.key in lying:
                    num_changed += 1
                    assert found is None, record.key
                else:
                    assert found is not None and found.data == record.data, record.key
                    whole += 1
        served += await restored(tier, prompt, records)
        await in_parallel(tier.delete(record.key, deadline=soon()) for record in records)
    assert served > 0 and whole > 0
    tell(f"{tier.name}: {num_changed:,} damaged records, 0 served; {served:,} good ones restored, {whole:,} read")


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
