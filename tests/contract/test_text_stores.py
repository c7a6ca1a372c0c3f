"""Text stores beside the catalog, for operator rules and jobs: their contract, in a file and in a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from kvstore.catalog.coordination import JOBS, OPERATOR_RULES, FileTextStore, TextStore, TextStoreKind
from kvstore.catalog.redis.coordination import RedisTextStore
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.testing.servers import RedisCluster, RedisServer
from kvstore.testing.servers.ports import free_ports
from kvstore.testing.waiting import soon
from kvstore.tiers.locations import RedisLocation, parse_hot
from kvstore.tiers.redis import open_control


@pytest.fixture(params=[OPERATOR_RULES, JOBS], ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> TextStoreKind:
    assert isinstance(request.param, TextStoreKind)
    return request.param


class TextStoreContract:
    """Behaviour of `TextStore`."""

    async def test_the_last_text_counts_until_it_is_removed(self, store: TextStore) -> None:
        """Under each name the last text, with any letters; names without one are ignored."""
        assert await store.read(deadline=soon()) == {}
        for name, text in (("a", "1"), ("b/ü", "ü"), ("a", ""), ("c", "3")):
            await store.write(name, text, deadline=soon())
        assert await store.read(deadline=soon()) == {"a": "", "b/ü": "ü", "c": "3"}
        await store.remove(["a", "c", "nobody"], deadline=soon())
        await store.remove([], deadline=soon())
        assert await store.read(deadline=soon()) == {"b/ü": "ü"}

    async def test_changes_at_the_same_time_all_count(self, store: TextStore) -> None:
        """A write continues after its caller was cancelled, and the next one begins: none undoes another."""
        await store.write("old", "x", deadline=soon())
        texts = {str(number): "x" for number in range(20)}
        writes = [store.write(name, text, deadline=soon()) for name, text in texts.items()]
        await asyncio.gather(*writes, store.remove(["old"], deadline=soon()))
        assert await store.read(deadline=soon()) == texts

    async def test_its_size_is_bounded(self, store: TextStore) -> None:
        """A text that is too long, and one name too many, are refused; a name that is there is not one too many."""
        with pytest.raises(InvalidRequest, match="at most"):
            await store.write("a", "x" * 5000, deadline=soon())
        store.kind = replace(store.kind, texts_max=2)
        await store.write("a", "1", deadline=soon())
        await store.write("b", "1", deadline=soon())
        with pytest.raises(InvalidRequest, match=f"2 {store.kind.name} already: {store.kind.when_full}"):
            await store.write("c", "1", deadline=soon())
        await store.write("b", "2", deadline=soon())
        assert await store.read(deadline=soon()) == {"a": "1", "b": "2"}


class TestFile(TextStoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path, kind: TextStoreKind) -> TextStore:
        return FileTextStore(tmp_path, kind)

    @pytest.mark.parametrize("content", ["{", "[]", "null", '["a rule"]'])
    async def test_a_malformed_file_is_named_and_kept(self, tmp_path: Path, store: TextStore, content: str) -> None:
        """A file that is no JSON object is not overwritten."""
        path = tmp_path / f"{store.kind.name}.json"
        path.write_text(content)
        with pytest.raises(Unavailable, match="repair or delete"):
            await store.read(deadline=soon())
        with pytest.raises(Unavailable, match="repair or delete"):
            await store.write("a", "1", deadline=soon())
        assert path.read_text() == content


async def test_a_folder_that_is_gone_is_unavailable(tmp_path: Path) -> None:
    """The error names the next step."""
    with pytest.raises(Unavailable, match="check the disk"):
        await FileTextStore(tmp_path / "gone", JOBS).write("a", "1", deadline=soon())


async def test_a_server_that_is_gone_is_unavailable() -> None:
    """The error names the next step."""
    async with Redis(host="127.0.0.1", port=free_ports(1)[0], retry=Retry(NoBackoff(), 0)) as client:
        with pytest.raises(Unavailable, match="check that the hot Redis runs"):
            await RedisTextStore(client, JOBS).read(deadline=soon())


@pytest.mark.servers
class TestRedis(TextStoreContract):
    @pytest.fixture
    async def store(self, shared_redis: RedisServer, kind: TextStoreKind) -> AsyncIterator[TextStore]:
        async with Redis(host=shared_redis.host, port=shared_redis.port) as client:
            await client.flushdb()
            yield RedisTextStore(client, kind)


@pytest.mark.servers
class TestCluster(TextStoreContract):
    @pytest.fixture
    async def store(self, shared_cluster: RedisCluster, kind: TextStoreKind) -> AsyncIterator[TextStore]:
        shared_cluster.flush()
        location = parse_hot(shared_cluster.url)
        assert isinstance(location, RedisLocation)
        async with open_control(location) as client:
            yield RedisTextStore(client, kind)
