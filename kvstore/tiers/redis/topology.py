"""Which node a name lives on, and how to send it commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstore.runtime.deadline import Deadline
from kvstore.tiers.locations_redis import RedisLocation
from kvstore.tiers.redis.access import Access
from kvstore.tiers.redis.cluster import Cluster
from kvstore.tiers.redis.node import Node, at
from kvstore.tiers.redis.reading import Reading
from kvstore.tiers.redis.resp import Command, Reply
from kvstore.tiers.redis.sentinels import BehindSentinels

__all__ = ["Standalone", "Topology", "open_topology"]


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
