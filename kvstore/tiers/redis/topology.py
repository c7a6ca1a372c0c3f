"""Which node a name lives on, and how to send it commands."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from kvstore.errors import Unavailable
from kvstore.runtime.background import Background
from kvstore.runtime.deadline import Deadline
from kvstore.tiers.locations import HostPort, RedisLocation
from kvstore.tiers.redis.access import Access
from kvstore.tiers.redis.cluster import Cluster
from kvstore.tiers.redis.node import Node, at
from kvstore.tiers.redis.reading import Reading
from kvstore.tiers.redis.replies import check_reply
from kvstore.tiers.redis.resp import Command, Reply

__all__ = ["BehindSentinels", "Sentinels", "Standalone", "Topology", "open_topology"]


class Topology(Protocol):
    """Sends commands to the nodes that their names live on; replies that are errors are `ErrorReply` values.

    All names of one record share a hash tag, so they are on one node in any topology.
    """

    async def ask(self, commands: Sequence[tuple[str, Command]], *, deadline: Deadline) -> list[Reply]:
        """Run small commands, each given with its name: one round trip for each node that holds any of the names.

        Commands on one name are run in order.

        Raises:
            Unavailable: A node that is needed does not answer, or the deadline came first.
        """
        ...

    async def move(self, name: str, command: Command, *, deadline: Deadline) -> Reply:
        """Run a command that carries the bytes of `name`; errors as `ask`."""
        ...

    async def read(self, reading: Reading, *, deadline: Deadline) -> None:
        """Read a record; errors as `ask`, and those of the reading."""
        ...

    async def nodes(self, deadline: Deadline) -> Sequence[Node]:
        """Every node that holds records, once."""
        ...

    async def aclose(self) -> None:
        """Drop all connections. Idempotent."""
        ...


def open_topology(location: RedisLocation, num_data_connections: int) -> Topology:
    """The topology at a location; no I/O yet, except for reading certificates.

    Raises:
        InvalidRequest: A certificate cannot be used.
    """
    if location.mode == "cluster":
        return Cluster(location, num_data_connections)
    if location.mode == "sentinel":
        return BehindSentinels(location, num_data_connections)
    return Standalone(location, num_data_connections)


class Standalone:
    """One server."""

    def __init__(self, location: RedisLocation, num_data_connections: int) -> None:
        (address,) = location.addresses
        self._node = Node(Access.to_servers(location), at(address), str(address), num_data_connections)

    async def ask(self, commands: Sequence[tuple[str, Command]], *, deadline: Deadline) -> list[Reply]:
        return await self._node.control(*(command for _, command in commands), deadline=deadline)

    async def move(self, name: str, command: Command, *, deadline: Deadline) -> Reply:
        (reply,) = await self._node.data(command, deadline=deadline)
        return reply

    async def read(self, reading: Reading, *, deadline: Deadline) -> None:
        await self._node.read(reading, deadline=deadline)

    async def nodes(self, deadline: Deadline) -> Sequence[Node]:
        return (self._node,)

    async def aclose(self) -> None:
        await self._node.aclose()


_log = logging.getLogger(__name__)

_ONE_S = 0.3
_WATCH_S = 0.5


class BehindSentinels:
    """The server that sentinels call the primary, as a topology.

    The sentinels are asked at each connection attempt, and regularly besides: after a planned failover the old primary
    accepts writes for some ten more seconds, only to lose them.
    """

    def __init__(self, location: RedisLocation, num_data_connections: int) -> None:
        self._sentinels = Sentinels(location)
        name = f"{location.service} behind {','.join(map(str, location.addresses))}"
        self._node = Node(Access.to_servers(location), self._sentinels.primary, name, num_data_connections)
        self._background = Background("Redis behind sentinels")
        self._watching = False

    async def ask(self, commands: Sequence[tuple[str, Command]], *, deadline: Deadline) -> list[Reply]:
        """See `Topology.ask`."""
        self._watch_on()
        return await self._node.control(*(command for _, command in commands), deadline=deadline)

    async def move(self, name: str, command: Command, *, deadline: Deadline) -> Reply:
        """See `Topology.move`."""
        self._watch_on()
        (reply,) = await self._node.data(command, deadline=deadline)
        return reply

    async def read(self, reading: Reading, *, deadline: Deadline) -> None:
        """See `Topology.read`."""
        self._watch_on()
        await self._node.read(reading, deadline=deadline)

    async def nodes(self, deadline: Deadline) -> Sequence[Node]:
        """See `Topology.nodes`."""
        return (self._node,)

    async def aclose(self) -> None:
        """Drop all connections. Idempotent."""
        await self._background.aclose()
        await self._node.aclose()
        await self._sentinels.aclose()

    def _watch_on(self) -> None:
        if not self._watching:
            self._watching = True
            self._background.spawn(self._watch(), "watch")

    async def _watch(self) -> None:
        before: HostPort | None = None
        while True:
            await asyncio.sleep(_WATCH_S)
            try:
                address = await self._sentinels.primary(Deadline.after(2 * _ONE_S))
            except Unavailable:
                continue
            if address == before:  # two sentinels agree: one alone may be cut off from the others
                self._node.leave_all_but(address)
            before = address


class Sentinels:
    """The sentinels of a location, asked in turn."""

    def __init__(self, location: RedisLocation) -> None:
        assert location.service is not None
        self._service = location.service
        access = Access.to_sentinels(location)
        self._nodes = [Node(access, at(address), str(address), 0) for address in location.addresses]
        self._next = 0
        self._primary: HostPort | None = None

    async def primary(self, deadline: Deadline) -> HostPort:
        """Where the primary is. Each call starts with another sentinel, since one that is cut off gives stale answers.

        Raises:
            Unavailable: No sentinel answered, or none knows the service.
        """
        first = self._next
        self._next = (first + 1) % len(self._nodes)
        problem: Unavailable | None = None
        for node in self._nodes[first:] + self._nodes[:first]:
            try:
                address = await self._ask(node, deadline.earlier(_ONE_S))
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
            next_step = "they ask for a login: if it is the servers' own, add ?sentinel_login=same to the url"
        raise Unavailable(
            f"no sentinel names the primary: {next_step}",
            service=self._service,
            last=problem,
        ) from problem

    async def _ask(self, node: Node, deadline: Deadline) -> HostPort:
        question = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
        (reply,) = await node.control(question, deadline=deadline)
        check_reply(reply)
        if isinstance(reply, list) and len(reply) == 2:
            host, port = reply
            if isinstance(host, bytes) and isinstance(port, bytes) and port.isdigit() and len(port) <= 5:
                return HostPort(host.decode(errors="replace"), int(port))
        raise Unavailable("the sentinel does not know the service", service=self._service, address=node.address)

    async def aclose(self) -> None:
        """Drop all connections. Idempotent."""
        await asyncio.gather(*(node.aclose() for node in self._nodes))
