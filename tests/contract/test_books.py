"""Text stores beside the catalog, for operator rules and jobs: their contract, in a file and in a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from kvstore.catalog.coordination import JOBS, OPERATOR_RULES, FileTextStore, TextStore, TextStoreKind
from kvstore.catalog.redis.coordination import RedisTextStore
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.runtime.deadline import Deadline
from kvstore.testing.servers import RedisCluster, RedisServer
from kvstore.testing.servers.ports import free_ports
from kvstore.tiers.locations import RedisLocation, parse_hot
from kvstore.tiers.redis import open_control


def soon() -> Deadline:
    return Deadline.after(60.0)


@pytest.fixture(params=[OPERATOR_RULES, JOBS], ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> TextStoreKind:
    assert isinstance(request.param, TextStoreKind)
    return request.param


class TextStoreContract:
    """Behaviour of `TextStore`."""

    async def test_the_last_text_counts_until_it_is_removed(self, book: TextStore) -> None:
        """Under each name the last text, with any letters; names without one are ignored."""
        assert await book.read(deadline=soon()) == {}
        for name, text in (("a", "1"), ("b/ü", "ü"), ("a", ""), ("c", "3")):
            await book.write(name, text, deadline=soon())
        assert await book.read(deadline=soon()) == {"a": "", "b/ü": "ü", "c": "3"}
        await book.remove(["a", "c", "nobody"], deadline=soon())
        await book.remove([], deadline=soon())
        assert await book.read(deadline=soon()) == {"b/ü": "ü"}

    async def test_changes_at_the_same_time_all_count(self, book: TextStore) -> None:
        """A write continues where its caller has given up, and the next one begins: none undoes another."""
        await book.write("old", "x", deadline=soon())
        texts = {str(number): "x" for number in range(20)}
        writes = [book.write(name, text, deadline=soon()) for name, text in texts.items()]
        await asyncio.gather(*writes, book.remove(["old"], deadline=soon()))
        assert await book.read(deadline=soon()) == texts

    async def test_it_does_not_grow_for_ever(self, book: TextStore) -> None:
        """A text that is too long, and one name too many, are refused; a name that is there is not one too many."""
        with pytest.raises(InvalidRequest, match="at most"):
            await book.write("a", "x" * 5000, deadline=soon())
        book.kind = replace(book.kind, texts_max=2)
        await book.write("a", "1", deadline=soon())
        await book.write("b", "1", deadline=soon())
        with pytest.raises(InvalidRequest, match=f"2 {book.kind.name} already: {book.kind.when_full}"):
            await book.write("c", "1", deadline=soon())
        await book.write("b", "2", deadline=soon())
        assert await book.read(deadline=soon()) == {"a": "1", "b": "2"}


class TestFile(TextStoreContract):
    @pytest.fixture
    def book(self, tmp_path: Path, kind: TextStoreKind) -> TextStore:
        return FileTextStore(tmp_path, kind)

    async def test_what_cannot_be_read_is_not_taken_for_nothing(self, tmp_path: Path, book: TextStore) -> None:
        """A file that is no JSON is named, and not written over."""
        path = tmp_path / f"{book.kind.name}.json"
        path.write_text("{")
        with pytest.raises(Unavailable, match="repair or delete"):
            await book.read(deadline=soon())
        with pytest.raises(Unavailable, match="repair or delete"):
            await book.write("a", "1", deadline=soon())
        assert path.read_text() == "{"

    async def test_a_folder_that_is_gone_is_told(self, tmp_path: Path, kind: TextStoreKind) -> None:
        """As `Unavailable`, with what to look at."""
        with pytest.raises(Unavailable, match="check the disk"):
            await FileTextStore(tmp_path / "gone", kind).write("a", "1", deadline=soon())


@pytest.mark.servers
class TestRedis(TextStoreContract):
    @pytest.fixture
    async def book(self, shared_redis: RedisServer, kind: TextStoreKind) -> AsyncIterator[TextStore]:
        async with Redis(host=shared_redis.host, port=shared_redis.port) as client:
            await client.flushdb()
            yield RedisTextStore(client, kind)

    async def test_a_server_that_is_not_there_is_told(self, kind: TextStoreKind) -> None:
        """As what the caller does next: try again."""
        async with Redis(host="127.0.0.1", port=free_ports(1)[0]) as client:
            with pytest.raises(Unavailable, match="check that the hot Redis runs"):
                await RedisTextStore(client, kind).read(deadline=soon())


@pytest.mark.servers
class TestCluster(TextStoreContract):
    @pytest.fixture
    async def book(self, shared_cluster: RedisCluster, kind: TextStoreKind) -> AsyncIterator[TextStore]:
        shared_cluster.flush()
        location = parse_hot(shared_cluster.url)
        assert isinstance(location, RedisLocation)
        async with open_control(location) as client:
            yield RedisTextStore(client, kind)
