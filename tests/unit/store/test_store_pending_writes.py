"""Pending entries when the log does not answer as it should."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Self, TypeVar

import pytest
from store_harness import LIMITS, MIB, slow_tier

from kvstore.errors import Unavailable
from kvstore.runtime.background import Background
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.runtime.meters import Meters
from kvstore.store.context import StoreContext
from kvstore.store.limits import StoreLimits
from kvstore.store.write_back.pending_writes import EntryResult, PendingWrites
from kvstore.testing.dict_pending import DictPendingLog, PendingBooks
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.waiting import soon, until
from kvstore.tiers.memory import MemoryTier

pytestmark = pytest.mark.virtual_time

T = TypeVar("T")

LEASE_S = 0.3
RECORD = Prompt(ATTENTION, "a", 64).record(64, 0, 0)
KEY = RECORD.key


class PendingHarness:
    """The pending writes of one service, and a log that refuses or delays some steps.

    Attributes:
        refused: Steps that the log does not carry out.
        held: Steps that it carries out when it is let go.
        steps: All steps, in order.
    """

    def __init__(self, limits: StoreLimits = LIMITS) -> None:
        self.books, self.hot, self.meters = PendingBooks(), slow_tier("redis"), Meters()
        self.refused: set[str] = set()
        self.held: set[str] = set()
        self.answer = asyncio.Event()
        self.steps: list[str] = []
        self.background = Background("test")
        instruments = Instruments(meters=self.meters)
        context = StoreContext(MemoryTier(MIB), self.hot, None, limits, instruments, self.background)
        self.writes = PendingWrites(DictPendingLog(self.books, lease_s=LEASE_S, ask=self._ask), context)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.background.aclose()

    async def _ask(self, what: str, work: Callable[[], T], deadline: Deadline) -> T:
        self.steps.append(what)
        if what in self.refused:
            raise Unavailable("the log was told not to answer")
        if what in self.held:
            await self.answer.wait()
        return work()

    async def write_hot(self) -> None:
        """The record reaches the hot tier, and nothing is sure to bring it any further."""
        self.writes.begin(RECORD, is_promise=True)
        assert await self.writes.write_entry(KEY, soon(), is_hot=True) is EntryResult.WRITTEN
        await self.writes.confirm(KEY, await self.hot.put(RECORD, deadline=soon()), soon())
        self.writes.end(KEY, in_hot=True)

    async def write_cold(self, *, arrives: bool) -> None:
        self.writes.begin(RECORD)
        await self.writes.write_entry(KEY, soon(), is_hot=False)
        self.writes.end(KEY, in_cold=arrives)

    async def settled(self) -> None:
        await until(lambda: not len(self.writes))


@pytest.fixture
async def harness() -> AsyncIterator[PendingHarness]:
    async with PendingHarness() as harness:
        yield harness


async def test_a_write_that_fails_leaves_the_entry_of_an_earlier_one_whose_end_failed(harness: PendingHarness) -> None:
    """The hot tier has a record, and the log did not answer when its entry was given back. Another write of it fails:
    its end leaves the entry, since it is all that says that the record has to reach the cold tier."""
    harness.refused = {"pending release"}
    await harness.write_hot()
    await until(lambda: harness.meters.get("pending_failures", step="end") >= 1)
    harness.refused = set()
    await harness.write_cold(arrives=False)
    await harness.settled()
    assert KEY in harness.books.entries


async def test_an_entry_whose_end_failed_is_ended_by_a_write_that_arrives(harness: PendingHarness) -> None:
    """The same, but the cold tier gets the record: it may go, and nothing is pending."""
    harness.refused = {"pending release"}
    await harness.write_hot()
    await until(lambda: harness.meters.get("pending_failures", step="end") >= 1)
    await harness.write_cold(arrives=True)
    await harness.settled()
    assert (harness.hot.keys_allowed, harness.books.entries) == ([KEY], {})


async def test_nothing_is_remembered_of_a_write_that_went_on_without_a_log(harness: PendingHarness) -> None:
    """The log does not answer, so a write to the cold tier goes on without an entry, and nobody knows how it ended:
    there is nothing to leave to others, and nothing that would ever end."""
    harness.refused = {"pending add", "pending release", "pending finish"}
    harness.writes.begin(RECORD)
    assert await harness.writes.write_entry(KEY, soon(), is_hot=False) is EntryResult.WRITTEN
    harness.writes.end(KEY, maybe_in_cold=True)
    await harness.settled()
    assert harness.books.entries == {}


async def test_what_the_log_did_not_hear_is_told_again(harness: PendingHarness) -> None:
    """It does not answer for a while: then it gets the entry back, and nothing is remembered of the record."""
    harness.refused = {"pending release"}
    await harness.write_hot()
    await until(lambda: harness.steps.count("pending release") > 2)
    assert len(harness.writes) == 1
    harness.refused = set()
    await harness.settled()
    assert KEY in harness.books.entries


async def test_an_end_that_takes_long_does_not_take_away_the_next_entry() -> None:
    """A record is in the cold tier, and the log is slow to end its entry. Until it has, nobody writes the next one,
    which would end with it."""
    async with PendingHarness(replace(LIMITS, write_back_timeout_s=0.1)) as harness:
        harness.held = {"pending finish"}
        await harness.write_cold(arrives=True)
        await until(lambda: "pending finish" in harness.steps)
        writing = asyncio.ensure_future(harness.write_hot())
        await asyncio.wait({writing}, timeout=0.3)  # longer than a write may take
        harness.answer.set()
        await writing
        await harness.settled()
        assert KEY in harness.books.entries
