"""`TieredStore` when tiers are slow, down, frozen or incomplete, and across a restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.api import Ack, SaveOutcome, Staged
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.format.manifest import parse_manifest
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters
from kvstore.store.limits import StoreLimits
from kvstore.store.tiered import TieredStore
from kvstore.testing.faults import FaultyTier
from kvstore.testing.prompts import ATTENTION, HYBRID, WINDOWED, Prompt
from kvstore.tiers.base import Tier
from kvstore.tiers.filesystem import FilesystemTier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.wrap import GuardedTier

MIB = 1 << 20
LIMITS = replace(StoreLimits(), stage_bytes=12 * MIB, backoff_s_min=0.01, backoff_s_max=0.05, drain_timeout_s=0.2)


def soon(seconds: float = 10.0) -> Deadline:
    return Deadline.after(seconds)


def slow_tier(name: str) -> FaultyTier:
    return FaultyTier(MemoryTier(64 * MIB), name=name)


@asynccontextmanager
async def opened(
    prompt: Prompt,
    *,
    hot: Tier | None = None,
    cold: FaultyTier | None = None,
    limits: StoreLimits = LIMITS,
    memory_bytes: int = 16 * MIB,
) -> AsyncIterator[TieredStore]:
    """A store with empty memory over these tiers, the prompt's namespace open."""
    store = TieredStore(MemoryTier(memory_bytes), hot, cold, limits=limits)
    await store.open_namespace(prompt.description, deadline=soon())
    try:
        yield store
    finally:
        await store.aclose()


async def fill(tier: FaultyTier, prompt: Prompt, *, tokens: list[int] | None = None) -> None:
    for record in prompt.records(tokens):
        await tier.inner.put(record, deadline=soon())


async def stage(store: TieredStore, prompt: Prompt, **query: int) -> Staged:
    return await store.stage(prompt.query(**query), deadline=soon())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not condition():
            await asyncio.sleep(0.002)


class TestPromotion:
    @pytest.mark.parametrize("layout", [ATTENTION, WINDOWED, HYBRID])
    async def test_cold_records_are_staged_and_go_on_to_hot(self, layout) -> None:
        """Only the cold tier has the prompt: it is staged from there, and the hot tier gets what was read."""
        prompt, hot, cold = Prompt(layout, "a", 250), slow_tier("redis"), slow_tier("s3")
        await fill(cold, prompt)
        async with opened(prompt, hot=hot, cold=cold) as store:
            staged = await stage(store, prompt)
            assert staged.resume_tokens == 240
            assert staged.sources == {"s3": len(staged.keys)}
            assert await store.drain(soon()) == 0
            assert sorted(hot.keys_put) == sorted(staged.keys)
            assert (await stage(store, prompt)).sources == {"memory": len(staged.keys)}

    async def test_each_record_comes_from_the_nearest_tier(self) -> None:
        """Page one is in memory, page two in hot and cold, page three in cold: each is read once, from the nearest."""
        prompt, hot, cold = Prompt(ATTENTION, "a", 192), slow_tier("redis"), slow_tier("s3")
        await fill(hot, prompt, tokens=[128])
        await fill(cold, prompt, tokens=[128, 192])
        async with opened(prompt, hot=hot, cold=cold) as store:
            for record in prompt.records([64]):
                await store.save(record, deadline=soon())
            staged = await stage(store, prompt)
            assert staged.resume_tokens == 192
            assert staged.sources == {"memory": 2, "redis": 2, "s3": 2}

    async def test_concurrent_stages_of_one_prefix_fetch_once(self) -> None:
        """Eight engines ask for the same prompt at the same time: each record is read once, all eight have a lease."""
        prompt, cold = Prompt(ATTENTION, "a", 256), slow_tier("s3")
        await fill(cold, prompt)
        cold.get_s = 0.02
        async with opened(prompt, cold=cold) as store:
            staged = await asyncio.gather(*(stage(store, prompt) for _ in range(8)))
            assert {one.resume_tokens for one in staged} == {256}
            assert len({one.lease for one in staged}) == 8
            assert cold.calls["get"] == 8  # four pages of two slices

    async def test_a_cancelled_stage_does_not_take_the_others_down(self) -> None:
        """Two stages share their reads; the one that started them is cancelled, the other gets everything."""
        prompt, cold = Prompt(ATTENTION, "a", 256), slow_tier("s3")
        await fill(cold, prompt)
        cold.get_s = 0.02
        async with opened(prompt, cold=cold) as store:
            first = asyncio.ensure_future(stage(store, prompt))
            await until(lambda: cold.calls["get"] > 0)
            second = asyncio.ensure_future(stage(store, prompt))
            await asyncio.sleep(0.005)
            first.cancel()
            assert (await second).resume_tokens == 256
            assert first.cancelled()

    async def test_a_stall_ends_a_stage_with_what_arrived(self) -> None:
        """The cold tier delivers four records and then hangs: the stage ends within the stall time, two pages long."""
        prompt, cold = Prompt(ATTENTION, "a", 640), slow_tier("s3")
        await fill(cold, prompt)
        cold.get_limit = 4
        async with opened(prompt, cold=cold) as store:
            started = asyncio.get_running_loop().time()
            staged = await stage(store, prompt)
            took = asyncio.get_running_loop().time() - started
            assert staged.resume_tokens == 128
            assert len(staged.keys) == 4
            assert 0.29 <= took < 0.8
            assert store.meters.get("stages_cut", reason="stall") == 1

    async def test_slow_but_steady_is_no_stall(self) -> None:
        """Records that take 100 ms each, for longer than the stall time in all, are waited for."""
        prompt, cold = Prompt(ATTENTION, "a", 512), slow_tier("s3")
        await fill(cold, prompt)
        cold.get_s = 0.1
        limits = replace(LIMITS, stage_records_in_flight=2)
        async with opened(prompt, cold=cold, limits=limits) as store:
            started = asyncio.get_running_loop().time()
            assert (await stage(store, prompt)).resume_tokens == 512
            assert asyncio.get_running_loop().time() - started > 2 * LIMITS.stall_timeout_s

    async def test_the_deadline_ends_a_stage_with_what_arrived(self) -> None:
        """At the deadline the stage returns the complete pages instead of raising, and before the deadline."""
        prompt, cold = Prompt(ATTENTION, "a", 640), slow_tier("s3")
        await fill(cold, prompt)
        cold.get_limit = 4
        async with opened(prompt, cold=cold) as store:
            deadline = soon(0.15)
            staged = await store.stage(prompt.query(), deadline=deadline)
            assert not deadline.expired
            assert staged.resume_tokens == 128
            assert store.meters.get("stages_cut", reason="deadline") == 1

    async def test_records_that_vanished_shorten_the_hit_and_are_remembered(self) -> None:
        """The cold tier says yes to a head and no to the get: the hit ends there, and lookups say so from then on."""
        prompt, cold = Prompt(ATTENTION, "a", 256), slow_tier("s3")
        await fill(cold, prompt)
        cold.lost = {prompt.key(192, 0, 1)}
        async with opened(prompt, cold=cold) as store:
            assert (await store.lookup(prompt.query(), deadline=soon())).resume_tokens == 256
            assert (await stage(store, prompt)).resume_tokens == 128
            found = await store.lookup(prompt.query(), deadline=soon())
            assert found.resume_tokens == 128
            cold.lost.clear()
            await store.save(prompt.record(192, 0, 1), deadline=soon())  # the writer fills the hole
            assert (await stage(store, prompt)).resume_tokens == 256

    async def test_a_lost_state_falls_back_to_the_one_before(self) -> None:
        """A hybrid's state at the end has gone: the hit ends at an earlier boundary that still has one."""
        prompt, cold = Prompt(HYBRID, "a", 256), slow_tier("s3")
        await fill(cold, prompt)
        cold.lost = {prompt.key(256, 1, 2), prompt.key(192, 1, 0)}
        async with opened(prompt, cold=cold) as store:
            staged = await stage(store, prompt)
            assert staged.resume_tokens == 128
            assert store._memory.pinned_bytes == staged.num_bytes + 1024 * len(staged.keys)

    async def test_records_of_another_boundary_are_put_aside(self) -> None:
        """An intact record stands under this name but spans other tokens than the prefix: quarantined, not served."""
        prompt, cold = Prompt(ATTENTION, "a", 128), slow_tier("s3")
        await fill(cold, prompt, tokens=[64])
        liar = Prompt(ATTENTION, "a", 128)
        for slice_ in range(2):
            from kvstore.format.header_v1 import HEADER_BYTES
            from kvstore.format.record import seal
            from kvstore.model.spans import Span

            header = replace(liar.record(128, 0, slice_).header, span=Span(0, 64))
            await cold.inner.put(seal(header, bytearray(HEADER_BYTES + 8)), deadline=soon())
        async with opened(prompt, cold=cold) as store:
            assert (await stage(store, prompt)).resume_tokens == 64
            assert await cold.inner.head([prompt.key(128)], deadline=soon()) == [None]
            assert cold.calls["quarantine"] >= 1

    async def test_a_hit_larger_than_the_budget_is_cut_to_what_fits(self) -> None:
        """Ten pages of 200 kB, room for about three: the hit is three pages, and the rest of memory stays free."""
        prompt, cold = Prompt(ATTENTION, "a", 640, payload_bytes=100_000), slow_tier("s3")
        await fill(cold, prompt)
        limits = replace(LIMITS, stage_bytes=650_000)
        async with opened(prompt, cold=cold, limits=limits) as store:
            staged = await stage(store, prompt)
            assert staged.resume_tokens == 192
            assert store._memory.pinned_bytes <= 650_000
            assert cold.calls["get"] == 6  # nothing was read in vain
            other = Prompt(ATTENTION, "b", 640, payload_bytes=100_000)
            await fill(cold, other)
            assert (await stage(store, other)).lease is None  # the first lease holds the budget
            assert staged.lease is not None
            await store.release(staged.lease)
            assert (await stage(store, other)).resume_tokens == 192

    async def test_hot_that_hangs_leaves_time_for_cold(self) -> None:
        """Both tiers have the prompt; hot answers heads but its gets hang: the stage falls back to cold."""
        prompt, hot, cold = Prompt(ATTENTION, "a", 128), slow_tier("redis"), slow_tier("s3")
        for tier in (hot, cold):
            await fill(tier, prompt)
        hot.get_limit = 0
        async with opened(prompt, hot=hot, cold=cold) as store:
            staged = await stage(store, prompt)
            assert staged.resume_tokens == 128
            assert staged.sources == {"s3": 4}

    async def test_leases_have_an_upper_limit(self) -> None:
        """The table of leases is full: a stage answers with nothing, and works again after a release."""
        prompt = Prompt(ATTENTION, "a", 128)
        async with opened(prompt, limits=replace(LIMITS, leases_max=1)) as store:
            for record in prompt.records():
                await store.save(record, deadline=soon())
            first = await stage(store, prompt)
            assert first.lease is not None
            assert (await stage(store, prompt)) == Staged(None, 0)
            await store.release(first.lease)
            assert (await stage(store, prompt)).resume_tokens == 128

    async def test_the_end_of_an_owner_ends_its_leases(self) -> None:
        """A peer dies: its leases end at once, those of others stay."""
        prompt = Prompt(ATTENTION, "a", 128)
        async with opened(prompt) as store:
            for record in prompt.records():
                await store.save(record, deadline=soon())
            for owner in ("one", "one", "two"):
                staged = await store.stage(prompt.query(), deadline=soon(), owner=owner)
            assert store.release_owner("one") == 2
            assert staged.lease is not None
            assert await store.renew(staged.lease, deadline=soon())
            assert store.release_owner("two") == 1
            assert store._memory.pinned_bytes == 0


class TestLookup:
    async def test_a_frozen_tier_opens_its_guard(self) -> None:
        """Three lookups find that the hot tier hangs; the stages after them are not slowed down by it any more."""
        prompt, hot, cold = Prompt(ATTENTION, "a", 250), slow_tier("redis"), slow_tier("s3")
        await fill(cold, prompt)
        hot.frozen = True
        guard = GuardedTier(hot, meters=Meters())
        async with opened(prompt, hot=guard, cold=cold) as store:
            for _ in range(3):
                assert (await store.lookup(prompt.query(), deadline=soon(0.1))).resume_tokens == 240
            assert guard.is_open
            started = asyncio.get_running_loop().time()
            assert (await stage(store, prompt)).resume_tokens == 240
            assert asyncio.get_running_loop().time() - started < 0.1
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
            assert asyncio.get_running_loop().time() - started < 0.6

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
            deadline = soon(0.2)
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


class TestWriteBack:
    async def test_records_reach_hot_and_cold_in_prefix_order(self) -> None:
        """Records saved in reverse are written to each tier shortest prefix first."""
        prompt, hot, cold = Prompt(ATTENTION, "a", 640), slow_tier("redis"), slow_tier("s3")
        async with opened(prompt, hot=hot, cold=cold, limits=replace(LIMITS, write_back_in_flight=1)) as store:
            for record in reversed(prompt.records()):
                assert store._keep(record, None) is SaveOutcome.STORED  # no turn of the loop in between
            assert await store.drain(soon()) == 0
            expected = [record.key.prefix for record in prompt.records()]
            assert [key.prefix for key in hot.keys_put] == expected
            assert [key.prefix for key in cold.keys_put] == expected

    async def test_the_queue_is_bounded_and_drops_new_records(self) -> None:
        """The cold tier is down: the queue fills to its limit, later records stay in memory only, counted."""
        prompt, cold = Prompt(ATTENTION, "a", 640), slow_tier("s3")
        cold.down = True
        limits = replace(LIMITS, write_back_bytes=6 * 1192, write_back_attempts=1_000_000)
        async with opened(prompt, cold=cold, limits=limits) as store:
            for record in prompt.records():
                assert await store.save(record, deadline=soon()) is SaveOutcome.STORED
            status = await store.status(deadline=soon())
            assert status["write_back"] == {"s3": {"records": 6, "bytes": 6 * 1192, "failing": True}}
            assert store.meters.get("write_back_dropped", tier="s3", reason="queue_full") == 14
            assert (await stage(store, prompt)).resume_tokens == 640
            cold.down = False
            assert await store.drain(soon()) == 0
            assert [key.prefix for key in cold.keys_put] == [record.key.prefix for record in prompt.records()[:6]]

    async def test_a_tier_that_is_down_is_not_hammered(self) -> None:
        """With a tier down, pauses grow: half a second brings a handful of attempts, not thousands."""
        prompt, cold = Prompt(ATTENTION, "a", 640), slow_tier("s3")
        cold.down = True
        limits = replace(LIMITS, write_back_attempts=1_000_000, backoff_s_max=30.0)
        async with opened(prompt, cold=cold, limits=limits) as store:
            for record in prompt.records():
                await store.save(record, deadline=soon())
            await asyncio.sleep(0.5)
            assert cold.calls["put"] <= 4 + 7  # the first of each worker, then 10, 20, ... 640 ms

    async def test_records_that_never_arrive_are_given_up(self) -> None:
        """After the last attempt a record is dropped and counted, so that a queue cannot jam for ever."""
        prompt, cold = Prompt(ATTENTION, "a", 64), slow_tier("s3")
        cold.down = True
        async with opened(prompt, cold=cold, limits=replace(LIMITS, write_back_attempts=3)) as store:
            await store.save(prompt.record(64), deadline=soon())
            assert await store.drain(soon()) == 0
            assert cold.calls["put"] == 3
            assert store.meters.get("write_back_dropped", tier="s3", reason="attempts") == 1

    async def test_discarded_records_are_not_written_back(self) -> None:
        """A record is found bad while it waits for the cold tier: it never gets there."""
        prompt, cold = Prompt(ATTENTION, "a", 64), slow_tier("s3")
        cold.down = True
        async with opened(prompt, cold=cold) as store:
            await store.save(prompt.record(64), deadline=soon())
            await until(lambda: cold.calls["put"] > 0)
            with pytest.raises(Unavailable):  # the cold tier could not be told
                await store.discard(prompt.key(64), "test", deadline=soon())
            cold.down = False
            assert await store.drain(soon()) == 0
            assert cold.keys_put == []

    async def test_acks_wait_for_their_tier(self) -> None:
        """A save with ack cold returns when the cold tier has it, and raises when it is down; memory keeps it."""
        prompt, hot, cold = Prompt(ATTENTION, "a", 128), slow_tier("redis"), slow_tier("s3")
        async with opened(prompt, hot=hot, cold=cold) as store:
            first, second = prompt.record(64), prompt.record(128)
            assert await store.save(first, ack=Ack.COLD, deadline=soon()) is SaveOutcome.STORED
            assert cold.keys_put == [first.key]
            assert await store.save(first, ack=Ack.COLD, deadline=soon()) is SaveOutcome.EXISTS
            hot.down = True
            with pytest.raises(Unavailable):
                await store.save(second, ack=Ack.HOT, deadline=soon())
            hot.down = False
            assert await store.save(second, ack=Ack.HOT, deadline=soon()) is SaveOutcome.STORED

    async def test_ack_hot_needs_a_shared_hot_tier(self) -> None:
        """Without a hot tier the ack is refused by name, before anything is stored."""
        prompt = Prompt(ATTENTION, "a", 64)
        async with opened(prompt, cold=slow_tier("s3")) as store:
            with pytest.raises(InvalidRequest, match="hot"):
                await store.save(prompt.record(64), ack=Ack.HOT, deadline=soon())
            assert (await store.lookup(prompt.query(), deadline=soon())).groups_present == (0, 0, 0, 0)


class TestSave:
    async def test_a_full_memory_answers_full(self) -> None:
        """Everything that memory holds is leased: a save answers FULL, and works again after the release."""
        prompt = Prompt(ATTENTION, "a", 64, payload_bytes=300_000)
        limits = replace(LIMITS, stage_bytes=750_000)
        async with opened(prompt, limits=limits, memory_bytes=1_000_000) as store:
            for record in prompt.records():
                assert await store.save(record, deadline=soon()) is SaveOutcome.STORED
            staged = await stage(store, prompt)
            assert staged.lease is not None
            big = Prompt(ATTENTION, "b", 64, payload_bytes=500_000).record(64)
            assert await store.save(big, deadline=soon()) is SaveOutcome.FULL
            await store.release(staged.lease)
            assert await store.save(big, deadline=soon()) is SaveOutcome.STORED

    async def test_too_many_bytes_at_once_answer_busy(self) -> None:
        """Saves beyond the limit of bytes being verified answer BUSY; the others are stored."""
        prompt = Prompt(ATTENTION, "a", 640, payload_bytes=400_000)
        async with opened(prompt, limits=replace(LIMITS, save_bytes_in_flight=1_000_000)) as store:
            saves = [store.save(record, deadline=soon()) for record in prompt.records()[:6]]
            outcomes = await asyncio.gather(*saves)
            assert sorted(outcome.value for outcome in outcomes) == ["busy"] * 4 + ["stored"] * 2

    async def test_the_manifest_is_kept_beside_the_records(self) -> None:
        """Opening a namespace writes its description to each slower tier, once."""
        prompt, cold = Prompt(ATTENTION, "a", 64), slow_tier("s3")
        async with opened(prompt, cold=cold) as store:
            await until(lambda: cold.calls["put_manifest"] == 1)
            manifest = await cold.get_manifest(prompt.namespace, deadline=soon())
            assert manifest is not None
            assert parse_manifest(manifest).id == prompt.namespace
            await store.open_namespace(prompt.description, deadline=soon())
            await asyncio.sleep(0.01)
            assert cold.calls["put_manifest"] == 1


async def test_a_restart_serves_from_the_directory(tmp_path: Path) -> None:
    """Records are saved, the process ends in order, another one opens the directory: the prompt is staged from it."""
    prompt = Prompt(HYBRID, "restart", 250)
    for run in range(2):
        cold = await FilesystemTier.open(tmp_path / "records", budget_bytes=64 * MIB)
        store = TieredStore(MemoryTier(16 * MIB), None, cold)
        await store.open_namespace(prompt.description, deadline=soon())
        if run == 0:
            for record in prompt.records():
                await store.save(record, deadline=soon())
        else:
            staged = await stage(store, prompt)
            assert staged.resume_tokens == 240
            assert staged.sources == {"filesystem": len(staged.keys)}
            assert staged.lease is not None
            for key in staged.keys:
                await store.load(staged.lease, key, deadline=soon())
        await store.aclose()
        await cold.aclose()
