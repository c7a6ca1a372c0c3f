"""Pending entries when the log does not answer as it should."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Self, TypeVar

import pytest
from store_world import LIMITS, slow_tier, soon, until

from kvstore.errors import Unavailable
from kvstore.runtime.background import Background
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters
from kvstore.store.limits import StoreLimits
from kvstore.store.write_back.pending_writes import EntryResult, PendingWrites
from kvstore.testing.dict_pending import DictPendingLog, PendingBooks
from kvstore.testing.prompts import ATTENTION, Prompt

pytestmark = pytest.mark.virtual_time

T = TypeVar("T")

LEASE_S = 0.3
RECORD = Prompt(ATTENTION, "a", 64).record(64, 0, 0)
KEY = RECORD.key


class World:
    """What one service knows of a record on its way, and what stands in a log that may be told not to answer.

    Attributes:
        refused: Steps that the log does not carry out.
        held: Steps that it carries out when it is let go.
        asked: All steps, in order.
    """

    def __init__(self, limits: StoreLimits = LIMITS) -> None:
        self.books, self.hot, self.meters = PendingBooks(), slow_tier("redis"), Meters()
        self.refused: set[str] = set()
        self.held: set[str] = set()
        self.let_go = asyncio.Event()
        self.asked: list[str] = []
        self.background = Background("test")
        self.pending_writes = PendingWrites(
            DictPendingLog(self.books, lease_s=LEASE_S, ask=self._ask),
            self.hot,
            background=self.background,
            meters=self.meters,
            limits=limits,
            clock=SYSTEM_CLOCK,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.background.aclose()

    async def _ask(self, what: str, work: Callable[[], T], deadline: Deadline) -> T:
        self.asked.append(what)
        if what in self.refused:
            raise Unavailable("the log was told not to answer")
        if what in self.held:
            await self.let_go.wait()
        return work()

    async def write_hot(self) -> None:
        """The record reaches the hot tier, and nothing is sure to bring it any further."""
        self.pending_writes.begin(RECORD, is_promise=True)
        assert await self.pending_writes.note(KEY, soon(), is_hot=True) is EntryResult.WRITTEN
        await self.pending_writes.confirm(KEY, await self.hot.put(RECORD, deadline=soon()), soon())
        self.pending_writes.end(KEY, in_hot=True)

    async def write_cold(self, *, arrives: bool) -> None:
        self.pending_writes.begin(RECORD)
        await self.pending_writes.note(KEY, soon(), is_hot=False)
        self.pending_writes.end(KEY, in_cold=arrives)

    async def settled(self) -> None:
        await until(lambda: not len(self.pending_writes))


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with World() as world:
        yield world


async def test_a_write_that_fails_leaves_the_entry_of_an_earlier_one_whose_end_failed(world: World) -> None:
    """The hot tier has a record, and the log did not answer when its entry was given back. Another write of it fails:
    its end leaves the entry, since it is all that says that the record has to reach the cold tier."""
    world.refused = {"pending release"}
    await world.write_hot()
    await until(lambda: world.meters.get("pending_failures", step="end") >= 1)
    world.refused = set()
    await world.write_cold(arrives=False)
    await world.settled()
    assert KEY in world.books.entries


async def test_an_entry_whose_end_failed_is_ended_by_a_write_that_arrives(world: World) -> None:
    """The same, but the cold tier gets the record: it may go, and nothing is pending."""
    world.refused = {"pending release"}
    await world.write_hot()
    await until(lambda: world.meters.get("pending_failures", step="end") >= 1)
    await world.write_cold(arrives=True)
    await world.settled()
    assert (world.hot.keys_allowed, world.books.entries) == ([KEY], {})


async def test_nothing_is_remembered_of_a_write_that_went_on_without_a_log(world: World) -> None:
    """The log does not answer, so a write to the cold tier goes on without an entry, and nobody knows how it ended:
    there is nothing to leave to others, and nothing that would ever end."""
    world.refused = {"pending add", "pending release", "pending finish"}
    world.pending_writes.begin(RECORD)
    assert await world.pending_writes.note(KEY, soon(), is_hot=False) is EntryResult.WRITTEN
    world.pending_writes.end(KEY, maybe_in_cold=True)
    await world.settled()
    assert world.books.entries == {}


async def test_what_the_log_did_not_hear_is_told_again(world: World) -> None:
    """It does not answer for a while: then it gets the entry back, and nothing is remembered of the record."""
    world.refused = {"pending release"}
    await world.write_hot()
    await until(lambda: world.asked.count("pending release") > 2)
    assert len(world.pending_writes) == 1
    world.refused = set()
    await world.settled()
    assert KEY in world.books.entries


async def test_an_end_that_takes_long_does_not_take_away_the_next_entry() -> None:
    """A record is in the cold tier, and the log is slow to end its entry. Until it has, nobody writes the next one,
    which would end with it."""
    async with World(replace(LIMITS, write_back_timeout_s=0.1)) as world:
        world.held = {"pending finish"}
        await world.write_cold(arrives=True)
        await until(lambda: "pending finish" in world.asked)
        writing = asyncio.ensure_future(world.write_hot())
        await asyncio.wait({writing}, timeout=0.3)  # longer than a write may take
        world.let_go.set()
        await writing
        await world.settled()
        assert KEY in world.books.entries
