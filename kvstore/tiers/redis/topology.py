"""Which node a name lives on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstore.tiers.redis.node import Node
from kvstore.tiers.redis.url import RedisUrl

__all__ = ["Standalone", "Topology"]


class Topology(Protocol):
    """Maps names to nodes. All keys of one record share a hash tag, so they are on one node in any topology."""

    def node_for(self, name: str) -> Node:
        """The node that holds `name`."""
        ...

    def nodes(self) -> Sequence[Node]:
        """Every node that holds records, once."""
        ...

    async def aclose(self) -> None:
        """Drop all connections. Idempotent."""
        ...


class Standalone:
    """One server."""

    def __init__(self, url: RedisUrl, num_data_connections: int) -> None:
        self._node = Node(url, num_data_connections)

    def node_for(self, name: str) -> Node:
        return self._node

    def nodes(self) -> Sequence[Node]:
        return (self._node,)

    async def aclose(self) -> None:
        await self._node.aclose()
