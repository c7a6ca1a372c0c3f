"""Reports of engines are bounded in bytes: of each tenant, and of all."""

from __future__ import annotations

import pytest

from kvstore.api import Outcome
from kvstore.model.keys import Boundary, NamespaceId, PrefixHash
from kvstore.runtime.bounded_map import BoundedMap, SharedRoom
from kvstore.runtime.deadline import Deadline
from kvstore.store.tiered import TieredStore
from kvstore.tiers.memory import MemoryTier

NAMESPACE = NamespaceId(bytes(16))


def report(tenant: str, number: int, reason: str, detail: dict[str, object]) -> Outcome:
    boundary = Boundary(64, PrefixHash(number.to_bytes(32, "little")))
    return Outcome(f"{number:05}", NAMESPACE, 64, 63, 0, 0, reason, detail, boundary, 1, tenant=tenant)


def largest(number: int) -> dict[str, object]:
    return {f"{number}-{one}".ljust(256, "\U00020000"): f"{number}+{one}".ljust(256, "\U00020000") for one in range(16)}


@pytest.mark.parametrize("reason", ["nothing_stored", "save_busy"])
async def test_large_reports_take_a_bounded_room(reason: str) -> None:
    """Each tenant sends as many of the largest as are kept of usual ones: the latest ones stay, within the bounds."""
    store = TieredStore(MemoryTier(8 << 20))
    room = store._explainer._room
    for tenant in range(12):
        before_bytes = room.used_bytes
        for number in range(1000):
            store.report(report(f"tenant {tenant}", number, reason, largest(number)))
        assert room.used_bytes - before_bytes <= 16 << 20
    assert room.used_bytes <= 64 << 20 and sum(kept.used_bytes for kept in room.all) == room.used_bytes
    for tenant in range(12):
        if reason == "nothing_stored":
            told = await store.explain("00999", tenant=f"tenant {tenant}", deadline=Deadline.after(10))
            assert told["request"] == "00999"
    await store.aclose()


async def test_usual_reports_are_kept_by_number() -> None:
    """Of the size that engines send, as many stay as docs/explain.md says."""
    store = TieredStore(MemoryTier(8 << 20))
    explainer = store._explainer
    detail: dict[str, object] = {"bytes": 1 << 30, "fetch_s": 0.5, "records_from_memory": 4000, "records_from_s3": 5000}
    for number in range(4200):
        store.report(report("red", number, "save_busy", {"records": 64}))
        store.report(report("red", number, "nothing_stored", detail))
    assert len(explainer._losses._tenants["red"].records.entries) == 4096
    assert len(explainer._reported["red"].entries) == 2048
    await store.aclose()


def test_who_takes_most_loses_first() -> None:
    """In a room for all, the largest gives way; an entry put again counts once."""
    room = SharedRoom(100)
    small, large = BoundedMap[int, str](room, 10, 100), BoundedMap[int, str](room, 10, 100)
    small.put(1, "a", 20)
    for number in range(5):
        large.put(number, "b", 20)
    small.put(1, "c", 20)
    assert list(small.entries.values()) == ["c"] and list(large.entries) == [1, 2, 3, 4]
    assert room.used_bytes == 100
