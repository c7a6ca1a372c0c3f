"""redis-py as a general client, for the scripts and small commands of the catalog and the pending writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any, cast

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError, RedisClusterException, RedisError

from kvstore.errors import Unavailable, UnsupportedFormat
from kvstore.format.manifest import STORE_VERSION_PLACE, check_store_version
from kvstore.format.names import manifest_name
from kvstore.runtime.background import Background
from kvstore.runtime.deadline import Deadline
from kvstore.tiers.locations import RedisLocation
from kvstore.tiers.redis.cluster import Cluster, SlotMap, ranges_of

ControlClient = Redis | RedisCluster
"""A client of the primary, or of all nodes of a cluster; replies are `bytes`. Its errors are redis-py's
(`redis.exceptions.RedisError`); its users translate them."""

_CONNECT_S = 2.0
"""For a connection attempt. Commands have no limit: run each within its deadline's scope."""
_CONNECTIONS_MAX = 42
"""Per node in a cluster. Further commands fail with `ConnectionError`, so each user of a client bounds its own: the
catalog 24, pending writes 8, and two each the leases of retention, of a rebuild and of comparisons, marks, and
operators' rules."""
_WATCH_S = 0.5
_SENTINEL_S = 0.5
_MAP_S = 4.0


@asynccontextmanager
async def open_control(location: RedisLocation, *, refuses_newer: bool = False) -> AsyncIterator[ControlClient]:
    """A client of the Redis at `location`, in any mode, closed at the end of the block.

    It connects at the first command, and recovers by itself from lost connections, failovers and moved slots. In a
    cluster all keys of one script or transaction must share a hash tag.

    Args:
        location: Where, and how to log in.
        refuses_newer: Read the store's version on each new connection, before other commands, and refuse a server that
            a newer release has taken over, with `ConnectionError`. Without effect in a cluster, where only one node has
            the version.
    """
    options = _options(location)
    async with AsyncExitStack() as stack:
        if location.mode == "cluster":
            topology = Cluster(location, num_data_connections=1)
            stack.push_async_callback(topology.aclose)
            cluster = _ClusterClient(topology, max_connections=_CONNECTIONS_MAX, retry=_retry(3), **options)
            stack.push_async_callback(_close, cluster)
            watch = Background("control client of a cluster")
            stack.push_async_callback(watch.aclose)
            watch.keep_running(partial(_follow_primaries, cluster, topology), "follow")
            yield cluster
            return
        options |= {"db": location.database, "retry": _retry(1), "max_connections": _CONNECTIONS_MAX}
        if refuses_newer:
            options["redis_connect_func"] = _greet
        if location.mode == "sentinel":
            assert location.service is not None
            login = {} if location.sentinel_login else {"username": None, "password": None}
            sentinel_options = _options(location) | login | {"socket_timeout": _SENTINEL_S}
            addresses = [tuple(address) for address in location.addresses]
            sentinel = Sentinel(addresses, sentinel_kwargs=sentinel_options, **options)  # type: ignore[no-untyped-call]
            for one in sentinel.sentinels:
                stack.push_async_callback(one.aclose)
            client = sentinel.master_for(location.service)
            watch = Background("control client behind sentinels")
            stack.push_async_callback(watch.aclose)
            watch.keep_running(partial(_follow, client), "follow")
        else:
            ((host, port),) = location.addresses
            client = Redis(host=host, port=port, **options)
        stack.push_async_callback(client.aclose)
        yield client


class _OurMap(ClusterNode):
    """What redis-py takes for the only seed of a cluster: it gives the map that our own `Cluster` reads.

    By itself redis-py takes a node that does not tell its host for one on this machine. It waits for a frozen seed
    until the caller's deadline. It forgets the seeds of the url once it knows other nodes.
    """

    __slots__ = ("_topology", "given")

    def __init__(self, topology: Cluster) -> None:
        super().__init__("map", 0)
        self._topology = topology
        self.given: SlotMap | None = None

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        self.given = [*await self._topology.read_map(Deadline.after(_MAP_S))]
        return [[first, last, [host, port, ""]] for first, last, (host, port) in ranges_of(self.given)]


class _ClusterClient(RedisCluster):
    """redis-py's client of a cluster, with our map."""

    def __init__(self, topology: Cluster, **options: Any) -> None:
        self.map = _OurMap(topology)
        super().__init__(startup_nodes=[self.map], require_full_coverage=False, **options)

    async def initialize(self, *arguments: Any, **options: Any) -> RedisCluster:
        self._seed()
        return await super().initialize(*arguments, **options)

    async def read_map(self) -> None:
        """Read who has which slots. Raises `Unavailable` if no node tells."""
        self._seed()
        try:
            await self.nodes_manager.initialize()
        except RedisClusterException as error:
            if isinstance(error.__cause__, Unavailable):
                raise error.__cause__ from error
            raise

    def _seed(self) -> None:
        # redis-py replaces its seeds by copies, and by the nodes that it finds
        self.nodes_manager.startup_nodes = {self.map.name: self.map}


async def _close(cluster: RedisCluster) -> None:
    await cluster.aclose()
    # `aclose` closes nothing if the first command was cancelled during the discovery of nodes
    await cluster.nodes_manager.aclose()
    await cluster.nodes_manager.aclose("startup_nodes")


async def _follow(client: Redis) -> None:
    """Leave the old primary when sentinels name another: it accepts writes for ten more seconds, and loses them."""
    pool = cast(SentinelConnectionPool, client.connection_pool)
    while True:
        await asyncio.sleep(_WATCH_S)
        with suppress(RedisError, OSError, TimeoutError):
            # drops idle connections if the address has changed
            await pool.get_master_address()  # type: ignore[no-untyped-call]


async def _follow_primaries(client: _ClusterClient, topology: Cluster) -> None:
    """Have the client read its map again when other nodes have the slots, and leave nodes that have none. A lost
    connection or a redirection tells it too. From a node that is frozen neither comes, although its replica has taken
    over: its calls end with their connections."""
    while True:
        await asyncio.sleep(_WATCH_S)
        with suppress(Unavailable, RedisError):
            now = await topology.owners(Deadline.after(_MAP_S))
            if client.map.given in (None, now):
                continue
            before = list(client.nodes_manager.nodes_cache.values())
            await client.read_map()
            left = [node for node in before if client.nodes_manager.nodes_cache.get(node.name) is not node]
            await asyncio.gather(*(node.disconnect() for node in left), return_exceptions=True)


async def _greet(connection: AbstractConnection) -> None:
    """Log in, then check whether this release may write to the server."""
    await connection.on_connect()
    await connection.send_command("GET", manifest_name(STORE_VERSION_PLACE))
    note = await connection.read_response(disable_decoding=True)
    try:
        check_store_version(note if isinstance(note, bytes) else None, "redis")
    except (UnsupportedFormat, Unavailable) as error:
        raise ConnectionError(str(error)) from error


def _options(location: RedisLocation) -> dict[str, Any]:
    options: dict[str, Any] = {
        "username": location.username,
        "password": location.password,
        # With a limit, redis-py sends with `asyncio.wait_for`, which before Python 3.12 may ignore a cancellation, so
        # that a service would not stop.
        "socket_timeout": None,
        "socket_connect_timeout": _CONNECT_S,
        "protocol": 2,
    }
    if location.tls:
        files = {
            "ssl_ca_certs": location.ca_file,
            "ssl_certfile": location.cert_file,
            "ssl_keyfile": location.key_file or location.cert_file,
        }
        options |= {"ssl": True} | {name: str(path) for name, path in files.items() if path is not None}
    return options


def _retry(attempts: int) -> Retry:
    """Retry on a new connection, since the pool's may lead to a dead server; in a cluster with a reloaded map."""
    return Retry(ExponentialBackoff(cap=0.2, base=0.01), attempts)
