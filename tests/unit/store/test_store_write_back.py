"""Saves of a `TieredStore`, and how records get to the slower tiers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from store_harness import LIMITS, MIB, PATIENT, fill, opened, slow_tier, stage

from kvstore.api import Ack, Retention, SaveOutcome
from kvstore.catalog.entry import Level
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.format.manifest import parse_manifest
from kvstore.format.record import Record
from kvstore.runtime.deadline import Deadline
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import ATTENTION, HYBRID, Prompt
from kvstore.testing.waiting import soon, until
from kvstore.tiers.base import PutOutcome
from kvstore.tiers.filesystem import FilesystemTier
from kvstore.tiers.memory import RECORD_OVERHEAD_BYTES, MemoryTier

SHORT_QUEUE = replace(LIMITS, write_back_bytes=6 * 1192, write_back_attempts=1_000_000, write_back_in_flight=1)


async def _bug(*_: object, **__: object) -> PutOutcome:
    raise ValueError("a test's")


@pytest.mark.virtual_time
class TestWriteBack:
    async def test_records_reach_hot_and_cold_in_prefix_order(self) -> None:
        """Records saved in reverse are written to each tier shortest prefix first."""
        prompt, hot, cold = Prompt(ATTENTION, "a", 640), slow_tier("redis"), slow_tier("s3")
        async with opened(prompt, hot=hot, cold=cold, limits=replace(LIMITS, write_back_in_flight=1)) as store:
            for level in (Level.HOT, Level.COLD):
                store.operations.pause(level, is_paused=True)
            for record in reversed(prompt.records()):
                assert await store.save(record, deadline=soon()) is SaveOutcome.STORED
            for level in (Level.HOT, Level.COLD):
                store.operations.pause(level, is_paused=False)
            assert await store.drain(soon()) == 0
            expected = [record.key.prefix for record in prompt.records()]
            assert [key.prefix for key in hot.keys_put] == expected
            assert [key.prefix for key in cold.keys_put] == expected

    async def test_what_is_of_use_for_a_short_time_stays_in_memory(self) -> None:
        """Neither hot nor cold gets it, unless the save waits for that tier; it can be staged here."""
        prompt, hot, cold = Prompt(ATTENTION, "a", 640), slow_tier("redis"), slow_tier("s3")
        first, *others = prompt.records()
        async with opened(prompt, hot=hot, cold=cold) as store:
            for record in others:
                assert await store.save(record, retention=Retention.SHORT, deadline=soon()) is SaveOutcome.STORED
            await store.save(first, ack=Ack.HOT, retention=Retention.SHORT, deadline=soon())
            assert await store.drain(soon()) == 0
            assert (hot.keys_put, cold.keys_put) == ([first.key], [])
            assert (await stage(store, prompt)).resume_tokens == 640

    async def test_what_finds_no_room_in_the_queue_waits_in_memory(self) -> None:
        """The cold tier is down: the queue fills to its limit, later records wait in memory, and none is lost."""
        prompt, cold = Prompt(ATTENTION, "a", 640), slow_tier("s3")
        cold.down = True
        async with opened(prompt, cold=cold, limits=SHORT_QUEUE) as store:
            for record in prompt.records():
                assert await store.save(record, deadline=soon()) is SaveOutcome.STORED
            status = await store.status(deadline=soon())
            assert status["write_back"] == {"s3": {"records": 20, "bytes": 20 * 1192, "failing": True, "paused": False}}
            assert (await stage(store, prompt)).resume_tokens == 640
            cold.down = False
            assert await store.drain(soon()) == 0
            assert sorted(cold.keys_put) == sorted(record.key for record in prompt.records())
            status = await store.status(deadline=soon())
            assert status["write_back"] == {"s3": {"records": 0, "bytes": 0, "failing": False, "paused": False}}

    async def test_what_memory_evicts_before_its_turn_is_dropped(self) -> None:
        """The cold tier is down, and memory holds ten records: the queue has six, and of the others the last ten are
        left when it is back."""
        prompt, cold = Prompt(ATTENTION, "a", 640), slow_tier("s3")
        cold.down = True
        memory_bytes = 10 * (1192 + RECORD_OVERHEAD_BYTES)
        limits = replace(SHORT_QUEUE, stage_bytes=memory_bytes // 2)
        async with opened(prompt, cold=cold, limits=limits, memory_bytes=memory_bytes) as store:
            for record in prompt.records():
                assert await store.save(record, deadline=soon()) is SaveOutcome.STORED
            assert store.meters.get("write_back_dropped", tier="s3", reason="evicted") == 4
            queue = (await store.status(deadline=soon()))["write_back"]["s3"]
            assert (queue["records"], queue["bytes"]) == (16, 16 * 1192)
            cold.down = False
            assert await store.drain(soon()) == 0
            kept = [*prompt.records()[:6], *prompt.records()[10:]]
            assert sorted(cold.keys_put) == sorted(record.key for record in kept)

    async def test_a_backlog_of_one_tenant_delays_no_other(self) -> None:
        """Red has saved 200 records when blue saves ten: these are written while most of red's wait. What is in the
        queue already comes first.
        """
        red, blue = (Prompt(ATTENTION, name, tokens, tenant=name) for name, tokens in (("red", 6400), ("blue", 320)))
        cold = slow_tier("s3")
        async with opened(red, cold=cold, limits=SHORT_QUEUE) as store:
            await store.open_namespace(blue.description, deadline=soon())
            store.operations.pause(Level.COLD, is_paused=True)
            for record in (*red.records(), *blue.records()):
                await store.save(record, deadline=soon())
            store.operations.pause(Level.COLD, is_paused=False)
            assert await store.drain(soon()) == 0
            last = max(index for index, key in enumerate(cold.keys_put) if key.namespace == blue.namespace)
            assert last < 6 + 2 * 10 + 1
            ours = [key.prefix for key in cold.keys_put if key.namespace == red.namespace]
            assert ours == [record.key.prefix for record in red.records()]

    async def test_a_drain_waits_for_what_waits_in_memory(self) -> None:
        """Records that were saved before the call count, whether they are in the queue or in memory; later ones not."""
        prompt, cold = Prompt(ATTENTION, "a", 640), slow_tier("s3")
        async with opened(prompt, cold=cold, limits=SHORT_QUEUE) as store:
            store.operations.pause(Level.COLD, is_paused=True)
            for record in prompt.records()[:10]:
                await store.save(record, deadline=soon())
            left, mark, _ = store.operations.left_to_write(Level.COLD)
            assert left == 10
            for record in prompt.records()[10:]:
                await store.save(record, deadline=soon())
            assert store.operations.left_to_write(Level.COLD, mark) == (10, mark, True)
            store.operations.pause(Level.COLD, is_paused=False)
            await until(lambda: len(cold.keys_put) == 20)
            assert store.operations.left_to_write(Level.COLD, mark) == (0, mark, False)

    async def test_a_record_that_is_found_bad_makes_room_for_others(self) -> None:
        """Everything in the queue is found bad while it waits, and one record in memory: the others are written."""
        prompt, cold = Prompt(ATTENTION, "a", 640), slow_tier("s3")
        async with opened(prompt, cold=cold, limits=SHORT_QUEUE) as store:
            store.operations.pause(Level.COLD, is_paused=True)
            for record in prompt.records():
                await store.save(record, deadline=soon())
            bad = prompt.records()[:7]
            for record in bad:
                await store.discard(record.key, "test", deadline=soon())
            store.operations.pause(Level.COLD, is_paused=False)
            assert await store.drain(soon()) == 0
            assert [key.prefix for key in cold.keys_put] == [record.key.prefix for record in prompt.records()[7:]]

    async def test_what_is_queued_does_not_push_out_what_waits(self) -> None:
        """A tier writes half as fast as records are saved. The oldest in memory go first, whether they are written or
        not: what was queued just now is no more in use than what waits."""
        prompt, cold = Prompt(ATTENTION, "a", 64 * 60), slow_tier("s3")
        memory_bytes = 20 * (1192 + RECORD_OVERHEAD_BYTES)
        limits = replace(SHORT_QUEUE, stage_bytes=memory_bytes // 2)
        cold.put_s = 0.002
        async with opened(prompt, cold=cold, limits=limits, memory_bytes=memory_bytes) as store:
            for record in prompt.records():
                await store.save(record, deadline=soon())
                await asyncio.sleep(0.001)
            assert await store.drain(soon()) == 0
            lost = store.meters.get("write_back_dropped", tier="s3", reason="evicted")
            assert len(cold.keys_put) == 120 - lost
            assert lost <= 120 / 2 - 20 - 6 + 2

    async def test_copies_do_not_come_before_what_waits(self) -> None:
        """A record that was read from the cold tier is not copied to the hot one while saved ones wait for it."""
        prompt, other = Prompt(ATTENTION, "a", 640), Prompt(ATTENTION, "b", 64)
        hot, cold = slow_tier("redis"), slow_tier("s3")
        await fill(cold, other)
        async with opened(prompt, hot=hot, cold=cold, limits=SHORT_QUEUE) as store:
            await store.open_namespace(other.description, deadline=soon())
            store.operations.pause(Level.HOT, is_paused=True)
            for record in prompt.records()[:10]:
                await store.save(record, deadline=soon())
            assert (await stage(store, other)).resume_tokens == 64
            assert store.meters.get("write_back_dropped", tier="redis", reason="queue_full") == 2
            store.operations.pause(Level.HOT, is_paused=False)
            assert await store.drain(soon()) == 0
            assert set(hot.keys_put) == {record.key for record in prompt.records()[:10]}

    async def test_a_write_that_fails_in_an_unknown_way_does_not_end_the_others(self) -> None:
        """The only worker dies of an error that no tier should raise: another one writes what is left."""
        prompt, cold = Prompt(ATTENTION, "a", 640), slow_tier("s3")
        async with opened(prompt, cold=cold, limits=SHORT_QUEUE) as store:
            store.operations.pause(Level.COLD, is_paused=True)
            for record in prompt.records()[:10]:
                await store.save(record, deadline=soon())
            put, bad = cold.put, prompt.records()[0]

            async def fail_once(record: Record, *, deadline: Deadline) -> PutOutcome:
                return await (_bug() if record.key == bad.key else put(record, deadline=deadline))

            cold.put = fail_once  # type: ignore[method-assign]
            store.operations.pause(Level.COLD, is_paused=False)
            assert await store.drain(soon()) == 0
            assert store.meters.get("write_back_dropped", tier="s3", reason="failed") == 1
            assert [key.prefix for key in cold.keys_put] == [record.key.prefix for record in prompt.records()[1:10]]

    async def test_a_record_larger_than_the_queue_is_dropped(self) -> None:
        """It would never have room: it stays in memory, and those after it are written."""
        prompt, cold = Prompt(ATTENTION, "a", 640), slow_tier("s3")
        large = Prompt(ATTENTION, "b", 64, payload_bytes=8 * 1192).record(64)
        async with opened(prompt, cold=cold, limits=SHORT_QUEUE) as store:
            for record in (large, *prompt.records()):
                assert await store.save(record, deadline=soon()) is SaveOutcome.STORED
            assert await store.drain(soon()) == 0
            assert len(cold.keys_put) == 20
            assert store.meters.get("write_back_dropped", tier="s3", reason="too_large") == 1

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

    async def test_a_record_that_alone_is_refused_is_given_up(self) -> None:
        """A record fails while others are written: it lets them pass, fails again and again, is dropped and counted."""
        prompt, cold = Prompt(ATTENTION, "a", 640), slow_tier("s3")
        bad, *good = prompt.records()
        cold.refused = {bad.key}
        async with opened(prompt, cold=cold, limits=replace(LIMITS, write_back_attempts=3)) as store:
            for record in (bad, *good):
                await store.save(record, deadline=soon())
            assert await store.drain(soon()) == 0
            assert set(cold.keys_put) == {record.key for record in good}
            assert cold.calls["put"] == 1 + 3 + len(good)
            assert store.meters.get("write_back_dropped", tier="s3", reason="attempts") == 1

    async def test_a_record_that_fails_does_not_hold_up_the_others(self) -> None:
        """The first of a prompt fails again and again: it is tried once before the others, and then after them."""
        prompt, cold = Prompt(ATTENTION, "a", 640), slow_tier("s3")
        bad, *good = prompt.records()
        cold.refused = {bad.key}
        async with opened(prompt, cold=cold, limits=replace(PATIENT, write_back_in_flight=1)) as store:
            for record in (bad, *good):
                await store.save(record, deadline=soon())
            await until(lambda: len(cold.keys_put) == len(good))
            assert cold.calls["put"] <= len(good) + 2
            cold.refused.clear()
            assert await store.drain(soon()) == 0
            assert cold.keys_put[-1] == bad.key

    async def test_an_outage_drops_nothing(self) -> None:
        """A tier takes nothing for many times the attempts of a record: once it is back it gets every one."""
        prompt, cold = Prompt(ATTENTION, "a", 640), slow_tier("s3")
        cold.down = True
        limits = replace(LIMITS, write_back_attempts=2, backoff_s_max=0.01)
        async with opened(prompt, cold=cold, limits=limits) as store:
            for record in prompt.records():
                await store.save(record, deadline=soon())
            await until(lambda: cold.calls["put"] > 2 * 3 * len(prompt.records()) + 10)
            assert store.meters.get("write_back_dropped", tier="s3", reason="attempts") == 0
            cold.down = False
            assert await store.drain(soon()) == 0
            assert set(cold.keys_put) == {record.key for record in prompt.records()}

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

    async def test_what_is_found_bad_while_it_is_written_is_not_written_again(self) -> None:
        """Its write fails later. Meanwhile another record of the same name is saved, and that one is written."""
        prompt, cold = Prompt(ATTENTION, "a", 64), slow_tier("s3")
        cold.frozen = True
        async with opened(prompt, cold=cold, limits=replace(LIMITS, write_back_timeout_s=0.5)) as store:
            await store.save(prompt.record(64), deadline=soon())
            await until(lambda: cold.calls["put"] > 0)
            with pytest.raises(Unavailable):
                await store.discard(prompt.key(64), "test", deadline=Deadline.after(0.1))
            other = Prompt(ATTENTION, "a", 64, payload_bytes=2000).record(64)
            assert await store.save(other, deadline=soon()) is SaveOutcome.STORED
            cold.frozen = False
            assert await store.drain(soon()) == 0
            await asyncio.sleep(1.0)  # the first write is over, and a second try of it would be too
            stored = await cold.inner.get(prompt.key(64), deadline=soon())
            assert stored is not None and stored.data == other.data

    async def test_a_tier_that_comes_and_goes_costs_no_record(self) -> None:
        """It is down for long, takes one record, and is down again: nothing was its records' fault."""
        prompt, cold = Prompt(ATTENTION, "a", 640), slow_tier("s3")
        limits = replace(LIMITS, write_back_attempts=3, write_back_in_flight=1)
        async with opened(prompt, cold=cold, limits=limits) as store:
            cold.down, cold.put_s = True, 0.05
            for record in prompt.records():
                await store.save(record, deadline=soon())
            for num_put in range(3):
                cold.down, wanted = True, cold.calls["put"] + 5 * len(prompt.records())
                await until(lambda wanted=wanted: cold.calls["put"] > wanted)  # type: ignore[misc]
                cold.down = False
                await until(lambda num_put=num_put: len(cold.keys_put) > num_put)  # type: ignore[misc]
            assert len(cold.keys_put) < len(prompt.records())
            assert await store.drain(soon()) == 0
            assert set(cold.keys_put) == {record.key for record in prompt.records()}

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
        prompt = Prompt(ATTENTION, "a", 192, payload_bytes=5 << 20)  # large enough to be verified in a thread
        async with opened(prompt, limits=replace(LIMITS, save_bytes_in_flight=12 << 20)) as store:
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
