"""The contract of tiers, run on a real Redis, and what stripes add to it."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import uvloop

from kvstore.format.header_v1 import HEADER_BYTES
from kvstore.format.names import format_name
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.io_loops import open_io_loops
from kvstore.testing.records import flipped, make_key, make_record
from kvstore.testing.servers import RedisServer
from kvstore.testing.tier_contract import LARGE_BYTES, LastingTierContract, RawMedium
from kvstore.testing.waiting import soon
from kvstore.tiers.base import PutOutcome, Tier
from kvstore.tiers.redis.node import Node
from kvstore.tiers.redis.reading import PART_BYTES, STRIPE_BYTES, Reading, stripe_names, stripe_ranges
from tests.contract.media import RedisMedium

pytestmark = pytest.mark.servers


@pytest.fixture
def medium(shared_redis: RedisServer) -> Iterator[RedisMedium]:
    medium = RedisMedium(shared_redis.url)
    medium.raw.flushall()
    yield medium
    medium.raw.close()


@pytest.fixture
async def tier(medium: RedisMedium) -> AsyncIterator[Tier]:
    tier = await medium.open_tier()
    yield tier
    await tier.aclose()


class TestRedisTier(LastingTierContract):
    @pytest.fixture
    async def medium(self, medium: RedisMedium) -> RawMedium:
        return medium


# Its successor, a hook, would change the loop of every test of the run.
@pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture is deprecated")
class TestRedisTierOnUvloop(LastingTierContract):
    """The loop of the service receives differently: the whole contract again."""

    @pytest.fixture
    def event_loop_policy(self) -> asyncio.AbstractEventLoopPolicy:
        return uvloop.EventLoopPolicy()

    @pytest.fixture
    async def medium(self, medium: RedisMedium) -> RawMedium:
        assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
        return medium


class TestRedisTierOnTwoThreads(LastingTierContract):
    """Bytes move on other loops than the caller's: the whole contract again."""

    @pytest.fixture
    async def medium(self, medium: RedisMedium) -> AsyncIterator[RawMedium]:
        async with open_io_loops(2) as medium.io_loops:
            yield medium


async def test_no_value_is_larger_than_a_stripe(medium: RedisMedium, tier: Tier) -> None:
    """A record at the limit is one value, one byte more makes it striped, and no value is above the limit."""
    at_limit, above = make_record(1, STRIPE_BYTES - HEADER_BYTES), make_record(2, STRIPE_BYTES - HEADER_BYTES + 1)
    for record in (at_limit, above, make_record(3, LARGE_BYTES)):
        await tier.put(record, deadline=soon())
    assert medium.raw.strlen(format_name(at_limit.key)) == STRIPE_BYTES
    assert medium.raw.strlen(format_name(above.key)) == HEADER_BYTES
    assert max(medium.raw.strlen(name) for name in medium.raw.keys("*")) == STRIPE_BYTES
    assert all(medium.raw.ttl(name) == -1 for name in medium.raw.keys("*"))
    stored = await tier.get(above.key, deadline=soon())
    assert stored is not None and stored.data == above.data


async def test_missing_stripe_is_a_miss(medium: RedisMedium, tier: Tier) -> None:
    """Redis evicted one stripe: a miss, not corrupt, and the record can be put again."""
    record = make_record(1, LARGE_BYTES)
    await tier.put(record, deadline=soon())
    medium.raw.delete(stripe_names(record.header)[1])
    assert await tier.get(record.key, deadline=soon()) is None
    assert tier.num_quarantined == 0
    assert await tier.put(record, deadline=soon()) is PutOutcome.STORED
    stored = await tier.get(record.key, deadline=soon())
    assert stored is not None and stored.data == record.data


async def test_what_is_told_to_exist_is_whole(medium: RedisMedium, tier: Tier) -> None:
    """An evictable record has lost a stripe, and was not read since: a put stores it again."""
    record = make_record(1, LARGE_BYTES)
    await tier.put_evictable(record, deadline=soon())
    medium.raw.delete(stripe_names(record.header)[1])
    assert await tier.put(record, deadline=soon()) is PutOutcome.STORED
    stored = await tier.get(record.key, deadline=soon())
    assert stored is not None and stored.data == record.data
    assert {medium.raw.ttl(name) for name in medium.raw.keys("*")} == {-1}


async def test_a_stripe_that_goes_before_its_header_comes(
    medium: RedisMedium, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Redis without room evicts a stripe, which may expire until the header stands: nothing was stored, and nothing
    of it is left that says otherwise."""
    record = make_record(1, LARGE_BYTES)
    data = Node.data

    async def data_and_lose(self: Node, *commands: Any, deadline: Deadline) -> object:
        replies = await data(self, *commands, deadline=deadline)
        medium.raw.delete(stripe_names(record.header)[1])
        return replies

    monkeypatch.setattr(Node, "data", data_and_lose)
    assert await tier.put(record, deadline=soon()) is PutOutcome.FULL
    assert await tier.head([record.key], deadline=soon()) == [None]
    assert all(medium.raw.ttl(name) > 0 for name in medium.raw.keys("*"))
    monkeypatch.undo()
    assert await tier.put(record, deadline=soon()) is PutOutcome.STORED
    stored = await tier.get(record.key, deadline=soon())
    assert stored is not None and stored.data == record.data


async def test_no_room_for_a_header(medium: RedisMedium, tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Redis is full once the stripes are there: nothing is stored, and the stripes give their room back at once."""
    record = make_record(1, LARGE_BYTES)
    limit, policy = (medium.raw.config_get(name)[name] for name in ("maxmemory", "maxmemory-policy"))
    await tier.head([record.key], deadline=soon())
    control = Node.control

    async def fill_and_control(self: Node, *commands: Any, deadline: Deadline) -> object:
        if commands[0][0] == "EVAL":
            medium.raw.config_set("maxmemory", 1 << 20)
        return await control(self, *commands, deadline=deadline)

    monkeypatch.setattr(Node, "control", fill_and_control)
    medium.raw.config_set("maxmemory-policy", "noeviction")
    try:
        assert await tier.put(record, deadline=soon()) is PutOutcome.FULL
        assert medium.raw.keys("*") == []
    finally:
        medium.raw.config_set("maxmemory", limit)
        medium.raw.config_set("maxmemory-policy", policy)
    monkeypatch.undo()
    assert await tier.put(record, deadline=soon()) is PutOutcome.STORED


async def test_a_put_of_what_exists_sends_one_stripe(medium: RedisMedium, tier: Tier) -> None:
    """Another engine has put a large record of the same name: no more than one stripe is sent, and none stays."""
    theirs, ours = (make_record(1, LARGE_BYTES, seed=seed) for seed in (1, 2))
    assert await tier.put(theirs, deadline=soon()) is PutOutcome.STORED
    names, before = set(medium.raw.keys("*")), medium.raw.info("stats")["total_net_input_bytes"]
    assert await tier.put(ours, deadline=soon()) is PutOutcome.EXISTS
    assert medium.raw.info("stats")["total_net_input_bytes"] - before < STRIPE_BYTES + 20_000
    assert set(medium.raw.keys("*")) == names


async def test_a_record_that_is_replaced_while_it_is_read(
    medium: RedisMedium, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis evicts a record between two parts of a read, and another engine puts its own: the bytes fit neither
    record, so the new one is read, and not quarantined."""
    before, since = (make_record(1, 3 * PART_BYTES, seed=seed) for seed in (1, 2))
    await tier.put(since, deadline=soon())
    read = Node.read

    async def read_both(self: Node, reading: Reading, *, deadline: Deadline) -> None:
        monkeypatch.setattr(Node, "read", read)
        values = [before.data, since.data]
        while (command := reading.next()) is not None:
            _, _, first, last = command
            assert isinstance(first, int) and isinstance(last, int)
            reading.take(values[0][first : last + 1 if last >= 0 else None])
            values = values[-1:]

    monkeypatch.setattr(Node, "read", read_both)
    stored = await tier.get(since.key, deadline=soon())
    assert stored is not None and stored.data == since.data
    assert tier.num_quarantined == 0


async def test_stripe_of_the_wrong_size(medium: RedisMedium, tier: Tier) -> None:
    """A stripe that was cut short is damage: quarantined."""
    record = make_record(1, LARGE_BYTES)
    await tier.put(record, deadline=soon())
    medium.raw.set(stripe_names(record.header)[0], b"short")
    assert await tier.get(record.key, deadline=soon()) is None
    assert tier.num_quarantined == 1


async def test_loser_leaves_no_stripes(medium: RedisMedium, tier: Tier) -> None:
    """After a race of two different large records only the winner's stripes are left."""
    records = [make_record(1, LARGE_BYTES, seed=seed) for seed in (1, 2)]
    outcomes = await asyncio.gather(*(tier.put(record, deadline=soon()) for record in records))
    winner = records[outcomes.index(PutOutcome.STORED)]
    expected = {format_name(winner.key), *stripe_names(winner.header)}
    assert {name.decode() for name in medium.raw.keys("*")} == expected


@pytest.mark.parametrize("payload_bytes", [1000, LARGE_BYTES])
async def test_what_is_told_to_exist_stays(medium: RedisMedium, tier: Tier, payload_bytes: int) -> None:
    """An evictable record is put again: a caller that gets EXISTS relies on it, so it is not evictable any more."""
    record = make_record(1, payload_bytes)
    await tier.put(record, deadline=soon())
    await tier.allow_eviction([record.key], deadline=soon())
    assert all(medium.raw.ttl(name) > 0 for name in medium.raw.keys("*"))
    assert await tier.put(record, deadline=soon()) is PutOutcome.EXISTS
    assert [medium.raw.ttl(name) for name in medium.raw.keys("*")] == [-1] * len(medium.raw.keys("*"))
    await tier.allow_eviction([record.key], deadline=soon())
    assert all(medium.raw.ttl(name) > 0 for name in medium.raw.keys("*"))


@pytest.mark.parametrize("payload_bytes", [1000, LARGE_BYTES])
async def test_what_may_go_may_go_from_the_start(medium: RedisMedium, tier: Tier, payload_bytes: int) -> None:
    """A record that is put as evictable has an expiry in all its parts. One that must stay has none, also if it is put
    as evictable later; a later put removes the expiry."""
    promised, record = make_record(1, payload_bytes), make_record(2, payload_bytes)
    assert await tier.put(promised, deadline=soon()) is PutOutcome.STORED
    kept = medium.raw.keys("*")
    assert await tier.put_evictable(promised, deadline=soon()) is PutOutcome.EXISTS
    assert await tier.put_evictable(record, deadline=soon()) is PutOutcome.STORED
    assert {medium.raw.ttl(name) for name in kept} == {-1}
    assert all(medium.raw.ttl(name) > 86_400 for name in set(medium.raw.keys("*")).difference(kept))
    assert await tier.put_evictable(record, deadline=soon()) is PutOutcome.EXISTS
    assert await tier.put(record, deadline=soon()) is PutOutcome.EXISTS
    assert {medium.raw.ttl(name) for name in medium.raw.keys("*")} == {-1}


async def test_stripes_of_a_dead_writer_expire(medium: RedisMedium, tier: Tier) -> None:
    """Stripes without a header, as a killed writer leaves them, are a miss, have an expiry, and do no harm to a put."""
    record = make_record(1, LARGE_BYTES)
    start, stop = stripe_ranges(record.header)[0]
    medium.raw.set(stripe_names(record.header)[0], bytes(record.data[start:stop]), px=600_000)
    assert await tier.get(record.key, deadline=soon()) is None
    assert [entry async for entry in tier.scan()] == []
    assert await tier.put(record, deadline=soon()) is PutOutcome.STORED
    assert all(medium.raw.ttl(name) == -1 for name in stripe_names(record.header))


@pytest.mark.parametrize("damage", ["in its header", "behind it", "in its second part", "shorter", "longer"])
async def test_a_damaged_value_of_several_parts(medium: RedisMedium, tier: Tier, damage: str) -> None:
    """A corrupt value that is read in parts is quarantined, and the record can be put again."""
    record = make_record(1, 2 << 20)
    data = bytearray(record.data)
    if damage == "longer":
        data += b"x"
    elif damage == "shorter":
        del data[-1]
    else:
        data[{"in its header": 20, "behind it": HEADER_BYTES, "in its second part": PART_BYTES + 5}[damage]] ^= 1
    assert await tier.put(record, deadline=soon()) is PutOutcome.STORED
    await medium.write(record.key, bytes(data))
    assert await tier.get(record.key, deadline=soon()) is None
    assert tier.num_quarantined == 1
    assert await tier.put(record, deadline=soon()) is PutOutcome.STORED
    stored = await tier.get(record.key, deadline=soon())
    assert stored is not None and stored.data == record.data


async def test_quarantine_keeps_the_bytes_for_a_while(medium: RedisMedium, tier: Tier) -> None:
    """Damaged bytes stay under a name of their own, with an expiry."""
    record = make_record(1)
    await tier.put(record, deadline=soon())
    await medium.write(record.key, b"damaged")
    assert await tier.get(record.key, deadline=soon()) is None
    aside = f"quarantine:{format_name(record.key)}"
    assert medium.raw.get(aside) == b"damaged"
    assert medium.raw.ttl(aside) > 0


async def test_head_is_one_round_trip(medium: RedisMedium, tier: Tier) -> None:
    """A head of 1,000 keys is as many commands in one go, answered while another connection carries pages."""
    await tier.put(make_record(7), deadline=soon())
    sizes = await tier.head([make_key(number) for number in range(1000)], deadline=soon())
    assert [index for index, size in enumerate(sizes) if size is not None] == [7]


async def test_scan_of_many(medium: RedisMedium, tier: Tier) -> None:
    """A scan over several of the server's batches lists each record, beside foreign keys."""
    numbers = range(1500)
    await asyncio.gather(*(tier.put(make_record(number, 10), deadline=soon()) for number in numbers))
    medium.raw.set("somebody else's", b"x")
    medium.raw.set("v1/not-a-record", b"x")
    scanned = [entry.key async for entry in tier.scan()]
    assert set(scanned) == {make_key(number) for number in numbers}


async def test_a_scan_remembers_nothing(medium: RedisMedium, tier: Tier) -> None:
    """Memory for what was listed would end a service whose Redis holds ten million records."""
    names = [format_name(make_key(number)) for number in range(20_000)]
    for start in range(0, len(names), 1000):
        medium.raw.mset(dict.fromkeys(names[start : start + 1000], b"x"))
    tracemalloc.start()
    try:
        before_bytes, _ = tracemalloc.get_traced_memory()
        num_listed = len([None async for _ in tier.scan()])
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_listed >= len(names)
    assert most_bytes - before_bytes < 2 << 20


async def test_value_of_a_foreign_type(medium: RedisMedium, tier: Tier) -> None:
    """A list under a record's name harms no head of others, is quarantined by a get, and gives way to the record."""
    record, beside = make_record(1), make_record(2)
    medium.raw.rpush(format_name(record.key), b"x")
    await tier.put(beside, deadline=soon())
    assert await tier.head([record.key, beside.key], deadline=soon()) == [0, beside.num_bytes]
    assert [entry.key async for entry in tier.scan()] == [beside.key]
    assert await tier.get(record.key, deadline=soon()) is None
    assert tier.num_quarantined == 1
    assert await tier.put(record, deadline=soon()) is PutOutcome.STORED


@pytest.mark.parametrize("payload_bytes", [1000, 2 << 20, LARGE_BYTES])
@pytest.mark.parametrize("damage", ["payload bit", "wrong size"])
async def test_a_value_that_is_replaced_while_it_is_judged(
    medium: RedisMedium, tier: Tier, payload_bytes: int, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer's good record takes the name of a damaged one that is being read: it stays."""
    bad, good = (make_record(1, payload_bytes, seed=seed) for seed in (1, 2))
    data = bytes(bad.data)
    await tier.put(bad, deadline=soon())
    await medium.write(bad.key, flipped(data, 8 * (len(data) - 1)) if damage == "payload bit" else data[:-1])
    num_reads = 0
    read = Node.read

    async def read_and_replace(self: Node, reading: Reading, *, deadline: Deadline) -> None:
        nonlocal num_reads
        try:
            await read(self, reading, deadline=deadline)
        finally:
            num_reads += 1
            if num_reads == 2:  # a corrupt record is read twice
                await tier.delete(bad.key, deadline=soon())
                await tier.put(good, deadline=soon())

    monkeypatch.setattr(Node, "read", read_and_replace)
    assert await tier.get(bad.key, deadline=soon()) is None
    assert tier.num_quarantined == 0
    stored = await tier.get(good.key, deadline=soon())
    assert stored is not None and stored.data == good.data
