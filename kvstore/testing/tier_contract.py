"""The contract of `Tier` as tests: subclass `TierContract`, give it a `medium`, and a new tier is tested.

What stands here is what `TieredStore` relies on. Damage is planted through `RawMedium`, which reaches the stored bytes
behind the tier's back; so a tier that does not verify its reads fails here.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from kvstore.errors import Closed, Unavailable
from kvstore.format.header_v1 import HEADER_BYTES
from kvstore.format.record import Record
from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.testing.records import DAMAGE, NAMESPACE, flipped, make_key, make_record
from kvstore.testing.waiting import soon
from kvstore.tiers.base import Entry, PutOutcome, Tier

LARGE_BYTES = 9 << 20
OTHER_NAMESPACE = NamespaceId(bytes(range(16)))


class RawMedium(ABC):
    """The raw store behind a tier: opens tiers on it, and reads and writes stored bytes without their code.

    Attributes:
        receives: The tier receives into `allocate`'s buffer (else it hands out its own).
    """

    receives = True

    @abstractmethod
    async def open_tier(self) -> Tier:
        """A tier on this medium; the caller closes it."""

    @abstractmethod
    async def read(self, key: RecordKey) -> bytes | None:
        """All bytes stored under the name of `key`, or `None`."""

    @abstractmethod
    async def write(self, key: RecordKey, data: bytes) -> None:
        """Store `data` under the name of `key`, in place of what is there."""


class TierContract:
    """Tests of one implementation; a subclass overrides the fixture `medium`."""

    @pytest.fixture
    async def medium(self) -> RawMedium:
        raise NotImplementedError("override the fixture `medium`")

    @pytest.fixture
    async def tier(self, medium: RawMedium) -> AsyncIterator[Tier]:
        tier = await medium.open_tier()
        yield tier
        await tier.aclose()

    @pytest.mark.parametrize("payload_bytes", [0, 1, 1000, 300_000, 4_000_000, LARGE_BYTES])
    async def test_round_trip(self, tier: Tier, payload_bytes: int) -> None:
        """What was put is got back, bit for bit, and seen by head."""
        record = make_record(payload_bytes, payload_bytes)
        assert await tier.put(record, deadline=soon()) is PutOutcome.STORED
        stored = await tier.get(record.key, deadline=soon())
        assert stored is not None
        assert stored.data == record.data
        assert stored.header == record.header
        assert await tier.head([record.key], deadline=soon()) in ([record.num_bytes], [0])

    async def test_evictable(self, tier: Tier) -> None:
        """A record that may go is there like any other, once."""
        record = make_record(1, 1000)
        outcomes = [await tier.put_evictable(record, deadline=soon()), await tier.put(record, deadline=soon())]
        assert outcomes == [PutOutcome.STORED, PutOutcome.EXISTS]
        stored = await tier.get(record.key, deadline=soon())
        assert stored is not None and stored.data == record.data

    async def test_absent(self, tier: Tier) -> None:
        """What was never put is a miss in every verb, and no error."""
        key = make_key(1)
        assert await tier.get(key, deadline=soon()) is None
        assert await tier.head([key], deadline=soon()) == [None]
        assert await tier.delete(key, deadline=soon()) is False
        await tier.quarantine(key, "not there", deadline=soon())
        assert tier.num_quarantined == 0

    async def test_head_of_many(self, tier: Tier) -> None:
        """Answers come in the order of the keys, also of none, of absent ones and of one asked twice."""
        assert await tier.head([], deadline=soon()) == []
        records = {number: make_record(number, 100 + number) for number in range(0, 40, 2)}
        for record in records.values():
            await tier.put(record, deadline=soon())
        numbers = [*range(40), 2, 3]
        sizes = await tier.head([make_key(number) for number in numbers], deadline=soon())
        assert sizes == [records[number].num_bytes if number in records else None for number in numbers]

    async def test_slices_and_groups_are_apart(self, tier: Tier) -> None:
        """Records of one prefix differ by group and slice."""
        keys = [make_key(5, group=group, slice_=slice_) for group in (0, 1, 10) for slice_ in (0, 1, 11)]
        for key in keys:
            assert await tier.put(make_record(key), deadline=soon()) is PutOutcome.STORED
        for key in keys:
            record = await tier.get(key, deadline=soon())
            assert record is not None and record.data == make_record(key).data

    @pytest.mark.parametrize("payload_bytes", [1000, LARGE_BYTES])
    async def test_second_put_changes_nothing(self, tier: Tier, payload_bytes: int) -> None:
        """The first record under a name stays; the second put returns `EXISTS`."""
        first, second = (make_record(1, payload_bytes, seed=seed) for seed in (1, 2))
        assert await tier.put(first, deadline=soon()) is PutOutcome.STORED
        assert await tier.put(second, deadline=soon()) is PutOutcome.EXISTS
        assert await tier.put(first, deadline=soon()) is PutOutcome.EXISTS
        stored = await tier.get(first.key, deadline=soon())
        assert stored is not None and stored.data == first.data

    @pytest.mark.parametrize("payload_bytes", [1000, LARGE_BYTES])
    async def test_put_race(self, tier: Tier, payload_bytes: int) -> None:
        """Of several puts of one name at once exactly one wins, and its bytes are the ones that stay, whole."""
        num_racers = 12 if payload_bytes < LARGE_BYTES else 4
        records = [make_record(1, payload_bytes, seed=seed // 2) for seed in range(num_racers)]
        outcomes = await asyncio.gather(*(tier.put(record, deadline=soon()) for record in records))
        assert sorted(outcome.value for outcome in outcomes) == ["exists"] * (num_racers - 1) + ["stored"]
        winner = records[outcomes.index(PutOutcome.STORED)]
        stored = await tier.get(winner.key, deadline=soon())
        assert stored is not None and stored.data == winner.data

    @pytest.mark.parametrize("payload_bytes", [1000, LARGE_BYTES])
    async def test_delete(self, tier: Tier, medium: RawMedium, payload_bytes: int) -> None:
        """A deleted record is gone from the medium too, and can be put again."""
        record = make_record(1, payload_bytes)
        await tier.put(record, deadline=soon())
        assert await tier.delete(record.key, deadline=soon()) is True
        assert await tier.get(record.key, deadline=soon()) is None
        assert await medium.read(record.key) is None
        assert await tier.delete(record.key, deadline=soon()) is False
        assert await tier.put(record, deadline=soon()) is PutOutcome.STORED
        assert await tier.get(record.key, deadline=soon()) is not None

    async def test_delete_all(self, tier: Tier, medium: RawMedium) -> None:
        """Many records leave at once, one that is not there among them; the others stay."""
        going = [make_record(number) for number in range(20)] + [make_record(20, LARGE_BYTES)]
        staying = make_record(30)
        for record in [*going[:10], *going[11:], staying]:
            await tier.put(record, deadline=soon())
        await tier.delete_all([record.key for record in going], deadline=soon())
        assert await tier.head([record.key for record in going], deadline=soon()) == [None] * len(going)
        assert [await medium.read(record.key) for record in going] == [None] * len(going)
        assert await tier.get(staying.key, deadline=soon()) is not None
        await tier.delete_all([], deadline=soon())

    async def test_scan(self, tier: Tier) -> None:
        """A scan lists every record once with its bytes, of one namespace or of all, and no manifest."""
        here = [make_record(number, 50 + number) for number in range(30)] + [make_record(99, LARGE_BYTES)]
        there = [make_record(make_key(number, namespace=OTHER_NAMESPACE)) for number in range(3)]
        for record in [*here, *there]:
            await tier.put(record, deadline=soon())
        await tier.put_manifest(NAMESPACE, b"{}", deadline=soon())
        await tier.delete(here.pop(0).key, deadline=soon())

        def entries(records: list[Record]) -> list[Entry]:
            return sorted((Entry(record.key, record.num_bytes) for record in records), key=lambda entry: entry.key)

        async def scanned(namespace: NamespaceId | None) -> list[Entry]:
            return sorted([entry async for entry in tier.scan(namespace)], key=lambda entry: entry.key)

        assert await scanned(NAMESPACE) == entries(here)
        assert await scanned(OTHER_NAMESPACE) == entries(there)
        assert await scanned(None) == entries(here + there)

    async def test_manifests(self, tier: Tier) -> None:
        """A namespace's description is kept, replaced by a later one, and apart from other namespaces."""
        assert await tier.get_manifest(NAMESPACE, deadline=soon()) is None
        await tier.put_manifest(NAMESPACE, b'{"a":1}', deadline=soon())
        await tier.put_manifest(NAMESPACE, b'{"a":2}', deadline=soon())
        assert await tier.get_manifest(NAMESPACE, deadline=soon()) == b'{"a":2}'
        assert await tier.get_manifest(OTHER_NAMESPACE, deadline=soon()) is None

    async def test_usage(self, tier: Tier) -> None:
        """What a tier knows of its use is right: records counted, bytes not below the records', nothing quarantined."""
        before = await tier.usage(deadline=soon())
        records = [make_record(number, 10_000) for number in range(5)]
        for record in records:
            await tier.put(record, deadline=soon())
        after = await tier.usage(deadline=soon())
        assert after.num_quarantined == 0
        if after.num_records is not None and before.num_records is not None:
            assert after.num_records - before.num_records == len(records)
        if after.used_bytes is not None and before.used_bytes is not None:
            assert after.used_bytes - before.used_bytes >= sum(record.num_bytes for record in records)

    @pytest.mark.parametrize("payload_bytes", [1000, LARGE_BYTES])
    async def test_receives_into_the_callers_buffer(self, tier: Tier, medium: RawMedium, payload_bytes: int) -> None:
        """`allocate` is asked once, for exactly the record's bytes, and the record stands in what it returned.

        A tier that keeps records in memory does not ask: it hands out its own.
        """
        record = make_record(1, payload_bytes)
        await tier.put(record, deadline=soon())
        buffers: list[np.ndarray[Any, Any]] = []

        def allocate(num_bytes: int) -> memoryview:
            buffers.append(np.zeros(num_bytes, dtype=np.uint8))
            return buffers[-1].data

        stored = await tier.get(record.key, deadline=soon(), allocate=allocate)
        assert stored is not None and stored.data == record.data
        assert [len(buffer) for buffer in buffers] == [record.num_bytes] * medium.receives
        stands_in = buffers[0] if medium.receives else np.frombuffer(record.data, dtype=np.uint8)
        assert np.shares_memory(np.frombuffer(stored.data, dtype=np.uint8), stands_in)

    @pytest.mark.parametrize("damage", list(DAMAGE))
    async def test_damage_is_never_served(self, tier: Tier, medium: RawMedium, damage: str) -> None:
        """Bytes that are not the record their name says are a counted miss, quarantined, and can be put again."""
        record, other = make_record(1), make_record(2)
        told: list[RecordKey] = []
        tier.on_quarantine = lambda key, reason: told.append(key)
        await tier.put(record, deadline=soon())
        await medium.write(record.key, DAMAGE[damage](bytes(record.data), bytes(other.data)))
        assert await tier.get(record.key, deadline=soon()) is None
        assert tier.num_quarantined == 1
        assert told == [record.key]
        assert (await tier.usage(deadline=soon())).num_quarantined == 1
        assert await medium.read(record.key) is None
        assert await tier.get(record.key, deadline=soon()) is None
        assert tier.num_quarantined == 1
        assert await tier.head([record.key], deadline=soon()) == [None]
        assert [entry async for entry in tier.scan(NAMESPACE)] == []
        assert await tier.put(record, deadline=soon()) is PutOutcome.STORED
        stored = await tier.get(record.key, deadline=soon())
        assert stored is not None and stored.data == record.data

    async def test_flipped_bits_of_a_large_record(self, tier: Tier, medium: RawMedium) -> None:
        """One flipped bit anywhere in a large record, in its header or far behind, makes it a miss."""
        record = make_record(1, LARGE_BYTES)
        for at_bytes in (20, HEADER_BYTES + 1, 5 << 20, LARGE_BYTES + HEADER_BYTES - 1):
            assert await tier.put(record, deadline=soon()) is PutOutcome.STORED
            await medium.write(record.key, flipped(bytes(record.data), 8 * at_bytes + 6))
            assert await tier.get(record.key, deadline=soon()) is None
        assert tier.num_quarantined == 4

    async def test_random_flipped_bits(self, tier: Tier, medium: RawMedium) -> None:
        """Every one of 25 random single-bit flips is detected."""
        record = make_record(1, 100)
        bits = np.random.default_rng(1).integers(0, 8 * record.num_bytes, 25)
        for bit in map(int, bits):
            assert await tier.put(record, deadline=soon()) is PutOutcome.STORED
            await medium.write(record.key, flipped(bytes(record.data), bit))
            assert await tier.get(record.key, deadline=soon()) is None, f"{bit=}"
        assert tier.num_quarantined == len(bits)

    @pytest.mark.parametrize("payload_bytes", [1000, LARGE_BYTES])
    async def test_quarantine(self, tier: Tier, medium: RawMedium, payload_bytes: int) -> None:
        """A record that a reader found bad is no longer read, counted, and can be put again."""
        record = make_record(1, payload_bytes)
        await tier.put(record, deadline=soon())
        await tier.quarantine(record.key, "found bad by a test", deadline=soon())
        assert await tier.get(record.key, deadline=soon()) is None
        assert await medium.read(record.key) is None
        assert tier.num_quarantined == 1
        assert await tier.put(record, deadline=soon()) is PutOutcome.STORED
        stored = await tier.get(record.key, deadline=soon())
        assert stored is not None and stored.data == record.data

    @pytest.mark.parametrize("payload_bytes", [1000, LARGE_BYTES])
    async def test_quarantine_of_what_was_seen(self, tier: Tier, payload_bytes: int) -> None:
        """Another writer's record that took the place of a bad one since it was read stays; the bad one itself goes."""
        bad, good = (make_record(1, payload_bytes, seed=seed) for seed in (1, 2))
        await tier.put(good, deadline=soon())
        assert await tier.quarantine(bad.key, "an old look", seen=bad, deadline=soon()) is False
        stored = await tier.get(good.key, deadline=soon())
        assert stored is not None and stored.data == good.data
        assert tier.num_quarantined == 0
        seen = await tier.get(good.key, deadline=soon())
        assert await tier.quarantine(good.key, "a fresh one", seen=seen, deadline=soon()) is True
        assert await tier.head([good.key], deadline=soon()) == [None]
        assert await tier.quarantine(good.key, "a late one", seen=seen, deadline=soon()) is False
        assert tier.num_quarantined == 1

    async def test_deadline_that_has_passed(self, tier: Tier) -> None:
        """A call without time left is refused, not answered as a miss; the next one is served."""
        record = make_record(1)
        past = Deadline.after(-1)
        for call in (
            tier.head([record.key], deadline=past),
            tier.get(record.key, deadline=past),
            tier.put(record, deadline=past),
            tier.delete(record.key, deadline=past),
            tier.get_manifest(NAMESPACE, deadline=past),
            tier.put_manifest(NAMESPACE, b"{}", deadline=past),
        ):
            with pytest.raises(Unavailable):
                await call
        assert await tier.put(record, deadline=soon()) is PutOutcome.STORED
        assert await tier.get(record.key, deadline=soon()) is not None

    @pytest.mark.parametrize("payload_bytes", [1000, LARGE_BYTES])
    async def test_cancelled_gets(self, tier: Tier, payload_bytes: int) -> None:
        """A get may be cancelled at any point; gets beside and after it are right."""
        record, beside = make_record(1, payload_bytes), make_record(2, 2000)
        await tier.put(record, deadline=soon())
        await tier.put(beside, deadline=soon())
        for step in range(24):
            cancelled = asyncio.ensure_future(tier.get(record.key, deadline=soon()))
            neighbour = asyncio.ensure_future(tier.get(beside.key, deadline=soon()))
            await _cancel_at(cancelled, step)
            got = await neighbour
            assert got is not None and got.data == beside.data
        stored = await tier.get(record.key, deadline=soon())
        assert stored is not None and stored.data == record.data
        assert tier.num_quarantined == 0

    @pytest.mark.parametrize("payload_bytes", [1000, LARGE_BYTES])
    async def test_cancelled_puts(self, tier: Tier, payload_bytes: int) -> None:
        """A put that was cancelled at any point left a whole record or none, and does not hinder the next one."""
        for step in range(16):
            record = make_record(step, payload_bytes)
            await _cancel_at(asyncio.ensure_future(tier.put(record, deadline=soon())), step)
            seen = await tier.get(record.key, deadline=soon())
            assert seen is None or seen.data == record.data
            assert await tier.put(record, deadline=soon()) in (PutOutcome.STORED, PutOutcome.EXISTS)
            stored = await tier.get(record.key, deadline=soon())
            assert stored is not None and stored.data == record.data
        assert tier.num_quarantined == 0

    async def test_many_at_once(self, tier: Tier) -> None:
        """Puts and gets of many records at once each get their own bytes."""
        records = [make_record(number, 1000 * (number % 7) + 1) for number in range(60)]
        await asyncio.gather(*(tier.put(record, deadline=soon()) for record in records))
        stored = await asyncio.gather(*(tier.get(record.key, deadline=soon()) for record in records))
        assert all(got is not None and got.data == put.data for got, put in zip(stored, records, strict=True))

    async def test_closed(self, medium: RawMedium) -> None:
        """After `aclose`, which may be called twice, every verb says `Closed`."""
        tier = await medium.open_tier()
        await tier.aclose()
        await tier.aclose()
        for call in (
            tier.head([make_key(1)], deadline=soon()),
            tier.get(make_key(1), deadline=soon()),
            tier.put(make_record(1), deadline=soon()),
            tier.delete(make_key(1), deadline=soon()),
            tier.quarantine(make_key(1), "closed", deadline=soon()),
            tier.usage(deadline=soon()),
            anext(tier.scan()),
        ):
            with pytest.raises(Closed):
                await call


class LastingTierContract(TierContract):
    """The contract of tiers whose medium outlives them."""

    async def test_seen_by_the_next_owner(self, medium: RawMedium) -> None:
        """What one tier stored, a tier that is opened later on the same medium serves."""
        small, large = make_record(1), make_record(2, LARGE_BYTES)
        first = await medium.open_tier()
        for record in (small, large):
            await first.put(record, deadline=soon())
        await first.put_manifest(NAMESPACE, b"{}", deadline=soon())
        await first.aclose()
        second = await medium.open_tier()
        try:
            for record in (small, large):
                stored = await second.get(record.key, deadline=soon())
                assert stored is not None and stored.data == record.data
            assert await second.get_manifest(NAMESPACE, deadline=soon()) == b"{}"
        finally:
            await second.aclose()


async def _cancel_at(task: asyncio.Future[Any], step: int) -> None:
    """Cancel after `step` turns of the loop, later ones after up to some 30 ms; it may have ended before."""
    if step < 8:
        for _ in range(step):
            await asyncio.sleep(0)
    else:
        await asyncio.sleep(0.0004 * (step - 7) ** 1.6)
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error
