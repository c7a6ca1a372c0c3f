"""The contract of `PageStore`, what is found, staged and loaded: bits, resume points, holes, bad records."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.api import LeaseId, Lookup, PageStore, SaveOutcome, Staged
from kvstore.errors import Unavailable
from kvstore.format.record import open_record
from kvstore.model.layout import Layout
from kvstore.testing.prompts import ATTENTION, HYBRID, WINDOWED, Prompt
from kvstore.testing.store_node import (
    LAYOUTS,
    StoreNode,
    look_up,
    save_all,
    save_one,
    soon,
    stage_all,
)

__all__ = ["HitContract"]

_RENEW_S = 0.05


async def keep_leased(store: PageStore, lease: LeaseId) -> None:
    """Renew a lease until this is cancelled, as a reader does that is not done yet."""
    while await store.renew(lease, deadline=soon()):
        await asyncio.sleep(_RENEW_S)


class HitContract:
    """What a `PageStore` promises to readers."""

    @pytest.fixture
    def store(self, node: StoreNode) -> PageStore:
        return node.store

    @pytest.mark.parametrize("layout", LAYOUTS)
    async def test_what_is_saved_is_staged_and_loaded_bit_for_bit(self, store: PageStore, layout: Layout) -> None:
        """All records of a prompt are saved; a stage leases those of its end, and each loads as it was saved."""
        prompt = Prompt(layout, "round trip", 250)
        saved = await save_all(store, prompt)
        found = await look_up(store, prompt)
        staged = await stage_all(store, prompt)
        assert found.resume_tokens == staged.resume_tokens == 240  # the last boundary: inside a page, by a tail
        assert staged.lease is not None
        assert len(staged.lease) == 16
        assert set(staged.keys) <= {record.key for record in saved}
        assert sum(staged.sources.values()) == len(staged.keys)
        by_key = {record.key: record for record in saved}
        assert staged.num_bytes == sum(by_key[key].num_bytes for key in staged.keys)
        for key, span in zip(staged.keys, staged.spans, strict=True):
            loaded = await store.load(staged.lease, key, deadline=soon())
            assert bytes(loaded.data) == bytes(by_key[key].data)
            assert open_record(loaded.data, key).header == by_key[key].header
            assert span == (loaded.header.span.start, loaded.header.span.stop)
        await store.release(staged.lease)

    async def test_only_the_records_that_a_resume_point_needs_are_staged(self, store: PageStore) -> None:
        """A window of 100 tokens at 240 needs the pages from token 141 on; a state is needed at its boundary only."""
        windowed, hybrid = Prompt(WINDOWED, "needs", 240), Prompt(HYBRID, "needs", 240)
        for prompt in (windowed, hybrid):
            await save_all(store, prompt)
        staged = await stage_all(store, windowed)
        assert sorted(span for key, span in zip(staged.keys, staged.spans, strict=True) if key.group == 1) == [
            (128, 192), (128, 192), (192, 240), (192, 240),
        ]  # fmt: skip
        staged = await stage_all(store, hybrid)
        assert [span for key, span in zip(staged.keys, staged.spans, strict=True) if key.group == 1] == [(240, 240)] * 3

    async def test_allocated_buffers_may_be_used_and_hold_the_record(self, store: PageStore) -> None:
        """A reader that brings its own buffer gets the record, in it or in the store's own."""
        prompt = Prompt(ATTENTION, "allocate", 64)
        record = (await save_all(store, prompt))[0]
        staged = await stage_all(store, prompt)
        assert staged.lease is not None
        buffers = [bytearray(record.num_bytes)]
        loaded = await store.load(
            staged.lease, record.key, deadline=soon(), allocate=lambda size: memoryview(buffers[0])[:size]
        )
        assert bytes(loaded.data) == bytes(record.data)

    async def test_progress_is_told(self, store: PageStore) -> None:
        """The callback hears growing totals, and at least the last one when all records came from this node."""
        prompt = Prompt(ATTENTION, "progress", 256)
        await save_all(store, prompt)
        totals: list[int] = []
        staged = await store.stage(prompt.query(), deadline=soon(), progress=totals.append)
        assert totals == sorted(totals)
        assert all(0 < total <= staged.num_bytes for total in totals)

    async def test_saved_twice_exists(self, store: PageStore) -> None:
        """The second save of a name is dropped, whatever its bytes; the first ones are served."""
        prompt = Prompt(ATTENTION, "twice", 64)
        first = await save_all(store, prompt)
        other = prompt.record(64, 0, 0, seed=1)
        assert bytes(other.data) != bytes(first[0].data)
        assert await store.save(other, deadline=soon()) is SaveOutcome.EXISTS
        staged = await stage_all(store, prompt)
        assert staged.lease is not None
        loaded = await store.load(staged.lease, other.key, deadline=soon())
        assert bytes(loaded.data) == bytes(first[0].data)

    async def test_nothing_saved_is_nothing_staged(self, store: PageStore) -> None:
        """An unknown prompt resumes where the engine already is, without a lease."""
        prompt = Prompt(ATTENTION, "unknown", 256)
        await store.open_namespace(prompt.description, deadline=soon())
        query = prompt.query(local_tokens=32)
        assert await store.lookup(query, deadline=soon()) == Lookup(32, (0,) * len(query.boundaries))
        assert await store.stage(query, deadline=soon()) == Staged(None, 32)

    async def test_local_tokens_above_the_cap_stage_nothing(self, store: PageStore) -> None:
        """An engine that already holds more than the cap is told to stay where it is."""
        prompt = Prompt(ATTENTION, "local", 256)
        await save_all(store, prompt)
        query = prompt.query(local_tokens=200, cap_tokens=128)
        assert (await store.lookup(query, deadline=soon())).resume_tokens == 200
        assert await store.stage(query, deadline=soon()) == Staged(None, 200)

    async def test_records_below_the_local_tokens_are_not_staged(self, store: PageStore) -> None:
        """What the engine holds itself is not fetched again."""
        prompt = Prompt(ATTENTION, "above local", 256)
        await save_all(store, prompt)
        staged = await store.stage(prompt.query(local_tokens=128), deadline=soon())
        assert staged.resume_tokens == 256
        assert sorted(set(staged.spans)) == [(128, 192), (192, 256)]

    async def test_the_cap_bounds_the_resume_point_not_the_records(self, store: PageStore) -> None:
        """A page may reach past a cap inside it; the resume point does not."""
        prompt = Prompt(ATTENTION, "cap", 256)
        await save_all(store, prompt)
        staged = await store.stage(prompt.query(cap_tokens=112), deadline=soon())
        assert staged.resume_tokens == 112
        assert max(stop for _, stop in staged.spans) == 128

    async def test_presence_is_told_group_by_group(self, store: PageStore) -> None:
        """Each boundary has a bit for each group all of whose slices are there."""
        prompt = Prompt(HYBRID, "presence", 128)
        await store.open_namespace(prompt.description, deadline=soon())
        for record in prompt.records([64]):
            await save_one(store, record)
        for record in (prompt.record(128, 0, 0), prompt.record(128, 0, 1), prompt.record(128, 1, 0)):
            await save_one(store, record)
        found = await look_up(store, prompt)
        tokens = [boundary.tokens for boundary in prompt.query().boundaries]
        present = dict(zip(tokens, found.groups_present, strict=True))
        assert present[64] == 0b11
        assert present[128] == 0b01  # one of three slices of the state
        assert found.resume_tokens == 64

    @pytest.mark.parametrize("layout", LAYOUTS)
    async def test_a_missing_slice_shortens_the_hit(self, node: StoreNode, layout: Layout) -> None:
        """One slice of one record is lost behind the store's back: the hit ends before it, without an error."""
        prompt = Prompt(layout, "hole", 256)
        await save_all(node.store, prompt)
        await node.drain(soon())
        await node.lose(prompt.key(192, 0, 1))
        staged = await stage_all(node.store, prompt)
        assert staged.resume_tokens == 128
        assert all(stop <= 128 for _, stop in staged.spans)
        assert (await look_up(node.store, prompt)).resume_tokens == 128

    @pytest.mark.parametrize("layout", LAYOUTS)
    async def test_discarded_records_are_never_served_again(self, node: StoreNode, layout: Layout) -> None:
        """A reader reports a bad record: no lease, lookup or stage serves it any more, until it is saved anew."""
        store, prompt = node.store, Prompt(layout, "discard", 256)
        await save_all(store, prompt)
        await node.drain(soon())
        staged = await stage_all(store, prompt)
        assert staged.lease is not None
        bad = prompt.key(128, 0, 1)
        good = next(key for key in staged.keys if key != bad)
        assert bad in staged.keys
        async with asyncio.TaskGroup() as group:  # three tiers may take longer than a lease lasts
            renewing = group.create_task(keep_leased(store, staged.lease))
            await store.discard(bad, "checksum failed at the reader", deadline=soon())
            with pytest.raises(Unavailable):
                await store.load(staged.lease, bad, deadline=soon())
            assert (await store.load(staged.lease, good, deadline=soon())).key == good
            renewing.cancel()
        assert (await look_up(store, prompt)).resume_tokens == 64
        assert (await stage_all(store, prompt)).resume_tokens == 64
        await save_one(store, prompt.record(128, 0, 1))
        assert (await stage_all(store, prompt)).resume_tokens == 256
