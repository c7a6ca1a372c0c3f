"""The words for why a prompt was not resumed any further."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

import pytest
from store_harness import slow_tier

from kvstore.api import Ack, Outcome
from kvstore.catalog.base import Addition, LeaveReason, Leaving, Removal
from kvstore.catalog.entry import Level
from kvstore.cli.status_problems import LATE
from kvstore.client import BlockingStore, PageDoor, describe_pages
from kvstore.errors import Unavailable
from kvstore.model.keys import PrefixHash, RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.service.server import Server
from kvstore.store.catalogued_tier import CataloguedTier
from kvstore.store.explain.reasons import LEFT, REASONS
from kvstore.store.recorder import Recorder
from kvstore.store.tiered import TieredStore
from kvstore.testing.dict_catalog import CatalogBooks, DictCatalog
from kvstore.testing.prompts import ATTENTION, HYBRID, Prompt, describe
from kvstore.testing.waiting import soon, until
from kvstore.tiers.memory import MemoryTier
from kvstore.wire.address import parse_address
from tests.virtual_time import ShiftedClock

T = TypeVar("T")
PROMPT = Prompt(ATTENTION, "a", 64)
ROOT = Path(__file__).resolve().parents[3]


def test_every_word_is_documented() -> None:
    """The tables of docs/explain.md list each with what it means, and no other."""
    rows = re.findall(r"^\| (?:`(\w+)`|none) \| (.+?) \|", (ROOT / "docs/explain.md").read_text(), re.MULTILINE)
    told = {word: why for word, why in rows if why in {reason.why for reason in REASONS.values()}}
    assert told == {word: reason.why for word, reason in REASONS.items()}


@pytest.mark.parametrize("word", [word for word in REASONS if word in LATE or word.startswith("save_")])
def test_advice_does_not_go_in_a_circle(word: str) -> None:
    """`kvstore status` shows what to do about these reasons, and so does the doctor of losses: neither sends its reader
    to itself, or to the other one and back."""
    advice = REASONS[word].advice
    assert advice and "kvstore status" not in advice
    if word.startswith("save_"):
        assert "kvstore doctor" not in advice


def test_every_way_to_leave_has_a_word() -> None:
    """A tombstone's reason is never unknown."""
    assert set(LEFT) == set(LeaveReason)
    assert set(LEFT.values()) <= set(REASONS)


def test_every_word_of_the_connector_is_known() -> None:
    """What an engine tells has a sentence here."""
    text = "".join(path.read_text() for path in (ROOT / "connector/scheduler").glob("*.py"))
    told = set(re.findall(r"""(?:_miss|outcomes\.report)\(state, "(\w+)\"""", text))
    told |= set(re.findall(r"""return "(\w+)", \{""", text))
    assert len(told) > 12
    assert told - {"nothing_staged"} <= set(REASONS)


class ExplainedStore:
    """A store over a tier `redis`, whose server has the catalog too, and a tier `s3`."""

    def __init__(self) -> None:
        self.redis, self.s3 = slow_tier("redis"), slow_tier("s3")
        self.clock = ShiftedClock()
        instruments = Instruments(self.clock)
        self.books = CatalogBooks(complete=True)
        self.catalog = DictCatalog(self.books, clock=self.clock, ask=self._ask)
        self.recorder = Recorder(self.catalog, instruments)
        hot = CataloguedTier(self.redis, Level.HOT, self.recorder)
        cold = CataloguedTier(self.s3, Level.COLD, self.recorder)
        self.store = TieredStore(MemoryTier(16 << 20), hot, cold, recorder=self.recorder, instruments=instruments)

    async def _ask(self, what: str, work: Callable[[], T], deadline: Deadline) -> T:
        if self.redis.down:
            raise Unavailable("it does not answer", tier="redis")
        return work()

    async def save(self) -> None:
        await self.store.open_namespace(PROMPT.description, deadline=soon())
        for record in PROMPT.records():
            await self.store.save(record, ack=Ack.COLD, deadline=soon())
        assert await self.store.drain(soon()) == 0

    async def evict(self, level: Level, reason: LeaveReason = LeaveReason.EVICTED) -> None:
        leaving = [Leaving(PROMPT.namespace, PROMPT.boundary(64).prefix)]
        (entry,) = await self.catalog.start_leaving(leaving, level, deadline=soon())
        assert entry is not None
        assert await self.catalog.finish_leaving([(entry, reason)], level, deadline=soon())

    async def explain(self, *, reason: str = "nothing_stored", groups: int = 0) -> Mapping[str, Any]:
        """The explanation of a request that comes now and needs the prompt's page."""
        stop = PROMPT.boundary(64)
        self.clock.ahead_s += 60
        self.clock.date_ahead_s += 60
        self.store.report(Outcome("r", PROMPT.namespace, 64, 64, 0, 0, reason, {}, stop, groups))
        return await self.again()

    async def again(self) -> Mapping[str, Any]:
        return await self.store.explain("r", deadline=soon())

    async def listed(self) -> str:
        told: Any = await self.store.explain("", deadline=soon())
        return str(told["requests"][0]["reason"])


@pytest.fixture
async def world() -> AsyncIterator[ExplainedStore]:
    made = ExplainedStore()
    yield made
    made.redis.down = False
    await made.store.aclose()
    await made.recorder.aclose()


@pytest.mark.parametrize("reason", ["nothing_stored", "gone"])
async def test_evicted_from_one_tier_and_held_by_another(world: ExplainedStore, reason: str) -> None:
    """It left Redis long ago and S3 has it: the eviction is not why the request missed, and each tier is named."""
    await world.save()
    await world.evict(Level.HOT)
    told = await world.explain(reason=reason)
    assert told["reason"] == {"nothing_stored": "other_tier", "gone": "gone"}[reason]
    assert told["detail"]["in_redis"] == "not stored: evicted 60 s before the request"
    assert told["detail"]["in_s3"] == "stored"


async def test_evicted_from_each_tier(world: ExplainedStore) -> None:
    """The last tier that it left gives the reason; the other one is named too."""
    await world.save()
    await world.evict(Level.HOT)
    await world.evict(Level.COLD, LeaveReason.QUOTA)
    told = await world.explain()
    assert (told["reason"], told["detail"]["left_from"]) == ("quota", "cold")
    assert told["detail"]["in_redis"].startswith("not stored: evicted")
    assert told["detail"]["in_s3"].startswith("not stored: quota")


async def test_evicted_from_one_tier_and_incomplete_in_another(world: ExplainedStore) -> None:
    """What S3 has of it does not suffice: that it left Redis is the reason."""
    await world.save()
    await world.catalog.remove(
        [Removal(PROMPT.key(64, slice_=1), Level.COLD, None, LeaveReason.CORRUPT)], deadline=soon()
    )
    await world.evict(Level.HOT)
    told = await world.explain()
    assert told["reason"] == "evicted"
    assert told["detail"]["in_s3"] == "stored in part: corrupt 60 s before the request"


async def test_while_the_catalog_does_not_answer(world: ExplainedStore) -> None:
    """Nobody can know why it was not stored: that is said, with the tier, until the catalog answers."""
    await world.save()
    await world.evict(Level.HOT)
    await world.evict(Level.COLD)
    world.redis.down = True
    told = await world.explain()
    assert told["reason"] == await world.listed() == "no_answer"
    assert "redis" in told["detail"]["no_answer"] and "doctor" in told["advice"]
    world.redis.down = False
    assert (await world.again())["reason"] == await world.listed() == "evicted"


async def test_while_the_catalog_takes_no_changes(world: ExplainedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis is full but can be read, and S3 takes what the catalog does not learn of: it is not called never stored."""
    with monkeypatch.context() as full:

        async def refuse(*_: object, **__: object) -> list[bool]:
            raise Unavailable("it has no memory left", tier="redis")

        full.setattr(world.catalog, "add", refuse)
        await world.save()
        told = await world.explain()
        assert told["reason"] == "no_answer"
        said = told["detail"]["no_answer"]
        assert "took no changes" in said and "4 of this service wait" in said and "=" not in said


async def test_what_the_catalog_never_learnt_of(world: ExplainedStore) -> None:
    """The service that wrote it to S3 was killed while Redis was full: it is stored, so it is not called never stored,
    also after it was computed and saved again. While S3 is silent, nobody can know.
    """
    await world.store.open_namespace(PROMPT.description, deadline=soon())
    for record in PROMPT.records():
        await world.s3.inner.put(record, deadline=soon())
    world.s3.down = True
    assert (await world.explain())["reason"] == "no_answer"
    world.s3.down = False
    told = await world.again()
    assert told["reason"] == await world.listed() == "catalog_incomplete" and "in the background" in told["advice"]
    assert told["detail"] == {"in_s3": "stored, and unknown to the catalog"}
    await world.save()
    told = await world.again()
    assert told["reason"] == await world.listed() == "catalog_incomplete"


async def test_what_a_silent_tier_may_have_held_is_not_called_never_stored(world: ExplainedStore) -> None:
    """S3 did not answer when the reason was looked for. What it may have held then is not known later either, once the
    catalog knows the prompt from what was stored or read since."""
    await world.store.open_namespace(PROMPT.description, deadline=soon())
    for record in PROMPT.records():
        await world.s3.inner.put(record, deadline=soon())
    world.s3.down = True
    assert (await world.explain())["reason"] == "no_answer"
    world.s3.down = False
    await world.save()
    told = await world.again()
    assert told["reason"] == await world.listed() == "no_answer" and "stored_after_s" in told["detail"]


@pytest.mark.parametrize("groups", [0, 1])
async def test_nothing_is_missing_any_more(world: ExplainedStore, groups: int) -> None:
    """Some of it was stored before the request and the rest after it: no loss is to be looked for."""
    await world.save()
    told = await world.explain(groups=groups)
    assert told["reason"] == "stored_since" and "losses" not in told["advice"]
    assert told["detail"]["in_s3"] == "stored" and "slices_missing" not in told["detail"]


async def test_a_reason_that_was_found_stays(world: ExplainedStore) -> None:
    """The catalog falls silent after the search: its answer of before is still right."""
    await world.save()
    await world.evict(Level.HOT)
    await world.evict(Level.COLD)
    assert (await world.explain())["reason"] == "evicted"
    world.redis.down = True
    told = await world.again()
    assert told["reason"] == await world.listed() == "evicted"
    assert "redis" in told["detail"]["no_answer"]


async def test_a_tier_that_describes_other_namespaces_does_not_answer(world: ExplainedStore) -> None:
    """Whether another namespace has the prompt is not known: then it may not be called never stored."""
    await world.store.open_namespace(PROMPT.description, deadline=soon())
    other = describe(ATTENTION, "other")
    await world.catalog.register(other.id, ATTENTION, "", deadline=soon())
    world.s3.down = True
    told = await world.explain()
    assert told["reason"] == "no_answer" and "s3" in told["detail"]["no_answer"]
    world.s3.down = False
    assert (await world.again())["reason"] == "never_stored"


async def test_the_same_weights_in_another_namespace(world: ExplainedStore) -> None:
    """It has the prompt, if at all, up to other boundaries: the fields that differ are named, of no other model."""
    await world.store.open_namespace(PROMPT.description, deadline=soon())
    for prompt in (Prompt(replace(ATTENTION, page_tokens=256), "a", 256), Prompt(HYBRID, "b", 64, model="other")):
        await world.store.open_namespace(prompt.description, deadline=soon())
        for record in prompt.records():
            await world.store.save(record, ack=Ack.COLD, deadline=soon())
    assert await world.store.drain(soon()) == 0
    told = await world.explain()
    assert told["reason"] == "never_stored"
    assert told["detail"]["fields"] == "layout.page_tokens"
    assert told["detail"]["layout.page_tokens"] == "64 here, 256 there"


async def test_parts_of_one_engines_pages_are_no_other_engines(world: ExplainedStore) -> None:
    """An engine that names its pages itself has a namespace for each group, pool or rank, under the same keys. None of
    them is named, whether it has the page or not; nor is one that has another door."""
    same = {"model": "test", "engine": "vllm offloading"}
    of_groups = [describe_pages({**same, "group": group}, page_tokens=64) for group in (0, 1)]
    for description in (PROMPT.description, *of_groups):
        await world.store.open_namespace(description, deadline=soon())
        await world.catalog.register(description.id, description.layout(), "", deadline=soon())
    stop = PROMPT.boundary(64)
    for stored, asked in ((of_groups[1], of_groups[0]), (of_groups[0], PROMPT.description)):
        key = RecordKey(stored.id, PrefixHash(bytes(32)) if asked is PROMPT.description else stop.prefix, 0, 0)
        await world.catalog.add([Addition(key, Level.COLD, 10, 64)], deadline=soon())
        world.store.report(Outcome("r", asked.id, 64, 64, 0, 0, "nothing_stored", {}, stop))
        told = await world.again()
        assert told["reason"] == "never_stored" and "other_namespace" not in told["detail"]


async def test_a_tenant_with_more_namespaces_than_are_compared(world: ExplainedStore) -> None:
    """Each costs a read of its description, so not all are: how many were left out is said."""
    await world.store.open_namespace(PROMPT.description, deadline=soon())
    assert "namespaces_not_compared" not in (await world.explain())["detail"]
    for number in range(70):
        other = describe(ATTENTION, f"other {number}")
        await world.catalog.register(other.id, ATTENTION, "", deadline=soon())
    assert (await world.explain())["detail"]["namespaces_not_compared"] == 6


async def test_the_background_says_no_answer_too(world: ExplainedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search that nobody asked for meets a silent catalog: the list says so."""
    monkeypatch.setattr("kvstore.store.explain.explainer._PAUSE_S", 0.0)
    await world.store.open_namespace(PROMPT.description, deadline=soon())
    world.redis.down = True
    world.store.report(Outcome("r", PROMPT.namespace, 64, 64, 0, 0, "nothing_stored", {}, PROMPT.boundary(64)))
    searching = world.store._explainer._searching
    assert searching is not None
    await searching
    assert await world.listed() == "no_answer"


async def test_memory_without_room_is_told_with_the_size_that_is_enough(world: ExplainedStore) -> None:
    """About, and only where a part of the prompt was loaded: three quarters of the 16 MiB can be leased."""
    for name, resume_tokens, detail in (("part", 320, {"bytes": 4 << 20}), ("nothing", 64, {})):
        world.store.report(Outcome(name, None, 1000, 960, 64, resume_tokens, "node_memory", detail=detail))
    told = await world.store.explain("part", deadline=soon())
    whole_bytes = (4 << 20) * (960 - 64) / (320 - 64)
    expected = {"bytes": 4 << 20, "memory_bytes": 16 << 20, "memory_for_all_bytes": ceil(whole_bytes * 4 / 3)}
    assert told["detail"] == expected
    assert (await world.store.explain("nothing", deadline=soon()))["detail"] == {"memory_bytes": 16 << 20}


async def test_what_cut_a_query_of_pages_short_is_its_reason(world: ExplainedStore, tmp_path: Path) -> None:
    """A caller with its own keys knows only how many pages it got. Its door knows why the store gave no more: memory
    has no room for them, or a tier is silent. The latest query counts, and what the store never had stays that.
    """
    server = Server(world.store)
    address = parse_address(f"unix:{tmp_path / 'socket'}")
    await server.listen([address])
    keys = [f"page {number}" for number in range(14)]

    def query(door: PageDoor, name: str, keys: list[str], *, is_lookup: bool = False) -> int:
        num_found = sum(door.present(keys)) if is_lookup else door.exists(keys)
        door.report(name, keys, num_found, reason="nothing_stored")
        return num_found

    def ask(door: PageDoor) -> None:
        assert all(door.write_from(keys, [[bytearray(1 << 20)]] * len(keys)))
        assert 0 < query(door, "large", keys) < len(keys)  # three quarters of the 16 MiB can be leased
        world.books.complete, world.s3.down = False, True
        world.clock.ahead_s += 60  # lookups ask again now whether the catalog is complete
        assert query(door, "silent", ["unknown"]) == query(door, "silent lookup", ["unknown"], is_lookup=True) == 0
        world.books.complete, world.s3.down = True, False
        world.clock.ahead_s += 60
        assert query(door, "unknown", ["unknown"]) == 0

    try:
        with BlockingStore(str(address)) as store:
            door = PageDoor(store, describe_pages({"weights_id": "w", "model": "m"}, page_tokens=64))
            await asyncio.to_thread(ask, door)
            await until(  # reports are sent in the background
                lambda: world.store.explain("", deadline=soon()), holds=lambda told: len(told["requests"]) >= 4
            )
            for name, reason in {
                "large": "node_memory",
                "silent": "tier_failed",
                "silent lookup": "tier_failed",
                "unknown": "never_stored",
            }.items():
                told = await world.store.explain(name, deadline=soon())
                assert (told["request"], told["reason"]) == (name, reason)
                assert told["detail"].get("tier") == ("s3" if reason == "tier_failed" else None)
            door.close()
    finally:
        await server.aclose()
