"""A cluster as the client of the catalog and the guard of the tier see it: slots move, nodes are silent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Connection
from redis.exceptions import RedisError

from kvstore.catalog.base import Addition
from kvstore.catalog.entry import Level
from kvstore.catalog.redis.catalog import RedisCatalog
from kvstore.catalog.redis.nodes import RedisNodes
from kvstore.doctor.check import Verdict
from kvstore.doctor.redis import judge_redis
from kvstore.errors import Unavailable
from kvstore.model.keys import PrefixHash
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.runtime.meters import Meters
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.records import make_key, make_record
from kvstore.testing.servers import RedisCluster, RedisServer
from kvstore.testing.servers.ports import free_ports
from kvstore.testing.servers.redis import redis_process
from kvstore.testing.waiting import eventually, soon, until
from kvstore.tiers.guarded import GuardedTier
from kvstore.tiers.locations import parse_redis
from kvstore.tiers.redis import RedisTier, open_control
from kvstore.tiers.redis.cluster import slot_of
from kvstore.tiers.redis.examine import examine_redis
from tests.integration.redis_traffic import number_on, served_everywhere

pytestmark = pytest.mark.servers

_SOON_S = 5.0


@asynccontextmanager
async def nodes_at(url: str) -> AsyncIterator[RedisNodes]:
    async with open_control(parse_redis(url)) as client:
        yield RedisNodes(client, gate=None)


def names_on(group: RedisCluster, server: RedisServer, count: int) -> list[str]:
    """Names that live on `server`."""
    names = (f"{{moving {number}}}" for number in range(10_000))
    return list(islice((name for name in names if group.primary_of(slot_of(name)) is server), count))


@contextmanager
def moving(names: list[str], source: RedisServer, target: RedisServer) -> Iterator[None]:
    """The slots of these names are on their way, and no name has been moved yet."""
    source_id, target_id = (server.ask("CLUSTER", "MYID").decode() for server in (source, target))
    slots = {slot_of(name) for name in names}
    for slot in slots:
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
    yield
    for slot in slots:
        for server in (source, target):
            server.ask("CLUSTER", "SETSLOT", slot, "STABLE")


@contextmanager
def empty_node(group: RedisCluster, folder: Path) -> Iterator[RedisServer]:
    """A server that has just been added to the cluster, and has no slots."""
    port, bus_port = free_ports(2)
    options = ["--cluster-enabled", "yes", "--cluster-port", str(bus_port), "--cluster-node-timeout", "1500"]
    server = RedisServer(redis_process(folder, port, options), port)
    server.start()
    try:
        known = group.servers[0]
        [own_line] = [line for line in known.ask("CLUSTER", "NODES").splitlines() if b"myself" in line]
        known_bus = own_line.split()[1].decode().partition("@")[2].partition(",")[0]
        server.ask("CLUSTER", "MEET", known.host, known.port, known_bus)
        own_id = server.ask("CLUSTER", "MYID")
        eventually(lambda: all(own_id in one.ask("CLUSTER", "NODES") for one in group.servers))
        eventually(lambda: b"cluster_state:ok" in server.ask("CLUSTER", "INFO"))
        yield server
    finally:
        server.process.stop()
        for one in group.servers:
            one.ask("CLUSTER", "FORGET", own_id.decode())


async def write_all(nodes: RedisNodes, names: list[str]) -> None:
    """Each name by itself, and all of them in one round trip per node."""
    for name in names:
        assert await nodes.one(("SET", name, "1"), deadline=Deadline.after(_SOON_S)) in (b"OK", True)
    calls = [(slot_of(name), ("GET", name)) for name in names]
    assert await nodes.run(calls, deadline=Deadline.after(_SOON_S)) == [b"1"] * len(names)


async def test_slots_that_move_to_another_node(cluster: RedisCluster) -> None:
    """A command is sent on the connection that `ASKING` was sent on, however many there are to the node."""
    await asyncio.to_thread(cluster.settle)
    source, target, _ = cluster.primaries()
    names, others = names_on(cluster, source, 10), names_on(cluster, target, 2)
    async with nodes_at(cluster.url) as nodes:
        # two connections, which take turns
        await asyncio.gather(*(nodes.one(("SET", name, "1"), deadline=Deadline.after(_SOON_S)) for name in others))
        with moving(names, source, target):
            await write_all(nodes, names)


async def test_connections_that_are_lost(cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node has closed those of the pool: the names of a lookup are sent at once again, not one by one."""
    send, num_sent = Connection.send_packed_command, 0

    async def count(connection: Connection, *arguments: Any, **options: Any) -> None:
        nonlocal num_sent
        num_sent += 1
        await send(connection, *arguments, **options)

    await asyncio.to_thread(cluster.settle)
    names = [f"{{lost {number}}}" for number in range(3000)]
    gets = [(slot_of(name), ("GET", name)) for name in names]
    async with nodes_at(cluster.url) as nodes:
        await nodes.run([(slot_of(name), ("SET", name, name)) for name in names], deadline=soon())
        await asyncio.gather(*(nodes.run(gets, deadline=soon()) for _ in range(12)))  # several connections to each node
        cluster.primaries()[0].ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        monkeypatch.setattr(Connection, "send_packed_command", count)
        assert await nodes.run(gets, deadline=soon()) == [name.encode() for name in names]
        assert num_sent < 100
        cluster.primaries()[0].ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        found = await asyncio.gather(*(nodes.one(command, deadline=soon()) for _, command in gets[:12]))
        assert found == [name.encode() for name in names[:12]]


@pytest.mark.parametrize("is_half", [False, True])
async def test_slots_that_move_during_a_walk_over_the_catalog(cluster: RedisCluster, *, is_half: bool) -> None:
    """From a node that is listed later to one that was listed before: no entry is missed, so that retention and garbage
    collection take no boundary for one whose parent is gone. Also of slots whose move is not over.
    """
    await asyncio.to_thread(cluster.settle)
    cluster.flush()
    target, *others = sorted(cluster.primaries(), key=lambda server: f"127.0.0.1:{server.port}")
    prompt = Prompt(ATTENTION, "walked", 64 * 40)
    keys = prompt.record_keys()
    async with open_control(parse_redis(cluster.url)) as client:
        catalog = RedisCatalog(client)
        await catalog.register(prompt.namespace, prompt.layout, "", deadline=soon())
        await catalog.add([Addition(key, Level.COLD, 1000, 0) for key in keys], deadline=soon())
        walked: set[PrefixHash] = set()
        moved: list[tuple[int, RedisServer]] = []
        async for entry in catalog.iterate(prompt.namespace):
            if not moved and cluster.primary_of(slot_of(f"{{{entry.prefix.hex()}}}")) in others:
                for key in keys[::8]:
                    slot = slot_of(f"{{{key.prefix.hex()}}}")
                    if (source := cluster.primary_of(slot)) in others and slot not in dict(moved):
                        move_keys(slot, source, target)
                        moved.append((slot, source))
                        if not is_half:
                            settle_slot(cluster, slot, target)
            walked.add(entry.prefix)
        assert len(moved) > 1
        assert walked == {key.prefix for key in keys}
    for slot, source in moved:
        if is_half:
            settle_slot(cluster, slot, target)
        move_keys(slot, target, source)
        settle_slot(cluster, slot, source)


def move_keys(slot: int, source: RedisServer, target: RedisServer) -> None:
    """Move what a slot holds; the slot itself stays where it is."""
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.ask("CLUSTER", "MYID").decode())
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.ask("CLUSTER", "MYID").decode())
    for name in source.ask("CLUSTER", "GETKEYSINSLOT", slot, 1000):
        source.ask("MIGRATE", "127.0.0.1", target.port, name, 0, 5000)


def settle_slot(group: RedisCluster, slot: int, owner: RedisServer) -> None:
    """Give a slot, with what it holds, to a node."""
    for server in (owner, *group.primaries()):
        server.ask("CLUSTER", "SETSLOT", slot, "NODE", owner.ask("CLUSTER", "MYID").decode())


async def test_slots_that_move_to_a_node_without_slots(cluster: RedisCluster, tmp_path: Path) -> None:
    """As when a cluster is given another node: no map names it before it has its first slot."""
    await asyncio.to_thread(cluster.settle)
    source = cluster.primaries()[0]
    names = names_on(cluster, source, 10)
    with empty_node(cluster, tmp_path) as target:
        async with nodes_at(cluster.url) as nodes:
            with moving(names, source, target):
                await write_all(nodes, names)


async def test_nodes_that_do_not_tell_their_host(cluster: RedisCluster) -> None:
    """They are at the address that was used so far, in maps and in redirections, and not on this machine."""
    await asyncio.to_thread(cluster.settle)
    for server in cluster.servers:
        server.ask("CONFIG", "SET", "cluster-preferred-endpoint-type", "unknown-endpoint")
    try:
        async with nodes_at(cluster.url) as nodes:
            old = cluster.primaries()[0]
            names = names_on(cluster, old, 10)
            await write_all(nodes, names)
            assert {node.host for node in nodes.client.nodes_manager.nodes_cache.values()} == {"127.0.0.1"}
            await asyncio.to_thread(make_replica, cluster, old)
            await write_all(nodes, names)
    finally:
        for server in cluster.servers:
            server.ask("CONFIG", "SET", "cluster-preferred-endpoint-type", "ip")


def make_replica(group: RedisCluster, primary: RedisServer) -> None:
    """Have its replica take its slots over, by hand."""
    port = next(int(value[1]) for value in primary.ask("ROLE")[2])
    replica = next(server for server in group.servers if server.port == port)
    give_up = Deadline.after(30)
    while replica.ask("ROLE")[0] != b"master" or primary.ask("ROLE")[0] != b"slave":
        assert not give_up.expired
        with suppress(RedisError):  # it is on its way already; after five seconds it has given up
            replica.ask("CLUSTER", "FAILOVER")
        time.sleep(0.3)


async def test_a_node_leaves_during_a_scan(cluster: RedisCluster) -> None:
    """The scan fails, and can be repeated. It does not say that the tier is closed, which would end its callers."""
    await asyncio.to_thread(cluster.settle)
    tier = RedisTier(cluster.url)
    for number in range(30):
        await tier.put(make_record(number), deadline=Deadline.after(_SOON_S))
    entries = tier.scan()
    await anext(entries)
    last = cluster.primary_of(16383)  # nodes are scanned in the order of their slots
    await asyncio.to_thread(make_replica, cluster, last)
    for _ in range(4):  # the map is read again every two seconds, and a node without calls is left then
        await tier.facts(deadline=Deadline.after(_SOON_S))
        await asyncio.sleep(2.2)
    with pytest.raises(Unavailable, match="the node has just left the Redis Cluster"):
        async for _ in entries:
            pass
    await tier.aclose()


async def test_a_seed_that_is_frozen(cluster: RedisCluster) -> None:
    """The first call waits for it for a second at most, and goes on with the next seed."""
    await asyncio.to_thread(cluster.settle)
    primaries = cluster.primaries()
    frozen = next(server for server in cluster.servers if server not in primaries)
    url = f"redis+cluster://127.0.0.1:{frozen.port},127.0.0.1:{primaries[0].port}"
    frozen.freeze()
    try:
        for _ in range(6):
            async with nodes_at(url) as nodes:
                await nodes.one(("SET", "seeds", "1"), deadline=Deadline.after(3))
    finally:
        frozen.thaw()


async def test_one_dead_node_does_not_end_the_use_of_others(cluster: RedisCluster) -> None:
    """Nobody takes its slots over. Its own names are refused at once; those of other nodes are served all along."""
    await asyncio.to_thread(cluster.settle)
    dead, alive, _ = cluster.primaries()
    port = int(dead.ask("ROLE")[2][0][1])
    here, there = make_key(number_on(cluster, dead)), make_record(number_on(cluster, alive))
    meters = Meters()
    guard = GuardedTier(RedisTier(cluster.url), Instruments(meters=meters))
    await guard.put(there, deadline=Deadline.after(_SOON_S))
    for server in (dead, next(server for server in cluster.servers if server.port == port)):
        server.kill9()
    for _ in range(3):  # until its own breaker is open; three failures in a row also open the guard
        with pytest.raises(Unavailable):
            await guard.get(here, deadline=Deadline.after(_SOON_S))
    await until(lambda: not guard.is_open, _SOON_S)
    refused = meters.get("tier_refused", tier="redis")
    for _ in range(5):
        for _ in range(3):
            with pytest.raises(Unavailable, match="a node of the Redis Cluster failed"):
                await guard.get(here, deadline=Deadline.after(_SOON_S))
            with pytest.raises(Unavailable, match="at one node of the cluster, the others are used: "):
                await guard.usage(deadline=Deadline.after(_SOON_S))
        stored = await guard.get(there.key, deadline=Deadline.after(_SOON_S))
        assert stored is not None and stored.data == there.data
    assert meters.get("tier_refused", tier="redis") == refused
    await asyncio.to_thread(cluster.settle)
    await served_everywhere(guard)
    await guard.aclose()


async def test_slots_that_are_half_moved_are_named(cluster: RedisCluster) -> None:
    """By `kvstore doctor`, at both nodes, until they are moved or the move is taken back."""
    await asyncio.to_thread(cluster.settle)
    location, (source, target, _) = parse_redis(cluster.url), cluster.primaries()
    with moving(names_on(cluster, source, 2), source, target):
        seen = await examine_redis(location, deadline=soon())
        assert sorted(seen.num_slots_moving.values()) == [2, 2]
        (topology,) = [one for one in judge_redis(location, seen) if one.name == "redis.topology"]
        assert topology.verdict is Verdict.WARNING and f"2 at {source.host}:{source.port}" in topology.seen
        assert "redis-cli --cluster fix" in topology.fix
    assert not (await examine_redis(location, deadline=soon())).num_slots_moving
