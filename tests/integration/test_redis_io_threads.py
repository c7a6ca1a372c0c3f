"""The Redis tier with two threads that move bytes: faults of one connection, ends with work in flight, stages."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator

import pytest
import redis.asyncio

from kvstore.api import Ack, SaveOutcome
from kvstore.compose import open_store
from kvstore.errors import Closed, Unavailable
from kvstore.runtime.io_loops import open_io_loops
from kvstore.settings import load_settings
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.records import make_record
from kvstore.testing.servers import RedisServer, redis_server
from kvstore.testing.waiting import soon, until
from kvstore.tiers.base import PutOutcome
from kvstore.tiers.redis import RedisTier

pytestmark = pytest.mark.servers


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
async def tier(server: RedisServer) -> AsyncIterator[RedisTier]:
    """With two connections for records, one in each thread."""
    async with open_io_loops(2) as io_loops:
        tier = RedisTier(server.url, num_connections=2, io_loops=io_loops)
        yield tier
        await tier.aclose()


async def test_the_loss_of_one_connection_fails_what_was_on_it(server: RedisServer, tier: RedisTier) -> None:
    """Two puts wait, one in each thread, and Redis drops the connection of one of them: that one fails, the other is
    stored, and the next put on the lost connection opens it again."""
    records = [make_record(number, 1 << 20) for number in range(4)]
    async with redis.asyncio.Redis.from_url(server.url) as operator:
        await operator.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
        puts = [asyncio.ensure_future(tier.put(record, deadline=soon())) for record in records[:2]]

        async def setting() -> list[dict[str, str]]:
            return [one for one in await operator.client_list() if one["cmd"] == "set"]

        waiting = await until(setting, holds=lambda clients: len(clients) >= 2)
        await operator.client_kill_filter(_id=waiting[0]["id"])
        ended, _ = await asyncio.wait(puts, return_when=asyncio.FIRST_COMPLETED, timeout=10)
        (failed,) = ended
        assert isinstance(failed.exception(), Unavailable)
        await operator.execute_command("CLIENT", "UNPAUSE")
        (left,) = set(puts) - ended
        assert await left is PutOutcome.STORED
    for record in records:
        assert await tier.put(record, deadline=soon()) in (PutOutcome.STORED, PutOutcome.EXISTS)
        stored = await tier.get(record.key, deadline=soon())
        assert stored is not None and stored.data == record.data


async def test_a_cancelled_read_writes_no_more(server: RedisServer, tier: RedisTier) -> None:
    """Reads are cancelled while their bytes arrive in other threads: once the call has ended, its buffer stays as it
    is."""
    record = make_record(1, 3 << 20)
    await tier.put(record, deadline=soon())
    for delay_s in (0.0, 0.0005, 0.001, 0.002, 0.004):
        buffers: list[memoryview] = []

        def allocate(num_bytes: int, buffers: list[memoryview] = buffers) -> memoryview:
            buffers.append(memoryview(bytearray(num_bytes)))
            return buffers[-1]

        call = asyncio.ensure_future(tier.get(record.key, deadline=soon(), allocate=allocate))
        await asyncio.sleep(delay_s)
        call.cancel()
        await asyncio.wait([call])
        seen = [bytes(buffer) for buffer in buffers]
        await asyncio.sleep(0.05)
        assert seen == [bytes(buffer) for buffer in buffers]
    stored = await tier.get(record.key, deadline=soon())
    assert stored is not None and stored.data == record.data


async def test_records_are_received_in_other_threads(tier: RedisTier) -> None:
    """Each of the two threads receives some of four records that are read at the same time."""
    records = [make_record(number, 1 << 20) for number in range(4)]
    for record in records:
        await tier.put(record, deadline=soon())
    threads: set[str] = set()

    def allocate(num_bytes: int) -> memoryview:
        threads.add(threading.current_thread().name)
        return memoryview(bytearray(num_bytes))

    calls = (tier.get(record.key, deadline=soon(), allocate=allocate) for record in records)
    stored = await asyncio.gather(*calls)
    assert [found.data for found in stored if found is not None] == [record.data for record in records]
    assert threads == {"kvstore-io-0", "kvstore-io-1"}


async def test_closing_with_calls_in_flight(server: RedisServer) -> None:
    """The tier and its threads end while a frozen server holds puts, reads and an attempt to connect: all calls end
    soon, and no thread is left."""
    before = threading.active_count()
    records = [make_record(number, 1 << 20) for number in range(6)]
    async with open_io_loops(2) as io_loops:
        tier = RedisTier(server.url, num_connections=3, io_loops=io_loops)
        await tier.put(records[0], deadline=soon())
        server.freeze()
        calls = [asyncio.ensure_future(tier.put(record, deadline=soon(60))) for record in records[1:]]
        calls += [asyncio.ensure_future(tier.get(records[0].key, deadline=soon(60))) for _ in range(4)]
        await asyncio.sleep(0.1)
        started_s = time.monotonic()
        await tier.aclose()
    ended = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
    assert time.monotonic() - started_s < 20
    assert all(isinstance(end, Closed | Unavailable) for end in ended), ended
    server.thaw()
    await asyncio.sleep(0)
    assert len([thread for thread in threading.enumerate() if thread.name.startswith("kvstore-io")]) == 0
    assert threading.active_count() <= before + 2  # those of `asyncio.to_thread` stay


@pytest.mark.parametrize("io_threads", [1, 2])
async def test_a_store_saves_and_stages_the_same_bytes(
    server: RedisServer, io_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one store saved in Redis another one stages into its arena, with bytes on the store's loop or on others; the
    timer of a stage is changed on the loop that it belongs to alone."""
    reschedule = asyncio.Timeout.reschedule
    threads: dict[asyncio.Timeout, set[threading.Thread]] = defaultdict(set)

    def reschedule_and_note(timer: asyncio.Timeout, when: float | None) -> None:
        threads[timer].add(threading.current_thread())  # first when it is entered
        reschedule(timer, when)

    monkeypatch.setattr(asyncio.Timeout, "reschedule", reschedule_and_note)
    patient = {"stall_timeout_ms": 20_000, "fetch_timeout_ms": 20_000, "drain_timeout_s": 1}
    settings = load_settings(
        {"memory_bytes": "64MiB", "cold": "memory:", "hot": server.url, "io_threads": io_threads, **patient}
    )
    prompt = Prompt(ATTENTION, "a", 256, payload_bytes=1 << 20)
    async with open_store(settings) as store:
        await store.open_namespace(prompt.description, deadline=soon())
        for record in prompt.records():
            assert await store.save(record, ack=Ack.HOT, deadline=soon()) is SaveOutcome.STORED
    async with open_store(settings) as store:
        await store.open_namespace(prompt.description, deadline=soon())
        staged = await store.stage(prompt.query(), deadline=soon())
        assert staged.lease is not None and set(staged.sources) == {"redis"}
        for record in prompt.records():
            loaded = await store.load(staged.lease, record.key, deadline=soon())
            assert loaded.data == record.data
    assert threads and all(len(those) == 1 for those in threads.values())


async def test_a_store_ends_with_work_in_flight(server: RedisServer) -> None:
    """A frozen Redis holds a stage and saves: the store ends in little more than its drain timeout."""
    settings = load_settings(
        {"memory_bytes": "64MiB", "cold": "memory:", "hot": server.url, "io_threads": 2, "drain_timeout_s": 0.2}
    )
    prompt = Prompt(ATTENTION, "a", 256, payload_bytes=1 << 20)
    async with open_store(settings) as store:
        await store.open_namespace(prompt.description, deadline=soon())
        first, *others = prompt.records()
        assert await store.save(first, ack=Ack.HOT, deadline=soon()) is SaveOutcome.STORED
        server.freeze()
        saves = [asyncio.ensure_future(store.save(record, ack=Ack.HOT, deadline=soon(60))) for record in others]
        await asyncio.sleep(0.1)
        started_s = time.monotonic()
    assert time.monotonic() - started_s < 15
    await asyncio.wait_for(asyncio.gather(*saves, return_exceptions=True), 10)
    server.thaw()
