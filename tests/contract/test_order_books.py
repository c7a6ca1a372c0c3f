"""Where orders of operators stand: what every book does, in a file and in a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from kvstore.catalog.orders import ORDERS_MAX, FileOrders, OrderBook
from kvstore.catalog.redis_orders import RedisOrders
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.runtime.deadline import Deadline
from kvstore.testing.servers import RedisCluster, RedisServer
from kvstore.testing.servers.ports import free_ports
from kvstore.tiers.locations import RedisLocation, parse_hot
from kvstore.tiers.redis import open_control


def soon() -> Deadline:
    return Deadline.after(60.0)


class OrderBookContract:
    """Behaviour of `OrderBook`."""

    async def test_the_last_text_counts(self, book: OrderBook) -> None:
        """What was written is read, under each name the last text, whatever letters it has."""
        assert await book.read(deadline=soon()) == {}
        for name, text in (("a", "1"), ("b/ü", "2"), ("a", "")):
            await book.write(name, text, deadline=soon())
        assert await book.read(deadline=soon()) == {"a": "", "b/ü": "2"}

    async def test_it_does_not_grow_for_ever(self, book: OrderBook, monkeypatch: pytest.MonkeyPatch) -> None:
        """A text that is too long, and one name too many, are refused; a name that is there is not one too many."""
        with pytest.raises(InvalidRequest, match="at most"):
            await book.write("a", "x" * 5000, deadline=soon())
        monkeypatch.setattr("kvstore.catalog.orders.ORDERS_MAX", 2)
        await book.write("a", "1", deadline=soon())
        await book.write("b", "1", deadline=soon())
        with pytest.raises(InvalidRequest, match="already"):
            await book.write("c", "1", deadline=soon())
        await book.write("b", "2", deadline=soon())
        assert len(await book.read(deadline=soon())) == 2 < ORDERS_MAX


class TestFile(OrderBookContract):
    @pytest.fixture
    def book(self, tmp_path: Path) -> OrderBook:
        return FileOrders(tmp_path / "orders.json")

    async def test_what_cannot_be_read_is_not_taken_for_nothing(self, tmp_path: Path) -> None:
        """A file that is no JSON is named, and not written over."""
        path = tmp_path / "orders.json"
        path.write_text("{")
        with pytest.raises(Unavailable, match="mend or delete"):
            await FileOrders(path).read(deadline=soon())
        with pytest.raises(Unavailable, match="mend or delete"):
            await FileOrders(path).write("a", "1", deadline=soon())
        assert path.read_text() == "{"


@pytest.mark.servers
class TestRedis(OrderBookContract):
    @pytest.fixture
    async def book(self, shared_redis: RedisServer) -> AsyncIterator[OrderBook]:
        async with Redis(host=shared_redis.host, port=shared_redis.port) as client:
            await client.flushdb()
            yield RedisOrders(client)

    async def test_a_server_that_is_not_there_is_told(self) -> None:
        """As what the caller does next: try again."""
        async with Redis(host="127.0.0.1", port=free_ports(1)[0]) as client:
            with pytest.raises(Unavailable, match="check the server"):
                await RedisOrders(client).read(deadline=soon())


@pytest.mark.servers
class TestCluster(OrderBookContract):
    @pytest.fixture
    async def book(self, shared_cluster: RedisCluster) -> AsyncIterator[OrderBook]:
        shared_cluster.flush()
        location = parse_hot(shared_cluster.url)
        assert isinstance(location, RedisLocation)
        async with open_control(location) as client:
            yield RedisOrders(client)
