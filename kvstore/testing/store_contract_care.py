"""The contract of `PageStore`, what is refused and what is given back: bad records, leases, cancels, the end."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.api import Ack, LeaseId, PageStore, SaveOutcome
from kvstore.errors import Closed, CorruptRecord, InvalidRequest, Unavailable
from kvstore.format.header_v1 import HeaderV1
from kvstore.format.record import HEADER_BYTES, Record, open_record, seal
from kvstore.model.kinds import RecordKind
from kvstore.model.layout import Span
from kvstore.runtime.deadline import Deadline
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.store_node import (
    LEASE_S,
    StoreNode,
    cancel_after,
    look_up,
    save_all,
    save_one,
    soon,
    stage_all,
    until,
)

__all__ = ["CareContract"]


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
        header = HeaderV1(prompt.key(64, group, slice_), kind, span, 0, 100, 0, bytes(16), created_ms=1)
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
        """A renewed lease outlives its first time; left alone it ends, and what it held is free."""
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
            store.save(record, deadline=soon()),
            store.discard(record.key, "test", deadline=soon()),
            store.status(deadline=soon()),
        ):
            with pytest.raises(Closed):
                await call
