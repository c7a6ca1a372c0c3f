"""The Redis tier against a real server that is killed, frozen, full, locked, or no Redis at all."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
import redis

from kvstore.errors import Unavailable
from kvstore.format.names import format_name
from kvstore.model.keys import RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.runtime.io_loops import open_io_loops
from kvstore.runtime.meters import Meters
from kvstore.testing.records import make_key, make_record
from kvstore.testing.servers import RedisServer, redis_server
from kvstore.testing.servers.ports import free_ports
from kvstore.testing.waiting import until
from kvstore.tiers.base import PutOutcome, Tier
from kvstore.tiers.breaker import Breaker
from kvstore.tiers.guarded import GuardedTier
from kvstore.tiers.redis import RedisTier

pytestmark = pytest.mark.servers


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
async def tier(server: RedisServer, request: pytest.FixtureRequest) -> AsyncIterator[RedisTier]:
    async with open_io_loops(request.param) as io_loops:
        tier = RedisTier(server.url, io_loops=io_loops)
        yield tier
        await tier.aclose()


async def served_again(tier: Tier, key: RecordKey, within_s: float) -> None:
    """Ask until an answer comes, a miss included."""
    give_up = Deadline.after(within_s)
    while True:
        try:
            await tier.get(key, deadline=Deadline.after(1))
        except Unavailable:
            assert not give_up.expired, f"no answer within {within_s} s"
            await asyncio.sleep(0.02)
        else:
            return


async def test_killed_and_restarted(server: RedisServer, tier: RedisTier) -> None:
    """A killed server is an error at once that names it; once it is back the same tier serves again by itself."""
    record = make_record(1)
    await tier.put(record, deadline=Deadline.after(5))
    server.kill9()
    started_s = time.monotonic()
    for _ in range(5):
        with pytest.raises(Unavailable, match=f"{server.host}:{server.port}"):
            await tier.get(record.key, deadline=Deadline.after(60))
    assert time.monotonic() - started_s < 10
    server.restart()
    await served_again(tier, record.key, within_s=5)
    assert await tier.put(record, deadline=Deadline.after(5)) is PutOutcome.STORED
    stored = await tier.get(record.key, deadline=Deadline.after(5))
    assert stored is not None and stored.data == record.data


async def test_killed_with_calls_in_flight(server: RedisServer, tier: RedisTier) -> None:
    """Calls in flight when the server died end at once as unavailable; none hangs."""
    records = [make_record(number, 3 << 20) for number in range(24)]
    puts = [asyncio.ensure_future(tier.put(record, deadline=Deadline.after(20))) for record in records]
    await asyncio.sleep(0.005)
    server.kill9()
    started_s = time.monotonic()
    outcomes = await asyncio.gather(*puts, return_exceptions=True)
    assert time.monotonic() - started_s < 5
    assert all(isinstance(outcome, PutOutcome | Unavailable) for outcome in outcomes)
    assert any(isinstance(outcome, Unavailable) for outcome in outcomes)


async def test_frozen_costs_the_deadline_and_no_more(server: RedisServer, tier: RedisTier) -> None:
    """A frozen server costs a call its deadline; after the thaw the same tier serves again."""
    record = make_record(1, 2 << 20)
    await tier.put(record, deadline=Deadline.after(5))
    server.freeze()
    for call in (
        tier.get(record.key, deadline=Deadline.after(0.3)),
        tier.head([record.key], deadline=Deadline.after(0.3)),
    ):
        started_s = time.monotonic()
        with pytest.raises(Unavailable):
            await call
        assert time.monotonic() - started_s < 5
    server.thaw()
    await served_again(tier, record.key, within_s=5)
    stored = await tier.get(record.key, deadline=Deadline.after(5))
    assert stored is not None and stored.data == record.data


async def test_late_reply_never_reaches_the_callers_buffer(server: RedisServer, tier: RedisTier) -> None:
    """A get that gave up leaves its buffer alone, though the reply arrives later on a connection that lives on."""
    record, beside = make_record(1, 3 << 20), make_record(2)
    for put in (record, beside):
        await tier.put(put, deadline=Deadline.after(5))
    for pause_s in (0.0, 0.0005, 0.001, 0.002, 0.004):
        buffers: list[np.ndarray] = []

        def allocate(num_bytes: int, buffers: list[np.ndarray] = buffers) -> memoryview:
            buffers.append(np.zeros(num_bytes, dtype=np.uint8))
            return memoryview(buffers[-1])

        get = asyncio.ensure_future(tier.get(record.key, deadline=Deadline.after(5), allocate=allocate))
        await asyncio.sleep(pause_s)
        get.cancel()
        await asyncio.wait({get})
        for buffer in buffers:
            buffer[:] = 7
        stored = await tier.get(beside.key, deadline=Deadline.after(5))
        assert stored is not None and stored.data == beside.data
        await asyncio.sleep(0.05)
        if not get.cancelled():
            continue
        assert all((buffer == 7).all() for buffer in buffers)


async def test_breaker_opens_and_closes_by_itself(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    """Frozen: one call waits, all others are refused at once; thawed: served again without any call having failed."""
    meters = Meters()
    tier = GuardedTier(
        RedisTier(server.url),
        Instruments(meters=meters),
        breaker=Breaker(hang_s=0.25, delay_first_s=0.1, delay_max_s=0.4),
    )
    record = make_record(1)
    await tier.put(record, deadline=Deadline.after(5))
    caplog.set_level(logging.INFO)
    server.freeze()
    with pytest.raises(Unavailable):
        await tier.get(record.key, deadline=Deadline.after(0.3))
    started_s = time.monotonic()
    for _ in range(100):
        with pytest.raises(Unavailable, match="not used until"):
            await tier.get(record.key, deadline=Deadline.after(60))
    assert time.monotonic() - started_s < 10
    await asyncio.sleep(0.5)
    assert tier.is_open
    server.thaw()
    await until(lambda: not tier.is_open, 6)
    stored = await tier.get(record.key, deadline=Deadline.after(5))
    assert stored is not None and stored.data == record.data
    assert meters.get("tier_refused", tier="redis") == 100
    assert meters.get("tier_open", tier="redis") == 0
    lines = [entry for entry in caplog.records if entry.name == "kvstore.tiers.guarded"]
    assert [entry.levelname for entry in lines] == ["WARNING", "INFO"]
    assert "check" in lines[0].getMessage()
    await tier.aclose()


async def test_at_its_memory_limit() -> None:
    """A server at `maxmemory` without eviction: puts are FULL, also large ones, which leave nothing; reads go on."""
    with redis_server(maxmemory_bytes=24 << 20) as server:
        tier = RedisTier(server.url)
        records = [make_record(number, 2 << 20) for number in range(20)]
        outcomes = [await tier.put(record, deadline=Deadline.after(5)) for record in records]
        assert set(outcomes) == {PutOutcome.STORED, PutOutcome.FULL}
        large = make_record(100, 17 << 20)
        assert await tier.put(large, deadline=Deadline.after(5)) is PutOutcome.FULL
        with redis.Redis.from_url(server.url) as raw:
            assert list(raw.keys(format_name(large.key).replace("{", "\\{") + "*")) == []
        for record, outcome in zip(records, outcomes, strict=True):
            stored = await tier.get(record.key, deadline=Deadline.after(5))
            assert (stored is not None) == (outcome is PutOutcome.STORED)
            assert stored is None or stored.data == record.data
        for record in records[:8]:
            await tier.delete(record.key, deadline=Deadline.after(5))
        await until(  # memory is given back in the background
            lambda: tier.put(records[0], deadline=Deadline.after(5)),
            5,
            holds=lambda outcome: outcome is not PutOutcome.FULL,
        )
        usage = await tier.usage(deadline=Deadline.after(5))
        assert usage.limit_bytes == 24 << 20
        await tier.aclose()


async def test_nothing_listens() -> None:
    """An address where nothing listens: the error names it, what was expected and the next step, at once."""
    (port,) = free_ports(1)
    tier = RedisTier(f"redis://user:the-secret@127.0.0.1:{port}/0")
    with pytest.raises(Unavailable, match=rf"check that a server runs there .*127\.0\.0\.1:{port}") as caught:
        await tier.head([make_key(1)], deadline=Deadline.after(5))
    assert "the-secret" not in str(caught.value)
    await tier.aclose()


async def test_wrong_and_right_password() -> None:
    """A wrong or missing password says so and is never repeated; the right one works, also with odd characters."""
    with redis_server(password="p@ss/w:rd") as server:
        for login, hint in ((":wrong@", "check user and password"), ("", "put user and password into the url")):
            tier = RedisTier(f"redis://{login}{server.host}:{server.port}/0")
            with pytest.raises(Unavailable, match=hint) as caught:
                await tier.head([make_key(1)], deadline=Deadline.after(5))
            assert "wrong@" not in str(caught.value) and "=wrong" not in str(caught.value)
            await tier.aclose()
        tier = RedisTier(f"redis://default:p%40ss%2Fw%3Ard@{server.host}:{server.port}/3")
        assert await tier.put(make_record(1), deadline=Deadline.after(5)) is PutOutcome.STORED
        assert await tier.get(make_key(1), deadline=Deadline.after(5)) is not None
        await tier.aclose()


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$99999999999\r\n", b"\x00" * 9000, b"*-7\r\n", b"$3\r\nabcXX"]
)
async def test_not_a_redis(answer: bytes) -> None:
    """A server that answers something else is unavailable, not a miss, a hang or a crash."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        await writer.drain()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        tier = RedisTier(f"redis://127.0.0.1:{port}/0")
        with pytest.raises(Unavailable):
            await tier.get(make_key(1), deadline=Deadline.after(1))
        await tier.aclose()
