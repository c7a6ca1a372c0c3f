"""Sends commands to the node that a name lives on: one server, the primary behind sentinels, or a cluster."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from kvstore.errors import Unavailable
from kvstore.runtime.background import Background
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.io_loops import IoLoop
from kvstore.tiers.locations import HostPort, RedisLocation
from kvstore.tiers.redis.access import Access
from kvstore.tiers.redis.cluster import Cluster
from kvstore.tiers.redis.node import Node
from kvstore.tiers.redis.reading import Reading
from kvstore.tiers.redis.replies import check_reply
from kvstore.tiers.redis.resp import Command, Reply

_log = logging.getLogger(__name__)

_SENTINEL_S = 0.3
_CHECK_S = 0.5


class Topology(Protocol):
    """Sends commands to the nodes that their names live on; replies that are errors are `ErrorReply` values.

    All names of one record share a hash tag, so they are on one node in any topology.
    """

    async def query(
        self, commands: Sequence[tuple[str, Command]], *, deadline: Deadline, carries_bytes: bool = False
    ) -> list[Reply]:
        """Run commands, each given with its name: one round trip for each node that holds any of the names.

        Commands on names of one node are run in order.

        Args:
            carries_bytes: Some of them carry bytes of a record.

        Raises:
            SlotMoves: A command on several names met a slot that moves. Others may have been run.
            Unavailable: A node that is needed does not answer, or the deadline came first.
        """
        ...

    async def read(self, reading: Reading, *, deadline: Deadline) -> None:
        """Read a record; errors as `query`, and those of the reading."""
        ...

    async def nodes(self, deadline: Deadline) -> Sequence[Node]:
        """Every node that holds records, once."""
        ...

    async def placement(self, deadline: Deadline, *, is_fresh: bool = False) -> Sequence[HostPort | None]:
        """Which node has which hash slot; empty: one node has all of them.

        Args:
            is_fresh: As a node says now, which `nodes` then follows too.
        """
        ...

    async def aclose(self) -> None:
        """Drop all connections. Idempotent."""
        ...


def open_topology(location: RedisLocation, num_data_connections: int, io_loops: Sequence[IoLoop] = ()) -> Topology:
    """The topology at a location; no I/O yet, except for reading certificates.

    Args:
        num_data_connections: Connections to each server that carry records.
        io_loops: Where these move their bytes, see `Node`.

    Raises:
        InvalidRequest: A certificate cannot be used.
    """
    if location.mode == "cluster":
        return Cluster(location, num_data_connections, io_loops)
    if location.mode == "sentinel":
        return _BehindSentinels(location, num_data_connections, io_loops)
    (address,) = location.addresses
    return _SingleNode(Node(Access(location), address, num_data_connections, io_loops=io_loops))


class _SingleNode:
    """One node that holds all names."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def _started(self) -> Node:
        """The node, for a call."""
        return self._node

    async def query(
        self, commands: Sequence[tuple[str, Command]], *, deadline: Deadline, carries_bytes: bool = False
    ) -> list[Reply]:
        node = self._started()
        run = node.data if carries_bytes else node.control
        return await run(*(command for _, command in commands), deadline=deadline)

    async def read(self, reading: Reading, *, deadline: Deadline) -> None:
        await self._started().read(reading, deadline=deadline)

    async def nodes(self, deadline: Deadline) -> Sequence[Node]:
        return (self._node,)

    async def placement(self, deadline: Deadline, *, is_fresh: bool = False) -> Sequence[HostPort | None]:
        return ()

    async def aclose(self) -> None:
        await self._node.aclose()


class _BehindSentinels(_SingleNode):
    """The server that sentinels call the primary.

    The sentinels are queried at each connection attempt, and every 0.5 s: after a planned failover the old primary
    accepts writes for about ten more seconds, and loses them.
    """

    def __init__(self, location: RedisLocation, num_data_connections: int, io_loops: Sequence[IoLoop]) -> None:
        assert location.service is not None
        self._service = location.service
        access = Access(location, to_sentinels=True)
        self._sentinels = [Node(access, address) for address in location.addresses]
        self._next = 0
        self._primary: HostPort | None = None
        self._background = Background("Redis behind sentinels")
        name = f"{location.service} behind {','.join(map(str, location.addresses))}"
        super().__init__(Node(Access(location), self._find_primary, num_data_connections, name, io_loops))

    def _started(self) -> Node:
        if not len(self._background):
            self._background.keep_running(self._follow, "follow")
        return self._node

    async def _follow(self) -> None:
        before: HostPort | None = None
        while True:
            await asyncio.sleep(_CHECK_S)
            try:
                address = await self._find_primary(Deadline.after(2 * _SENTINEL_S))
            except Unavailable:
                continue
            if address == before:  # two sentinels agree: one alone may be cut off from the others
                self._node.leave_all_but(address)
            before = address

    async def _find_primary(self, deadline: Deadline) -> HostPort:
        """Query the sentinels, each time starting with another one: one that is cut off gives outdated answers.

        Raises:
            Unavailable: No sentinel answered, or none knows the service.
        """
        first = self._next
        self._next = (first + 1) % len(self._sentinels)
        problem: Unavailable | None = None
        for sentinel in self._sentinels[first:] + self._sentinels[:first]:
            try:
                address = await query_sentinel(sentinel, self._service, deadline.earlier(_SENTINEL_S))
            except Unavailable as error:
                problem = error
                continue
            if self._primary not in (None, address):
                _log.info("the primary of %s is now %s, it was %s", self._service, address, self._primary)
            self._primary = address
            return address
        assert problem is not None
        next_step = "check the sentinels' addresses and the service's name in the url"
        if "NOAUTH" in str(problem):
            next_step = "they require a login: if it is the same as the servers', add ?sentinel_login=same to the url"
        raise Unavailable(
            f"no sentinel names the primary: {next_step}", service=self._service, last=problem
        ) from problem

    async def aclose(self) -> None:
        await self._background.aclose()
        await asyncio.gather(*(node.aclose() for node in (self._node, *self._sentinels)))


async def query_sentinel(sentinel: Node, service: str, deadline: Deadline) -> HostPort:
    """The primary that a sentinel names.

    Raises:
        Unavailable: It does not answer, or does not know the service.
    """
    (reply,) = await sentinel.control(("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service), deadline=deadline)
    check_reply(reply)
    host, port = reply if isinstance(reply, list) and len(reply) == 2 else (None, None)
    if isinstance(host, bytes) and isinstance(port, bytes) and port.isdigit() and len(port) <= 5:
        return HostPort(host.decode(errors="replace"), int(port))
    raise Unavailable("the sentinel does not know the service", service=service, address=sentinel.address)
