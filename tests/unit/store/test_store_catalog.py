"""A store with a catalog: what it tells it, what it believes of it, and what happens without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from kvstore.api import Ack
from kvstore.catalog.base import LeaveReason
from kvstore.catalog.entry import Level
from kvstore.catalog.sqlite import SqliteCatalog
from kvstore.errors import Unavailable
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters
from kvstore.store.catalogued import CataloguedTier
from kvstore.store.recorder import Recorder
from kvstore.store.tiered import TieredStore
from kvstore.testing.dict_catalog import CatalogBooks, DictCatalog
from kvstore.testing.faults import FaultyTier
from kvstore.testing.prompts import ATTENTION, HYBRID, Prompt
from kvstore.tiers.base import PutOutcome
from kvstore.tiers.memory import MemoryTier

T = TypeVar("T")


def soon() -> Deadline:
    return Deadline.after(10.0)


@dataclass
class World:
    """Two tiers of memory that stand for the shared ones, and the store of one node."""

    catalog: SqliteCatalog
    recorder: Recorder
    hot: FaultyTier
    cold: FaultyTier
    memory: MemoryTier
    store: TieredStore

    async def save(self, prompt: Prompt) -> None:
        await self.store.open_namespace(prompt.description, deadline=soon())
        await self.store.lookup(prompt.query(), deadline=soon())
        for record in prompt.records():
            await self.store.save(record, ack=Ack.COLD, deadline=soon())
        await self.store.drain(soon())

    def forget_memory(self) -> None:
        for key in list(self.memory._slots):
            self.memory.remove(key)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    meters = Meters()
    catalog = SqliteCatalog(tmp_path / "catalog.db")
    recorder = Recorder(catalog, meters, SYSTEM_CLOCK)
    hot = FaultyTier(MemoryTier(16 << 20, name="hot"))
    cold = FaultyTier(MemoryTier(16 << 20, name="cold"))
    memory = MemoryTier(16 << 20)
    store = TieredStore(
        memory,
        CataloguedTier(hot, Level.HOT, recorder),
        CataloguedTier(cold, Level.COLD, recorder),
        recorder=recorder,
        meters=meters,
    )
    yield World(catalog, recorder, hot, cold, memory, store)
    await store.aclose()
    await recorder.aclose()
    await catalog.aclose()


async def test_what_is_saved_is_in_the_catalog(world: World) -> None:
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


async def test_a_complete_catalog_is_asked_instead_of_the_tiers(world: World) -> None:
    """Another node's memory is empty: the lookup is answered without a head, in full, with sizes and tiers."""
    prompt = Prompt(HYBRID, "a", 200)
    await world.save(prompt)
    expected = await world.store.lookup(prompt.query(), deadline=soon())
    await world.catalog.set_complete(True, deadline=soon())
    world.forget_memory()
    world.store._finder._catalog._asked_s = float("-inf")  # type: ignore[union-attr]
    world.hot.down = world.cold.down = True
    found = await world.store.lookup(prompt.query(), deadline=soon())
    assert found.resume_tokens == expected.resume_tokens > 128
    assert found.groups_present == expected.groups_present
    (offer,) = found.offers
    assert offer.tier_bytes.keys() == {"hot"} and offer.tier_bytes["hot"] > 0
    assert (await world.store.lookup(Prompt(HYBRID, "b", 200).query(), deadline=soon())).resume_tokens == 0


async def test_a_prompt_of_many_boundaries_is_asked_for_in_two_rounds(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most boundaries end no page: the pages are asked for first, then what can still matter; the answer is one."""
    prompt = Prompt(HYBRID, "a", 1000)
    await world.save(prompt)
    await world.catalog.set_complete(True, deadline=soon())
    world.store._finder._catalog._asked_s = float("-inf")  # type: ignore[union-attr]
    world.forget_memory()
    asked = []
    lookup = world.catalog.lookup

    async def note(namespace, prefixes, *, deadline):  # type: ignore[no-untyped-def]
        asked.append(len(prefixes))
        return await lookup(namespace, prefixes, deadline=deadline)

    monkeypatch.setattr(world.catalog, "lookup", note)
    at_once = await world.store.lookup(prompt.query(), deadline=soon())
    monkeypatch.setattr("kvstore.store.catalog_lookup._AT_ONCE", 1)
    in_turn = await world.store.lookup(prompt.query(), deadline=soon())
    assert in_turn.resume_tokens == at_once.resume_tokens == 992
    assert asked[0] == 62 and asked[1] == 15 and len(asked) == 3


@pytest.mark.parametrize("trouble", ["empty", "closed"])
async def test_without_an_answer_the_tiers_are_asked(world: World, trouble: str) -> None:
    """A catalog that was lost, or that does not answer, costs nothing but its own question."""
    prompt = Prompt(ATTENTION, "a", 250)
    await world.save(prompt)
    world.forget_memory()
    if trouble == "empty":
        await world.catalog.clear(deadline=soon())
    else:
        await world.catalog.aclose()
    found = await world.store.lookup(prompt.query(), deadline=soon())
    assert found.resume_tokens == 240
    staged = await world.store.stage(prompt.query(), deadline=soon())
    assert staged.resume_tokens == 240 and staged.sources == {"hot": 8}


async def test_a_record_that_is_gone_is_taken_off(world: World) -> None:
    """The catalog tells of a record that both media have lost: the stage is shorter, and the next lookup knows."""
    prompt = Prompt(ATTENTION, "a", 256)
    await world.save(prompt)
    await world.catalog.set_complete(True, deadline=soon())
    world.store._finder._catalog._asked_s = float("-inf")  # type: ignore[union-attr]
    world.forget_memory()
    for tier in (world.hot, world.cold):
        assert await tier.inner.delete(prompt.key(192, 0, 1), deadline=soon())
    assert (await world.store.lookup(prompt.query(), deadline=soon())).resume_tokens == 256
    assert (await world.store.stage(prompt.query(), deadline=soon())).resume_tokens == 128
    await world.recorder.drain(soon())
    world.forget_memory()
    assert (await world.store.lookup(prompt.query(), deadline=soon())).resume_tokens == 128
    reasons = {tombstone.reason for tombstone in await world.catalog.tombstones(limit=10, deadline=soon())}
    assert reasons == {LeaveReason.LOST}


async def test_reads_are_counted(world: World) -> None:
    """What is staged is used: hits, in one batch, for each boundary once a stage."""
    prompt = Prompt(ATTENTION, "a", 128)
    await world.save(prompt)
    for _ in range(2):
        await world.store.stage(prompt.query(), deadline=soon())
    await world.recorder.drain(soon())
    entry = await world.catalog.get(prompt.namespace, prompt.boundary(64).prefix, deadline=soon())
    assert entry is not None and entry.hits == 2


async def test_changes_wait_for_a_catalog_that_comes_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_a_put_into_a_leaving_boundary_is_tried_again(world: World) -> None:
    """A record that is written while its boundary is being deleted is refused, and stored once that has ended."""
    prompt = Prompt(ATTENTION, "a", 64)
    await world.save(prompt)
    where = (prompt.namespace, prompt.boundary(64).prefix, Level.COLD)
    assert await world.catalog.start_leaving(*where, deadline=soon()) is not None
    tier = CataloguedTier(world.cold, Level.COLD, world.recorder)
    record = prompt.record(64)
    with pytest.raises(Unavailable, match="being deleted"):
        await tier.put(record, deadline=soon())
    for one in prompt.records():
        await world.cold.delete(one.key, deadline=soon())
    await world.catalog.finish_leaving(*where, LeaveReason.EVICTED, deadline=soon())
    await asyncio.gather(*(tier.put(one, deadline=soon()) for one in prompt.records()))
    entry = await world.catalog.get(prompt.namespace, prompt.boundary(64).prefix, deadline=soon())
    assert entry is not None and entry.num_records(Level.COLD) == 2


async def test_records_that_nobody_told_of_cost_one_miss(world: World) -> None:
    """A backup was restored behind a complete catalog: the lookup finds nothing, the save finds the records there, and
    from then on they are known, with their own bytes.
    """
    prompt = Prompt(ATTENTION, "a", 128)
    restored = Prompt(ATTENTION, "a", 128, payload_bytes=3000).records()
    for record in restored:
        for tier in (world.hot, world.cold):
            await tier.inner.put(record, deadline=soon())
    await world.catalog.set_complete(True, deadline=soon())
    await world.store.open_namespace(prompt.description, deadline=soon())
    assert (await world.store.lookup(prompt.query(), deadline=soon())).resume_tokens == 0
    await world.save(prompt)
    totals = (await world.catalog.totals(deadline=soon()))[prompt.namespace]
    for level in Level:
        assert totals.levels[level].num_bytes == sum(record.num_bytes for record in restored)
    world.forget_memory()
    staged = await world.store.stage(prompt.query(), deadline=soon())
    assert (staged.resume_tokens, staged.sources) == (128, {"hot": 4})


async def test_a_catalog_that_hangs_holds_up_nobody() -> None:
    """It does not answer: a put returns at its deadline, done, and the catalog is told later."""
    books, back = CatalogBooks(), asyncio.Event()

    async def ask(what: str, work: Callable[[], T], deadline: Deadline) -> T:
        async with deadline.scope(what):
            await back.wait()
        return work()

    recorder = Recorder(DictCatalog(books, ask=ask), Meters(), SYSTEM_CLOCK)
    prompt = Prompt(ATTENTION, "a", 64)
    recorder.register(prompt.namespace, prompt.layout, "")
    tier = CataloguedTier(MemoryTier(16 << 20, name="cold"), Level.COLD, recorder)
    assert await tier.put(prompt.records()[0], deadline=Deadline.after(0.05)) is PutOutcome.STORED
    assert len(recorder) == 1  # still on its way
    back.set()
    assert await recorder.drain(soon()) == 0
    assert len(books.entries) == 1
    await recorder.aclose()
