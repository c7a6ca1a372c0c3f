"""The general client that the Redis tier's package opens for others, against real servers."""

from __future__ import annotations

import asyncio

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from kvstore.catalog.redis.catalog import RedisCatalog
from kvstore.runtime.deadline import Deadline
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.servers import RedisCluster, RedisServer, redis_server
from kvstore.tiers.locations import parse_redis
from kvstore.tiers.redis import open_control

pytestmark = pytest.mark.servers


async def test_standalone(shared_redis: RedisServer) -> None:
    """Commands, a pipeline and a script, in the database that the url names."""
    async with open_control(parse_redis(f"redis://127.0.0.1:{shared_redis.port}/7")) as control:
        await control.flushdb()
        assert await control.set("control:a", b"1") is True
        pipeline = control.pipeline(transaction=False)
        pipeline.get("control:a")
        pipeline.get("control:b")
        assert await pipeline.execute() == [b"1", None]
        script = control.register_script("return redis.call('INCRBY', KEYS[1], ARGV[1])")
        assert await script(keys=["control:a"], args=[4]) == 5
        await control.flushdb()


async def test_a_restarted_server_is_found_again() -> None:
    """A client whose server was killed says so, and works again once the server is back."""
    with redis_server(password="p@ss") as server:
        async with open_control(parse_redis(f"redis://:p%40ss@127.0.0.1:{server.port}")) as control:
            assert await control.ping() is True
            server.kill9()
            with pytest.raises(RedisConnectionError):
                await control.ping()
            server.restart()
            assert await control.ping() is True


@pytest.mark.parametrize("server", ["shared_redis", "shared_cluster"])
async def test_more_lookups_than_connections(request: pytest.FixtureRequest, server: str) -> None:
    """Many engines look up at the same moment: calls wait for a connection, none fails for the lack of one."""
    running: RedisServer | RedisCluster = request.getfixturevalue(server)
    prompt = Prompt(ATTENTION, "many engines", 64)
    prefixes = [boundary.prefix for boundary in prompt.query().boundaries]
    async with open_control(parse_redis(running.url)) as control:
        catalog, namespace = RedisCatalog(control), prompt.description.id
        await catalog.register(namespace, prompt.layout, "", deadline=Deadline.after(60))
        deadline = Deadline.after(60)
        tables = await asyncio.gather(*(catalog.lookup(namespace, prefixes, deadline=deadline) for _ in range(200)))
    assert len(tables) == 200
