"""What the memory tier promises beyond the contract of all tiers: budget, order of eviction, pins, no copies."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.errors import Closed, InternalError, InvalidRequest
from kvstore.model.keys import RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.testing.records import make_key, make_record
from kvstore.testing.waiting import soon
from kvstore.tiers.base import PutOutcome
from kvstore.tiers.memory import RECORD_OVERHEAD_BYTES, MemoryTier

COST = make_record(0).num_bytes + RECORD_OVERHEAD_BYTES


def tier_for(num_records: int) -> MemoryTier:
    return MemoryTier(COST * num_records)


async def test_get_returns_the_same_object() -> None:
    """A record that is put is the record that is got: neither is copied."""
    tier, record = tier_for(2), make_record(1)
    assert await tier.put(record, deadline=Deadline.after(1)) is PutOutcome.STORED
    assert await tier.get(record.key, deadline=Deadline.after(1)) is record
    assert tier.peek(record.key) is record


def test_least_recently_used_is_evicted_first() -> None:
    """Of three records the one that was not read is evicted for the fourth."""
    tier = tier_for(3)
    for number in range(3):
        tier.insert(make_record(number))
    tier.peek(make_key(0))
    assert tier.insert(make_record(3)) is PutOutcome.STORED
    assert [make_key(number) in tier for number in range(4)] == [True, False, True, True]
    assert (tier.num_evicted, tier.used_bytes) == (1, 3 * COST)


def test_pinned_records_are_not_evicted() -> None:
    """With everything pinned a put is FULL and evicts nothing; after unpin it fits."""
    tier = tier_for(2)
    tier.insert(make_record(0))
    tier.insert(make_record(1))
    pins = [tier.pin(make_key(number)) for number in range(2)]
    assert [pin.record.key for pin in pins if pin is not None] == [make_key(0), make_key(1)]
    assert tier.insert(make_record(2)) is PutOutcome.FULL
    assert (len(tier), tier.num_evicted) == (2, 0)
    for pin in pins:
        assert pin is not None
        tier.unpin(pin)
    assert tier.insert(make_record(2)) is PutOutcome.STORED
    assert make_key(0) not in tier


def test_full_evicts_nothing() -> None:
    """A record that cannot fit beside the pinned ones does not cost the others their place."""
    tier = tier_for(3)
    for number in range(3):
        tier.insert(make_record(number))
    assert tier.pin(make_key(0)) is not None
    assert tier.insert(make_record(9, payload_bytes=3 * COST)) is PutOutcome.FULL
    assert len(tier) == 3


def test_what_is_absent_is_not_pinned() -> None:
    """A pin of a record that is not there pins nothing."""
    tier = tier_for(2)
    tier.insert(make_record(0))
    assert tier.pin(make_key(7)) is None
    assert tier.pinned_bytes == 0


def test_pins_count() -> None:
    """A record that two pins hold stays until both have ended, in either order."""
    tier = tier_for(1)
    tier.insert(make_record(0))
    first, second = tier.pin(make_key(0)), tier.pin(make_key(0))
    assert first is not None and second is not None
    assert tier.pinned_bytes == COST
    assert (first.added_bytes, second.added_bytes) == (COST, 0)
    tier.unpin(first)
    assert tier.insert(make_record(1)) is PutOutcome.FULL
    tier.unpin(second)
    assert tier.insert(make_record(1)) is PutOutcome.STORED
    with pytest.raises(InternalError, match="twice"):
        tier.unpin(second)


def test_deleted_while_pinned() -> None:
    """No reader finds it any more, its bytes stay charged until the pin ends, and the pin of a successor is its own."""
    tier = tier_for(2)
    tier.insert(make_record(0))
    pin = tier.pin(make_key(0))
    assert pin is not None
    assert tier.remove(make_key(0))
    assert tier.peek(make_key(0)) is None
    assert tier.used_bytes == COST
    assert tier.insert(make_record(0)) is PutOutcome.STORED
    second = tier.pin(make_key(0))
    assert second is not None
    tier.unpin(pin)
    assert (tier.used_bytes, tier.pinned_bytes) == (COST, COST)
    assert tier.peek(make_key(0)) is second.record


def test_bad_budget_is_refused() -> None:
    """A budget of nothing is a mistake in the settings."""
    with pytest.raises(InvalidRequest, match="positive"):
        MemoryTier(0)


async def test_closed() -> None:
    """After `aclose` nothing is kept and inserts raise."""
    tier = tier_for(2)
    tier.insert(make_record(0))
    await tier.aclose()
    assert (len(tier), tier.used_bytes) == (0, 0)
    with pytest.raises(Closed):
        tier.insert(make_record(1))


async def test_thousands_are_deleted_some_hundred_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a tier deletes one by one: a deletion that was begun for all of them at once would hold the event loop."""
    tier = tier_for(4096)
    for number in range(4096):
        tier.insert(make_record(number))
    running = most = 0

    async def delete(key: RecordKey, *, deadline: Deadline) -> bool:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return tier.remove(key)

    monkeypatch.setattr(tier, "delete", delete)
    await tier.delete_all([make_key(number) for number in range(4096)], deadline=soon())
    assert len(tier) == 0 and most <= 256
