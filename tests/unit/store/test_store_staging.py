"""Stages of a `TieredStore` when slower tiers are slow, frozen, incomplete or lying."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest
from store_harness import LIMITS, MIB, fill, opened, slow_tier, stage

from kvstore.api import Staged
from kvstore.client import ClientOptions
from kvstore.format.header_v1 import HEADER_BYTES
from kvstore.format.record import seal
from kvstore.model.keys import Boundary
from kvstore.model.kinds import Keyed
from kvstore.model.layout import GroupLayout, Layout, Span
from kvstore.runtime.instruments import Instruments
from kvstore.runtime.tracing import RequestContext, request_context
from kvstore.runtime.turns import still_working
from kvstore.store.recorder import Recorder
from kvstore.store.tiered import TieredStore
from kvstore.testing.dict_catalog import CatalogBooks, DictCatalog
from kvstore.testing.prompts import ATTENTION, HYBRID, WINDOWED, Prompt
from kvstore.testing.waiting import soon, until
from kvstore.tiers.memory import MemoryTier

pytestmark = pytest.mark.virtual_time


class TestStages:
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

    @pytest.mark.parametrize("num_tokens", [256, 131_072])
    async def test_a_stage_is_not_silent_for_as_long_as_its_client_waits(self, num_tokens: int) -> None:
        """The hot tier hangs during the lookup, then the cold one during the reads: together longer than a client
        waits for a sign. Of a long prompt the lookup alone takes that long. Else the client would take the service for
        dead, and its other calls would fail too.
        """
        prompt, hot, cold = Prompt(ATTENTION, "a", num_tokens), slow_tier("redis"), slow_tier("s3")
        await fill(cold, prompt, tokens=[64, 128, 192, 256])
        hot.frozen, cold.get_limit = True, 0
        loop, client_waits_s = asyncio.get_running_loop(), ClientOptions().stall_timeout_s
        async with opened(prompt, hot=hot, cold=cold) as store:
            signs_s = [loop.time()]
            still_working.set(lambda: signs_s.append(loop.time()))
            assert (await stage(store, prompt)).lease is None
            signs_s.append(loop.time())
        assert signs_s[-1] - signs_s[0] > client_waits_s
        assert max(after - before for before, after in pairwise(signs_s)) < client_waits_s

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

    @pytest.mark.parametrize(("get_s", "is_quick"), [(0.02, True), (0.2, False)])
    async def test_reads_at_a_time_follow_how_long_they_take(self, get_s: float, is_quick: bool) -> None:
        """Of a tier that is quick more than four records are read at a time, and fewer of one that is slow."""
        prompt, cold = Prompt(ATTENTION, "a", 64 * 10), slow_tier("s3")
        await fill(cold, prompt)
        cold.get_s = get_s
        async with opened(prompt, cold=cold) as store:
            started_s = asyncio.get_running_loop().time()
            assert (await stage(store, prompt)).sources == {"s3": 20}
            took_s = asyncio.get_running_loop().time() - started_s
        assert (took_s < 4.5 * get_s) if is_quick else (took_s > 6 * get_s)

    async def test_a_tenant_with_many_stages_hardly_delays_another_one(self) -> None:
        """A slow tier reads for both in turn, however many records of the first one wait for their turn or for room."""
        many = [Prompt(ATTENTION, f"a{number}", 64 * 20, tenant="a") for number in range(20)]
        prompt, cold = Prompt(ATTENTION, "b", 64 * 4, tenant="b"), slow_tier("s3")
        for one in (*many, prompt):
            await fill(cold, one)
        cold.get_s = 0.02
        num_bytes = prompt.records()[0].num_bytes

        async def stage_for(one: Prompt) -> Staged:
            request_context.set(RequestContext(1, 1, one.tenant, b""))  # of this task alone
            return await stage(store, one)

        for limits in (LIMITS, replace(LIMITS, stage_bytes_in_flight=16 * num_bytes)):
            async with opened(prompt, cold=cold, limits=limits) as store:
                await store.open_namespace(many[0].description, deadline=soon())
                others = [asyncio.ensure_future(stage_for(one)) for one in many]
                await asyncio.sleep(0.1)
                started_s = asyncio.get_running_loop().time()
                staged = await asyncio.ensure_future(stage_for(prompt))
                assert staged.resume_tokens == 256
                assert asyncio.get_running_loop().time() - started_s < 0.15
                await asyncio.gather(*others)

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

    async def test_a_name_that_is_given_twice_leaves_nothing_pinned(self) -> None:
        """Names of a caller's own pages may repeat: once the stage's lease has ended, no record is pinned."""
        prompt = Prompt(Layout(64, (GroupLayout(Keyed(), 2),)), "a", 256, step_tokens=64)
        async with opened(prompt) as store:
            for record in prompt.records():
                store.memory.insert(record)
            query = prompt.query()
            first, *others = query.boundaries
            twice = (first, *(Boundary(one.tokens, first.prefix) for one in others))
            staged = await store.stage(replace(query, boundaries=twice), deadline=soon())
            if staged.lease is not None:
                await store.release(staged.lease)
            await until(lambda: store.memory.pinned_bytes == 0)
            assert not store.memory.pinned_by

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
        """Records that take 110 ms each, for longer than the stall time in all, are waited for."""
        prompt, cold = Prompt(ATTENTION, "a", 512), slow_tier("s3")
        await fill(cold, prompt)
        cold.get_s = 0.11
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
            assert store.memory.pinned_bytes == staged.num_bytes + 1024 * len(staged.keys)

    async def test_records_of_another_boundary_are_quarantined(self) -> None:
        """An intact record stands under this name but spans other tokens than the prefix: quarantined, not served."""
        prompt, cold = Prompt(ATTENTION, "a", 128), slow_tier("s3")
        await fill(cold, prompt, tokens=[64])
        liar = Prompt(ATTENTION, "a", 128)
        for slice_ in range(2):
            header = replace(liar.record(128, 0, slice_).header, span=Span(0, 64))
            await cold.inner.put(seal(header, bytearray(HEADER_BYTES + 8)), deadline=soon())
        async with opened(prompt, cold=cold) as store:
            assert (await stage(store, prompt)).resume_tokens == 64
            assert await cold.inner.head([prompt.key(128)], deadline=soon()) == [None]
            assert cold.calls["quarantine"] >= 1

    async def test_a_discard_leaves_what_was_put_since(self) -> None:
        """A reader finds a leased record bad; another engine has put a good one into the cold tier since: it stays."""
        prompt, cold = Prompt(ATTENTION, "a", 64), slow_tier("s3")
        await fill(cold, prompt)
        key, other = prompt.key(64), prompt.key(64, 0, 1)
        async with opened(prompt, cold=cold) as store:
            assert (await stage(store, prompt)).resume_tokens == 64
            await cold.inner.delete(key, deadline=soon())
            await cold.inner.put(prompt.record(64, seed=1), deadline=soon())
            for bad in (key, other):
                await store.discard(bad, "found bad by a reader", deadline=soon())
            assert [size is None for size in await cold.inner.head([key, other], deadline=soon())] == [False, True]
            assert key not in store.memory and other not in store.memory
            assert (await stage(store, prompt)).resume_tokens == 0

    async def test_a_hit_larger_than_the_budget_is_cut_to_what_fits(self) -> None:
        """Ten pages of 200 kB, room for about three: the hit is three pages, and the rest of memory stays free."""
        prompt, cold = Prompt(ATTENTION, "a", 640, payload_bytes=100_000), slow_tier("s3")
        await fill(cold, prompt)
        limits = replace(LIMITS, stage_bytes=650_000)
        async with opened(prompt, cold=cold, limits=limits) as store:
            staged = await stage(store, prompt)
            assert staged.resume_tokens == 192
            assert store.memory.pinned_bytes <= 650_000
            assert cold.calls["get"] == 6  # nothing was read in vain
            other = Prompt(ATTENTION, "b", 640, payload_bytes=100_000)
            await fill(cold, other)
            assert (await stage(store, other)).lease is None  # the first lease holds the budget
            assert staged.lease is not None
            await store.release(staged.lease)
            assert (await stage(store, other)).resume_tokens == 192

    async def test_what_a_longer_hit_held_makes_room_for_a_shorter_one(self) -> None:
        """Room for the 7 records of the whole prompt, of which the last turns out to be gone: the states of the page
        before, which nobody wanted until then, take the place of those that are of no use any more."""
        prompt, cold = Prompt(HYBRID, "a", 128, payload_bytes=100_000), slow_tier("s3")
        await fill(cold, prompt)
        cold.lost.add(prompt.key(128, 1, 2))
        async with opened(prompt, cold=cold, limits=replace(LIMITS, stage_bytes=750_000)) as store:
            staged = await stage(store, prompt)
            assert cold.calls["get"] == 10
            assert (staged.resume_tokens, len(staged.keys)) == (64, 5)
            assert store.memory.pinned_bytes < 550_000

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
            assert (await stage(store, prompt)) == Staged(None, 0, cut="node_memory")
            await store.release(first.lease)
            assert (await stage(store, prompt)).resume_tokens == 128

    async def test_stages_at_a_time_keep_to_the_limit_of_leases(self) -> None:
        """Four stages begin while the table of leases has room for one: one gets it, nothing of the others is held."""
        prompt, cold = Prompt(ATTENTION, "a", 128), slow_tier("s3")
        await fill(cold, prompt)
        async with opened(prompt, cold=cold, limits=replace(LIMITS, leases_max=1)) as store:
            staged = await asyncio.gather(*(stage(store, prompt) for _ in range(4)))
            leases = [one.lease for one in staged if one.lease is not None]
            assert len(leases) == 1
            assert [one for one in staged if one.lease is None] == [Staged(None, 0, cut="node_memory")] * 3
            await store.release(leases[0])
            assert store.memory.pinned_bytes == 0

    async def test_stages_of_long_prompts_keep_to_it_too(self) -> None:
        """Their uses are noted piece by piece, so that others come between; a cancelled one leaves no lease."""
        recorder = Recorder(DictCatalog(CatalogBooks()), Instruments())
        store = TieredStore(MemoryTier(16 * MIB), recorder=recorder, limits=replace(LIMITS, leases_max=2))
        prompt = Prompt(ATTENTION, "a", 64 * 400, payload_bytes=100)
        await store.open_namespace(prompt.description, deadline=soon())
        for record in prompt.records():
            store.memory.insert(record)
        staged = await asyncio.gather(*(stage(store, prompt) for _ in range(6)))
        leases = [one.lease for one in staged if one.lease is not None]
        assert len(leases) == 2
        for lease in leases:
            await store.release(lease)
        running = asyncio.ensure_future(stage(store, prompt))
        while not len(store.leases):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        await until(lambda: store.memory.pinned_bytes == 0)
        assert running.cancelled() and len(store.leases) == 0
        await store.aclose()
        await recorder.aclose()
