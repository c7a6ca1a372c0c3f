"""Budgets: receipts, order, waiters that leave at any moment, and the shares of tenants."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InternalError, InvalidRequest, Unavailable
from kvstore.runtime.budget import ByteBudget, Grant, Shares
from kvstore.runtime.deadline import Deadline


async def waiting(budget: ByteBudget, *sizes: int, tenant: str = "") -> list[asyncio.Task[Grant]]:
    tasks = [asyncio.ensure_future(budget.take(size, tenant)) for size in sizes]
    await asyncio.sleep(0)
    return tasks


def test_a_grant_is_a_receipt() -> None:
    """Bytes are granted up to the limit, given back once, and a second time is an error."""
    budget = ByteBudget(10)
    grant = budget.try_take(7)
    assert grant is not None and grant.num_bytes == 7
    assert budget.try_take(4) is None
    budget.give_back(grant)
    assert budget.used_bytes == 0
    with pytest.raises(InternalError):
        budget.give_back(grant)
    assert budget.used_bytes == 0
    with pytest.raises(InvalidRequest):
        ByteBudget(0)


async def test_a_wait_ends_at_its_deadline() -> None:
    """What is free is granted at once; else until the deadline, and a wait that ends there leaves nothing granted."""
    budget, late = ByteBudget(10), Deadline.after(-1)
    first = await budget.take_until(late, "room", 8)
    with pytest.raises(Unavailable, match="room did not end"):
        await budget.take_until(Deadline.after(0.01), "room", 3)
    asyncio.get_running_loop().call_later(0.01, budget.give_back, first)
    second = await budget.take_until(Deadline.after(20), "room", 10)
    assert (second.num_bytes, budget.used_bytes) == (10, 10)
    with pytest.raises(InvalidRequest):
        await budget.take_until(Deadline.after(20), "room", 11)


async def test_waiters_are_served_in_order() -> None:
    """A small wish does not overtake a large one, and both are served as room comes."""
    budget = ByteBudget(10)
    first = await budget.take(8)
    large, small = await waiting(budget, 10, 1)
    assert budget.try_take(1) is None
    assert not small.done()
    budget.give_back(first)
    budget.give_back(await large)
    budget.give_back(await small)
    assert budget.used_bytes == 0


async def test_a_wish_over_the_whole_budget_is_refused() -> None:
    """What could never be granted is refused at once instead of waiting for ever."""
    with pytest.raises(InvalidRequest):
        await ByteBudget(10).take(11)


async def test_a_waiter_who_leaves_makes_room_for_the_next() -> None:
    """A cancelled waiter at the head of the queue no longer blocks those behind it that fit."""
    budget = ByteBudget(10)
    held = await budget.take(5)
    large, small = await waiting(budget, 10, 5)
    large.cancel()
    with pytest.raises(asyncio.CancelledError):
        await large
    grant = await asyncio.wait_for(small, 5)
    assert budget.used_bytes == 10
    budget.give_back(grant)
    budget.give_back(held)
    assert budget.used_bytes == 0


async def test_a_waiter_cancelled_after_its_grant_gives_it_back() -> None:
    """A cancel that lands between the grant and the waiter's next step leaks nothing."""
    budget = ByteBudget(10)
    held = await budget.take(10)
    (task, behind) = await waiting(budget, 10, 10)
    budget.give_back(held)  # grants to `task`, which has not run yet
    assert budget.used_bytes == 10
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    budget.give_back(await asyncio.wait_for(behind, 5))
    assert budget.used_bytes == 0


async def test_a_waiter_cancelled_before_a_give_back_is_passed_over() -> None:
    """Bytes given back in the same tick as a cancel go to the next waiter, not to the one who left."""
    budget = ByteBudget(10)
    held = await budget.take(10)
    (task, behind) = await waiting(budget, 4, 10)
    task.cancel()
    budget.give_back(held)
    with pytest.raises(asyncio.CancelledError):
        await task
    budget.give_back(await asyncio.wait_for(behind, 5))
    assert budget.used_bytes == 0


@pytest.mark.parametrize("seed", range(5))
async def test_nothing_leaks_under_random_cancels(seed: int) -> None:
    """Two hundred takers, a third of them cancelled at a random moment: the limit holds and all bytes come back."""
    choose, budget = random.Random(seed), ByteBudget(20)

    async def taker() -> None:
        grant = await budget.take(choose.randint(1, 20))
        try:
            assert budget.used_bytes <= budget.limit_bytes
            await asyncio.sleep(choose.random() / 2000)
        finally:
            budget.give_back(grant)

    tasks = [asyncio.ensure_future(taker()) for _ in range(200)]
    for task in choose.sample(tasks, 66):
        await asyncio.sleep(0)
        task.cancel()
    outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
    assert {type(outcome) for outcome in outcomes} <= {type(None), asyncio.CancelledError}
    assert budget.used_bytes == 0
    assert budget.try_take(20) is not None


async def test_a_tenant_that_waits_for_its_share_delays_no_other() -> None:
    """It has three quarters and asks for more: another tenant gets its bytes at once, and the waiter when the first
    gives some back."""
    budget = ByteBudget(100)
    held = [await budget.take(25, "greedy") for _ in range(3)]
    (late,) = await waiting(budget, 10, tenant="greedy")
    assert not late.done() and budget.try_take(1, "greedy") is None
    other = budget.try_take(12, "other")
    assert other is not None
    budget.give_back(held[0])
    late_grant = await asyncio.wait_for(late, 5)
    for grant in (*held[1:], other, late_grant):
        budget.give_back(grant)
    assert budget.used_bytes == 0


async def test_one_large_item_of_a_tenant_is_granted() -> None:
    """It is more than the tenant's share, which would never be enough: it gets in while the tenant holds nothing."""
    budget = ByteBudget(100)
    held = await budget.take(10, "other")
    (large,) = await waiting(budget, 100, tenant="large")
    assert not large.done()
    budget.give_back(held)
    grant = await asyncio.wait_for(large, 5)
    assert budget.try_take(1, "other") is None
    budget.give_back(grant)
    assert budget.try_take(1, "other") is not None


@pytest.mark.parametrize("num_tenants", [1, 2, 7])
def test_greedy_tenants_leave_room_for_one_more(num_tenants: int) -> None:
    """All of them take one by one as long as they may: they get the same, three quarters together at least, and
    another one still gets at least half of what each has."""
    shares = Shares(1000)
    tenants = [f"tenant {number}" for number in range(num_tenants)]
    while sum(shares.try_take(tenant, 1) for tenant in tenants):
        pass
    held = [shares.used_by(tenant) for tenant in tenants]
    assert max(held) - min(held) <= 2
    assert shares.used >= 740
    taken = 0
    while shares.try_take("late", 1):
        taken += 1
    assert taken >= 0.1 * min(held) and taken > 30


def test_without_tenants_all_is_to_be_had() -> None:
    """The service's own user may have everything, and gives it back."""
    shares = Shares(10)
    assert shares.try_take("", 10)
    assert not shares.try_take("", 1)
    assert not shares.try_take("a", 1)
    shares.give_back("", 10)
    assert shares.used == 0
    with pytest.raises(InternalError):
        shares.give_back("", 1)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40)), max_size=60))
def test_never_more_than_there_is(calls: list[tuple[str, int]]) -> None:
    """Never more is held than there is, and all that was taken can be given back."""
    shares = Shares(100)
    taken = [(tenant, amount) for tenant, amount in calls if shares.try_take(tenant, amount)]
    assert shares.used == sum(amount for _, amount in taken) <= 100
    for tenant, amount in taken:
        shares.give_back(tenant, amount)
    assert shares.used == 0
