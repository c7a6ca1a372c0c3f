"""Mark books, for hints on their way to the service that evicts: their contract, in memory and in a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

import pytest
from redis.asyncio import Redis

from kvstore.catalog import coordination
from kvstore.catalog.coordination import LocalMarkBook, MarkBook
from kvstore.catalog.redis import coordination as redis_coordination
from kvstore.catalog.redis.coordination import RedisMarkBook
from kvstore.model.keys import NAMESPACE_BYTES, PREFIX_BYTES, NamespaceId
from kvstore.testing.servers import RedisCluster, RedisServer
from kvstore.testing.waiting import soon
from kvstore.tiers.locations import RedisLocation, parse_hot
from kvstore.tiers.redis import open_control

ONE, OTHER = NamespaceId(b"a" * NAMESPACE_BYTES), NamespaceId(b"b" * NAMESPACE_BYTES)


def prefix(number: int) -> bytes:
    return bytes([0, number, 255, 10]) * (PREFIX_BYTES // 4)


class MarkBookContract:
    """Behaviour of `MarkBook`."""

    async def test_the_last_mark_counts_until_it_is_dropped(self, book: MarkBook) -> None:
        """Of each namespace apart, with any bytes; prefixes without a mark are ignored."""
        assert await book.read(ONE, deadline=soon()) == {}
        assert await book.put(ONE, {prefix(1): b"\x00\xff\n", prefix(2): b"2"}, deadline=soon())
        assert await book.put(ONE, {prefix(2): b"two"}, deadline=soon())
        assert await book.put(OTHER, {prefix(1): b"other"}, deadline=soon())
        assert await book.read(ONE, deadline=soon()) == {prefix(1): b"\x00\xff\n", prefix(2): b"two"}
        await book.drop(ONE, [prefix(1), prefix(9)], deadline=soon())
        await book.drop(ONE, [], deadline=soon())
        assert await book.read(ONE, deadline=soon()) == {prefix(2): b"two"}
        assert await book.read(OTHER, deadline=soon()) == {prefix(1): b"other"}
        await book.drop(ONE, [prefix(2)], deadline=soon())
        assert await book.read(ONE, deadline=soon()) == {}

    async def test_its_size_is_bounded(self, book: MarkBook, monkeypatch: pytest.MonkeyPatch) -> None:
        """A full namespace takes no more; another one does."""
        for module in (coordination, redis_coordination):
            monkeypatch.setattr(module, "MARKS_MAX", 2)
        assert await book.put(ONE, {prefix(1): b"1", prefix(2): b"2"}, deadline=soon())
        assert not await book.put(ONE, {prefix(3): b"3"}, deadline=soon())
        assert await book.put(OTHER, {prefix(3): b"3"}, deadline=soon())
        assert len(await book.read(ONE, deadline=soon())) == 2


class TestLocal(MarkBookContract):
    @pytest.fixture
    def book(self) -> MarkBook:
        return LocalMarkBook()


@pytest.mark.servers
class TestRedis(MarkBookContract):
    @pytest.fixture
    async def book(self, shared_redis: RedisServer) -> AsyncIterator[MarkBook]:
        async with Redis(host=shared_redis.host, port=shared_redis.port) as client:
            await client.flushdb()
            yield RedisMarkBook(client)

    async def test_no_command_holds_redis_for_long(self, book: MarkBook, shared_redis: RedisServer) -> None:
        """Many marks are set, read and dropped in pieces."""
        marks = {number.to_bytes(PREFIX_BYTES, "big"): b"mark" for number in range(5000)}
        async with Redis(host=shared_redis.host, port=shared_redis.port) as client:
            await client.config_resetstat()
            assert await book.put(ONE, marks, deadline=soon())
            assert await book.read(ONE, deadline=soon()) == marks
            await book.drop(ONE, marks.keys(), deadline=soon())
            assert await book.read(ONE, deadline=soon()) == {}
            stats = await client.info("commandstats")
        assert all(stats[f"cmdstat_{verb}"]["calls"] >= 4 for verb in ("hset", "hscan", "hdel"))
        assert "cmdstat_hgetall" not in stats

    async def test_marks_end(self, book: MarkBook, shared_redis: RedisServer) -> None:
        """A week after the last one Redis drops them, if no service does."""
        await book.put(ONE, {prefix(1): b"1"}, deadline=soon())
        async with Redis(host=shared_redis.host, port=shared_redis.port) as client:
            assert 604_000 < await client.ttl(f"c1/hints/{ONE.hex()}") <= 604_800

    async def test_marks_of_an_interrupted_call_end(self, book: MarkBook, shared_redis: RedisServer) -> None:
        """Redis does not take the second piece: here one of its values is none."""
        marks = {number.to_bytes(PREFIX_BYTES, "big"): b"mark" for number in range(1024)}
        with pytest.raises(Exception, match=r"Invalid input|convert"):
            await book.put(ONE, marks | {prefix(1): cast(bytes, [])}, deadline=soon())
        async with Redis(host=shared_redis.host, port=shared_redis.port) as client:
            assert await client.hlen(f"c1/hints/{ONE.hex()}") == 1024
            assert 604_000 < await client.ttl(f"c1/hints/{ONE.hex()}") <= 604_800


@pytest.mark.servers
class TestCluster(MarkBookContract):
    @pytest.fixture
    async def book(self, shared_cluster: RedisCluster) -> AsyncIterator[MarkBook]:
        shared_cluster.flush()
        location = parse_hot(shared_cluster.url)
        assert isinstance(location, RedisLocation)
        async with open_control(location) as client:
            yield RedisMarkBook(client)
