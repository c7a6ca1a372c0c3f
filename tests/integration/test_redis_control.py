"""The general client that the Redis tier's package opens for others, against real servers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from kvstore.catalog.redis.catalog import RedisCatalog
from kvstore.catalog.redis.nodes import RedisNodes
from kvstore.compose import open_store
from kvstore.errors import Unavailable
from kvstore.runtime.deadline import Deadline
from kvstore.settings import load_settings
from kvstore.testing.faulty_proxy import FaultyProxy
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.servers import RedisCluster, RedisServer, redis_server
from kvstore.testing.waiting import soon
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


async def test_a_name_that_moves_to_the_new_primary() -> None:
    """A failover by DNS: the old primary lives on as a replica, and open connections lead to it. The first write of
    each kind says so, and the next one is sent to where the name leads by then.
    """
    with redis_server() as old, redis_server() as new, FaultyProxy(old.port) as name:
        async with open_control(parse_redis(f"redis://127.0.0.1:{name.port}")) as control:
            nodes, write = RedisNodes(control, gate=None), ("SET", "name", "1")
            await asyncio.gather(*(nodes.one(write, deadline=soon()) for _ in range(8)))  # several connections
            for primary, replica in ((new, old), (old, new)):
                primary.ask("REPLICAOF", "NO", "ONE")
                replica.ask("REPLICAOF", "127.0.0.1", primary.port)
                name.lead_to(primary.port)
                with pytest.raises(Unavailable, match="the server is a replica: name the primary"):
                    if primary is new:
                        await nodes.one(write, deadline=soon())
                    else:
                        await nodes.run([(0, write), (0, write)], deadline=soon())
                await asyncio.gather(*(nodes.one(write, deadline=soon()) for _ in range(8)))


async def test_all_that_share_a_client_find_a_connection(
    shared_redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store's catalog, and all that is kept beside it, have one client: its pool has what they may use together."""
    bounds, clients, init = list[int](), set[object](), RedisNodes.__init__

    def noted(nodes: RedisNodes, client: Any, *arguments: Any, **options: Any) -> None:
        init(nodes, client, *arguments, **options)
        bounds.append(vars(vars(nodes)["_calls"])["_value"])
        clients.add(client)

    monkeypatch.setattr(RedisNodes, "__init__", noted)
    settings = {"hot": shared_redis.url, "cold": f"file://{tmp_path}", "cold_bytes": "1GiB", "memory_bytes": "16MiB"}
    async with open_store(load_settings(settings)):
        (client,) = clients
        assert len(bounds) == 7 and sum(bounds) <= cast(Any, client).connection_pool.max_connections


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
