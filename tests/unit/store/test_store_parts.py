"""Leases and absent keys, on a clock that the test owns; the state of a tier in a status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest

from kvstore.errors import Unavailable
from kvstore.runtime.background import Background
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.store.context import StoreContext
from kvstore.store.leases import LeaseTable
from kvstore.store.limits import StoreLimits
from kvstore.store.lookup import AbsentKeys
from kvstore.store.tiered import TieredStore
from kvstore.testing.records import make_key, make_record
from kvstore.testing.waiting import soon
from kvstore.tiers.base import TierUsage
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.refusals import PartDown
from tests.virtual_time import ManualClock


@pytest.fixture
async def parts() -> AsyncIterator[tuple[LeaseTable, MemoryTier, ManualClock]]:
    memory, clock, background = MemoryTier(1 << 20), ManualClock(), Background("test")
    for number in range(4):
        memory.insert(make_record(number))
    limits = StoreLimits(lease_s=10.0, leases_max=2)
    yield LeaseTable(StoreContext(memory, None, None, limits, Instruments(clock), background)), memory, clock
    await background.aclose()


Parts = tuple[LeaseTable, MemoryTier, ManualClock]


def pins(memory: MemoryTier, *numbers: int) -> dict:
    return {make_key(number): memory.pin(make_key(number)) for number in numbers}


async def test_a_lease_ends_exactly_at_its_time(parts: Parts) -> None:
    """It serves until the last moment, not at it, whether or not anybody swept."""
    leases, memory, clock = parts
    lease = leases.grant(pins(memory, 0))
    clock.now_s += 9.99
    assert leases.record(lease, make_key(0)) is not None
    assert leases.record(lease, make_key(1)) is None
    assert leases.renew(lease)
    clock.now_s += 9.99
    assert leases.sweep() == 0
    clock.now_s += 0.01
    assert leases.record(lease, make_key(0)) is None
    assert not leases.renew(lease)
    assert memory.pinned_bytes == 0
    assert leases.num_expired == 1


async def test_a_sweep_frees_what_is_not_used(parts: Parts) -> None:
    """Dead engines do not call: the sweep ends their leases and leaves the living ones."""
    leases, memory, clock = parts
    leases.grant(pins(memory, 0, 1))
    clock.now_s += 5
    living = leases.grant(pins(memory, 1, 2))
    assert leases.refuses("")
    clock.now_s += 6
    assert leases.sweep() == 1
    assert not leases.refuses("")
    assert leases.record(living, make_key(1)) is not None
    leases.release_all()
    assert memory.pinned_bytes == 0
    assert len(leases) == 0


async def test_the_end_of_a_long_lease_gives_others_turns(parts: Parts) -> None:
    """Its records are unpinned a thousand at a time: between two turns of the loop, never all."""
    leases, memory, _ = parts
    memory.limit_bytes = 64 << 20
    numbers = range(4, 5004)
    for number in numbers:
        memory.insert(make_record(number))
    lease = leases.grant(pins(memory, *numbers))
    seen = [memory.pinned_bytes]
    leases.release(lease)
    assert leases.record(lease, make_key(4)) is None
    while memory.pinned_bytes:
        seen.append(memory.pinned_bytes)
        await asyncio.sleep(0)
    seen.append(0)
    assert max(before - after for before, after in pairwise(seen)) < seen[0] / 4
    again = leases.grant(pins(memory, *numbers))
    leases.release(again)
    leases.release_all()
    assert memory.pinned_bytes == 0


async def test_a_bad_record_leaves_every_lease(parts: Parts) -> None:
    """Two leases hold it: neither serves it any more, the rest stays, and no pin is lost."""
    leases, memory, _ = parts
    one, two = leases.grant(pins(memory, 0, 1)), leases.grant(pins(memory, 0))
    leases.forget(make_key(0))
    assert leases.record(one, make_key(0)) is leases.record(two, make_key(0)) is None
    assert leases.record(one, make_key(1)) is not None
    leases.release(one)
    leases.release(two)
    assert memory.pinned_bytes == 0


def test_absent_keys_forget_themselves() -> None:
    """A key is known as absent for its time, or until it is written."""
    clock = ManualClock()
    absent = AbsentKeys(clock)
    absent.add(make_key(0), 5.0)
    absent.add(make_key(1), 50.0)
    clock.now_s += 5.0
    assert make_key(0) not in absent
    assert make_key(1) in absent
    absent.remove(make_key(1))
    assert make_key(1) not in absent
    assert len(absent) == 0


@pytest.mark.parametrize("kind", [Unavailable, PartDown])
async def test_a_status_tells_a_part_from_the_whole(kind: type[Unavailable]) -> None:
    """A node of a cluster does not answer: the status says by a value that the others are used."""

    class Broken(MemoryTier):
        async def usage(self, *, deadline: Deadline) -> TierUsage:
            raise kind("a node failed")

    store = TieredStore(MemoryTier(1 << 20), Broken(1 << 20, name="redis"))
    tiers = (await store.status(deadline=soon()))["tiers"]
    assert isinstance(tiers, dict)
    assert tiers["redis"] == {
        "name": "redis",
        "healthy": False,
        "reason": "a node failed",
        "is_part_down": kind is PartDown,
    }
    await store.aclose()
