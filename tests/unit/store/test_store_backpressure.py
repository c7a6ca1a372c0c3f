"""BudgetGate: what a bounded level takes between two looks at its totals, and who waits."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline
from kvstore.store.retention.backpressure import BudgetGate
from kvstore.testing.records import make_key
from kvstore.testing.waiting import soon
from tests.virtual_time import ManualClock

KEY, OTHER = make_key(1), make_key(2)


@pytest.fixture
def gate() -> BudgetGate:
    return BudgetGate(100, 90, SYSTEM_CLOCK)


async def test_everything_is_let_in_until_the_books_were_read(gate: BudgetGate) -> None:
    """Nothing is known of the level, so nothing is refused; then its totals count."""
    assert await gate.take(KEY, 1000, soon())
    gate.settle(100)
    assert not await gate.take(OTHER, 1, Deadline.after(0.02))
    gate.suspend()
    assert await gate.take(OTHER, 1, soon())


async def test_a_put_waits_until_enough_has_left(gate: BudgetGate) -> None:
    """Eviction is asked for, and the put goes on in the turn in which its bytes fit, before the deadline."""
    gate.settle(95)
    waiting = asyncio.ensure_future(gate.take(KEY, 10, soon()))
    async with asyncio.timeout(5):
        await gate.wanted(60.0)
    assert (waiting.done(), gate.requested_bytes) == (False, 10)
    gate.free(4)
    await asyncio.sleep(0)
    assert not waiting.done()
    gate.free(1)
    assert await waiting
    assert (gate.used_bytes, gate.requested_bytes) == (100, 10)


async def test_what_is_being_written_counts_once(gate: BudgetGate) -> None:
    """Bytes count from the moment they are let in; those of a put that stored nothing are free again."""
    gate.settle(50)
    assert await gate.take(KEY, 30, soon())
    assert await gate.take(OTHER, 20, soon())
    assert gate.used_bytes == 100
    gate.end(KEY, 30, is_stored=True)
    gate.end(OTHER, 20, is_stored=False)
    assert (gate.used_bytes, gate.requested_bytes, gate.ended_bytes) == (80, 0, 30)


async def test_when_nothing_can_leave_puts_are_refused_at_once(gate: BudgetGate) -> None:
    """All is pinned: nobody waits for what will not come, until something leaves after all."""
    gate.settle(100)
    waiting = asyncio.ensure_future(gate.take(KEY, 10, soon()))
    await asyncio.sleep(0)
    gate.stuck()
    assert not await waiting
    assert not await gate.take(KEY, 10, soon())
    gate.free(20)
    assert await gate.take(KEY, 10, soon())


async def test_more_than_the_budget_never_fits(gate: BudgetGate) -> None:
    """A record larger than the level is refused at once."""
    gate.settle(0)
    assert not await gate.take(KEY, 101, soon())
    assert gate.requested_bytes == 0


async def test_a_cancelled_wait_leaves_nothing_behind(gate: BudgetGate) -> None:
    """Whoever waited and is gone asks for nothing, and its boundary is not being written."""
    gate.settle(100)
    waiting = asyncio.ensure_future(gate.take(KEY, 10, soon()))
    await asyncio.sleep(0)
    assert gate.boundaries_in_flight() == {KEY.namespace + KEY.prefix}
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (gate.requested_bytes, set(gate.boundaries_in_flight())) == (0, set())


async def test_what_was_written_lately_is_known_in_order(gate: BudgetGate) -> None:
    """The catalog's times are whole seconds: of one second, the order of writing says which is older."""
    gate.settle(0)
    for key in (KEY, OTHER, KEY):
        assert await gate.take(key, 1, soon())
        gate.end(key, 1, is_stored=True)
    first, second = OTHER.namespace + OTHER.prefix, KEY.namespace + KEY.prefix
    assert gate.order() == {first: 0.0, second: 0.5}
    assert gate.boundaries_in_work() == {first, second}


async def test_eviction_is_asked_for_earlier_where_writers_had_to_wait(gate: BudgetGate) -> None:
    """As much earlier as it takes, an eighth of the budget at most; as late as before where nobody waits any more."""
    starts = [gate.start_bytes]
    for _ in range(6):
        gate.settle(100)
        assert not await gate.take(KEY, 1, Deadline.after(0.002))
        gate.settle(0)
        gate.evicted()
        starts.append(gate.start_bytes)
    assert starts[0] == 90 and starts == sorted(starts, reverse=True)
    assert starts[-1] == starts[-2] == 90 - 12
    for _ in range(100):
        gate.evicted()
    assert gate.start_bytes == 90


async def test_what_was_asked_for_and_served_is_not_asked_for_again(gate: BudgetGate) -> None:
    """Eviction made room while others asked for it: nobody looks again for their sake."""
    gate.settle(95)
    assert await gate.take(KEY, 1, soon())
    gate.free(50)
    asking = asyncio.ensure_future(gate.wanted(60.0))
    await asyncio.sleep(0)
    assert not asking.done()
    assert await gate.take(OTHER, 50, soon())
    await asking


async def test_others_are_presumed_to_write_on() -> None:
    """What they wrote before the last look counts on from there, until the next look says what it was."""
    clock = ManualClock()
    gate = BudgetGate(1000, 900, clock, is_shared=True)
    gate.settle(100)
    assert await gate.take(KEY, 50, soon())
    gate.end(KEY, 50, is_stored=True)
    assert gate.used_bytes == 150
    clock.now_s += 1
    gate.settle(550)  # 400 of it are others'
    assert gate.used_bytes == 550
    clock.now_s += 1
    assert gate.used_bytes == 950
    waiting = asyncio.ensure_future(gate.take(KEY, 100, soon()))
    await gate.wanted(60.0)
    assert not waiting.done()
    gate.settle(600)  # they wrote less
    assert await waiting and gate.used_bytes == 700
    clock.now_s += 0.5
    assert gate.used_bytes == 700 + 100
    gate.suspend()
    assert gate.used_bytes == 700


async def test_alone_nothing_is_presumed() -> None:
    """A directory's whole blocks are no other writer."""
    clock = ManualClock()
    gate = BudgetGate(1000, 900, clock)
    for used_bytes in (100, 500):
        gate.settle(used_bytes)
        clock.now_s += 1
    assert gate.used_bytes == 500
