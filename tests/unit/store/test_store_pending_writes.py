"""Pending entries when the log does not answer as it should."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Self, TypeVar

import pytest
from store_harness import LIMITS, MIB, slow_tier

from kvstore.catalog.pending import PendingEntry, PendingTotals
from kvstore.errors import Unavailable
from kvstore.format.record import Record
from kvstore.runtime.background import Background
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.runtime.meters import Meters
from kvstore.store.context import StoreContext
from kvstore.store.limits import StoreLimits
from kvstore.store.write_back.pending_writes import PendingWrites
from kvstore.store.write_back.queue import WriteBack
from kvstore.testing.dict_pending import DictPendingLog, PendingBooks
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.waiting import soon, until
from kvstore.tiers.base import PutOutcome
from kvstore.tiers.memory import MemoryTier

pytestmark = pytest.mark.virtual_time

T = TypeVar("T")

LEASE_S = 0.3
PROMPT = Prompt(ATTENTION, "a", 128)
RECORD = PROMPT.record(64, 0, 0)
KEY = RECORD.key
OTHERS = Prompt(ATTENTION, "b", 64 * 100).records()
FULL = MemoryTier(1)


class PendingHarness:
    """The pending writes of one service, and a log that refuses or delays some steps.

    Attributes:
        refused: Steps that the log does not carry out.
        held: Steps that it carries out when it is let go.
        steps: All steps, in order.
    """

    def __init__(self, limits: StoreLimits = LIMITS) -> None:
        self.books, self.meters = PendingBooks(), Meters()
        self.hot, self.cold = slow_tier("redis"), slow_tier("s3")
        self.refused: set[str] = set()
        self.held: set[str] = set()
        self.answer = asyncio.Event()
        self.steps: list[str] = []
        self.background = Background("test")
        instruments = Instruments(meters=self.meters)
        self.memory = MemoryTier(MIB)
        context = StoreContext(self.memory, self.hot, self.cold, limits, instruments, self.background)
        self.writes = PendingWrites(DictPendingLog(self.books, lease_s=LEASE_S, ask=self._ask), context)
        self.queue = WriteBack(self.hot, self.writes, context)

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
        write = self.writes.begin(RECORD, self.hot, is_promise=True)
        assert await self.writes.put(write, soon()) in (PutOutcome.STORED, PutOutcome.EXISTS)
        self.writes.end(write)

    async def write_cold(self, record: Record = RECORD, *, arrives: bool) -> None:
        write = self.writes.begin(record, self.cold if arrives else FULL)
        assert await self.writes.put(write, soon()) is (PutOutcome.STORED if arrives else PutOutcome.FULL)
        self.writes.end(write)

    def save(self, record: Record, *, is_evictable: bool = False) -> None:
        """Queue a record for the hot tier."""
        self.memory.insert(record)
        self.queue.offer_saved(record, is_evictable=is_evictable)

    def others_have_pending(self, num_bytes: int) -> None:
        """Note what other services have pending."""
        self.writes.set_totals(PendingTotals(1, num_bytes))

    def dropped(self, reason: str) -> int:
        return int(self.meters.get("write_back_dropped", tier="redis", reason=reason))

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
    harness.cold.down = True
    write = harness.writes.begin(RECORD, harness.cold)
    with pytest.raises(Unavailable):
        await harness.writes.put(write, soon())
    harness.writes.end(write)
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


async def test_that_the_cold_tier_has_a_record_is_believed_for_a_moment_only(harness: PendingHarness) -> None:
    """The end of an entry waits behind others. Until its turn the record may have been discarded everywhere, and saved
    again by another service, which relies on the hot tier."""
    harness.held = {"pending finish"}
    await harness.write_cold(PROMPT.record(128, 0, 0), arrives=True)
    await until(lambda: "pending finish" in harness.steps)
    await harness.write_hot()
    await harness.write_cold(arrives=True)
    await asyncio.sleep(LEASE_S)
    other = DictPendingLog(harness.books, lease_s=LEASE_S)
    assert await other.add([PendingEntry(KEY, RECORD.num_bytes, 64)], deadline=soon())
    harness.answer.set()
    await harness.settled()
    assert KEY not in harness.hot.keys_allowed
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


async def test_a_promise_does_not_rest_on_what_was_heard_of_the_cold_tier(harness: PendingHarness) -> None:
    """A caller waits for the hot tier while a copy of what the cold one had is written there: the cold tier may have
    evicted it since, and nobody else would look."""
    promised = harness.writes.begin(RECORD, harness.hot, is_promise=True)
    copied = harness.writes.begin(RECORD, harness.hot, in_cold=True)
    for write in (promised, copied):
        assert await harness.writes.put(write, soon()) is not PutOutcome.FULL
        harness.writes.end(write)
    await harness.settled()
    assert harness.hot.keys_allowed == []
    assert KEY in harness.books.entries


async def test_a_promise_that_comes_while_an_entry_is_ended_counts(harness: PendingHarness) -> None:
    """The end of an earlier write must not forget it: a copy of what the cold tier had could let the record go."""
    harness.held = {"pending finish"}
    await harness.write_cold(arrives=True)
    await until(lambda: "pending finish" in harness.steps)
    promised = harness.writes.begin(RECORD, harness.hot, is_promise=True)
    harness.hot.keys_allowed.clear()
    harness.answer.set()
    assert await harness.writes.put(promised, soon()) is PutOutcome.STORED
    copied = harness.writes.begin(RECORD, harness.hot, in_cold=True)
    harness.writes.end(promised)
    harness.writes.end(copied)
    await harness.settled()
    assert harness.hot.keys_allowed == []
    assert KEY in harness.books.entries


async def test_a_short_record_of_two_services_is_left_to_a_finisher(harness: PendingHarness) -> None:
    """Neither may let it go while the other may rely on it, and both may end at the same time: then it would stay in
    the hot tier for good."""
    write = harness.writes.begin(RECORD, harness.hot, is_short=True)
    assert await harness.writes.put(write, soon()) is PutOutcome.STORED
    other = DictPendingLog(harness.books, lease_s=LEASE_S)
    await other.add([PendingEntry(KEY, RECORD.num_bytes, 64)], deadline=soon())
    harness.writes.end(write)
    await harness.settled()
    await other.finish([KEY], deadline=soon())
    assert harness.hot.keys_allowed == []
    assert KEY in harness.books.entries


async def test_a_record_that_may_still_arrive_is_not_claimed_before_its_lease_ends(harness: PendingHarness) -> None:
    """The hot tier did not answer: a finisher that looked now could find nothing, and end the entry just before the
    record is there."""
    harness.hot.unanswered = {KEY}
    write = harness.writes.begin(RECORD, harness.hot)
    with pytest.raises(Unavailable):
        await harness.writes.put(write, soon())
    harness.writes.end(write)
    await harness.settled()
    finisher = DictPendingLog(harness.books, lease_s=LEASE_S)
    assert await finisher.claim(1, deadline=soon()) == []
    await asyncio.sleep(2 * LEASE_S)
    assert [entry.key for entry in await finisher.claim(1, deadline=soon())] == [KEY]


@pytest.mark.parametrize("has_room", [True, False])
async def test_an_entry_that_is_lost_while_its_record_is_in_the_hot_tier_is_written_again(
    harness: PendingHarness, has_room: bool
) -> None:
    """Another service ended it, and the end of the write finds none to give back. A log that has no room for it is
    asked again until it has."""
    write = harness.writes.begin(RECORD, harness.hot, is_promise=True)
    await harness.writes.put(write, soon())
    del harness.books.entries[KEY]
    await asyncio.sleep(LEASE_S)
    harness.books.is_full = not has_room
    harness.writes.end(write)
    if not has_room:
        await until(lambda: harness.steps.count("pending add") > 3)
        assert len(harness.writes) == 1
        harness.books.is_full = False
    await harness.settled()
    assert KEY in harness.books.entries


async def test_the_entry_of_a_record_that_may_still_arrive_outlives_the_next_write(harness: PendingHarness) -> None:
    """A write to the hot tier is not answered, and the next one fails before it reaches the tier: its end leaves the
    entry of the first one."""
    harness.hot.unanswered = {KEY}
    for refused in (set[str](), {"pending add"}):
        harness.refused = refused
        write = harness.writes.begin(RECORD, harness.hot, is_promise=True)
        with pytest.raises(Unavailable):
            await harness.writes.put(write, soon())
        harness.writes.end(write)
        await harness.settled()
    assert await harness.hot.inner.head([KEY], deadline=soon()) == [RECORD.num_bytes]
    assert KEY in harness.books.entries


async def test_what_is_forgotten_and_saved_again_is_written(harness: PendingHarness) -> None:
    """Of a key that was found bad while it waited only the new record is written, once."""
    harness.queue.pause()
    harness.save(RECORD)
    harness.queue.forget(KEY)
    assert (len(harness.queue), harness.queue.queued_bytes) == (0, 0)
    harness.memory.remove(KEY)
    harness.save(RECORD)
    harness.queue.resume()
    assert await harness.queue.drain(soon()) == 0
    assert harness.hot.keys_put == [KEY]


async def test_what_is_finished_is_not_pending_any_more() -> None:
    """There is room again at once, not when somebody counts what is pending."""
    async with PendingHarness(replace(LIMITS, pending_bytes=RECORD.num_bytes - 1)) as harness:
        write = harness.writes.begin(RECORD, harness.hot)
        await harness.writes.put(write, soon())
        assert harness.writes.is_over_limit
        await harness.write_cold(arrives=True)
        harness.writes.end(write)
        await harness.settled()
        assert not harness.writes.is_over_limit


async def test_to_wait_for_others_is_no_failure() -> None:
    """A record waits while too much is pending, then the log fails once, twice over, and other records are written
    meanwhile. It is written in the end: it failed twice, not as often as it looked."""
    async with PendingHarness(replace(LIMITS, write_back_attempts=3)) as harness:
        for number in range(2):
            harness.others_have_pending(LIMITS.pending_bytes + 1)
            harness.save(RECORD)
            await asyncio.sleep(10 * LIMITS.backoff_s_max)
            harness.save(OTHERS[number], is_evictable=True)
            await until(lambda number=number: OTHERS[number].key in harness.hot.keys_put)  # type: ignore[misc]
            harness.refused = {"pending add"}
            harness.others_have_pending(0)
            await until(lambda number=number: harness.steps.count("pending add") > number)  # type: ignore[misc]
            harness.others_have_pending(LIMITS.pending_bytes + 1)
            harness.refused = set()
        harness.others_have_pending(0)
        await until(lambda: KEY in harness.hot.keys_put)
        assert not harness.dropped("attempts")


async def test_a_log_that_does_not_answer_is_not_the_records_fault() -> None:
    """Records that need no entry are written all the time, and one that needs an entry fails again and again."""
    async with PendingHarness(replace(LIMITS, write_back_attempts=3)) as harness:
        harness.refused = {"pending add"}
        harness.save(RECORD)
        for record in OTHERS:
            harness.save(record, is_evictable=True)
            await asyncio.sleep(LIMITS.backoff_s_max)
        assert harness.steps.count("pending add") > 10
        harness.refused = set()
        await until(lambda: KEY in harness.hot.keys_put)
        assert not harness.dropped("attempts")


async def test_what_waits_for_others_is_not_overtaken_for_long(harness: PendingHarness) -> None:
    """Records that need no entry come without end: those that had to wait are written all the same."""
    harness.hot.put_s = 0.02
    for number, record in enumerate(OTHERS):
        harness.save(record, is_evictable=True)
        if number == 10:
            harness.others_have_pending(LIMITS.pending_bytes + 1)
            harness.save(RECORD)
        if number == 50:
            harness.others_have_pending(0)
        await asyncio.sleep(0.002)
    assert KEY in harness.hot.keys_put


async def test_what_waits_for_others_is_no_probe(harness: PendingHarness) -> None:
    """The hot tier is back, and too much is pending: records that need no entry do not wait behind the pauses of all
    that do."""
    harness.hot.down, harness.refused = True, {"pending add"}
    for record in OTHERS[:50]:
        harness.save(record)
    harness.save(OTHERS[50], is_evictable=True)
    await asyncio.sleep(10 * LIMITS.backoff_s_max)
    harness.others_have_pending(LIMITS.pending_bytes + 1)
    harness.hot.down = False
    await asyncio.sleep(2 * LIMITS.backoff_s_max)
    assert OTHERS[50].key in harness.hot.keys_put
