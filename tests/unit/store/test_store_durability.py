"""Pending write-backs of a `TieredStore`: what stands in the log when, and who finishes what."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from store_harness import LEASE_S, MIB, PATIENT, SharedTiers, slow_tier, stage

from kvstore.api import Ack, Retention, SaveOutcome
from kvstore.catalog.entry import Level
from kvstore.catalog.pending import PendingEntry, PendingLog, PendingTotals
from kvstore.catalog.redis.pending import RedisPendingLog
from kvstore.catalog.sqlite.pending import SqlitePendingLog
from kvstore.errors import Unavailable
from kvstore.format.record import Record
from kvstore.model.keys import RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.store.tiered import TieredStore
from kvstore.testing.faults import FaultyTier
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.servers import RedisServer
from kvstore.testing.waiting import soon, until
from kvstore.tiers.base import PutOutcome, Tier
from kvstore.tiers.memory import RECORD_OVERHEAD_BYTES, MemoryTier

pytestmark = pytest.mark.servers

NOTHING = PendingTotals(0, 0)


@pytest.fixture
async def world(shared_redis: RedisServer, tmp_path: Path) -> AsyncIterator[SharedTiers]:
    world = SharedTiers(shared_redis.url, str(tmp_path))
    yield world
    for store in world.stores:
        await store.aclose()
    await world.client.aclose()


class Watched(FaultyTier):
    """Notes how many records were pending whenever one came."""

    def __init__(self, inner: Tier, log: PendingLog) -> None:
        super().__init__(inner, name="redis")
        self.log = log
        self.pending_at_put: list[int] = []

    async def put(self, record: Record, *, deadline: Deadline) -> PutOutcome:
        self.pending_at_put.append((await self.log.totals(deadline=deadline)).num_records)
        return await super().put(record, deadline=deadline)


@pytest.mark.parametrize("ack", list(Ack))
async def test_the_entry_stands_before_the_record_and_ends_after_the_cold_tier_has_it(
    world: SharedTiers, ack: Ack
) -> None:
    """At every level: an entry is there when the hot tier gets a record; in the end all may go there, and nothing
    is pending."""
    prompt = Prompt(ATTENTION, "a", 640)
    watched = Watched(world.hot.inner, world.log())
    store = await world.store(prompt, hot=watched)
    for record in prompt.records():
        assert await store.save(record, ack=ack, deadline=soon()) is SaveOutcome.STORED
    assert await store.drain(soon()) == 0
    assert len(watched.pending_at_put) == 20
    assert min(watched.pending_at_put) >= 1
    assert await world.totals() == NOTHING
    assert set(watched.keys_allowed) == set(world.cold.keys_put) == {record.key for record in prompt.records()}


async def test_the_hot_tier_keeps_what_the_cold_one_does_not_have(world: SharedTiers) -> None:
    """The cold tier is down for many leases: the owner renews, nobody else takes over, nothing may be evicted."""
    prompt = Prompt(ATTENTION, "a", 320)
    world.cold.down = True
    store, other = await world.store(prompt), await world.store(prompt)
    for record in prompt.records():
        await store.save(record, ack=Ack.HOT, deadline=soon())
    await asyncio.sleep(3 * LEASE_S)
    assert (await world.totals()).num_records == 10
    assert world.hot.keys_allowed == []
    assert other.meters.get("pending_failures", step="finish") == 0
    world.cold.down = False
    await until(lambda: len(world.cold.keys_put) == 10)
    await world.finished()
    assert len(world.hot.keys_allowed) == 10


async def test_another_service_finishes_what_a_dead_one_left(
    world: SharedTiers, caplog: pytest.LogCaptureFixture
) -> None:
    """A service dies with everything in the hot tier alone: after its leases another brings it to the cold one,
    bit for bit, serves it, and says so in its log."""
    caplog.set_level(logging.INFO, "kvstore.store.write_back")
    prompt = Prompt(ATTENTION, "a", 640)
    world.cold.down = True
    first = await world.store(prompt)
    for record in prompt.records():
        await first.save(record, ack=Ack.HOT, deadline=soon())
    await world.die(first)
    world.cold.down = False
    second = await world.store(prompt)
    await world.finished()
    for record in prompt.records():
        found = await world.cold.get(record.key, deadline=soon())
        assert found is not None
        assert found.data == record.data
    assert second.meters.get("pending_finished", outcome="stored") == 20
    await until(lambda: "writes to s3 that a service had left undone were finished: stored 20" in caplog.messages)
    assert set(world.hot.keys_allowed) == {record.key for record in prompt.records()}
    assert (await stage(second, prompt)).resume_tokens == 640


class Gated(FaultyTier):
    """Its puts wait to be let through."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner, name="redis")
        self.began, self.go = asyncio.Event(), asyncio.Event()

    async def put(self, record: Record, *, deadline: Deadline) -> PutOutcome:
        self.began.set()
        await self.go.wait()
        return await super().put(record, deadline=deadline)


class Deaf(RedisPendingLog):
    """Renews and claims no lease while it is deaf, as when Redis answers others alone; counts what it adds."""

    is_deaf = True
    num_adds = 0

    async def renew(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> list[bool]:
        if self.is_deaf:
            raise Unavailable("the log was told not to answer")
        return await super().renew(keys, deadline=deadline)

    async def claim(self, limit: int, *, deadline: Deadline) -> list[PendingEntry]:
        if self.is_deaf:
            raise Unavailable("the log was told not to answer")
        return await super().claim(limit, deadline=deadline)

    async def add(self, entries: Sequence[PendingEntry], *, deadline: Deadline) -> bool:
        self.num_adds += 1
        return await super().add(entries, deadline=deadline)


async def test_an_entry_that_another_service_ended_before_the_record_was_there_is_written_again(
    world: SharedTiers,
) -> None:
    """A write to the hot tier takes longer than its lease: another service takes the entry over, finds the record
    nowhere and ends it. The writer notices, so that its record never stands in the hot tier without an entry.
    """
    prompt, hot = Prompt(ATTENTION, "a", 64), Gated(world.hot.inner)
    record, log = prompt.records()[0], Deaf(world.client, world.scope, lease_s=LEASE_S)
    slow = TieredStore(MemoryTier(16 * MIB), hot, world.cold, pending=log, limits=PATIENT)
    world.stores.append(slow)
    await slow.open_namespace(prompt.description, deadline=soon())
    saving = asyncio.ensure_future(slow.save(record, ack=Ack.HOT, retention=Retention.SHORT, deadline=soon()))
    await hot.began.wait()
    assert (await world.totals()).num_records == 1
    other = await world.store(prompt)
    await until(lambda: other.meters.get("pending_finished", outcome="lost") == 1)
    await world.finished()
    log.is_deaf = False
    hot.go.set()
    assert await saving is SaveOutcome.STORED
    assert log.num_adds == 2
    await world.finished()
    assert await world.hot.head([record.key], deadline=soon()) == [record.num_bytes]
    assert hot.keys_allowed == [record.key]


async def test_a_service_that_stops_gives_back_what_it_did_not_finish(world: SharedTiers) -> None:
    """It ends in order while the cold tier is down: nobody waits for its leases, which last a minute."""
    prompt = Prompt(ATTENTION, "a", 320)
    world.cold.down = True
    first = await world.store(prompt, lease_s=60.0)
    for record in prompt.records():
        await first.save(record, deadline=soon())
    await until(lambda: len(world.hot.keys_put) == 10)
    await first.aclose()
    assert (await world.totals()).num_records == 10
    world.cold.down = False
    await world.store(prompt)
    await world.finished()
    assert len(world.cold.keys_put) == 10


async def test_what_is_pending_is_bounded_over_all_services(world: SharedTiers) -> None:
    """Beyond the limit saves that wait for the hot tier are busy, others wait in memory; lookups and loads go on; with
    the cold tier back saves are taken again, and all that waits is written."""
    prompt = Prompt(ATTENTION, "a", 1280)
    world.cold.down = True
    limits = replace(PATIENT, pending_bytes=6 * 1192, write_back_bytes=64 * 1192)
    store, other = await world.store(prompt, limits=limits), await world.store(prompt, limits=limits)
    records = prompt.records()
    outcomes = [await store.save(record, ack=Ack.HOT, deadline=soon()) for record in records[:20]]
    num_stored = outcomes.count(SaveOutcome.STORED)
    assert 4 <= num_stored <= 9  # what is counted over all services may have more or fewer of our own entries than now
    assert outcomes == [SaveOutcome.STORED] * num_stored + [SaveOutcome.BUSY] * (20 - num_stored)
    for record in records[:20]:
        await store.save(record, deadline=soon())
    await asyncio.sleep(0.1)
    assert len(world.hot.keys_put) < 14
    assert (await stage(store, prompt)).resume_tokens == 640
    await until(  # the other service learns of it
        lambda: other.save(records[30], ack=Ack.HOT, deadline=soon()),
        holds=lambda outcome: outcome is SaveOutcome.BUSY,
    )
    assert (await world.totals()).num_records < 14
    world.cold.down = False
    await world.finished()
    await until(
        lambda: other.save(records[31], ack=Ack.HOT, deadline=soon()),
        holds=lambda outcome: outcome is not SaveOutcome.BUSY,
    )
    await until(lambda: {record.key for record in records[:20]} <= set(world.cold.keys_put))
    assert not [name for name in store.meters.snapshot() if name.startswith("write_back_dropped")]


async def test_what_the_queue_cannot_hold_is_brought_from_the_hot_tier(world: SharedTiers) -> None:
    """The queue to the cold tier is too short for a burst: the rest does not wait for it once the hot tier has it, is
    finished from there, and is not lost."""
    prompt = Prompt(ATTENTION, "a", 640)
    store = await world.store(prompt, limits=replace(PATIENT, write_back_bytes=2 * 1192))
    world.cold.down = True
    for record in prompt.records():
        await store.save(record, ack=Ack.HOT, deadline=soon())
    await until(lambda: store.status(deadline=soon()), holds=lambda status: status["write_back"]["s3"]["records"] == 2)
    world.cold.down = False
    await world.finished()
    assert not [name for name in store.meters.snapshot() if name.startswith("write_back_dropped")]
    assert set(world.cold.keys_put) == {record.key for record in prompt.records()}
    assert set(world.hot.keys_allowed) == set(world.cold.keys_put)


async def test_a_burst_longer_than_both_queues_reaches_both_tiers(world: SharedTiers) -> None:
    """No save waits for a tier: what finds no room in the queue to the hot one waits in memory, and is finished from
    there for the cold one."""
    prompt = Prompt(ATTENTION, "a", 640)
    store = await world.store(prompt, limits=replace(PATIENT, write_back_bytes=2 * 1192))
    for record in prompt.records():
        await store.save(record, deadline=soon())
    await until(lambda: len(world.hot.keys_put) == 20)
    await world.finished()
    assert set(world.cold.keys_put) == {record.key for record in prompt.records()}
    assert set(world.hot.keys_allowed) == set(world.cold.keys_put)


async def test_an_entry_without_a_record_ends(world: SharedTiers) -> None:
    """A service died between entry and record: nothing was acknowledged, the entry is removed and counted."""
    prompt = Prompt(ATTENTION, "a", 64)
    dead = world.log()
    await dead.add([PendingEntry(prompt.key(64), 1192, 64)], deadline=soon())
    store = await world.store(prompt)
    await world.finished()
    assert store.meters.get("pending_finished", outcome="lost") == 1


async def test_a_copy_of_what_the_cold_tier_has_may_go_at_once(world: SharedTiers) -> None:
    """What is read from the cold tier and copied to the hot one is not pending afterwards and may be evicted there."""
    prompt = Prompt(ATTENTION, "a", 320)
    for record in prompt.records():
        await world.cold.inner.put(record, deadline=soon())
    store = await world.store(prompt)
    assert (await stage(store, prompt)).resume_tokens == 320
    assert await store.drain(soon()) == 0
    assert set(world.hot.keys_put) == set(world.hot.keys_allowed) == {record.key for record in prompt.records()}
    assert await world.totals() == NOTHING


async def test_a_short_record_that_waits_for_the_hot_tier_may_go_at_once(world: SharedTiers) -> None:
    """Its caller wants it there and does not want it kept: the cold tier never gets it."""
    prompt = Prompt(ATTENTION, "a", 64)
    store = await world.store(prompt)
    await store.save(prompt.record(64), ack=Ack.HOT, retention=Retention.SHORT, deadline=soon())
    assert await store.drain(soon()) == 0
    assert (world.hot.keys_allowed, world.cold.keys_put) == ([prompt.key(64)], [])
    assert await world.totals() == NOTHING


class Held(FaultyTier):
    """Holds up what is named, until it is let go."""

    def __init__(self, inner: Tier, *held: str) -> None:
        super().__init__(inner, name="redis")
        self.held = held
        self.let_go, self.written = asyncio.Event(), asyncio.Event()

    async def put(self, record: Record, *, deadline: Deadline) -> PutOutcome:
        if "put" not in self.held:
            return await super().put(record, deadline=deadline)
        await self.let_go.wait()
        await super().put(record, deadline=deadline)
        self.written.set()
        return await asyncio.Future()  # the answer does not arrive

    async def allow_eviction(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        if "allow_eviction" in self.held:
            await self.let_go.wait()
        await super().allow_eviction(keys, deadline=deadline)


class LateAnswer(FaultyTier):
    """Stores what is put, and answers when it is let go."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner, name="redis")
        self.let_go, self.written = asyncio.Event(), asyncio.Event()

    async def put(self, record: Record, *, deadline: Deadline) -> PutOutcome:
        outcome = await super().put(record, deadline=deadline)
        self.written.set()
        await self.let_go.wait()
        return outcome


async def test_a_copy_on_which_another_service_relies_may_not_go(world: SharedTiers) -> None:
    """One service copies a record from the cold tier, which then loses it; another one's save finds the copy, and is
    acknowledged. The first has only heard that the cold tier has it: the record may go once the other has written it.
    """
    prompt = Prompt(ATTENTION, "a", 64)
    for record in prompt.records():
        await world.cold.inner.put(record, deadline=soon())
    late = LateAnswer(world.hot.inner)
    copying, other = await world.store(prompt, hot=late), await world.store(prompt)
    assert (await stage(copying, prompt)).resume_tokens == 64
    await late.written.wait()
    for record in prompt.records():
        await world.cold.inner.delete(record.key, deadline=soon())
    world.cold.down = True
    outcomes = [await other.save(record, ack=Ack.HOT, deadline=soon()) for record in prompt.records()]
    assert SaveOutcome.EXISTS in outcomes
    late.let_go.set()
    assert await copying.drain(soon()) == 0
    assert late.keys_allowed == world.hot.keys_allowed == []
    world.cold.down = False
    await world.finished()
    assert set(world.cold.keys_put) == {record.key for record in prompt.records()}
    assert set(world.hot.keys_allowed) | set(late.keys_allowed) == set(world.cold.keys_put)


async def test_of_two_that_write_a_record_one_dies_before_it_can_look_at_its_entry(world: SharedTiers) -> None:
    """Both wrote the entry, and one is done with it; the other wrote the record to the hot tier once more and was
    killed before it could see whether its entry still stands: it does, and in the end the record may go."""
    prompt = Prompt(ATTENTION, "a", 64)
    record = prompt.record(64, 0, 0)
    held = Held(world.hot.inner, "put")
    dying, other = await world.store(prompt, hot=held, lease_s=1.0), await world.store(prompt, lease_s=1.0)
    saving = asyncio.ensure_future(dying.save(record, ack=Ack.HOT, deadline=soon()))
    await until(lambda: world.cold.keys_put == [record.key])
    await other.save(record, ack=Ack.COLD, deadline=soon())
    await until(lambda: world.hot.keys_allowed == [record.key])
    assert await other.drain(soon()) == 0
    assert (await world.totals()).num_records == 1
    held.let_go.set()
    await held.written.wait()
    await world.die(dying)
    saving.cancel()
    await world.finished()
    assert world.hot.keys_allowed == [record.key] * 2


async def test_that_the_cold_tier_had_a_record_is_not_believed_later(world: SharedTiers) -> None:
    """A record reached the cold tier, and left it again while its entry was being ended. Saved once more, at hot, it
    may not go from there: the cold tier gets it once more."""
    prompt = Prompt(ATTENTION, "a", 64)
    record = prompt.record(64, 0, 0)
    held = Held(world.hot.inner, "allow_eviction")
    store = await world.store(prompt, hot=held)
    await store.save(record, ack=Ack.COLD, retention=Retention.SHORT, deadline=soon())
    assert await world.cold.delete(record.key, deadline=soon())
    saving = asyncio.ensure_future(store.save(record, ack=Ack.HOT, deadline=soon()))
    await asyncio.sleep(0)
    held.let_go.set()
    assert await saving is SaveOutcome.STORED
    await world.finished()
    assert await world.cold.head([record.key], deadline=soon()) != [None]


class LateHead(FaultyTier):
    """Says what it has when it is let go: by then it may not be so."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner, name="s3")
        self.let_go, self.asked = asyncio.Event(), asyncio.Event()

    async def head(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> list[int | None]:
        found = await super().head(keys, deadline=deadline)
        self.asked.set()
        await self.let_go.wait()
        return found


async def test_a_finisher_does_not_believe_a_late_answer(world: SharedTiers) -> None:
    """It finds the record of a dead service in the cold tier, and hears of it late. Until then the record has left both
    tiers, and another service has acknowledged it at hot: from there it may not go."""
    prompt, cold, late = Prompt(ATTENTION, "a", 64), world.cold, LateHead(world.cold.inner)
    record = prompt.records()[0]
    await cold.put(record, deadline=soon())
    await world.log().add([PendingEntry(record.key, record.num_bytes, 64)], deadline=soon())
    world.cold = late
    finishing = await world.store(prompt)
    await late.asked.wait()
    world.cold, cold.down = cold, True
    await cold.inner.delete(record.key, deadline=soon())
    assert await (await world.store(prompt)).save(record, ack=Ack.HOT, deadline=soon()) is SaveOutcome.STORED
    await asyncio.sleep(0.25)
    late.let_go.set()
    await until(lambda: finishing.meters.get("pending_finished", outcome="present"))
    assert world.hot.keys_allowed == []
    cold.down = False
    await world.finished()
    assert await cold.head([record.key], deadline=soon()) != [None]


async def test_an_outage_of_the_hot_tier_does_not_hold_up_the_cold_one(world: SharedTiers) -> None:
    """The hot tier is away: records reach the cold one; when it is back it gets them too, and they may go there."""
    prompt = Prompt(ATTENTION, "a", 320)
    world.hot.down = True
    store = await world.store(prompt)
    for record in prompt.records():
        await store.save(record, deadline=soon())
    await until(lambda: len(world.cold.keys_put) == 10)
    world.hot.down = False
    assert await store.drain(soon()) == 0
    await world.finished()
    assert set(world.hot.keys_allowed) == set(world.hot.keys_put) == set(world.cold.keys_put)


class Full(FaultyTier):
    """Has no room, unless `has_room` is set."""

    has_room = False

    async def put(self, record: Record, *, deadline: Deadline) -> PutOutcome:
        if self.has_room:
            return await super().put(record, deadline=deadline)
        await self._fault("put", deadline)
        return PutOutcome.FULL


class FullTheSecondTime(FaultyTier):
    """Has room for each record once."""

    async def put(self, record: Record, *, deadline: Deadline) -> PutOutcome:
        return PutOutcome.FULL if record.key in self.keys_put else await super().put(record, deadline=deadline)


async def test_a_record_stored_without_an_answer_keeps_its_entry_if_it_is_refused_later(world: SharedTiers) -> None:
    """That there is no room at the second try does not say that the first one did not store it. Without an entry it
    would stay in the hot tier for good after a crash: that one may not evict it, and it would be copied nowhere."""
    prompt = Prompt(ATTENTION, "a", 64)
    first, record = prompt.records()
    hot = FullTheSecondTime(MemoryTier(MIB), name="redis")
    hot.unanswered = {record.key}
    world.cold.down = True
    store = await world.store(prompt, hot=hot, limits=replace(PATIENT, write_back_bytes=1192))
    for one in (first, record):
        await store.save(one, deadline=soon())
    await until(lambda: store.meters.get("write_back_dropped", tier="redis", reason="tier_full"))
    await world.die(store)
    world.cold.down = False
    await world.store(prompt, hot=hot)
    await world.finished()
    assert {first.key, record.key} == set(world.cold.keys_put) == set(hot.keys_allowed)


@pytest.mark.parametrize("hot_state", ["down", "full"])
async def test_a_burst_longer_than_its_queue_reaches_the_cold_tier_without_the_hot_one(
    world: SharedTiers, hot_state: str
) -> None:
    """The hot tier takes nothing: what finds no room in the queue to the cold one waits in memory for that one too."""
    prompt = Prompt(ATTENTION, "a", 640)
    hot = Full(MemoryTier(MIB), name="redis")
    hot.down = hot_state == "down"
    store = await world.store(prompt, limits=replace(PATIENT, write_back_bytes=2 * 1192), hot=hot)
    for record in prompt.records():
        await store.save(record, deadline=soon())
    await until(lambda: len(world.cold.keys_put) == 20)
    assert store.meters.get("write_back_dropped", tier="s3", reason="evicted") == 0
    hot.down = False
    assert await store.drain(soon()) == 0
    await world.finished()


async def test_what_memory_evicts_is_not_lost_to_the_cold_tier_if_the_hot_one_gets_it(world: SharedTiers) -> None:
    """The cold tier is down, and memory holds ten records: the others were in the hot tier before memory evicted them,
    and are copied from there."""
    prompt = Prompt(ATTENTION, "a", 640)
    limits = replace(PATIENT, write_back_bytes=6 * 1192, stage_bytes=5 * 1192)
    memory = MemoryTier(10 * (1192 + RECORD_OVERHEAD_BYTES))
    world.cold.down = True
    store = await world.store(prompt, limits=limits, memory=memory)
    for number, record in enumerate(prompt.records(), start=1):
        await store.save(record, deadline=soon())
        await until(lambda number=number: len(world.hot.keys_put) == number)  # type: ignore[misc]
    assert len(memory) == 10
    assert not [name for name in store.meters.snapshot() if name.startswith("write_back_dropped")]
    world.cold.down = False
    await world.finished()
    assert set(world.cold.keys_put) == {record.key for record in prompt.records()}


class Unsure(FaultyTier):
    """Takes nothing, and does not say so."""

    async def put(self, record: Record, *, deadline: Deadline) -> PutOutcome:
        if self.refused:
            raise Unavailable("no answer", tier=self.name)
        return await super().put(record, deadline=deadline)


async def test_a_save_that_the_hot_tier_did_not_answer_still_reaches_both(world: SharedTiers) -> None:
    """Its record waits in memory for the cold tier, and goes on waiting: nobody knows that the hot one has it. Later
    saves find it in memory and write nothing, so it is written to the hot tier too once that one answers."""
    prompt = Prompt(ATTENTION, "a", 64)
    first, record = prompt.records()
    hot = Unsure(MemoryTier(MIB), name="redis")
    world.cold.down = True
    store = await world.store(prompt, hot=hot, limits=replace(PATIENT, write_back_bytes=1192))
    await store.save(first, ack=Ack.HOT, deadline=soon())
    hot.refused = {record.key}
    with pytest.raises(Unavailable):
        await store.save(record, ack=Ack.HOT, deadline=soon())
    assert await store.save(record, deadline=soon()) is SaveOutcome.EXISTS
    await asyncio.sleep(2 * LEASE_S)  # a finisher looks for it in the hot tier
    world.cold.down, hot.refused = False, set()
    await until(lambda: {first.key, record.key} <= set(world.cold.keys_put) & set(hot.keys_put))
    await world.finished()
    assert not [name for name in store.meters.snapshot() if name.startswith("write_back_dropped")]


async def test_a_save_that_is_tried_again_does_not_wait_any_more(world: SharedTiers) -> None:
    """The first try failed, so its record waits for the hot tier, behind others. The second one wrote it: memory may
    evict it now, and nothing is counted as lost."""
    prompt = Prompt(ATTENTION, "a", 64)
    first, record = prompt.records()
    store = await world.store(prompt, limits=replace(PATIENT, write_back_bytes=1192))
    store.operations.pause(Level.HOT, is_paused=True)
    await store.save(first, deadline=soon())
    world.hot.down = True
    with pytest.raises(Unavailable):
        await store.save(record, ack=Ack.HOT, deadline=soon())
    world.hot.down = False
    assert await store.save(record, ack=Ack.HOT, deadline=soon()) is SaveOutcome.STORED
    store.memory.remove(record.key)
    assert not [name for name in store.meters.snapshot() if name.startswith("write_back_dropped")]


async def test_what_memory_evicts_and_the_hot_tier_has_no_room_for_is_counted(world: SharedTiers) -> None:
    """The cold tier is down. Memory evicts a record that is on its way to the hot tier, which then has no room for it:
    the cold one does not get it either."""
    prompt = Prompt(ATTENTION, "a", 320)
    limits = replace(PATIENT, write_back_bytes=4 * 1192, stage_bytes=4 * 1192)
    hot = Full(MemoryTier(MIB), name="redis")
    hot.has_room = world.cold.down = True
    store = await world.store(prompt, hot=hot, limits=limits, memory=MemoryTier(5 * (1192 + RECORD_OVERHEAD_BYTES)))
    for number, record in enumerate(prompt.records()):
        hot.down = number >= 4
        await store.save(record, deadline=soon())
        await until(lambda number=number: len(hot.keys_put) == min(4, number + 1))  # type: ignore[misc]
    hot.has_room = hot.down = False
    await until(lambda: store.meters.get("write_back_dropped", tier="redis", reason="tier_full") == 6)
    world.cold.down = False
    assert await store.drain(soon()) == 0
    assert len(world.cold.keys_put) == 9
    assert store.meters.get("write_back_dropped", tier="s3", reason="evicted") == 1


async def test_without_a_hot_tier_a_crash_is_told_of(tmp_path: Path) -> None:
    """Memory and a directory: what had not arrived when the process died is gone, and the next one says how much."""
    prompt, cold = Prompt(ATTENTION, "a", 320), slow_tier("filesystem")
    log = await SqlitePendingLog.open(tmp_path / "pending.db", lease_s=60.0)
    store = TieredStore(MemoryTier(16 * MIB), None, cold, pending=log, limits=PATIENT)
    await store.open_namespace(prompt.description, deadline=soon())
    for record in prompt.records()[:4]:
        await store.save(record, ack=Ack.COLD, deadline=soon())
    assert await store.drain(soon()) == 0
    assert await log.totals(deadline=soon()) == NOTHING
    cold.down = True
    for record in prompt.records()[4:]:
        await store.save(record, deadline=soon())
    await until(lambda: cold.calls["put"] >= 8)
    num_begun = (await log.totals(deadline=soon())).num_records
    assert num_begun > 0
    await store._context.background.aclose()
    await log.aclose()
    cold.down = False
    log = await SqlitePendingLog.open(tmp_path / "pending.db", lease_s=60.0)
    store = TieredStore(MemoryTier(16 * MIB), None, cold, pending=log, limits=PATIENT)
    await until(lambda: store.meters.get("pending_finished", outcome="lost") == num_begun)
    assert await log.totals(deadline=soon()) == NOTHING
    await store.aclose()
    await log.aclose()
