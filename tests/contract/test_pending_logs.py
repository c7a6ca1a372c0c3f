"""The contract of a log of pending writes, on each medium."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis.asyncio

from kvstore.catalog.pending import PendingEntry, PendingLog, PendingTotals
from kvstore.catalog.redis.pending import NUM_SHARDS, RedisPendingLog
from kvstore.catalog.sqlite.pending import SqlitePendingLog
from kvstore.errors import CorruptRecord, Unavailable
from kvstore.format.names import pack_key, unpack_key
from kvstore.runtime.deadline import Deadline
from kvstore.testing.dict_pending import DictPendingLog, PendingBooks
from kvstore.testing.records import make_key
from kvstore.testing.servers import RedisServer, redis_server
from kvstore.testing.waiting import soon
from tests.contract.pending_entries import entries
from tests.virtual_time import ManualClock

pytest_plugins = ["kvstore.testing.fixtures"]

pytestmark = pytest.mark.servers

LEASE_S = 0.3

Make = Callable[[], Awaitable[PendingLog]]


@dataclass
class Shared:
    """Makes owners that share one medium. `clock` measures the leases; `None`: the server's own."""

    make: Make
    clock: ManualClock | None

    async def wait(self, seconds: float) -> None:
        if self.clock is None:
            await asyncio.sleep(seconds)
        else:
            self.clock.now_s += seconds


@pytest.fixture(params=["redis", "sqlite", "dictionaries"])
async def shared(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Shared]:
    clock = ManualClock(1_700_000_000.0)
    async with AsyncExitStack() as stack:

        async def sqlite() -> PendingLog:
            log = await SqlitePendingLog.open(tmp_path / "pending.db", lease_s=LEASE_S, clock=clock)
            stack.push_async_callback(log.aclose)
            return log

        async def in_redis() -> PendingLog:
            server: RedisServer = request.getfixturevalue("shared_redis")
            client = redis.asyncio.Redis.from_url(server.url, socket_timeout=None)
            stack.push_async_callback(client.aclose)
            return RedisPendingLog(client, str(tmp_path), lease_s=LEASE_S)

        books = PendingBooks()

        async def in_dictionaries() -> PendingLog:
            return DictPendingLog(books, lease_s=LEASE_S, clock=clock)

        make = {"redis": in_redis, "sqlite": sqlite, "dictionaries": in_dictionaries}[request.param]
        yield Shared(make, None if request.param == "redis" else clock)


class TestContract:
    async def test_an_entry_belongs_to_its_owner_for_a_lease(self, shared: Shared) -> None:
        """Written entries cannot be claimed by another until their lease has ended; then they can, once."""
        first, second = await shared.make(), await shared.make()
        written = entries(*range(40))
        assert await first.add(written, deadline=soon())
        assert await second.claim(100, deadline=soon()) == []
        assert await first.totals(deadline=soon()) == PendingTotals(40, sum(e.num_bytes for e in written))
        await shared.wait(LEASE_S + 0.05)
        claimed = await second.claim(100, deadline=soon())
        assert {entry.key: entry for entry in claimed} == {entry.key: entry for entry in written}
        assert await second.claim(100, deadline=soon()) == []
        assert await first.claim(100, deadline=soon()) == []

    async def test_a_renewed_lease_lasts(self, shared: Shared) -> None:
        """An owner that renews keeps its entries beyond a lease; one that lost them gets 0."""
        first, second = await shared.make(), await shared.make()
        kept, lost = entries(1, 2), entries(3)
        await first.add(kept + lost, deadline=soon())
        for _ in range(3):
            await shared.wait(LEASE_S * 0.6)
            assert await first.renew([entry.key for entry in kept], deadline=soon()) == [1, 1]
        assert await second.claim(10, deadline=soon()) == lost
        keys = [entry.key for entry in kept + lost]
        assert await first.renew([*keys, make_key(99)], deadline=soon()) == [1, 1, 0, 0]

    async def test_only_the_owner_finishes(self, shared: Shared) -> None:
        """An entry that another owner has claimed stays when the former one finishes it; the new one removes it."""
        first, second = await shared.make(), await shared.make()
        written = entries(1, 2, 3)
        await first.add(written, deadline=soon())
        await first.release([written[0].key], deadline=soon())
        assert await second.claim(10, deadline=soon()) == written[:1]
        await first.finish([entry.key for entry in written], deadline=soon())
        assert await first.totals(deadline=soon()) == PendingTotals(1, written[0].num_bytes)
        await second.finish([written[0].key], deadline=soon())
        assert await first.totals(deadline=soon()) == PendingTotals(0, 0)

    @pytest.mark.parametrize("first_ends", [True, False], ids=["the first ends first", "the second ends first"])
    async def test_adding_again_shares(self, shared: Shared, first_ends: bool) -> None:
        """Two owners write the same entry: it is there once, with the later one's size, until both have finished it."""
        first, second = await shared.make(), await shared.make()
        (entry,) = entries(1)
        await first.add([entry], deadline=soon())
        assert await first.renew([entry.key], deadline=soon()) == [1]
        await second.add([PendingEntry(entry.key, 5000, entry.stop_tokens)], deadline=soon())
        await second.add([PendingEntry(entry.key, 5000, entry.stop_tokens)], deadline=soon())
        assert await first.totals(deadline=soon()) == PendingTotals(1, 5000)
        assert await first.renew([entry.key], deadline=soon()) == [2]
        one, other = (first, second) if first_ends else (second, first)
        await one.finish([entry.key], deadline=soon())
        assert await one.renew([entry.key], deadline=soon()) == [0]
        assert await other.renew([entry.key], deadline=soon()) == [1]
        assert (await first.totals(deadline=soon())).num_records == 1
        await other.finish([entry.key], deadline=soon())
        assert await first.totals(deadline=soon()) == PendingTotals(0, 0)

    async def test_one_owner_of_two_dies(self, shared: Shared) -> None:
        """An entry that the other owner finished or released may be claimed once the lease of the dead one has ended;
        it then has no other owner."""
        dead, second, third = [await shared.make() for _ in range(3)]
        finished, released = entries(1, 2)
        keys = [finished.key, released.key]
        for log in (dead, second):
            await log.add([finished, released], deadline=soon())
        await second.finish([finished.key], deadline=soon())
        await second.release([released.key], deadline=soon())
        assert await third.claim(10, deadline=soon()) == []
        await shared.wait(LEASE_S + 0.05)
        assert await third.claim(10, deadline=soon()) == [finished, released]
        assert await third.renew(keys, deadline=soon()) == [1, 1]
        assert await dead.renew(keys, deadline=soon()) == [0, 0]
        assert await second.renew(keys, deadline=soon()) == [0, 0]
        await dead.finish(keys, deadline=soon())
        assert (await third.totals(deadline=soon())).num_records == 2

    async def test_a_released_entry_stays(self, shared: Shared) -> None:
        """One of two owners releases an entry, then adds and finishes it again; the other finishes it too. The entry
        stays, and can be claimed. The owners are in one process."""
        first = await shared.make()
        second, third = first.other_owner(), first.other_owner()
        (entry,) = entries(1)
        for log in (first, second):
            await log.add([entry], deadline=soon())
        await first.release([entry.key], deadline=soon())
        assert await first.renew([entry.key], deadline=soon()) == [0]
        assert await third.claim(10, deadline=soon()) == []
        await first.add([entry], deadline=soon())
        assert await first.renew([entry.key], deadline=soon()) == [3]
        await first.finish([entry.key], deadline=soon())
        assert await third.claim(10, deadline=soon()) == []
        await second.finish([entry.key], deadline=soon())
        assert await third.claim(10, deadline=soon()) == [entry]
        assert await third.renew([entry.key], deadline=soon()) == [1]
        await first.finish([entry.key], deadline=soon())
        assert await first.totals(deadline=soon()) == PendingTotals(1, entry.num_bytes)

    async def test_claims_are_limited_and_reach_everything(self, shared: Shared) -> None:
        """Two owners claim in small steps: every entry comes once, to one of them."""
        first, second = await shared.make(), await shared.make()
        written = entries(*range(100))
        await first.add(written, deadline=soon())
        await first.release([entry.key for entry in written], deadline=soon())
        seen: list[PendingEntry] = []
        while step := [*await first.claim(7, deadline=soon()), *await second.claim(7, deadline=soon())]:
            assert len(step) <= 14
            seen += step
            await first.renew([entry.key for entry in seen], deadline=soon())
            await second.renew([entry.key for entry in seen], deadline=soon())
        assert sorted(entry.key for entry in seen) == sorted(entry.key for entry in written)

    async def test_empty_calls_are_answered(self, shared: Shared) -> None:
        """Calls without entries or keys do nothing."""
        log = await shared.make()
        assert await log.add([], deadline=soon())
        assert await log.renew([], deadline=soon()) == []
        await log.finish([], deadline=soon())
        assert await log.totals(deadline=soon()) == PendingTotals(0, 0)


class TestRedis:
    async def test_a_full_server_takes_no_entry_but_ends_those_it_has(self) -> None:
        """At its memory limit Redis takes no entry; renewing, claiming and finishing work."""
        with redis_server() as server:
            async with redis.asyncio.Redis.from_url(server.url) as client:
                log = RedisPendingLog(client, "scope", lease_s=30)
                written = entries(*range(8))
                assert await log.add(written, deadline=soon())
                await client.config_set("maxmemory", 1)
                assert not await log.add(entries(9), deadline=soon())
                keys = [entry.key for entry in written]
                assert await log.renew(keys, deadline=soon()) == [1] * 8
                await log.release(keys, deadline=soon())
                assert len(await log.claim(8, deadline=soon())) == 8
                await log.finish(keys, deadline=soon())
                assert await log.totals(deadline=soon()) == PendingTotals(0, 0)

    async def test_a_server_that_is_away_is_unavailable(self) -> None:
        """Redis is killed, or frozen: every call is `Unavailable` by its deadline."""
        with redis_server() as server:
            async with redis.asyncio.Redis.from_url(server.url, socket_timeout=30) as client:
                log = RedisPendingLog(client, "scope", lease_s=30)
                await log.add(entries(1), deadline=soon())
                server.freeze()
                with pytest.raises(Unavailable):
                    await log.add(entries(2), deadline=Deadline.after(0.3))
                server.kill9()
                with pytest.raises(Unavailable):
                    await log.claim(10, deadline=Deadline.after(5.0))

    async def test_entries_cost_little_and_have_no_expiry(self, shared_redis: RedisServer, tmp_path: Path) -> None:
        """A thousand entries take at most 400 bytes each, and no `volatile-*` policy may take one."""
        async with redis.asyncio.Redis.from_url(shared_redis.url) as client:
            await client.flushdb()
            log = RedisPendingLog(client, str(tmp_path), lease_s=30)
            await log.add(entries(*range(2000)), deadline=soon())
            names = [name async for name in client.scan_iter(match="kvstore:pending:*")]
            assert len(names) == 3 * NUM_SHARDS
            assert [await client.ttl(name) for name in names] == [-1] * len(names)
            used_bytes = sum([await client.memory_usage(name, samples=0) or 0 for name in names])
            assert used_bytes <= 400 * 2000


class TestSqlite:
    async def test_what_a_dead_owner_left_can_be_claimed_at_once(self, tmp_path: Path) -> None:
        """The next process of the directory need not wait for the leases of the one before."""
        first = await SqlitePendingLog.open(tmp_path / "pending.db", lease_s=3600)
        await first.add(entries(1, 2), deadline=soon())
        await first.aclose()
        second = await SqlitePendingLog.open(tmp_path / "pending.db", lease_s=3600)
        assert await second.claim(10, deadline=soon()) == entries(1, 2)
        await second.aclose()

    @pytest.mark.parametrize("step_s", [86_400.0, -86_400.0])
    async def test_a_date_that_is_set_ends_no_lease_and_prolongs_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float
    ) -> None:
        """What still waits would be taken for the records of a dead service, and counted as lost."""
        clock = ManualClock()
        log = await SqlitePendingLog.open(tmp_path / "pending.db", lease_s=LEASE_S, clock=clock)
        await log.add(entries(1), deadline=soon())
        date_ms = clock.wall_ms() + round(1000 * step_s)
        monkeypatch.setattr(clock, "wall_ms", lambda: date_ms)
        assert await log.other_owner().claim(10, deadline=soon()) == []
        clock.now_s += LEASE_S + 0.05
        assert await log.other_owner().claim(10, deadline=soon()) == entries(1)
        await log.aclose()

    async def test_a_damaged_file_is_renamed(self, tmp_path: Path) -> None:
        """The file holds something else: it is kept under another name, and a new one works."""
        path = tmp_path / "pending.db"
        path.write_bytes(b"no database at all" * 100)
        log = await SqlitePendingLog.open(path, lease_s=30)
        await log.add(entries(1), deadline=soon())
        assert await log.totals(deadline=soon()) == PendingTotals(1, 1001)
        await log.aclose()
        assert [p.read_bytes()[:18] for p in tmp_path.glob("pending.db.damaged")] == [b"no database at all"]

    async def test_a_directory_that_cannot_be_used_is_unavailable(self, tmp_path: Path) -> None:
        """It is a file: the error names what was to be opened."""
        (tmp_path / "taken").write_bytes(b"")
        with pytest.raises(Unavailable, match=r"pending\.db"):
            await SqlitePendingLog.open(tmp_path / "taken" / "pending.db", lease_s=30)


def test_keys_are_packed_both_ways() -> None:
    """A key fits 52 bytes and comes back; other sizes are refused."""
    key = make_key(7, group=65535, slice_=3)
    assert len(pack_key(key)) == 52
    assert unpack_key(pack_key(key)) == key
    with pytest.raises(CorruptRecord):
        unpack_key(b"short")
