"""A store with a catalog: what it tells it, what it believes of it, and what happens without it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import pytest
from store_harness import slow_tier

from kvstore.api import Ack, SaveOutcome
from kvstore.catalog.base import Addition, LeaveReason, Leaving, Removal
from kvstore.catalog.entry import BoundaryEntry, Level
from kvstore.catalog.pending import PendingEntry
from kvstore.catalog.sqlite.catalog import SqliteCatalog
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.format.record import Record
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.runtime.meters import Meters
from kvstore.store.catalogued_tier import CataloguedTier
from kvstore.store.limits import StoreLimits
from kvstore.store.recorder import Recorder
from kvstore.store.tiered import TieredStore
from kvstore.store.write_back.pending_writes import BELIEVED_S
from kvstore.testing.catalog_contract import mark_complete
from kvstore.testing.dict_catalog import CatalogBooks, DictCatalog
from kvstore.testing.dict_pending import DictPendingLog, PendingBooks
from kvstore.testing.faults import FaultyTier
from kvstore.testing.prompts import ATTENTION, HYBRID, Prompt
from kvstore.testing.waiting import soon, until
from kvstore.tiers.base import PutOutcome
from kvstore.tiers.memory import MemoryTier
from tests.unit.store.held_boundaries import held_of
from tests.virtual_time import ShiftedClock

T = TypeVar("T")


@dataclass
class CataloguedStore:
    """Two tiers of memory that stand for the shared ones, and the store of one node."""

    catalog: SqliteCatalog
    recorder: Recorder
    hot: FaultyTier
    cold: FaultyTier
    memory: MemoryTier
    store: TieredStore
    clock: ShiftedClock

    async def save(self, prompt: Prompt) -> None:
        await self.store.open_namespace(prompt.description, deadline=soon())
        await self.store.lookup(prompt.query(), deadline=soon())
        for record in prompt.records():
            await self.store.save(record, ack=Ack.COLD, deadline=soon())
        await self.store.drain(soon())

    async def forget_memory(self) -> None:
        async for entry in self.memory.scan():
            self.memory.remove(entry.key)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[CataloguedStore]:
    clock = ShiftedClock()
    instruments = Instruments(clock)
    catalog = SqliteCatalog(tmp_path / "catalog.db")
    recorder = Recorder(catalog, instruments)
    hot = FaultyTier(MemoryTier(16 << 20, name="hot"))
    cold = FaultyTier(MemoryTier(16 << 20, name="cold"))
    memory = MemoryTier(16 << 20)
    store = TieredStore(
        memory,
        CataloguedTier(hot, Level.HOT, recorder),
        CataloguedTier(cold, Level.COLD, recorder),
        recorder=recorder,
        instruments=instruments,
    )
    yield CataloguedStore(catalog, recorder, hot, cold, memory, store, clock)
    await store.aclose()
    await recorder.aclose()
    await catalog.aclose()


async def test_what_is_saved_is_in_the_catalog(world: CataloguedStore) -> None:
    """Both levels, exact bytes, positions and parents; a save of the same records again changes nothing."""
    prompt = Prompt(HYBRID, "a", 200)
    await world.save(prompt)
    await world.save(prompt)
    totals = (await world.catalog.totals(deadline=soon()))[prompt.namespace]
    records = prompt.records()
    for level in Level:
        assert totals.levels[level].num_records == len(records)
        assert totals.levels[level].num_bytes == sum(record.num_bytes for record in records)
    entry = await world.catalog.get(prompt.namespace, prompt.boundary(128).prefix, deadline=soon())
    assert entry is not None and (entry.tokens, entry.parent) == (128, prompt.boundary(64).prefix)
    tail = await world.catalog.get(prompt.namespace, prompt.boundary(192 + 0).prefix, deadline=soon())
    assert tail is not None and tail.parent == prompt.boundary(128).prefix


async def test_a_change_on_which_the_catalog_fails_holds_up_no_other(
    world: CataloguedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug in the catalog costs the changes that meet it: later ones are reported, and it is marked incomplete."""
    bad, good = Prompt(ATTENTION, "a", 64), Prompt(ATTENTION, "b", 64)
    await mark_complete(world.catalog)
    add = world.catalog.add

    async def fail(additions: Sequence[Addition], *, deadline: Deadline) -> list[bool]:
        if any(one.key.prefix == bad.boundary(64).prefix for one in additions):
            raise ValueError("a bug")
        return await add(additions, deadline=deadline)

    monkeypatch.setattr(world.catalog, "add", fail)
    async with asyncio.timeout(5.0):
        await world.save(bad)
        await world.save(good)
    assert await world.catalog.get(good.namespace, good.boundary(64).prefix, deadline=soon()) is not None
    assert len(world.recorder) == 0 and not await world.catalog.is_complete(deadline=soon())


async def test_a_change_that_the_catalog_refuses_costs_no_other_of_its_batch(world: CataloguedStore) -> None:
    """As where the entry of one boundary is damaged: of many changes that are sent together the others are taken."""
    prompt = Prompt(ATTENTION, "a", 64 * 20)
    await world.store.open_namespace(prompt.description, deadline=soon())
    await world.catalog.register(prompt.namespace, ATTENTION, "", deadline=soon())
    keys = [key for key in prompt.record_keys() if key.group == key.slice == 0]
    sizes = [0 if number == 7 else 100 for number in range(len(keys))]  # no record has 0 bytes
    first = world.recorder.sized(keys[0], Level.COLD, 100, 0, deadline=soon())
    others = [
        world.recorder.sized(key, Level.COLD, size, 0, deadline=soon())
        for key, size in zip(keys[1:], sizes[1:], strict=True)
    ]
    await asyncio.gather(first, *others)
    table = await world.catalog.lookup(prompt.namespace, [key.prefix for key in keys], deadline=soon())
    assert [number for number in range(len(keys)) if not table.present()[number]] == [7]


@pytest.mark.parametrize("is_small_first", [False, True])
async def test_each_namespace_has_its_own_parents(world: CataloguedStore, is_small_first: bool) -> None:
    """Two models with one tokenizer and pages of 32 and 64 tokens get the same prompt. With a parent of the other's
    pages a boundary would look broken, and retention would remove it.
    """
    large = Prompt(ATTENTION, "same", 256)
    small = Prompt(replace(ATTENTION, page_tokens=32), "same", 256, model="other")
    assert large.boundary(128).prefix == small.boundary(128).prefix
    both = (small, large) if is_small_first else (large, small)
    for prompt in both:
        await world.store.open_namespace(prompt.description, deadline=soon())
        await world.store.lookup(prompt.query(), deadline=soon())
    for prompt in both:
        await world.save(prompt)
        entries = [entry async for entry in world.catalog.iterate(prompt.namespace)]
        assert not held_of(entries, [group.num_slices for group in prompt.layout.groups]).broken().any()
        step = prompt.layout.page_tokens
        parents = {entry.tokens: entry.parent for entry in entries}
        assert parents.pop(step) is None
        assert parents == {at: prompt.boundary(at - step).prefix for at in range(2 * step, 257, step)}


async def test_a_complete_catalog_is_asked_instead_of_the_tiers(world: CataloguedStore) -> None:
    """Another node's memory is empty: the lookup is answered without a head, in full, with sizes and tiers."""
    prompt = Prompt(HYBRID, "a", 200)
    await world.save(prompt)
    expected = await world.store.lookup(prompt.query(), deadline=soon())
    await mark_complete(world.catalog)
    await world.forget_memory()
    world.clock.ahead_s += 10  # the store asks again whether the catalog is complete
    world.hot.down = world.cold.down = True
    found = await world.store.lookup(prompt.query(), deadline=soon())
    assert found.resume_tokens == expected.resume_tokens > 128
    assert found.groups_present == expected.groups_present
    (offer,) = found.offers
    assert offer.tier_bytes.keys() == {"hot"} and offer.tier_bytes["hot"] > 0
    assert (await world.store.lookup(Prompt(HYBRID, "b", 200).query(), deadline=soon())).resume_tokens == 0


async def test_a_prompt_of_many_boundaries_is_asked_for_in_two_rounds(
    world: CataloguedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most boundaries end no page: the pages are asked for first, then what can still matter; the answer is one."""
    prompt = Prompt(HYBRID, "a", 1000)
    await world.save(prompt)
    await mark_complete(world.catalog)
    world.clock.ahead_s += 10  # the store asks again whether the catalog is complete
    await world.forget_memory()
    asked = []
    lookup = world.catalog.lookup

    async def note(namespace, prefixes, *, deadline):  # type: ignore[no-untyped-def]
        asked.append(len(prefixes))
        return await lookup(namespace, prefixes, deadline=deadline)

    monkeypatch.setattr(world.catalog, "lookup", note)
    at_once = await world.store.lookup(prompt.query(), deadline=soon())
    monkeypatch.setattr("kvstore.store.lookup.NAMES_AT_ONCE", 30)
    in_turn = await world.store.lookup(prompt.query(), deadline=soon())
    assert in_turn.resume_tokens == at_once.resume_tokens == 992
    assert asked == [62, 15, 30, 17]  # never more than a piece at once


@pytest.mark.parametrize("trouble", ["empty", "closed"])
async def test_without_an_answer_the_tiers_are_asked(world: CataloguedStore, tmp_path: Path, trouble: str) -> None:
    """A catalog that was lost, or that does not answer, costs nothing but its own question."""
    prompt = Prompt(ATTENTION, "a", 250)
    await world.save(prompt)
    await world.forget_memory()
    if trouble == "empty":
        with closing(sqlite3.connect(tmp_path / "catalog.db")) as lost, lost:
            lost.executescript("DELETE FROM entries; DELETE FROM totals")
    else:
        await world.catalog.aclose()
    found = await world.store.lookup(prompt.query(), deadline=soon())
    assert found.resume_tokens == 240
    staged = await world.store.stage(prompt.query(), deadline=soon())
    assert staged.resume_tokens == 240 and staged.sources == {"hot": 8}


async def test_a_record_that_is_gone_is_taken_off(world: CataloguedStore) -> None:
    """The catalog tells of a record that both media have lost: the stage is shorter, and the next lookup knows."""
    prompt = Prompt(ATTENTION, "a", 256)
    await world.save(prompt)
    await mark_complete(world.catalog)
    world.clock.ahead_s += 10  # the store asks again whether the catalog is complete
    await world.forget_memory()
    for tier in (world.hot, world.cold):
        assert await tier.inner.delete(prompt.key(192, 0, 1), deadline=soon())
    assert (await world.store.lookup(prompt.query(), deadline=soon())).resume_tokens == 256
    assert (await world.store.stage(prompt.query(), deadline=soon())).resume_tokens == 128
    await world.recorder.drain(soon())
    await world.forget_memory()
    assert (await world.store.lookup(prompt.query(), deadline=soon())).resume_tokens == 128
    reasons = {tombstone.reason for tombstone in await world.catalog.tombstones(limit=10, deadline=soon())}
    assert reasons == {LeaveReason.LOST}


async def test_reads_are_counted(world: CataloguedStore) -> None:
    """What is staged is used: hits, in one batch, for each boundary once a stage."""
    prompt = Prompt(ATTENTION, "a", 128)
    await world.save(prompt)
    for _ in range(2):
        await world.store.stage(prompt.query(), deadline=soon())
    await world.recorder.drain(soon())
    entry = await world.catalog.get(prompt.namespace, prompt.boundary(64).prefix, deadline=soon())
    assert entry is not None and entry.hits == 2


async def test_changes_wait_for_a_catalog_that_comes_back(
    world: CataloguedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog refuses for a while: saves go on, and it learns of them in the end."""
    prompt = Prompt(ATTENTION, "a", 128)
    await world.store.open_namespace(prompt.description, deadline=soon())
    add, refused = world.catalog.add, 0

    async def refuse(additions, *, deadline):  # type: ignore[no-untyped-def]
        nonlocal refused
        refused += 1
        if refused < 3:
            raise Unavailable("not now")
        return await add(additions, deadline=deadline)

    monkeypatch.setattr(world.catalog, "add", refuse)
    for record in prompt.records():
        await world.store.save(record, ack=Ack.COLD, deadline=soon())
    await world.store.drain(soon())
    assert await world.recorder.drain(soon()) == 0
    totals = (await world.catalog.totals(deadline=soon()))[prompt.namespace]
    assert [level.num_records for level in totals.levels] == [4, 4]


async def test_a_put_into_a_leaving_boundary_is_tried_again(world: CataloguedStore) -> None:
    """A record that is written while its boundary is being deleted is refused, and stored once that has ended."""
    prompt = Prompt(ATTENTION, "a", 64)
    await world.save(prompt)
    leaving = Leaving(prompt.namespace, prompt.boundary(64).prefix)
    (hidden,) = await world.catalog.start_leaving([leaving], Level.COLD, deadline=soon())
    assert hidden is not None
    tier = CataloguedTier(world.cold, Level.COLD, world.recorder)
    record = prompt.record(64)
    with pytest.raises(Unavailable, match="being deleted"):
        await tier.put(record, deadline=soon())
    for one in prompt.records():
        await world.cold.delete(one.key, deadline=soon())
    await world.catalog.finish_leaving([(hidden, LeaveReason.EVICTED)], Level.COLD, deadline=soon())
    await asyncio.gather(*(tier.put(one, deadline=soon()) for one in prompt.records()))
    entry = await world.catalog.get(prompt.namespace, prompt.boundary(64).prefix, deadline=soon())
    assert entry is not None and entry.num_records(Level.COLD) == 2


async def test_records_that_nobody_told_of_cost_one_miss(world: CataloguedStore) -> None:
    """A backup was restored behind a complete catalog: the lookup finds nothing, the save finds the records there, and
    from then on they are known, with their own bytes.
    """
    prompt = Prompt(ATTENTION, "a", 128)
    restored = Prompt(ATTENTION, "a", 128, payload_bytes=3000).records()
    for record in restored:
        for tier in (world.hot, world.cold):
            await tier.inner.put(record, deadline=soon())
    await mark_complete(world.catalog)
    await world.store.open_namespace(prompt.description, deadline=soon())
    assert (await world.store.lookup(prompt.query(), deadline=soon())).resume_tokens == 0
    await world.save(prompt)
    totals = (await world.catalog.totals(deadline=soon()))[prompt.namespace]
    for level in Level:
        assert totals.levels[level].num_bytes == sum(record.num_bytes for record in restored)
    await world.forget_memory()
    staged = await world.store.stage(prompt.query(), deadline=soon())
    assert (staged.resume_tokens, staged.sources) == (128, {"hot": 4})


async def test_a_catalog_that_hangs_holds_up_nobody() -> None:
    """It does not answer: a put returns at its deadline, done, and the catalog is told later."""
    books, back = CatalogBooks(), asyncio.Event()

    async def ask(what: str, work: Callable[[], T], deadline: Deadline) -> T:
        async with deadline.scope(what):
            await back.wait()
        return work()

    recorder = Recorder(DictCatalog(books, ask=ask), Instruments())
    prompt = Prompt(ATTENTION, "a", 64)
    recorder.register(prompt.namespace, prompt.layout, "")
    tier = CataloguedTier(MemoryTier(16 << 20, name="cold"), Level.COLD, recorder)
    assert await tier.put(prompt.records()[0], deadline=Deadline.after(0.05)) is PutOutcome.STORED
    assert len(recorder) == 1  # still on its way
    back.set()
    assert await recorder.drain(soon()) == 0
    assert len(books.entries) == 1
    await recorder.aclose()


async def test_a_record_that_leaves_while_the_catalog_is_slow() -> None:
    """Another service deletes it after it was put, before the catalog has answered: nobody may rely on it."""
    books, answers = CatalogBooks(), asyncio.Event()

    async def ask(what: str, work: Callable[[], T], deadline: Deadline) -> T:
        async with deadline.scope(what):
            await answers.wait()
        return work()

    recorder = Recorder(DictCatalog(books, ask=ask), Instruments())
    prompt, inner = Prompt(ATTENTION, "a", 64), MemoryTier(16 << 20, name="cold")
    recorder.register(prompt.namespace, prompt.layout, "")
    record = prompt.records()[0]
    put = asyncio.create_task(CataloguedTier(inner, Level.COLD, recorder).put(record, deadline=soon()))
    await asyncio.sleep(BELIEVED_S * 1.2)
    await inner.delete(record.key, deadline=soon())
    answers.set()
    with pytest.raises(Unavailable, match="has just left the tier"):
        await put
    await recorder.aclose()


async def test_a_record_whose_boundary_leaves_before_the_catalog_is_told(
    world: CataloguedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog does not answer, so a save goes on; when it does, retention of another service is just deleting what
    the boundary had before. The record that came since is not deleted: the catalog learns of it, if later."""
    monkeypatch.setattr("kvstore.store.recorder._AGAIN_S", 0.05)
    prompt = Prompt(ATTENTION, "a", 64)
    before, since = prompt.records()[:2]
    await world.store.open_namespace(prompt.description, deadline=soon())
    await world.store.save(before, ack=Ack.COLD, deadline=soon())
    await world.store.drain(soon())
    boundary = (prompt.namespace, since.key.prefix)
    add, hidden = world.catalog.add, list[BoundaryEntry | None]()

    async def refuse(additions, *, deadline):  # type: ignore[no-untyped-def]
        if additions[0].level is not Level.COLD or hidden:
            return await add(additions, deadline=deadline)
        hidden.extend(await world.catalog.start_leaving([Leaving(*boundary)], Level.COLD, deadline=soon()))
        raise Unavailable("not now")

    monkeypatch.setattr(world.catalog, "add", refuse)
    assert await world.store.save(since, ack=Ack.COLD, deadline=soon()) is SaveOutcome.STORED
    await until(lambda: world.recorder.num_refused)
    await world.cold.inner.delete(before.key, deadline=soon())
    gone = [(entry, LeaveReason.EVICTED) for entry in hidden if entry is not None]
    await world.catalog.finish_leaving(gone, Level.COLD, deadline=soon())
    await until(
        lambda: world.catalog.totals(deadline=soon()),
        holds=lambda totals: totals[prompt.namespace].levels[Level.COLD].num_records == 1,
    )
    entry = await world.catalog.get(*boundary, deadline=soon())
    assert entry is not None and entry.keys(Level.COLD) == [since.key]


async def test_what_leaves_while_it_is_put_again_does_not_exist(
    world: CataloguedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tier tells that it has a record, and drops it before it is asked how large that is: the save is not told that
    the record exists."""
    prompt = Prompt(ATTENTION, "a", 64)
    record = prompt.records()[0]
    await world.store.open_namespace(prompt.description, deadline=soon())
    await world.cold.inner.put(record, deadline=soon())
    put = world.cold.put

    async def put_and_lose(record: Record, *, deadline: Deadline) -> PutOutcome:
        outcome = await put(record, deadline=deadline)
        await world.cold.inner.delete(record.key, deadline=deadline)
        return outcome

    monkeypatch.setattr(world.cold, "put", put_and_lose)
    with pytest.raises(Unavailable, match="put it again"):
        await world.store.save(record, ack=Ack.COLD, deadline=soon())
    monkeypatch.undo()
    assert await world.store.save(record, ack=Ack.COLD, deadline=soon()) is SaveOutcome.STORED


async def test_a_save_whose_end_is_not_known_is_looked_at_again() -> None:
    """The cold tier stores a record and its answer is lost, or comes too late: the save fails, and soon the catalog
    knows of the record all the same; nothing is pending then."""
    prompt, books, pending, meters = Prompt(ATTENTION, "unsure", 64), CatalogBooks(), PendingBooks(), Meters()
    catalog = DictCatalog(books)
    recorder = Recorder(catalog, Instruments(meters=meters))
    cold = FaultyTier(MemoryTier(16 << 20, name="cold"))
    store = TieredStore(
        MemoryTier(16 << 20),
        None,
        CataloguedTier(cold, Level.COLD, recorder),
        pending=DictPendingLog(pending, lease_s=0.3),
        recorder=recorder,
        instruments=Instruments(meters=meters),
    )
    await store.open_namespace(prompt.description, deadline=soon())
    record = prompt.records()[0]
    cold.unanswered.add(record.key)
    with pytest.raises(Unavailable):
        await store.save(record, ack=Ack.COLD, deadline=soon())
    await until(lambda: not pending.entries)
    totals = (await catalog.totals(deadline=soon()))[prompt.namespace].levels[Level.COLD]
    assert (totals.num_records, totals.num_bytes) == (1, record.num_bytes)
    await store.aclose()
    await recorder.aclose()


async def test_a_manifest_of_a_later_release_holds_no_write_back_up() -> None:
    """A service died with records of two namespaces on their way, and of one the manifest cannot be read here: those of
    the other are finished, and soon its own as well; only the catalog does not know of them."""
    known, later = Prompt(ATTENTION, "known", 64), Prompt(ATTENTION, "later", 64, tenant="other")
    pending, meters = PendingBooks(), Meters()
    recorder = Recorder(DictCatalog(CatalogBooks()), Instruments(meters=meters))
    hot, cold = FaultyTier(MemoryTier(16 << 20, name="hot")), FaultyTier(MemoryTier(16 << 20, name="cold"))
    await hot.put_manifest(later.namespace, b"not of this release", deadline=soon())
    log = DictPendingLog(pending, lease_s=0.3)
    for record in [*known.records(), *later.records()]:
        await log.add([PendingEntry(record.key, record.num_bytes, 64)], deadline=soon())
        await hot.put(record, deadline=soon())
    await log.release(list(pending.entries), deadline=soon())
    store = TieredStore(
        MemoryTier(16 << 20),
        CataloguedTier(hot, Level.HOT, recorder),
        CataloguedTier(cold, Level.COLD, recorder),
        pending=log,
        recorder=recorder,
        limits=replace(StoreLimits(stage_bytes=1 << 20), write_back_timeout_s=2.0),
        instruments=Instruments(meters=meters),
    )
    await store.open_namespace(known.description, deadline=soon())
    await until(lambda: not pending.entries)
    assert set(cold.keys_put) == {record.key for record in [*known.records(), *later.records()]}
    await store.aclose()
    await recorder.aclose()


@pytest.mark.parametrize("how", ["read", "quarantined"])
async def test_a_record_that_comes_while_it_is_missed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read finds nothing, or quarantines a bad record; before the catalog is told so, another service stores a good
    one and tells of it. The catalog has it afterwards, with its bytes, and the read has it too.
    """
    prompt = Prompt(ATTENTION, "a", 64)
    record, cold, catalog = prompt.record(64), slow_tier("s3"), DictCatalog(CatalogBooks())
    recorder = Recorder(catalog, Instruments())
    recorder.register(prompt.namespace, prompt.layout, "")
    tier = CataloguedTier(cold, Level.COLD, recorder)
    if how == "quarantined":
        await tier.put(prompt.record(64, seed=1), deadline=soon())
    remove = catalog.remove

    async def late(removals: Sequence[Removal], *, deadline: Deadline) -> None:
        await cold.inner.put(record, deadline=soon())
        added = Addition(record.key, Level.COLD, record.num_bytes, record.header.span.stop)
        await catalog.add([added], deadline=soon())
        await remove(removals, deadline=deadline)

    monkeypatch.setattr(catalog, "remove", late)
    if how == "read":
        assert await tier.get(record.key, deadline=soon()) is not None
    else:
        assert await tier.quarantine(record.key, "found bad", deadline=soon())
    entry = await catalog.get(prompt.namespace, record.key.prefix, deadline=soon())
    assert entry is not None
    assert entry.keys(Level.COLD) == [record.key]
    assert entry.num_bytes(Level.COLD) == record.num_bytes
    await recorder.aclose()


async def test_changes_that_are_left_at_the_end_mark_it_incomplete() -> None:
    """Redis is full: it takes no entry, but the mark. While they wait it is known how many and since when, and it is
    not called complete after them.
    """
    books = CatalogBooks(complete=True)
    instruments = Instruments(ShiftedClock())

    async def full(what: str, work: Callable[[], T], deadline: Deadline) -> T:
        if what in ("add", "remove"):
            raise Unavailable("it has no memory left")
        return work()

    recorder = Recorder(DictCatalog(books, ask=full), instruments)
    before_ms = SYSTEM_CLOCK.wall_ms()
    prompt = Prompt(ATTENTION, "a", 64)
    recorder.register(prompt.namespace, ATTENTION, "")
    assert (recorder.backlog.num_changes, recorder.backlog.since_ms) == (0, None)
    for record in prompt.records():
        assert await recorder.added(record, Level.COLD, deadline=soon())
    waits = recorder.backlog
    assert waits.num_changes == 2 and waits.since_ms is not None and waits.since_ms >= before_ms
    assert books.complete
    await recorder.aclose()
    assert not books.complete and instruments.meters.get("catalog_changes_lost") == 2
    await recorder.aclose()
    assert instruments.meters.get("catalog_changes_lost") == 2


async def test_a_namespace_that_is_opened_in_an_outage_is_registered_after_it() -> None:
    """Nothing is written to it, as for an engine that only reads: it is registered when the next one is opened."""
    books, is_away = CatalogBooks(), True

    async def ask(what: str, work: Callable[[], T], deadline: Deadline) -> T:
        if is_away:
            raise Unavailable("it is restarted")
        return work()

    instruments = Instruments()
    recorder = Recorder(DictCatalog(books, ask=ask), instruments)
    first, second = Prompt(ATTENTION, "a", 64), Prompt(ATTENTION, "a", 64, model="other")
    recorder.register(first.namespace, first.layout, "red")
    await until(lambda: instruments.meters.get("catalog_failures", call="register"))
    is_away = False
    recorder.register(second.namespace, second.layout, "blue")
    await until(lambda: books.tenants == {first.namespace: "red", second.namespace: "blue"})
    await recorder.aclose()


async def test_a_mark_that_failed_is_set_at_the_end() -> None:
    """The catalog refuses a change and, at that moment, the mark that it is incomplete too; then nothing more comes."""
    books, num_marks = CatalogBooks(complete=True), 0

    async def ask(what: str, work: Callable[[], T], deadline: Deadline) -> T:
        nonlocal num_marks
        if what == "add":
            raise InvalidRequest("no such slice")
        num_marks += what == "mark_incomplete"
        if what == "mark_incomplete" and num_marks == 1:
            raise Unavailable("it is restarted")
        return work()

    recorder = Recorder(DictCatalog(books, ask=ask), Instruments())
    prompt = Prompt(ATTENTION, "a", 64)
    recorder.register(prompt.namespace, prompt.layout, "")
    assert await recorder.added(prompt.record(64), Level.COLD, deadline=soon())
    assert await recorder.drain(soon()) == 0
    assert books.complete
    await recorder.aclose()
    assert not books.complete
