"""Retention of a level: budgets, quotas, pins, time to live, and what others left half done."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.api import PrefixQuery
from kvstore.catalog.base import Addition, BoundaryEntry, LeaveReason, Removal, Use
from kvstore.catalog.entry import Level
from kvstore.catalog.ownership import Ownership, SoleOwnership
from kvstore.catalog.sqlite import SqliteCatalog
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.eviction.holdings import Quota
from kvstore.model.keys import Boundary, NamespaceId, PrefixHash, RecordKey
from kvstore.model.kinds import FullAttention, Recurrent
from kvstore.model.layout import GroupLayout, Layout
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters
from kvstore.store.policy_choice import AutoChoice, FixedChoice
from kvstore.store.retention import Retention
from kvstore.store.retention_rules import RetentionRules
from kvstore.testing.records import NAMESPACE, make_record
from kvstore.tiers.memory import MemoryTier

LAYOUT = Layout(16, (GroupLayout(FullAttention(), 2), GroupLayout(Recurrent(), 1)))
RECORDS = 3
RECORD_BYTES = 192 + 1000
BOUNDARY_BYTES = RECORDS * RECORD_BYTES
OTHER = NamespaceId(hashlib.sha256(b"another tenant's").digest()[:16])


class Clock:
    """The date is the test's, deadlines are real."""

    def __init__(self) -> None:
        self.now_s = 1_800_000_000

    def monotonic_s(self) -> float:
        return SYSTEM_CLOCK.monotonic_s()

    def wall_ms(self) -> int:
        return self.now_s * 1000


class NobodysOwnership(Ownership):
    """Somebody else owns everything."""

    async def hold(self, name: str, *, deadline: Deadline) -> bool:
        return False

    async def release(self, name: str, *, deadline: Deadline) -> None:
        raise AssertionError("released what was never held")


class World:
    """A tier with its catalog; prompts of two groups, pages in two slices and states."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = Clock()
        self.tier = MemoryTier(1 << 26)
        self.catalog = SqliteCatalog(path, clock=self.clock)
        self.meters = Meters()

    @property
    def deadline(self) -> Deadline:
        return Deadline.after(5.0)

    def retention(self, ownership: Ownership | None = None, **rules: object) -> Retention:
        return Retention(
            self.tier,
            Level.COLD,
            self.catalog,
            ownership or SoleOwnership(),
            RetentionRules(**rules),  # type: ignore[arg-type]
            choice=FixedChoice("lru"),
            meters=self.meters,
            clock=self.clock,
        )

    async def save(self, prompt: str, num_pages: int, namespace: NamespaceId = NAMESPACE) -> list[PrefixHash]:
        path = [PrefixHash(hashlib.sha256(f"{prompt} {page}".encode()).digest()) for page in range(num_pages)]
        for page, prefix in enumerate(path):
            for group, slice_ in ((0, 0), (0, 1), (1, 0)):
                record = make_record(RecordKey(namespace, prefix, group, slice_))
                await self.tier.put(record, deadline=self.deadline)
                parent = path[page - 1] if page else None
                addition = Addition(record.key, Level.COLD, record.num_bytes, 16 * (page + 1), parent)
                assert await self.catalog.add([addition], deadline=self.deadline) == [True]
        self.clock.now_s += 1
        return path

    async def held(self, path: list[PrefixHash], namespace: NamespaceId = NAMESPACE) -> list[int]:
        """For each boundary how many of its records the tier has."""
        keys = [RecordKey(namespace, prefix, group, slice_) for prefix in path for group, slice_ in _SLICES]
        sizes = await self.tier.head(keys, deadline=self.deadline)
        return [sum(size is not None for size in sizes[at : at + RECORDS]) for at in range(0, len(sizes), RECORDS)]

    async def used_bytes(self) -> int:
        totals = await self.catalog.totals(deadline=self.deadline)
        return sum(total.levels[Level.COLD].num_bytes for total in totals.values())


_SLICES = ((0, 0), (0, 1), (1, 0))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path / "catalog.sqlite")
    await world.catalog.register(NAMESPACE, LAYOUT, "", deadline=world.deadline)
    await world.catalog.register(OTHER, LAYOUT, "paying", deadline=world.deadline)
    await world.catalog.set_complete(True, deadline=world.deadline)
    yield world
    await world.catalog.aclose()
    await world.tier.aclose()


async def test_under_the_budget_nothing_leaves(world: World) -> None:
    """A level with room is left alone."""
    path = await world.save("a", 4)
    assert await world.retention(budget_bytes=5 * BOUNDARY_BYTES).round() == 0
    assert await world.held(path) == [3, 3, 3, 3]


async def test_ends_leave_first_and_wholly(world: World) -> None:
    """The oldest prompt shrinks from its end, each boundary with pages and state; catalog and tier agree on the sum."""
    old, new = await world.save("old", 5), await world.save("new", 5)
    rules = {"budget_bytes": 8 * BOUNDARY_BYTES, "start_share": 1.0, "stop_share": 0.9}
    assert await world.retention(**rules).round() == 3 * BOUNDARY_BYTES
    assert await world.held(old) == [3, 3, 0, 0, 0]
    assert await world.held(new) == [3, 3, 3, 3, 3]
    assert await world.used_bytes() == 7 * BOUNDARY_BYTES
    tombstones = await world.catalog.tombstones(limit=10, deadline=world.deadline)
    assert {tombstone.prefix for tombstone in tombstones} == set(old[2:])
    assert {tombstone.reason for tombstone in tombstones} == {LeaveReason.EVICTED}


async def test_ten_times_the_budget_stays_within_it(world: World) -> None:
    """Prompts come and come: the level stays within its budget, and every boundary that is left is whole."""
    budget = 20 * BOUNDARY_BYTES
    retention = world.retention(budget_bytes=budget)
    paths = []
    for number in range(50):
        paths.append(await world.save(f"prompt {number}", 4))
        await retention.round()
        assert await world.used_bytes() <= budget
    usage = await world.tier.usage(deadline=world.deadline)
    totals = await world.catalog.totals(deadline=world.deadline)
    assert usage.num_records == totals[NAMESPACE].levels[Level.COLD].num_records == 54
    for path in paths:
        held = await world.held(path)
        assert held == sorted(held, reverse=True)
        assert set(held) <= {0, 3}


async def test_a_pinned_prefix_stays_with_all_below(world: World) -> None:
    """A pin in the middle of the oldest prompt keeps its start; what is behind the pin goes."""
    old, new = await world.save("old", 4), await world.save("new", 4)
    await world.catalog.pin(NAMESPACE, [old[1]], world.clock.now_s + 100, deadline=world.deadline)
    retention = world.retention(budget_bytes=1, start_share=1.0, stop_share=1.0)
    await retention.round()
    assert await world.held(old) == [3, 3, 0, 0]
    assert await world.held(new) == [0, 0, 0, 0]
    world.clock.now_s += 101
    await retention.round()
    assert await world.held(old) == [0, 0, 0, 0]


async def test_a_tenant_within_its_quota_is_safe_and_over_it_evicts_its_own(world: World) -> None:
    """Others' writes take nothing of a tenant with a quota; its own take its oldest."""
    first = await world.save("paying, first", 3, OTHER)
    others = [await world.save(f"free {number}", 3) for number in range(5)]
    rules = {"budget_bytes": 8 * BOUNDARY_BYTES, "quotas": {"paying": Quota(4 * BOUNDARY_BYTES, 4 * BOUNDARY_BYTES)}}
    await world.retention(**rules).round()
    assert await world.held(first, OTHER) == [3, 3, 3]
    assert await world.held(others[0]) == [0, 0, 0]
    second = await world.save("paying, second", 3, OTHER)
    before = [await world.held(path) for path in others]
    await world.retention(quotas=rules["quotas"]).round()
    assert await world.held(first, OTHER) == [3, 0, 0]
    assert await world.held(second, OTHER) == [3, 3, 3]
    assert [await world.held(path) for path in others] == before


async def test_what_is_not_used_for_its_time_to_live_leaves(world: World) -> None:
    """Read boundaries live on, the rest of their prompt expires."""
    path = await world.save("a", 3)
    world.clock.now_s += 100
    await world.catalog.use(NAMESPACE, [Use(path[0], 1)], deadline=world.deadline)
    await world.retention(ttl_s=50).round()
    assert await world.held(path) == [3, 0, 0]
    (tombstone, *_) = await world.catalog.tombstones(limit=1, deadline=world.deadline)
    assert tombstone.reason is LeaveReason.EXPIRED


async def lose(world: World, prefix: PrefixHash, *, only: tuple[int, int] | None = None) -> None:
    """A boundary's records, or one of them, are gone, as if they had never come."""
    for group, slice_ in [only] if only is not None else _SLICES:
        key = RecordKey(NAMESPACE, prefix, group, slice_)
        await world.tier.delete(key, deadline=world.deadline)
        removal = Removal(key, Level.COLD, RECORD_BYTES, LeaveReason.LOST)
        await world.catalog.remove([removal], deadline=world.deadline)


async def test_what_serves_no_hit_leaves_when_nobody_mends_it(world: World) -> None:
    """The start of a prompt is gone while its end came, and of another a slice in the middle: what is behind the hole
    is given a minute, and leaves then though there is room. What is before it stays.
    """
    headless, torn, whole = await world.save("a", 3), await world.save("b", 3), await world.save("c", 3)
    retention = world.retention(budget_bytes=100 * BOUNDARY_BYTES)
    await lose(world, headless[0])
    await lose(world, torn[1], only=(0, 1))
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


async def test_what_is_mended_in_time_stays(world: World) -> None:
    """The start was only late: nothing leaves, and nobody looks any more."""
    path = await world.save("a", 3)
    retention = world.retention(budget_bytes=100 * BOUNDARY_BYTES)
    await lose(world, path[0])
    assert await retention.round() == 0
    await world.save("a", 1)
    world.clock.now_s += 60
    assert await retention.round() == 0
    await lose(world, path[0])
    world.clock.now_s += 600
    assert await retention.round() == 0
    assert await world.held(path) == [0, 3, 3]


async def test_a_boundary_without_a_state_is_whole(world: World) -> None:
    """States are not saved at every page: the pages of a group that is not there at all serve what is behind them."""
    path = await world.save("a", 3)
    retention = world.retention(budget_bytes=100 * BOUNDARY_BYTES)
    await lose(world, path[1], only=(1, 0))
    world.clock.now_s += 100
    assert await retention.round() == 0
    assert await world.held(path) == [3, 2, 3]


async def test_nothing_is_missing_for_certain_while_the_catalog_lacks_some(world: World) -> None:
    """Redis was flushed and not reindexed yet: the start may be stored, though the catalog does not tell of it."""
    path = await world.save("a", 3)
    await lose(world, path[0])
    await world.catalog.set_complete(False, deadline=world.deadline)
    retention = world.retention(budget_bytes=100 * BOUNDARY_BYTES)
    for _ in range(3):
        world.clock.now_s += 100
        assert await retention.round() == 0
    assert await world.held(path) == [0, 3, 3]


async def test_what_serves_no_hit_stays_while_it_is_pinned(world: World) -> None:
    """An operator's word counts, whatever is missing."""
    path = await world.save("a", 3)
    await lose(world, path[0])
    await world.catalog.pin(NAMESPACE, [path[1]], world.clock.now_s + 1000, deadline=world.deadline)
    world.clock.now_s += 100
    await world.retention(budget_bytes=100 * BOUNDARY_BYTES).round()
    assert await world.held(path) == [0, 3, 0]


async def test_what_is_used_while_a_round_runs_stays_with_its_start(world: World) -> None:
    """A boundary that is read between the plan and its turn stays, and so does what it stands on."""
    path = await world.save("a", 3)

    class Reader(SqliteCatalog):
        """The same file, where somebody reads the end of the prompt as soon as the entries were listed."""

        async def start_leaving_all(self, *arguments: object, **options: object) -> list[BoundaryEntry | None]:
            world.clock.now_s += 10
            await self.use(NAMESPACE, [Use(path[2], 1)], deadline=world.deadline)
            return await super().start_leaving_all(*arguments, **options)  # type: ignore[arg-type]

    own, world.catalog = world.catalog, Reader(world.path, clock=world.clock)
    await world.catalog.register(NAMESPACE, LAYOUT, "", deadline=world.deadline)
    assert await world.retention(budget_bytes=1).round() == 0
    assert await world.held(path) == [3, 3, 3]
    await world.catalog.aclose()
    world.catalog = own


async def test_a_tier_that_refuses_leaves_no_hole(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deletes fail half-way: what stands below stays, and the next round finishes what is hidden."""
    path = await world.save("a", 3)
    real = world.tier.delete

    async def refuse(key: RecordKey, *, deadline: Deadline) -> bool:
        if key.group == 1:
            raise Unavailable("not now")
        return await real(key, deadline=deadline)

    monkeypatch.setattr(world.tier, "delete", refuse)
    retention = world.retention(budget_bytes=1)
    assert await retention.round() == 0
    assert (await world.held(path))[:2] == [3, 3]
    assert await world.used_bytes() == 3 * BOUNDARY_BYTES  # nothing is taken off before it is deleted
    monkeypatch.setattr(world.tier, "delete", real)
    assert await retention.round() == 3 * BOUNDARY_BYTES
    assert await world.held(path) == [0, 0, 0]
    assert await world.used_bytes() == 0


async def test_only_the_owner_evicts(world: World) -> None:
    """Where somebody else has the lease, nothing is touched."""
    path = await world.save("a", 3)
    retention = world.retention(NobodysOwnership(), budget_bytes=1)
    assert await retention.round() == 0
    assert await world.held(path) == [3, 3, 3]
    await retention.aclose()


async def test_rules_that_make_no_sense_are_refused() -> None:
    """Eviction cannot stop above where it starts."""
    with pytest.raises(InvalidRequest, match="stop"):
        RetentionRules(start_share=0.5, stop_share=0.9)


async def test_auto_follows_the_lookups_of_this_node() -> None:
    """Prompts that never come again drown a few that do: s3fifo, which lets newcomers wait, is followed."""
    choice = AutoChoice()
    assert choice.make_policy().name == "lru"
    for number in range(2500):
        talk = f"kept {number % 3}" if number % 5 == 0 else f"once {number}"
        path = [Boundary(16 * n, PrefixHash(hashlib.sha256(f"{talk} {n}".encode()).digest())) for n in range(1, 7)]
        query = PrefixQuery(NAMESPACE, tuple(path), 0, 96, 16)
        choice.observe(query, LAYOUT)
        if number % 500 == 499:
            await choice.settle(48 * BOUNDARY_BYTES, BOUNDARY_BYTES)
    assert choice.make_policy().name == "s3fifo"
