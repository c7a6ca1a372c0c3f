"""Byte budgets: receipts, order, and waiters who leave at any moment."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvstore.errors import InternalError, InvalidRequest
from kvstore.runtime.budget import ByteBudget, Grant


async def waiting(budget: ByteBudget, *sizes: int) -> list[asyncio.Task[Grant]]:
    tasks = [asyncio.ensure_future(budget.take(size)) for size in sizes]
    await asyncio.sleep(0)
    return tasks


def test_a_grant_is_a_receipt() -> None:
    """Bytes are granted up to the limit, given back once, and a second time is a bug that is told."""
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
