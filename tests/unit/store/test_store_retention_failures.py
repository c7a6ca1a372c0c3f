"""Retention where things went wrong: starts that never came, tiers that refuse, levels that cannot shrink."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from retention_harness import BOUNDARY_BYTES, LAYOUT, OTHER, RECORD_BYTES, RECORDS, RetainedTier, open_retained

from kvstore.catalog.base import Addition, LeaveReason, Leaving, NamespaceTotals, Step
from kvstore.catalog.entry import BoundaryEntry, Level
from kvstore.errors import InvalidRequest, Unavailable, UnsupportedFormat
from kvstore.eviction.holdings import Quota
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.store.catalogued_tier import CataloguedTier
from kvstore.store.recorder import Recorder
from kvstore.store.retention.backpressure import BudgetGate
from kvstore.store.retention.owner import LEASE_S
from kvstore.testing.catalog_contract import mark_complete
from kvstore.testing.dict_pending import DictOwnership, LeaseBooks
from kvstore.testing.records import NAMESPACE, make_record
from kvstore.testing.waiting import until
from kvstore.tiers.base import PutOutcome
from kvstore.tiers.guarded import GuardedTier
from kvstore.tiers.memory import MemoryTier

pytestmark = pytest.mark.virtual_time


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RetainedTier]:
    async with open_retained(tmp_path) as world:
        yield world


async def test_what_serves_no_hit_leaves_when_nobody_mends_it(world: RetainedTier) -> None:
    """The start of a prompt is gone while its end came, and of another a slice in the middle: what is behind the hole
    is given a minute, and leaves then though there is room. What is before it stays.
    """
    headless, torn, whole = await world.save("a", 3), await world.save("b", 3), await world.save("c", 3)
    retention = world.retention(budget_bytes=100 * BOUNDARY_BYTES)
    await world.lose(headless[0])
    await world.lose(torn[1], only=(0, 1))
    assert await retention.round() == 0
    world.clock.now_s += 59
    assert await retention.round() == 0
    assert (await world.held(headless), await world.held(torn)) == ([0, 3, 3], [3, 2, 3])
    world.clock.now_s += 1
    assert await retention.round() == 4 * BOUNDARY_BYTES - RECORD_BYTES
    assert (await world.held(headless), await world.held(torn)) == ([0, 0, 0], [3, 0, 0])
    assert await world.held(whole) == [3, 3, 3]
    tombstones = await world.catalog.tombstones(limit=4, deadline=world.deadline)
    assert {tombstone.reason for tombstone in tombstones} == {LeaveReason.BROKEN}


async def test_what_is_mended_in_time_stays(world: RetainedTier) -> None:
    """The start was only late: nothing leaves, and nobody looks any more."""
    path = await world.save("a", 3)
    retention = world.retention(budget_bytes=100 * BOUNDARY_BYTES)
    await world.lose(path[0])
    assert await retention.round() == 0
    await world.save("a", 1)
    world.clock.now_s += 60
    assert await retention.round() == 0
    await world.lose(path[0])
    world.clock.now_s += 600
    assert await retention.round() == 0
    assert await world.held(path) == [0, 3, 3]


async def test_a_boundary_without_a_state_is_whole(world: RetainedTier) -> None:
    """States are not saved at every page: the pages of a group that is not there at all serve what is behind them."""
    path = await world.save("a", 3)
    retention = world.retention(budget_bytes=100 * BOUNDARY_BYTES)
    await world.lose(path[1], only=(1, 0))
    world.clock.now_s += 100
    assert await retention.round() == 0
    assert await world.held(path) == [3, 2, 3]


async def test_nothing_is_missing_for_certain_while_the_catalog_lacks_some(world: RetainedTier) -> None:
    """Redis was flushed and not reindexed yet: the start may be stored, though the catalog does not tell of it."""
    path = await world.save("a", 3)
    await world.lose(path[0])
    await world.catalog.mark_incomplete(deadline=world.deadline)
    retention = world.retention(budget_bytes=100 * BOUNDARY_BYTES)
    for _ in range(3):
        world.clock.now_s += 100
        assert await retention.round() == 0
    assert await world.held(path) == [0, 3, 3]


async def test_a_rebuild_that_ends_during_a_round_makes_nothing_broken(
    world: RetainedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entries were read before the rebuild had added the start."""
    path = await world.save("a", 3)
    await world.lose(path[0])
    await world.catalog.mark_incomplete(deadline=world.deadline)
    world.clock.now_s += 600
    steps = world.catalog.steps

    async def steps_until_rebuilt(namespace: NamespaceId) -> AsyncIterator[Step]:
        async for step in steps(namespace):
            yield step
        await mark_complete(world.catalog)

    monkeypatch.setattr(world.catalog, "steps", steps_until_rebuilt)
    assert await world.retention(budget_bytes=100 * BOUNDARY_BYTES).round() == 0
    assert await world.held(path) == [0, 3, 3]
    monkeypatch.undo()
    assert await world.retention(budget_bytes=100 * BOUNDARY_BYTES).round() > 0  # complete all along, without the start


async def test_what_serves_no_hit_stays_while_it_is_pinned(world: RetainedTier) -> None:
    """An operator's word counts, whatever is missing."""
    path = await world.save("a", 3)
    await world.lose(path[0])
    await world.catalog.pin(NAMESPACE, [path[1]], world.clock.now_s + 1000, deadline=world.deadline)
    world.clock.now_s += 100
    await world.retention(budget_bytes=100 * BOUNDARY_BYTES).round()
    assert await world.held(path) == [0, 3, 0]


async def test_a_tier_that_refuses_leaves_no_hole(
    world: RetainedTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Deletes fail half-way: what is hidden stays hidden, nothing is taken off before it is deleted, and the next round
    finishes it. The log says why, once, since `status` sends whoever sees the failures there.
    """
    path = await world.save("a", 3)
    real = world.tier.delete

    async def refuse(key: RecordKey, *, deadline: Deadline) -> bool:
        if key.group == 1:
            raise Unavailable("not now")
        return await real(key, deadline=deadline)

    monkeypatch.setattr(world.tier, "delete", refuse)
    retention = world.retention(budget_bytes=1)
    assert await retention.round() == 0
    table = await world.catalog.lookup(NAMESPACE, path, deadline=world.deadline)
    assert not table.rows(Level.COLD).any()
    assert await world.used_bytes() == 3 * BOUNDARY_BYTES
    assert world.meters.get("retention_failures", tier=world.tier.name, at=world.tier.name) == 1
    assert await retention.round() == 0
    assert [record.getMessage().count("not now") for record in caplog.records if "eviction" in record.message] == [1]
    monkeypatch.setattr(world.tier, "delete", real)
    assert await retention.round() == 3 * BOUNDARY_BYTES
    assert await world.held(path) == [0, 0, 0]
    assert await world.used_bytes() == 0


@pytest.mark.parametrize("rules", [{}, {"budget_bytes": 100 * BOUNDARY_BYTES}])
async def test_deletions_that_died_are_ended_also_without_bounds(
    world: RetainedTier, rules: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service dies while it deletes a boundary from one tier: the next round of any service ends the deletion there,
    so that the tier takes the boundary again. While the hot tier does not answer, the next round tries again.
    """
    hot, path = MemoryTier(1 << 26), await world.save("a", 3)
    records = [make_record(RecordKey(NAMESPACE, path[1], group, slice_)) for group, slice_ in ((0, 0), (0, 1), (1, 0))]
    for record in records:
        await hot.put(record, deadline=world.deadline)
    added = [Addition(record.key, Level.HOT, record.num_bytes, 32) for record in records]
    assert all(await world.catalog.add(added, deadline=world.deadline))
    for level, prefix in ((Level.HOT, path[1]), (Level.COLD, path[2])):
        (hidden,) = await world.catalog.start_leaving([Leaving(NAMESPACE, prefix)], level, deadline=world.deadline)
        assert hidden is not None
    assert not any(await world.catalog.add(added, deadline=world.deadline))
    real, retention = hot.delete_all, world.retention(hot=hot, **rules)

    async def refuse(keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        raise Unavailable("not now")

    monkeypatch.setattr(hot, "delete_all", refuse)
    assert await retention.round() == BOUNDARY_BYTES
    assert not any(await world.catalog.add(added, deadline=world.deadline))
    monkeypatch.setattr(hot, "delete_all", real)
    assert await retention.round() == 0
    assert await hot.head([record.key for record in records], deadline=world.deadline) == [None] * 3
    assert await world.held(path) == [3, 3, 0]
    totals = (await world.catalog.totals(deadline=world.deadline))[NAMESPACE]
    assert [level.num_records for level in totals.levels] == [0, 6]
    assert all(await world.catalog.add(added, deadline=world.deadline))


async def test_a_quota_that_is_set_during_the_search_for_abandoned_deletions_evicts_nothing(
    world: RetainedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a round that has read all entries may say which boundaries lack their start. The collector stays on during
    the search, since it takes long.
    """
    path = await world.save("a", 12)
    world.clock.now_s += 600
    retention, step, num_pages = world.retention(), world.catalog.step, 0

    async def step_and_set(namespace: NamespaceId, cursor: str, *, count: int, deadline: Deadline) -> Step:
        nonlocal num_pages
        num_pages += 1
        assert gc.isenabled()
        if num_pages == 2:
            retention.set_quotas({"paying": Quota(guaranteed_bytes=1)})
        return await step(namespace, cursor, count=min(4, count), deadline=deadline)

    monkeypatch.setattr(world.catalog, "step", step_and_set)
    assert await retention.round() == 0
    assert num_pages >= 3
    assert await world.held(path) == [RECORDS] * 12


async def test_a_deletion_that_has_just_ended_is_left_alone(
    world: RetainedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round reads that a boundary is being deleted. The deletion ends, and the boundary is stored again: it stays."""
    (prefix,) = path = await world.save("a", 1)
    (hidden,) = await world.catalog.start_leaving([Leaving(NAMESPACE, prefix)], Level.COLD, deadline=world.deadline)
    assert hidden is not None
    real = world.catalog.leaving

    async def leaving(namespaces: Collection[NamespaceId]) -> AsyncIterator[BoundaryEntry]:
        async for entry in real(namespaces):
            ended = [(hidden, LeaveReason.REMOVED)]
            await world.catalog.finish_leaving(ended, Level.COLD, deadline=world.deadline)
            await world.save("a", 1)
            yield entry

    monkeypatch.setattr(world.catalog, "leaving", leaving)
    assert await world.retention().round() == 0
    assert await world.held(path) == [3]


async def test_a_round_that_fails_half_way_shows_again_what_it_had_not_begun(
    world: RetainedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier goes away after the first of many deletes: the starts of the prompts, which were hidden with their ends,
    are seen again and whole; another service finishes what was begun.
    """
    path = await world.save("a", 200)
    real, calls = world.tier.delete_all, 0

    async def fail_later(keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise Unavailable("not now")
        await real(keys, deadline=deadline)

    monkeypatch.setattr(world.tier, "delete_all", fail_later)
    left = await world.retention(budget_bytes=1).round()
    assert left == 32 * BOUNDARY_BYTES
    assert await world.used_bytes() == (200 - 32) * BOUNDARY_BYTES
    table = await world.catalog.lookup(NAMESPACE, path, deadline=world.deadline)
    seen = [bool(row.any()) for row in table.rows(Level.COLD)]
    assert seen == [True] * (200 - 64) + [False] * 64
    assert await world.held(path) == [3] * (200 - 32) + [0] * 32
    monkeypatch.setattr(world.tier, "delete_all", real)
    assert await world.retention(budget_bytes=500 * BOUNDARY_BYTES).round() == 32 * BOUNDARY_BYTES
    assert await world.held(path) == [3] * (200 - 64) + [0] * 64


async def test_a_tier_that_refuses_for_long_hides_only_what_must_leave(
    world: RetainedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket where nobody may delete: what is hidden counts as on its way, so later rounds hide no more, and lookups
    find the rest. Once deletions work, no more leaves than the budget asks for.
    """
    paths = [await world.save(f"prompt {number}", 1) for number in range(20)]
    world.clock.now_s += 100
    real = world.tier.delete_all

    async def refuse(keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        raise Unavailable("not allowed")

    monkeypatch.setattr(world.tier, "delete_all", refuse)
    retention = world.retention(budget_bytes=20 * BOUNDARY_BYTES, start_share=0.9, stop_share=0.8)
    for _ in range(5):
        assert await retention.round() == 0
        table = await world.catalog.lookup(NAMESPACE, [path[0] for path in paths], deadline=world.deadline)
        assert [bool(row.any()) for row in table.rows(Level.COLD)] == [False] * 4 + [True] * 16
    monkeypatch.setattr(world.tier, "delete_all", real)
    assert await retention.round() == 4 * BOUNDARY_BYTES
    assert await retention.round() == 0
    assert await world.used_bytes() == 16 * BOUNDARY_BYTES


async def test_a_tier_that_is_not_used_is_not_tried_for_each_boundary(
    world: RetainedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 is gone while most must leave: what is hidden when it fails is all that is hidden, each later round fails at
    once without reading the catalog, and says that the tier has failed. Once it is back, the rest is evicted.
    """
    paths = [await world.save(f"prompt {number}", 1) for number in range(200)]
    world.clock.now_s += 100
    inner, is_away = world.tier, True

    async def away(*_: object, deadline: Deadline) -> None:
        if is_away:
            raise Unavailable("not there")

    real = inner.delete_all
    monkeypatch.setattr(inner, "delete_all", away)
    monkeypatch.setattr(inner, "head", away)
    world.tier = GuardedTier(inner, Instruments(world.clock, world.meters))
    retention, steps, num_reads = world.retention(budget_bytes=1), world.catalog.steps, 0

    def counted(namespace: NamespaceId) -> AsyncIterator[Step]:
        nonlocal num_reads
        num_reads += namespace == NAMESPACE
        return steps(namespace)

    monkeypatch.setattr(world.catalog, "steps", counted)
    with pytest.raises(Unavailable, match="not used until a probe succeeds"):
        await retention.round()
    for _ in range(5):
        with pytest.raises(Unavailable, match="not used until a probe succeeds"):
            await retention.round()
    table = await world.catalog.lookup(NAMESPACE, [path[0] for path in paths], deadline=world.deadline)
    assert [bool(row.any()) for row in table.rows(Level.COLD)].count(False) == 64
    assert world.meters.get("retention_failures", tier=world.tier.name, at=world.tier.name) == 4
    assert num_reads == 1
    retention.start()
    await asyncio.sleep(3.5)
    assert world.meters.get("retention_failures", tier=world.tier.name, at=world.tier.name) == 8
    assert num_reads == 1
    is_away = False
    monkeypatch.setattr(inner, "delete_all", real)
    monkeypatch.delattr(inner, "head")
    while await world.used_bytes():
        await asyncio.sleep(0.5)
    await retention.aclose()


async def test_deletions_of_others_wait_for_a_tier_that_is_not_used(
    world: RetainedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 is gone and nothing must leave, but a service has left a deletion: no round reads the catalog for it until S3
    is back, and none counts as failed.
    """
    path = await world.save("a", 2)
    monkeypatch.setattr(world.clock, "monotonic_s", asyncio.get_running_loop().time)
    await world.catalog.start_leaving([Leaving(NAMESPACE, path[1])], Level.COLD, deadline=world.deadline)
    inner, is_away = world.tier, True

    async def head(keys: Sequence[RecordKey], *, deadline: Deadline) -> list[int | None]:
        if is_away:
            raise Unavailable("not there")
        return [None] * len(keys)

    monkeypatch.setattr(inner, "head", head)
    world.tier = guarded = GuardedTier(inner, Instruments(world.clock, world.meters))
    guarded.open_breaker("not there")
    retention, steps, num_reads = world.retention(budget_bytes=10 * BOUNDARY_BYTES), world.catalog.steps, 0

    def counted(namespace: NamespaceId) -> AsyncIterator[Step]:
        nonlocal num_reads
        num_reads += namespace == NAMESPACE
        return steps(namespace)

    monkeypatch.setattr(world.catalog, "steps", counted)
    retention.start()
    await asyncio.sleep(60.0)
    assert num_reads == 0 and not world.meters.get("retention_failures", tier=guarded.name, at=guarded.name)
    is_away = False
    while await world.used_bytes() > BOUNDARY_BYTES:
        await asyncio.sleep(0.5)
    await retention.aclose()


async def test_a_tier_that_fails_now_and_then_is_logged_now_and_then(
    world: RetainedTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every other deletion fails, as where S3 is throttled: a line a minute says so."""
    await world.save("a", 3)
    real, calls = world.tier.delete_all, 0

    async def sometimes(keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise Unavailable("not now")
        await real(keys, deadline=deadline)

    monkeypatch.setattr(world.tier, "delete_all", sometimes)
    monkeypatch.setattr(world.clock, "monotonic_s", asyncio.get_running_loop().time)
    retention = world.retention(budget_bytes=1)
    for number in range(20):
        await world.save(f"prompt {number}", 1)
        await retention.round()
    assert calls > 20
    assert [text for text in caplog.messages if "eviction" in text] == [
        f"eviction from {world.tier.name} failed, later rounds try again: not now"
    ]
    await asyncio.sleep(61)
    for number in range(20, 22):
        await world.save(f"prompt {number}", 1)
        await retention.round()
    assert sum("eviction" in text for text in caplog.messages) == 2


async def test_a_room_whose_level_cannot_shrink_is_stuck_until_it_can(world: RetainedTier) -> None:
    """All is pinned: a put that does not fit is refused at once instead of waiting; after the pin's end it is taken."""
    path = await world.save("a", 3)
    await world.catalog.pin(NAMESPACE, [path[2]], world.clock.now_s + 100, deadline=world.deadline)
    gate = BudgetGate(3 * BOUNDARY_BYTES, 2 * BOUNDARY_BYTES, world.clock)
    retention = world.retention(budget_gate=gate, budget_bytes=3 * BOUNDARY_BYTES)
    key = RecordKey(NAMESPACE, PrefixHash(bytes(32)), 0, 0)
    assert await retention.round() == 0
    assert not await gate.take(key, RECORD_BYTES, Deadline.after(60.0))
    world.clock.now_s += 101
    assert await retention.round() > 0
    assert await gate.take(key, RECORD_BYTES, Deadline.after(60.0))


@pytest.mark.parametrize("gate", [None, BudgetGate(100 * BOUNDARY_BYTES, 90 * BOUNDARY_BYTES, SYSTEM_CLOCK)])
async def test_rounds_that_evict_nothing_rest(
    world: RetainedTier, monkeypatch: pytest.MonkeyPatch, gate: BudgetGate | None
) -> None:
    """All that a tenant has too much is pinned, and the catalog is large: rounds take half of the time."""
    path = await world.save("a", 3, OTHER)
    await world.catalog.pin(OTHER, path, world.clock.now_s + 1000, deadline=world.deadline)
    monkeypatch.setattr(world.clock, "monotonic_s", asyncio.get_running_loop().time)
    retention = world.retention(quotas={"paying": Quota(0, 1)}, budget_gate=gate, period_s=0.01)
    real, num_reads = world.catalog.steps, 0

    async def slow_steps(namespace: NamespaceId) -> AsyncIterator[Step]:
        nonlocal num_reads
        num_reads += namespace == OTHER
        async for step in real(namespace):
            await asyncio.sleep(1.0)
            yield step

    monkeypatch.setattr(world.catalog, "steps", slow_steps)
    retention.start()
    await asyncio.sleep(40.0)
    await retention.aclose()
    assert 18 <= num_reads <= 21


async def test_rounds_that_can_delete_nothing_rest_longer_and_hide_little(
    world: RetainedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket where nobody may delete, for days: each round tries all that is hidden, so rounds take a tenth of the
    time, and hide no more once a piece was refused.
    """
    paths = [await world.save(f"prompt {number}", 1) for number in range(200)]
    monkeypatch.setattr(world.clock, "monotonic_s", asyncio.get_running_loop().time)
    retention = world.retention(budget_bytes=1, period_s=0.01)
    real, times = world.catalog.steps, list[float]()

    async def slow_steps(namespace: NamespaceId) -> AsyncIterator[Step]:
        if namespace == NAMESPACE:
            times.append(world.clock.monotonic_s())
        async for step in real(namespace):
            await asyncio.sleep(0.5)
            yield step

    async def refuse(keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        raise Unavailable("not allowed")

    monkeypatch.setattr(world.catalog, "steps", slow_steps)
    monkeypatch.setattr(world.tier, "delete_all", refuse)
    retention.start()
    while len(times) < 3:
        await asyncio.sleep(0.1)
    table = await world.catalog.lookup(NAMESPACE, [path[0] for path in paths], deadline=world.deadline)
    assert [bool(row.any()) for row in table.rows(Level.COLD)].count(False) == 2 * 64
    assert min(after - before for before, after in pairwise(times)) > 4.9
    await retention.aclose()


async def test_a_round_that_failed_late_is_soon_followed_by_another(
    world: RetainedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service was frozen for long, or Redis was: the gate admits everything until the totals are read again."""
    await world.save("a", 4)
    monkeypatch.setattr(world.clock, "monotonic_s", asyncio.get_running_loop().time)
    gate = BudgetGate(100 * BOUNDARY_BYTES, 90 * BOUNDARY_BYTES, world.clock)
    totals, num_reads = world.catalog.totals, 0

    async def late(*, deadline: Deadline) -> Mapping[NamespaceId, NamespaceTotals]:
        nonlocal num_reads
        num_reads += 1
        if num_reads == 1:
            await asyncio.sleep(40.0)
            raise Unavailable("no answer in time")
        return await totals(deadline=deadline)

    monkeypatch.setattr(world.catalog, "totals", late)
    retention = world.retention(budget_gate=gate, budget_bytes=2 * BOUNDARY_BYTES)
    retention.start()
    await asyncio.sleep(43.0)
    assert gate.held_bytes == await world.used_bytes()
    await retention.aclose()


async def test_a_room_is_not_stuck_while_something_is_written(world: RetainedTier) -> None:
    """Nothing can leave now, but what is being written may make something free: whoever waits goes on waiting."""
    path = await world.save("a", 3)
    await world.catalog.pin(NAMESPACE, [path[2]], world.clock.now_s + 100, deadline=world.deadline)
    gate = BudgetGate(3 * BOUNDARY_BYTES, 2 * BOUNDARY_BYTES, world.clock)
    retention = world.retention(budget_gate=gate, budget_bytes=3 * BOUNDARY_BYTES)
    gate.settle(3 * BOUNDARY_BYTES)
    waiting = asyncio.ensure_future(gate.take(RecordKey(OTHER, path[0], 0, 0), RECORD_BYTES, Deadline.after(60.0)))
    await asyncio.sleep(0)
    assert await retention.round() == 0
    await asyncio.sleep(0)
    assert not waiting.done()
    world.clock.now_s += 101
    assert await retention.round() > 0
    assert await waiting


async def test_a_record_that_was_there_and_not_in_the_books_takes_room(world: RetainedTier) -> None:
    """A put was refused because its boundary was being deleted, and its record survived: told of when it is put again,
    it counts at once, not only when the totals are read the next time.
    """
    recorder = Recorder(world.catalog, Instruments(meters=world.meters, clock=world.clock))
    recorder.register(NAMESPACE, LAYOUT, "")
    gate = BudgetGate(100 * BOUNDARY_BYTES, 90 * BOUNDARY_BYTES, world.clock)
    gate.settle(0)
    record = make_record(RecordKey(NAMESPACE, PrefixHash(bytes(32)), 0, 0))
    await world.tier.put(record, deadline=world.deadline)
    tier = CataloguedTier(world.tier, Level.COLD, recorder, gate)
    assert await tier.put(record, deadline=world.deadline) is PutOutcome.EXISTS
    assert (gate.used_bytes, await world.used_bytes()) == (RECORD_BYTES, RECORD_BYTES)
    await recorder.aclose()


async def test_room_is_free_once_the_totals_tell_of_it(world: RetainedTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for room writes only when what has left is off the books, which would be over the budget otherwise."""
    await world.save("a", 6)
    gate = BudgetGate(5 * BOUNDARY_BYTES, 4 * BOUNDARY_BYTES, SYSTEM_CLOCK)
    retention = world.retention(budget_gate=gate, budget_bytes=5 * BOUNDARY_BYTES)
    real, told = world.catalog.finish_leaving, 0

    async def finish(gone: Sequence[tuple[BoundaryEntry, LeaveReason]], level: Level, *, deadline: Deadline) -> int:
        nonlocal told
        assert gate.used_bytes == 6 * BOUNDARY_BYTES - told
        told += await real(gone, level, deadline=deadline)
        return told

    monkeypatch.setattr(world.catalog, "finish_leaving", finish)
    assert await retention.round() >= 2 * BOUNDARY_BYTES
    assert gate.used_bytes == await world.used_bytes() == 6 * BOUNDARY_BYTES - told


async def test_an_error_of_any_kind_ends_a_round_and_not_retention(
    world: RetainedTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rounds fail in ways that nobody expects: a later one evicts all the same. The log has each kind of expected error
    once, and the traceback of each bug."""
    path = await world.save("a", 4)
    totals = world.catalog.totals
    errors = InvalidRequest("not known"), UnsupportedFormat("another shape"), KeyError("a bug")
    answers = iter([*errors, *errors])

    async def stumble(*, deadline: Deadline) -> Mapping[NamespaceId, NamespaceTotals]:
        if (error := next(answers, None)) is not None:
            raise error
        return await totals(deadline=deadline)

    monkeypatch.setattr(world.catalog, "totals", stumble)
    retention = world.retention(budget_bytes=2 * BOUNDARY_BYTES, period_s=0.01)
    retention.start()
    await until(lambda: world.held(path), holds=lambda held: held != [3, 3, 3, 3])
    await retention.aclose()
    assert world.meters.get("retention_failures", tier=world.tier.name, at="catalog") == 6
    assert sum("a round of retention failed" in record.message for record in caplog.records) == 2
    assert sum(record.exc_info is not None for record in caplog.records) == 2


async def test_a_round_keeps_its_leases_however_long_it_takes(world: RetainedTier) -> None:
    """A lease is short, so that a dead owner is soon replaced. An owner that works for long is not."""
    books = LeaseBooks()
    mine, others = (DictOwnership(books, lease_s=LEASE_S) for _ in range(2))
    name = f"retention/cold/{NAMESPACE.hex()}"
    await world.save("a", 3)
    release = asyncio.Event()
    world.tier.delete_all = lambda keys, *, deadline: release.wait()  # type: ignore[method-assign, assignment]
    retention = world.retention(mine, budget_bytes=BOUNDARY_BYTES)
    world.clock.now_s += 100
    retention.start()
    for _ in range(10):
        await asyncio.sleep(LEASE_S / 2)
        assert not await others.hold(name, deadline=world.deadline)
    release.set()
    await retention.aclose()
    assert await others.hold(name, deadline=world.deadline)
