"""Turns: no more at a time than the limit, in order, and no turn is lost to a cancellation."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.errors import Unavailable
from kvstore.runtime.tracing import RequestContext, request_context
from kvstore.runtime.turns import TenantTurns, Turns


async def test_no_more_than_the_limit_in_order() -> None:
    """Twelve want to run, two may: at most two do, first come first served, some are cancelled while they wait."""
    turns = Turns(2)
    ran: list[int] = []
    most = 0

    async def one(number: int) -> None:
        nonlocal most
        async with turns.turn():
            most = max(most, turns.num_running)
            ran.append(number)
            await asyncio.sleep(0.001)

    tasks = [asyncio.ensure_future(one(number)) for number in range(12)]
    await asyncio.sleep(0)
    for number in (5, 9):
        tasks[number].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert ran == [0, 1, 2, 3, 4, 6, 7, 8, 10, 11]
    assert (most, turns.num_running) == (2, 0)


async def test_a_changed_limit() -> None:
    """A larger limit counts as soon as a block ends; a smaller one makes the next ones wait."""
    turns = Turns(1)
    ends = [asyncio.Event() for _ in range(6)]

    async def one(end: asyncio.Event) -> None:
        async with turns.turn():
            await end.wait()

    tasks = [asyncio.ensure_future(one(end)) for end in ends]
    await asyncio.sleep(0)
    turns.limit = 3
    ends[0].set()
    await tasks[0]
    await asyncio.sleep(0)
    assert turns.num_running == 3
    turns.limit = 1
    ends[1].set()
    await tasks[1]
    await asyncio.sleep(0)
    assert turns.num_running == 2
    for end in ends:
        end.set()
    await asyncio.gather(*tasks)
    assert turns.num_running == 0


async def test_cancelled_in_the_moment_of_its_turn() -> None:
    """A waiter that is given its turn and cancelled at once passes the turn on."""
    turns = Turns(1)
    end = asyncio.Event()

    async def one() -> None:
        async with turns.turn():
            await end.wait()

    tasks = [asyncio.ensure_future(one()) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.sleep(0.001)
    assert turns.num_running == 1
    end.set()
    await tasks[2]
    assert turns.num_running == 0


async def test_turns_go_round() -> None:
    """One connection asks for a hundred turns at once, its tenant has a second one, another tenant has one: each
    tenant's next turn comes after one of the other's, each connection's after one of its sibling's."""
    turns = Turns(1)
    ran: list[str] = []

    async def one(tenant: str, connection: int) -> None:
        async with turns.turn((tenant, connection)):
            ran.append(f"{tenant}{connection}")
            await asyncio.sleep(0.001)

    tasks = [asyncio.ensure_future(one("a", 1)) for _ in range(100)]
    await asyncio.sleep(0)
    tasks += [asyncio.ensure_future(one(*who)) for who in (("a", 2), ("b", 3), ("b", 3), ("a", 2))]
    await asyncio.sleep(0)
    tasks[50].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert ran[1:8] == ["a1", "b3", "a2", "b3", "a1", "a2", "a1"]
    assert ran.count("a1") == 99 and turns.num_running == 0 and not turns._waiting


async def test_turns_of_tenants() -> None:
    """Of a tenant one request runs and two wait, the next one is refused; another tenant's runs at once beside it.
    With both places taken tenants take turns. Nothing is kept of tenants without requests.
    """
    turns = TenantTurns(2, of_tenant=1, waiting_max=2)
    ends = {name: asyncio.Event() for name in ("a1", "a2", "a3", "b1", "c1", "b2")}
    running: list[str] = []

    async def one(name: str) -> None:
        request_context.set(RequestContext(tenant=name[0]))
        async with turns.turn():
            running.append(name)
            await ends[name].wait()

    tasks = {name: asyncio.ensure_future(one(name)) for name in ends}
    await asyncio.sleep(0.01)
    assert running == ["a1", "b1"]
    with pytest.raises(Unavailable):
        await asyncio.ensure_future(one("a4"))
    ends["a1"].set()
    await asyncio.sleep(0.01)
    assert running == ["a1", "b1", "c1"]  # not a2: another tenant waited
    tasks["a3"].cancel()
    for end in ends.values():
        end.set()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert sorted(running) == ["a1", "a2", "b1", "b2", "c1"]
    assert not vars(turns)["_of"]  # those of tenants without requests are gone
