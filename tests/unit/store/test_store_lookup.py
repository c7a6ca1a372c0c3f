"""Lookups of a `TieredStore`: who is asked, how much, and what a broken tier costs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest
from store_harness import MIB, fill, opened, slow_tier, stage

from kvstore.api import SaveOutcome
from kvstore.catalog.entry import EntryTable, Level
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.model.keys import NamespaceId, PrefixHash
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.runtime.meters import Meters
from kvstore.runtime.turns import LongWork
from kvstore.store.lookup import CatalogLookup
from kvstore.store.presence import Presence
from kvstore.testing.dict_catalog import CatalogBooks, DictCatalog
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.waiting import soon
from kvstore.tiers.guarded import GuardedTier
from kvstore.tiers.memory import MemoryTier

pytestmark = pytest.mark.virtual_time


class TestLookup:
    async def test_a_frozen_tier_opens_its_guard(self) -> None:
        """Three lookups find that the hot tier hangs; the stages after them are not slowed down by it any more."""
        prompt, hot, cold = Prompt(ATTENTION, "a", 250), slow_tier("redis"), slow_tier("s3")
        await fill(cold, prompt)
        hot.frozen = True
        guard = GuardedTier(hot, Instruments())
        async with opened(prompt, hot=guard, cold=cold) as store:
            for _ in range(3):
                assert (await store.lookup(prompt.query(), deadline=soon(0.4))).resume_tokens == 240
            assert guard.is_open
            assert (await stage(store, prompt)).resume_tokens == 240
            assert hot.calls["get"] == 0
            assert (await store.status(deadline=soon()))["tiers"]["redis"]["healthy"] is False
        await guard.aclose()

    async def test_what_memory_has_whole_is_asked_of_nobody(self) -> None:
        """The longest resume point that is possible is in memory: neither lookup nor stage sends a request."""
        prompt, cold = Prompt(ATTENTION, "a", 250), slow_tier("s3")
        async with opened(prompt, cold=cold) as store:
            for record in prompt.records():
                await store.save(record, deadline=soon())
            assert (await store.lookup(prompt.query(), deadline=soon())).resume_tokens == 240
            assert (await stage(store, prompt)).resume_tokens == 240
            assert cold.calls["head"] == cold.calls["get"] == 0

    async def test_offers_tell_what_each_tier_adds(self) -> None:
        """Pages in memory, hot and cold: how far each would carry the prompt, and what would be read from where."""
        prompt, hot, cold = Prompt(ATTENTION, "a", 250), slow_tier("redis"), slow_tier("s3")
        sizes = {record.header.span.stop: 0 for record in prompt.records()}
        for record in prompt.records():
            sizes[record.header.span.stop] += record.num_bytes
        first, second, *rest = sorted(sizes)
        await fill(hot, prompt, tokens=[first, second])
        await fill(cold, prompt)
        async with opened(prompt, hot=hot, cold=cold) as store:
            for record in prompt.records([first]):
                await store.save(record, deadline=soon())
            lookup = await store.lookup(prompt.query(), deadline=soon())
        assert [offer.resume_tokens for offer in lookup.offers] == [first, second, lookup.resume_tokens]
        memory, hot_offer, all_tiers = (offer.tier_bytes for offer in lookup.offers)
        assert memory.keys() == {"memory"}
        assert hot_offer.keys() == {"memory", "redis"}
        assert all_tiers.keys() == {"memory", "redis", "s3"}
        assert memory["memory"] == pytest.approx(sizes[first], rel=0.5)
        assert all_tiers["s3"] == pytest.approx(sum(sizes[stop] for stop in rest), rel=0.5)

    async def test_nothing_there_is_no_offer(self) -> None:
        """No resume point, no offer; and one tier that has all makes one."""
        prompt, cold = Prompt(ATTENTION, "a", 250), slow_tier("s3")
        async with opened(prompt, cold=cold) as store:
            assert (await store.lookup(prompt.query(), deadline=soon())).offers == ()
            await fill(cold, prompt)
            (offer,) = (await store.lookup(prompt.query(), deadline=soon())).offers
        assert (offer.resume_tokens, offer.tier_bytes.keys()) == (240, {"s3"})

    async def test_a_frozen_tier_costs_a_stage_no_more_than_the_stall_time(self) -> None:
        """The hot tier hangs on every call and the deadline is far away: the stage is served from cold, soon."""
        prompt, hot, cold = Prompt(ATTENTION, "a", 250), slow_tier("redis"), slow_tier("s3")
        await fill(cold, prompt)
        hot.frozen = True
        async with opened(prompt, hot=hot, cold=cold) as store:
            started = asyncio.get_running_loop().time()
            staged = await stage(store, prompt)
            assert staged.resume_tokens == 240
            assert staged.sources == {"s3": len(staged.keys)}
            assert asyncio.get_running_loop().time() - started < 2.5

    @pytest.mark.parametrize("fault", ["down", "frozen"])
    @pytest.mark.parametrize("broken", ["redis", "s3"])
    async def test_a_broken_tier_is_skipped_and_counted(self, fault: str, broken: str) -> None:
        """One tier refuses or hangs: the other one's answer counts, within the deadline, without an error."""
        prompt = Prompt(ATTENTION, "a", 250)
        tiers = {"redis": slow_tier("redis"), "s3": slow_tier("s3")}
        for tier in tiers.values():
            await fill(tier, prompt)
        setattr(tiers[broken], fault, True)
        async with opened(prompt, hot=tiers["redis"], cold=tiers["s3"]) as store:
            deadline = soon(1.5)
            assert (await store.lookup(prompt.query(), deadline=deadline)).resume_tokens == 240
            assert not deadline.expired
            assert store.meters.get("lookup_tier_failures", tier=broken) == 1
            tiers[broken].frozen = False

    async def test_memory_is_served_while_everything_else_is_down(self) -> None:
        """Both slower tiers are down: what this node has is found and staged."""
        prompt, hot, cold = Prompt(ATTENTION, "a", 128), slow_tier("redis"), slow_tier("s3")
        hot.down = cold.down = True
        async with opened(prompt, hot=hot, cold=cold) as store:
            for record in prompt.records():
                assert await store.save(record, deadline=soon()) is SaveOutcome.STORED
            assert (await store.lookup(prompt.query(), deadline=soon())).resume_tokens == 128
            assert (await stage(store, prompt)).sources == {"memory": 4}

    async def test_slices_may_be_spread_over_tiers(self) -> None:
        """One slice of a page is in memory, the other in hot: the page is there."""
        prompt, hot = Prompt(ATTENTION, "a", 64), slow_tier("redis")
        await hot.inner.put(prompt.record(64, 0, 1), deadline=soon())
        async with opened(prompt, hot=hot) as store:
            hot.down = True
            await store.save(prompt.record(64, 0, 0), deadline=soon())
            hot.down = False
            assert (await store.lookup(prompt.query(), deadline=soon())).groups_present[3] == 1
            assert (await stage(store, prompt)).resume_tokens == 64

    async def test_long_prompts_cost_few_requests(self) -> None:
        """131,072 tokens, of which 100,000 are in the cold tier: a few rounds of at most 16 heads."""
        prompt, cold = Prompt(ATTENTION, "long", 131_072, payload_bytes=10), slow_tier("s3")
        cold.inner = MemoryTier(256 * MIB)
        pages = list(range(64, 100_000, 64))
        await fill(cold, prompt, tokens=[*pages, pages[-1] + 48])
        async with opened(prompt, cold=cold) as store:
            found = await store.lookup(prompt.query(), deadline=soon())
            assert found.resume_tokens == pages[-1] + 48
            assert len(cold.keys_asked) <= 3 * 16 + 3
            assert cold.calls["head"] <= 4
            hot = slow_tier("redis")
            await fill(hot, prompt, tokens=pages)
        async with opened(prompt, hot=hot, cold=cold) as store:  # both together: the tail is in cold alone
            found = await store.lookup(prompt.query(), deadline=soon())
            assert found.resume_tokens == pages[-1] + 48


class Together(DictCatalog):
    """Answers neither question before it was asked both."""

    def __init__(self) -> None:
        super().__init__(CatalogBooks())
        self.asked = asyncio.Barrier(2)

    async def is_complete(self, *, deadline: Deadline) -> bool:
        await self.asked.wait()
        return True

    async def lookup(self, namespace: NamespaceId, prefixes: Sequence[PrefixHash], *, deadline: Deadline) -> EntryTable:
        await self.asked.wait()
        return await super().lookup(namespace, prefixes, deadline=deadline)


async def test_whether_the_catalog_is_complete_is_no_round_trip_more() -> None:
    """It is asked beside the entries, once in a while."""
    prompt, catalog, meters = Prompt(ATTENTION, "a", 250), Together(), Meters()
    await catalog.register(prompt.namespace, ATTENTION, "", deadline=soon())
    lookup = CatalogLookup(catalog, Level, Instruments(meters=meters), LongWork("lookups"))
    async with asyncio.timeout(5):
        assert await lookup.fill(Presence(ATTENTION, prompt.query()), soon())
    assert meters.get("catalog_lookups", complete="true") == 1


class Counting(DictCatalog):
    """Counts the questions; answers each after a while."""

    def __init__(self) -> None:
        super().__init__(CatalogBooks())
        self.num_asked = 0

    async def is_complete(self, *, deadline: Deadline) -> bool:
        self.num_asked += 1
        await asyncio.sleep(0)
        return True


async def test_many_lookups_ask_once_whether_the_catalog_is_complete() -> None:
    """A hundred at a time, when the last answer is no longer used: those that wait for their turn use the new one."""
    prompt, catalog = Prompt(ATTENTION, "a", 250), Counting()
    await catalog.register(prompt.namespace, ATTENTION, "", deadline=soon())
    lookup = CatalogLookup(catalog, Level, Instruments(), LongWork("lookups"))
    presences = [Presence(ATTENTION, prompt.query()) for _ in range(100)]
    assert all(await asyncio.gather(*(lookup.fill(one, soon()) for one in presences)))
    assert catalog.num_asked <= 2


class Failing(DictCatalog):
    """Answers no question while it has an error."""

    def __init__(self) -> None:
        super().__init__(CatalogBooks())
        self.error: Exception | None = None

    async def lookup(self, namespace: NamespaceId, prefixes: Sequence[PrefixHash], *, deadline: Deadline) -> EntryTable:
        if self.error is not None:
            raise self.error
        return await super().lookup(namespace, prefixes, deadline=deadline)


async def test_a_catalog_that_answers_no_lookups_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """In the log when it has lasted, and when it is over. One failure alone, or a refused question, is no outage."""
    caplog.set_level(logging.INFO, "kvstore.store")
    prompt, catalog = Prompt(ATTENTION, "a", 250), Failing()
    await catalog.register(prompt.namespace, ATTENTION, "", deadline=soon())
    lookup = CatalogLookup(catalog, Level, Instruments(), LongWork("lookups"))

    async def ask(num_times: int, error: Exception | None) -> bool:
        catalog.error = error
        for _ in range(num_times):
            await lookup.fill(Presence(ATTENTION, prompt.query()), soon())
            await asyncio.sleep(1.1)  # after a failure it is not asked for a second
        return lookup.outage.is_lasting

    assert not await ask(1, None)
    assert not await ask(1, Unavailable("a connection broke"))
    assert not await ask(1, None)
    assert not await ask(3, InvalidRequest("no such namespace"))
    assert not caplog.messages
    assert await ask(4, Unavailable("a node is silent: start it", node="a:1"))
    assert lookup.outage.reason == "a node is silent: start it node=a:1"
    assert not await ask(2, None)
    assert caplog.messages == [
        "the catalog answers no lookups: the tiers are asked instead, which is slower (a node is silent, node a:1): "
        "start it",
        "the catalog answers lookups again after 4.4 s",
    ]


class Slow(DictCatalog):
    """Takes 20 ms to answer, as a busy Redis does."""

    async def lookup(self, namespace: NamespaceId, prefixes: Sequence[PrefixHash], *, deadline: Deadline) -> EntryTable:
        async with deadline.scope("asking a slow catalog"):
            await asyncio.sleep(0.02)
        return await super().lookup(namespace, prefixes, deadline=deadline)


async def test_callers_with_little_time_keep_nobody_else_from_the_catalog() -> None:
    """One that would wait for 10 ms gets no answer of it. The next one does, and no outage is seen."""
    prompt, catalog = Prompt(ATTENTION, "a", 250), Slow(CatalogBooks(complete=True))
    await catalog.register(prompt.namespace, ATTENTION, "", deadline=soon())
    lookup = CatalogLookup(catalog, Level, Instruments(), LongWork("lookups"))
    for _ in range(3):
        assert not await lookup.fill(Presence(ATTENTION, prompt.query()), soon(0.01))
        assert await lookup.fill(Presence(ATTENTION, prompt.query()), soon())
        assert lookup.outage.since_ms is None
