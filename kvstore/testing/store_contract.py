"""The contract of `PageStore`: subclass `PageStoreContract`, give it a `node`, and every promise is tested.

    class TestMyStore(PageStoreContract):
        @pytest.fixture
        async def node(self):
            async with my_store(lease_s=LEASE_S) as store:
                yield StoreNode(store, ...)

The node's store must have an empty memory of at least 4 MiB, nothing stored, and leases of `LEASE_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kvstore.api import Ack, LeaseId, LoadedRecord, Lookup, PageStore, SaveOutcome, Staged
from kvstore.errors import Closed, CorruptRecord, InvalidRequest, Unavailable
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.record import Record, open_record, seal
from kvstore.model.keys import RecordKey
from kvstore.model.kinds import RecordKind
from kvstore.model.layout import Layout, Span
from kvstore.runtime.deadline import Deadline
from kvstore.testing.prompts import ATTENTION, HYBRID, WINDOWED, Prompt
from kvstore.testing.store_node import LAYOUTS, LEASE_S, StoreNode, cancel_after, look_up, save_all, save_one, stage_all
from kvstore.testing.waiting import soon, until

_RENEW_S = 0.05


async def keep_leased(store: PageStore, lease: LeaseId) -> None:
    """Renew a lease until this is cancelled, as a reader does that is not done yet."""
    while await store.renew(lease, deadline=soon()):
        await asyncio.sleep(_RENEW_S)


async def _load_many(store: PageStore, lease: LeaseId, keys: Sequence[RecordKey]) -> list[LoadedRecord]:
    """All of these records, ready to be read."""
    records = await store.load_many(lease, keys, deadline=soon())
    return [await leased.load(deadline=soon()) for leased in records]


def _read(loaded: LoadedRecord) -> bytes:
    with loaded.reading() as record:
        return bytes(record.data)


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
        """A reader that passes its own buffer gets the record, in it or in the store's own."""
        prompt = Prompt(ATTENTION, "allocate", 64)
        record = (await save_all(store, prompt))[0]
        staged = await stage_all(store, prompt)
        assert staged.lease is not None
        buffers = [bytearray(record.num_bytes)]
        loaded = await store.load(
            staged.lease, record.key, deadline=soon(), allocate=lambda size: memoryview(buffers[0])[:size]
        )
        assert bytes(loaded.data) == bytes(record.data)

    @pytest.mark.parametrize("payload_bytes", [1000, 150_000])
    async def test_many_records_are_loaded_with_one_call(self, store: PageStore, payload_bytes: int) -> None:
        """Each key of a lease gets its record, in the order of the keys, read in any order and on any thread."""
        prompt = Prompt(ATTENTION, "many", 256, payload_bytes=payload_bytes)
        saved = {record.key: bytes(record.data) for record in await save_all(store, prompt)}
        staged = await stage_all(store, prompt)
        assert staged.lease is not None
        async with asyncio.TaskGroup() as group:
            renewing = group.create_task(keep_leased(store, staged.lease))
            keys = staged.keys[::-1]
            records = await store.load_many(staged.lease, keys, deadline=soon())
            loaded = await asyncio.gather(*(leased.load(deadline=soon()) for leased in records))
            assert [one.num_bytes for one in loaded] == [len(saved[key]) for key in keys]
            for key, read in zip(keys, await asyncio.to_thread(list, map(_read, loaded)), strict=True):
                assert read == saved[key]
                open_record(read, key)
            assert await store.load_many(staged.lease, (), deadline=soon()) == []
            renewing.cancel()

    async def test_a_record_that_goes_while_it_is_read_is_whole_or_refused(self, node: StoreNode) -> None:
        """The lease ends and other records take its memory while a reader reads: it gets the right bytes, or learns at
        the end of its block that it has none."""
        store, prompt = node.store, Prompt(ATTENTION, "goes", 128, payload_bytes=150_000)
        saved = {record.key: bytes(record.data) for record in await save_all(store, prompt)}
        staged = await stage_all(store, prompt)
        assert staged.lease is not None
        records = await store.load_many(staged.lease, staged.keys, deadline=soon())
        loaded = [await leased.load(deadline=soon()) for leased in records]
        await store.release(staged.lease)
        for key in staged.keys:
            await node.lose(key)
        await save_all(store, Prompt(ATTENTION, "successor", 256, payload_bytes=150_000))
        for key, one in zip(staged.keys, loaded, strict=True):
            read = b""
            try:
                with one.reading() as record:
                    read = bytes(record.data)
            except (CorruptRecord, Unavailable):
                continue
            assert read == saved[key]

    async def test_progress_is_told(self, store: PageStore) -> None:
        """The callback hears growing totals, and at least the last one when all records came from this node."""
        prompt = Prompt(ATTENTION, "progress", 256)
        await save_all(store, prompt)
        totals: list[int] = []
        staged = await store.stage(prompt.query(), deadline=soon(), progress=totals.append)
        assert totals == sorted(totals)
        assert all(0 < total <= staged.num_bytes for total in totals)

    async def test_saved_twice_exists(self, store: PageStore) -> None:
        """The second save of a name is dropped, even if its bytes differ; the first ones are served."""
        prompt = Prompt(ATTENTION, "twice", 64)
        first = await save_all(store, prompt)
        other = prompt.record(64, 0, 0, seed=1)
        assert bytes(other.data) != bytes(first[0].data)
        assert await store.save(other, deadline=soon()) is SaveOutcome.EXISTS
        staged = await stage_all(store, prompt)
        assert staged.lease is not None
        loaded = await store.load(staged.lease, other.key, deadline=soon())
        assert bytes(loaded.data) == bytes(first[0].data)

    async def test_records_are_saved_together(self, store: PageStore) -> None:
        """Each record has its outcome, in their order; of none, nothing. A damaged one is refused."""
        prompt = Prompt(ATTENTION, "together", 256)
        await store.open_namespace(prompt.description, deadline=soon())
        records = prompt.records()
        assert await store.save_many([], deadline=soon()) == []
        await save_one(store, records[1])
        outcomes = await store.save_many(records, deadline=soon())
        assert [outcome is SaveOutcome.EXISTS for outcome in outcomes] == [at == 1 for at in range(len(records))]
        assert set(outcomes) == {SaveOutcome.STORED, SaveOutcome.EXISTS}
        assert (await stage_all(store, prompt)).resume_tokens == 256
        others = Prompt(ATTENTION, "together, damaged", 128).records()
        data = bytearray(others[1].data)
        data[-1] ^= 4
        with pytest.raises(CorruptRecord):
            await store.save_many([others[0], Record(others[1].header, memoryview(data).toreadonly())], deadline=soon())

    async def test_nothing_saved_is_nothing_staged(self, store: PageStore) -> None:
        """An unknown prompt resumes where the engine already is, without a lease."""
        prompt = Prompt(ATTENTION, "unknown", 256)
        await store.open_namespace(prompt.description, deadline=soon())
        query = prompt.query(local_tokens=32)
        assert await store.lookup(query, deadline=soon()) == Lookup(32, (0,) * len(query.boundaries))
        assert await store.stage(query, deadline=soon()) == Staged(None, 32)

    async def test_local_tokens_above_the_cap_stage_nothing(self, store: PageStore) -> None:
        """For an engine that holds more than the cap, the resume point is its own."""
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
        """A reader reports a bad record: no lease, lookup or stage serves it any more, until it is saved again."""
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
            first, second = await store.load_many(staged.lease, (good, bad), deadline=soon())
            assert (await first.load(deadline=soon())).peek().key == good
            with pytest.raises(Unavailable):
                await second.load(deadline=soon())
            assert (await store.load(staged.lease, good, deadline=soon())).key == good
            renewing.cancel()
        assert (await look_up(store, prompt)).resume_tokens == 64
        assert (await stage_all(store, prompt)).resume_tokens == 64
        await save_one(store, prompt.record(128, 0, 1))
        assert (await stage_all(store, prompt)).resume_tokens == 256


class CareContract:
    """What a `PageStore` promises about bad input, leases, cancellation and its end."""

    @pytest.fixture
    def store(self, node: StoreNode) -> PageStore:
        return node.store

    async def test_damaged_records_are_refused(self, store: PageStore) -> None:
        """A flipped bit in the payload or the header, or a cut end, is found on save; nothing is kept."""
        prompt = Prompt(ATTENTION, "damage", 64)
        await store.open_namespace(prompt.description, deadline=soon())
        record = prompt.record(64)
        for at in (HEADER_BYTES + 17, record.num_bytes - 1):
            data = bytearray(record.data)
            data[at] ^= 4
            with pytest.raises(CorruptRecord):
                await store.save(Record(record.header, memoryview(data).toreadonly()), deadline=soon())
        with pytest.raises(CorruptRecord):
            await store.save(Record(record.header, record.data[:-1]), deadline=soon())
        assert (await look_up(store, prompt)).groups_present == (0,) * 4

    @pytest.mark.parametrize(
        ("group", "slice_", "kind", "span"),
        [
            (1, 0, RecordKind.PAGE, Span(0, 64)),
            (0, 2, RecordKind.PAGE, Span(0, 64)),
            (0, 0, RecordKind.TAIL, Span(0, 64)),
            (0, 0, RecordKind.PAGE, Span(0, 128)),
            (0, 0, RecordKind.PAGE, Span(16, 80)),
            (0, 0, RecordKind.TAIL, Span(16, 48)),
            (0, 0, RecordKind.STATE, Span(64, 64)),
        ],
    )
    async def test_records_that_do_not_fit_the_layout_are_refused(
        self, store: PageStore, group: int, slice_: int, kind: RecordKind, span: Span
    ) -> None:
        """An intact record of a group, slice, kind or span that its namespace does not have is not taken."""
        prompt = Prompt(ATTENTION, "misfit", 64)
        await store.open_namespace(prompt.description, deadline=soon())
        header = HeaderV1.unsealed(
            prompt.key(64, group, slice_), kind, span, codec_chain=0, decoded_bytes=100, created_ms=1
        )
        with pytest.raises(CorruptRecord):
            await store.save(seal(header, bytearray(HEADER_BYTES + 100)), deadline=soon())

    async def test_unopened_namespaces_are_refused(self, store: PageStore) -> None:
        """Nothing can be asked of or saved to a namespace that was not opened; opening is idempotent."""
        prompt = Prompt(ATTENTION, "namespace", 64, model="nobody opened this")
        record = prompt.record(64)
        for call in (
            store.lookup(prompt.query(), deadline=soon()),
            store.stage(prompt.query(), deadline=soon()),
            store.save(record, deadline=soon()),
            store.discard(record.key, "test", deadline=soon()),
        ):
            with pytest.raises(InvalidRequest):
                await call
        for _ in range(2):
            assert await store.open_namespace(prompt.description, deadline=soon()) == prompt.namespace
        await save_one(store, record)

    async def test_namespaces_do_not_see_each_other(self, store: PageStore) -> None:
        """Equal tokens in another namespace are another prefix."""
        mine, theirs = Prompt(ATTENTION, "same", 128), Prompt(ATTENTION, "same", 128, model="another")
        await save_all(store, mine)
        await store.open_namespace(theirs.description, deadline=soon())
        assert (await look_up(store, theirs)).resume_tokens == 0
        assert (await stage_all(store, theirs)).lease is None

    async def test_leases_end_unless_renewed(self, node: StoreNode) -> None:
        """A renewed lease outlives its first term; without renewal it ends, and its records are free."""
        store, prompt = node.store, Prompt(ATTENTION, "expiry", 128)
        await save_all(store, prompt)
        staged = await stage_all(store, prompt)
        assert staged.lease is not None
        assert 0 < staged.lease_s <= LEASE_S
        assert node.num_pinned_bytes() >= staged.num_bytes
        for _ in range(3):
            await asyncio.sleep(LEASE_S / 2)
            assert await store.renew(staged.lease, deadline=soon())
        assert (await store.load(staged.lease, staged.keys[0], deadline=soon())).key == staged.keys[0]
        await asyncio.sleep(LEASE_S * 1.2)
        assert not await store.renew(staged.lease, deadline=soon())
        with pytest.raises(Unavailable):
            await store.load(staged.lease, staged.keys[0], deadline=soon())
        assert node.num_pinned_bytes() == 0

    async def test_released_leases_hold_nothing(self, node: StoreNode) -> None:
        """Release ends a lease at once; releasing again, or something unknown, is ignored."""
        store, prompt = node.store, Prompt(ATTENTION, "release", 128)
        await save_all(store, prompt)
        first, second = await stage_all(store, prompt), await stage_all(store, prompt)
        assert first.lease is not None
        assert second.lease is not None
        await store.release(first.lease)
        with pytest.raises(Unavailable):
            await store.load(first.lease, first.keys[0], deadline=soon())
        with pytest.raises(Unavailable):
            await _load_many(store, first.lease, first.keys)
        assert (await store.load(second.lease, second.keys[0], deadline=soon())).key == second.keys[0]
        await store.release(second.lease)
        await store.release(second.lease)
        await store.release(LeaseId(bytes(16)))
        await until(lambda: node.num_pinned_bytes() == 0)

    async def test_only_leased_records_are_loaded(self, store: PageStore) -> None:
        """A record that is there but not part of the lease is not served by it."""
        prompt = Prompt(ATTENTION, "leased", 128)
        await save_all(store, prompt)
        staged = await store.stage(prompt.query(cap_tokens=64), deadline=soon())
        assert staged.lease is not None
        with pytest.raises(Unavailable):
            await store.load(staged.lease, prompt.key(128), deadline=soon())
        with pytest.raises(Unavailable):
            await _load_many(store, staged.lease, (*staged.keys, prompt.key(128)))

    async def test_acks_of_tiers_that_are_not_there_are_refused(self, node: StoreNode) -> None:
        """Each level of acknowledgement is either reached or refused by name, never silently weakened."""
        status = await node.store.status(deadline=soon())
        tiers = status["tiers"]
        assert isinstance(tiers, dict)
        prompt = Prompt(ATTENTION, "acks", 128)
        await node.store.open_namespace(prompt.description, deadline=soon())
        has_cold, has_hot = {"filesystem", "s3"} & set(tiers), "redis" in tiers
        for ack, there, record in (
            (Ack.COLD, has_cold, prompt.record(64)),
            (Ack.HOT, has_hot, prompt.record(128)),
        ):
            if there:
                assert await node.store.save(record, ack=ack, deadline=soon()) is SaveOutcome.STORED
            else:
                with pytest.raises(InvalidRequest):
                    await node.store.save(record, ack=ack, deadline=soon())

    async def test_cancelled_saves_are_whole_or_absent(self, store: PageStore) -> None:
        """A save is cancelled after each number of loop turns: afterwards the record is right, or not there."""
        prompt = Prompt(ATTENTION, "cancel save", 64 * 12, payload_bytes=600_000)
        await store.open_namespace(prompt.description, deadline=soon())
        for turns in range(12):
            tokens = 64 * (turns + 1)
            records = [prompt.record(tokens, 0, slice_) for slice_ in range(2)]
            await cancel_after(turns, store.save(records[0], deadline=soon()))
            await save_one(store, records[1])
            assert await store.save(records[0], deadline=soon()) in {SaveOutcome.STORED, SaveOutcome.EXISTS}
            staged = await store.stage(prompt.query(local_tokens=tokens - 64, cap_tokens=tokens), deadline=soon())
            assert staged.lease is not None
            loaded = await store.load(staged.lease, records[0].key, deadline=soon())
            assert bytes(open_record(loaded.data, records[0].key).data) == bytes(records[0].data)
            await store.release(staged.lease)

    async def test_cancelled_stages_leave_nothing_leased(self, node: StoreNode) -> None:
        """A stage is cancelled after each number of loop turns: no byte stays pinned, and the next one works."""
        prompt = Prompt(ATTENTION, "cancel stage", 256)
        await save_all(node.store, prompt)
        for turns in range(12):
            staged = await cancel_after(turns, node.store.stage(prompt.query(), deadline=soon()))
            if staged is not None and staged.lease is not None:
                await node.store.release(staged.lease)
            await until(lambda: node.num_pinned_bytes() == 0)
        assert (await stage_all(node.store, prompt)).resume_tokens == 256

    async def test_cancelled_loads_cost_nothing(self, node: StoreNode) -> None:
        """A load of many is cancelled after each number of loop turns: the next one works, and nothing stays leased."""
        store, prompt = node.store, Prompt(ATTENTION, "cancel load", 128, payload_bytes=150_000)
        saved = {record.key: bytes(record.data) for record in await save_all(store, prompt)}
        for turns in range(12):
            staged = await stage_all(store, prompt)
            assert staged.lease is not None
            await cancel_after(turns, _load_many(store, staged.lease, staged.keys))
            for key, one in zip(staged.keys, await _load_many(store, staged.lease, staged.keys), strict=True):
                assert _read(one) == saved[key]
            await store.release(staged.lease)
            await until(lambda: node.num_pinned_bytes() == 0)

    async def test_expired_deadlines_do_no_harm(self, store: PageStore) -> None:
        """A call without time left answers less or `Unavailable`; it keeps nothing and breaks nothing."""
        prompt = Prompt(ATTENTION, "late", 128)
        await save_all(store, prompt)
        try:
            staged = await store.stage(prompt.query(), deadline=Deadline.after(0.0))
        except Unavailable:
            pass
        else:
            assert staged.resume_tokens in {0, 64, 128}
        assert (await stage_all(store, prompt)).resume_tokens == 128

    async def test_status_has_its_shape(self, store: PageStore) -> None:
        """Plain values: version, tiers with usage and health, leases, queues, counters."""
        prompt = Prompt(ATTENTION, "status", 64)
        await save_all(store, prompt)
        staged = await stage_all(store, prompt)
        status = await store.status(deadline=soon())
        assert isinstance(status["version"], str)
        tiers, leases, counters = status["tiers"], status["leases"], status["counters"]
        assert isinstance(tiers, dict)
        assert isinstance(leases, dict)
        assert isinstance(counters, dict)
        assert tiers["memory"]["healthy"] is True
        assert tiers["memory"]["num_records"] == 2
        assert tiers["memory"]["used_bytes"] >= staged.num_bytes
        assert leases["active"] == 1
        assert counters['saves{outcome="stored"}'] == 2
        assert isinstance(status["write_back"], dict)

    async def test_closed_stores_say_so(self, store: PageStore) -> None:
        """After `aclose`, which may be called twice, every call is `Closed`; a release is ignored."""
        prompt = Prompt(ATTENTION, "closed", 64)
        record = (await save_all(store, prompt))[0]
        staged = await stage_all(store, prompt)
        assert staged.lease is not None
        await store.aclose()
        await store.aclose()
        await store.release(staged.lease)
        for call in (
            store.open_namespace(prompt.description, deadline=soon()),
            store.lookup(prompt.query(), deadline=soon()),
            store.stage(prompt.query(), deadline=soon()),
            store.renew(staged.lease, deadline=soon()),
            store.load(staged.lease, record.key, deadline=soon()),
            _load_many(store, staged.lease, staged.keys),
            store.save(record, deadline=soon()),
            store.discard(record.key, "test", deadline=soon()),
            store.status(deadline=soon()),
        ):
            with pytest.raises(Closed):
                await call


class PageStoreContract(HitContract, CareContract):
    """What every `PageStore` promises. Subclasses provide the fixture `node`."""
