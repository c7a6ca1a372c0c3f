"""How commands are sent to the nodes of a cluster, and what is said of replies that no Redis gives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from redis.asyncio import Connection, Redis, RedisCluster
from redis.crc import key_slot
from redis.exceptions import ConnectionError, ResponseError, TimeoutError

from kvstore.catalog.redis.catalog import RedisCatalog
from kvstore.catalog.redis.coordination import RedisOwnership
from kvstore.catalog.redis.nodes import RedisNodes
from kvstore.catalog.redis.pending import RedisPendingLog
from kvstore.errors import Unavailable, next_step
from kvstore.testing.servers import redis_server
from kvstore.testing.waiting import soon


class Node:
    """A node with one connection, which refuses all commands or answers none."""

    def __init__(self, name: str, *, refuses: bool = False) -> None:
        self.name = name
        self.num_used = self.num_sent = 0
        self._refuses = refuses

    def acquire_connection(self) -> Node:
        self.num_used += 1
        return self

    def release(self, connection: Node) -> None:
        self.num_used -= 1

    async def send_packed_command(self, command: object, **_: object) -> None:
        self.num_sent += 1

    async def read_response(self, **_: object) -> None:
        if self._refuses:
            raise ResponseError("ERR refused")
        await asyncio.Event().wait()

    async def disconnect(self, **_: object) -> None:
        """Disconnected."""


def slot_of(name: str) -> int:
    return int(key_slot(name.encode()))


async def test_a_node_that_refuses_leaves_no_call_to_one_that_hangs() -> None:
    """Nothing limits such a call any more, and it has one of the few connections that may be used at a time."""
    hangs, refuses = Node("hangs", refuses=False), Node("refuses", refuses=True)
    client = RedisCluster.__new__(RedisCluster)
    slots = {0: [hangs], 1: [refuses]}
    client.nodes_manager = SimpleNamespace(slots_cache=slots, nodes_cache={"hangs": hangs, "refuses": refuses})
    nodes = RedisNodes(client, gate=None)
    with pytest.raises(Unavailable):
        await nodes.run([(0, ("GET", "a")), (1, ("GET", "b"))], deadline=soon())
    assert (hangs.num_used, refuses.num_used) == (0, 0)


class LostNode(Node):
    """A node whose machine is switched off: its open connections end, and no other one is opened in time."""

    def __init__(self, name: str, *, num_open: int) -> None:
        super().__init__(name)
        self._num_open = num_open

    async def send_packed_command(self, command: object, **_: object) -> None:
        self.num_sent += 1
        raise (
            ConnectionError("closed")
            if self.num_sent <= self._num_open
            else TimeoutError("Timeout connecting to server")
        )


class AnsweringNode(Node):
    async def read_response(self, **_: object) -> bytes:
        return b"here"


@pytest.mark.parametrize("num_open", [0, 1])
@pytest.mark.parametrize("num_commands", [1, 2])
async def test_a_node_whose_machine_is_switched_off(num_commands: int, num_open: int) -> None:
    """The map is read again, and the commands go to the node that has its slots by now."""
    gone, heir = LostNode("gone", num_open=num_open), AnsweringNode("heir")
    client = RedisCluster.__new__(RedisCluster)
    slots = {slot_of("{a}"): [gone]}
    client.nodes_manager = SimpleNamespace(slots_cache=slots, nodes_cache={"gone": gone, "heir": heir})

    async def read_map() -> None:
        client.nodes_manager.slots_cache = {slot_of("{a}"): [heir]}

    client.read_map = read_map
    nodes = RedisNodes(client, gate=None)
    gets = [("GET", f"{{a}}{number}") for number in range(num_commands)]
    if num_commands == 1:
        assert await nodes.one(gets[0], deadline=soon()) == b"here"
    else:
        assert await nodes.run([(slot_of("{a}"), get) for get in gets], deadline=soon()) == [b"here"] * num_commands


async def test_a_connection_that_is_closed_between_two_parts_of_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """redis-py would send the second part on a new connection, and the replies to the first one would never come."""
    send, num_sent = Connection.send_packed_command, 0

    async def send_once(connection: Connection, *arguments: Any, **options: Any) -> None:
        nonlocal num_sent
        num_sent += 1
        await send(connection, *arguments, **options)
        if num_sent == 1:
            await connection.disconnect()

    with redis_server() as server:
        client = Redis(host=server.host, port=server.port)
        try:
            nodes, names = RedisNodes(client, gate=None), [f"{number}" for number in range(3000)]
            await nodes.run([(0, ("SET", name, name)) for name in names], deadline=soon())
            gets = [(0, ("GET", name)) for name in names]
            monkeypatch.setattr(Connection, "send_packed_command", send_once)
            with pytest.raises(Unavailable, match="closed while commands were sent"):
                await nodes.run(gets, deadline=soon())
            assert num_sent == 1
            monkeypatch.undo()
            assert await nodes.run(gets, deadline=soon()) == [name.encode() for name in names]
        finally:
            await client.aclose()


class Foreign:
    """A server that gives one reply to everything."""

    def __init__(self, reply: object) -> None:
        self._reply = reply

    async def execute_command(self, *_: object) -> object:
        return self._reply


@pytest.mark.parametrize(
    ("call", "reply"),
    [
        (lambda server: RedisCatalog(server).epoch(deadline=soon()), 1),
        (lambda server: RedisOwnership(server, lease_s=1.0).hold("work", deadline=soon()), [1]),
        (lambda server: RedisPendingLog(server, "s3://a", lease_s=1.0).totals(deadline=soon()), [1]),
        (lambda server: RedisPendingLog(server, "s3://a", lease_s=1.0).claim(1, deadline=soon()), [b"key", b"facts"]),
    ],
    ids=["epoch", "lease", "totals", "claim"],
)
async def test_a_script_that_is_answered_by_another_server(
    call: Callable[[Foreign], Awaitable[object]], reply: object
) -> None:
    """The error says what happened, and then the next step."""
    with pytest.raises(Unavailable) as raised:
        await call(Foreign(reply))
    what, step = next_step(str(raised.value))
    assert what.startswith("the server at the address of Redis does not reply like one")
    assert step.startswith("check the address")
