"""Retention of a level: budgets, quotas, pins, time to live, and what others left half done."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from retention_harness import BOUNDARY_BYTES, LAYOUT, OTHER, RetainedTier, open_retained

from kvstore.api import PrefixQuery
from kvstore.catalog.base import LeaveReason, Use
from kvstore.catalog.coordination import Ownership
from kvstore.catalog.entry import BoundaryEntry, Level
from kvstore.catalog.sqlite.catalog import SqliteCatalog
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.eviction.candidates import CANDIDATES
from kvstore.eviction.holdings import Quota
from kvstore.model.keys import Boundary, NamespaceId, PrefixHash, RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.store.retention.cold_admission import ColdAdmission
from kvstore.store.retention.policy_choice import PolicyChoice
from kvstore.store.retention.rules import RetentionRules
from kvstore.testing.dict_pending import DictOwnership, LeaseBooks
from kvstore.testing.records import NAMESPACE
from tests.virtual_time import ManualClock

pytestmark = pytest.mark.virtual_time


class NobodysOwnership(Ownership):
    """Somebody else owns everything."""

    async def hold(self, name: str, *, deadline: Deadline) -> bool:
        return False

    async def agree(self, name: str, word: str, *, deadline: Deadline) -> str:
        return ""

    async def release(self, name: str, *, deadline: Deadline) -> None:
        raise AssertionError("released what was never held")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RetainedTier]:
    async with open_retained(tmp_path) as world:
        yield world


async def test_under_the_budget_nothing_leaves(world: RetainedTier) -> None:
    """A level with room is left alone."""
    path = await world.save("a", 4)
    assert await world.retention(budget_bytes=5 * BOUNDARY_BYTES).round() == 0
    assert await world.held(path) == [3, 3, 3, 3]


async def test_ends_leave_first_and_wholly(world: RetainedTier) -> None:
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


async def test_ten_times_the_budget_stays_within_it(world: RetainedTier) -> None:
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


async def test_a_pinned_prefix_stays_with_all_below(world: RetainedTier) -> None:
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


async def test_a_tenant_within_its_quota_is_safe_and_over_it_evicts_its_own(world: RetainedTier) -> None:
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


class OneNamespace(NobodysOwnership):
    """Somebody else owns all but one namespace."""

    def __init__(self, namespace: NamespaceId) -> None:
        self._name = namespace.hex()

    async def hold(self, name: str, *, deadline: Deadline) -> bool:
        return name.endswith(self._name)


@pytest.mark.parametrize(("quota", "budget", "left"), [(Quota(0, 20), None, (20, 20)), (Quota(30), 39, (30, 9))])
async def test_owners_of_a_tenants_namespaces_evict_its_excess_once(
    world: RetainedTier, quota: Quota, budget: int | None, left: tuple[int, int]
) -> None:
    """Each of two services owns a namespace of the tenant, a third one what others hold. All evict at the same time:
    the tenant keeps its maximum, and its guarantee.
    """
    third = NamespaceId(bytes(16))
    await world.catalog.register(third, LAYOUT, "paying", deadline=world.deadline)
    for number in range(20):
        for namespace in (OTHER, third, NAMESPACE):
            await world.save(f"{namespace.hex()} {number}", 1, namespace)
    world.clock.now_s += 100
    most = None if quota.maximum_bytes is None else quota.maximum_bytes * BOUNDARY_BYTES
    rules = {
        "quotas": {"paying": Quota(quota.guaranteed_bytes * BOUNDARY_BYTES, most)},
        "budget_bytes": None if budget is None else budget * BOUNDARY_BYTES,
        "start_share": 1.0,
        "stop_share": 1.0,
    }
    owners = [world.retention(OneNamespace(namespace), **rules) for namespace in (OTHER, third, NAMESPACE)]
    read = [await world.catalog.totals(deadline=world.deadline)] * len(owners)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.catalog, "totals", AsyncMock(side_effect=read))
        for owner in owners:
            await owner.round()
    for _ in range(10):
        for owner in owners:
            await owner.round()
    totals = await world.catalog.totals(deadline=world.deadline)
    held = {one: total.levels[Level.COLD].num_boundaries for one, total in totals.items()}
    assert (held[OTHER] + held[third], held[NAMESPACE]) == left


async def test_what_is_not_used_for_its_time_to_live_leaves(world: RetainedTier) -> None:
    """Read boundaries live on, the rest of their prompt expires."""
    path = await world.save("a", 3)
    world.clock.now_s += 100
    await world.catalog.use(NAMESPACE, [Use(path[0], 1)], deadline=world.deadline)
    await world.retention(ttl_s=50).round()
    assert await world.held(path) == [3, 0, 0]
    (tombstone, *_) = await world.catalog.tombstones(limit=1, deadline=world.deadline)
    assert tombstone.reason is LeaveReason.EXPIRED


async def test_what_is_used_while_a_round_runs_stays_with_its_start(world: RetainedTier) -> None:
    """A boundary that is read between the plan and its turn stays, and so does what it stands on."""
    path = await world.save("a", 3)

    class Reader(SqliteCatalog):
        """The same file, where somebody reads the end of the prompt as soon as the entries were listed."""

        async def start_leaving(self, *arguments: object, **options: object) -> list[BoundaryEntry | None]:
            world.clock.now_s += 10
            await self.use(NAMESPACE, [Use(path[2], 1)], deadline=world.deadline)
            return await super().start_leaving(*arguments, **options)  # type: ignore[arg-type]

    own, world.catalog = world.catalog, Reader(world.path, clock=world.clock)
    await world.catalog.register(NAMESPACE, LAYOUT, "", deadline=world.deadline)
    assert await world.retention(budget_bytes=1).round() == 0
    assert await world.held(path) == [3, 3, 3]
    await world.catalog.aclose()
    world.catalog = own


async def test_only_the_owner_evicts(world: RetainedTier) -> None:
    """Where somebody else has the lease, nothing is touched."""
    path = await world.save("a", 3)
    retention = world.retention(NobodysOwnership(), budget_bytes=1)
    assert await retention.round() == 0
    assert await world.held(path) == [3, 3, 3]
    await retention.aclose()


async def test_a_service_that_evicts_nothing_lets_others_evict(world: RetainedTier) -> None:
    """It decides what a nearly full tier gets, every few seconds, by a lease. Others end deletions meanwhile."""
    clock, books = ManualClock(), LeaseBooks()
    deciding, evicting = (DictOwnership(books, lease_s=10.0, clock=clock) for _ in range(2))
    path = await world.save("a", 4)
    admission = ColdAdmission("all", Instruments(clock=clock))
    budget_bytes = BOUNDARY_BYTES * 100 // 24
    retention = world.retention(deciding, choice=PolicyChoice(CANDIDATES, admission), budget_bytes=budget_bytes)
    for _ in range(3):  # the first one looks for what was begun before
        assert await retention.round() == 0
        clock.now_s += 11
    assert await retention.round() == 0
    assert admission.rules()[NAMESPACE.hex()] == "all"
    assert await world.retention(evicting, budget_bytes=BOUNDARY_BYTES).round() > 0
    assert await world.held(path) == [0, 0, 0, 0]


async def test_rules_that_make_no_sense_are_refused() -> None:
    """Eviction cannot stop above where it starts."""
    with pytest.raises(InvalidRequest, match="stop"):
        RetentionRules(start_share=0.5, stop_share=0.9)


async def test_auto_follows_the_lookups_of_this_node() -> None:
    """Most prompts are short and never return; they evict the few long ones that do, except under one policy."""
    choice = PolicyChoice(CANDIDATES)
    assert choice.make_policy().name == "lru"
    for number in range(2500):
        talk, first = (f"kept {number % 3}", 101) if number % 5 == 0 else (f"once {number}", 1)
        names = {16 * n: PrefixHash(hashlib.sha256(f"{talk} {n}".encode()).digest()) for n in range(first, first + 6)}
        query = PrefixQuery(NAMESPACE, tuple(Boundary(*one) for one in names.items()), 0, 16 * first + 80, 16)
        choice.observe(query, LAYOUT)
        if number % 500 == 499:
            await choice.settle(48 * BOUNDARY_BYTES, BOUNDARY_BYTES, is_near=True)
    assert choice.make_policy().name == "flops_per_byte"


async def test_a_bucket_that_did_not_answer_deletions_for_a_while(
    world: RetainedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round waited for its deletions in vain, which took long: what is over the budget leaves seconds later."""
    await world.save("a", 4)
    monkeypatch.setattr(world.clock, "monotonic_s", asyncio.get_running_loop().time)
    delete_all, tried_s = world.tier.delete_all, list[float]()

    async def hang(keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        tried_s.append(world.clock.monotonic_s())
        if len(tried_s) == 1:
            await asyncio.sleep(deadline.remaining_s)
            raise Unavailable("no answer in time")
        await delete_all(keys, deadline=deadline)

    monkeypatch.setattr(world.tier, "delete_all", hang)
    retention = world.retention(budget_bytes=2 * BOUNDARY_BYTES)
    retention.start()
    while await world.used_bytes() > 2 * BOUNDARY_BYTES:
        await asyncio.sleep(0.1)
    assert tried_s[1] - tried_s[0] < 10.0 + 11.0
    await retention.aclose()
