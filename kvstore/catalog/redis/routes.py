"""Finds the node of a cluster that has a hash slot, also after a redirection.

redis-py's own way fails while slots move. It sends `ASKING` on one connection and the command on another, it does not
know a node that has no slots yet, and it takes a redirection without a host for this machine.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any, Protocol

from redis.asyncio.cluster import ClusterNode
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    ConnectionError,
    MovedError,
    TimeoutError,
    TryAgainError,
)

from kvstore.errors import Unavailable

_READ_AGAIN_S = 0.2
_PAUSE_FIRST_S = 0.02
_LOST_MAX = 2
"""Lost connections until a command is given up."""
_ROUNDS_MAX = 5

LOST = (ConnectionError, TimeoutError)
"""A connection was lost, or could not be opened in time, as to a machine that is off. Commands have no other limit of
redis-py's, which would be a `TimeoutError` too.
"""
_ELSEWHERE = (AskError, MovedError, TryAgainError, ClusterDownError, *LOST)


class ClusterClient(Protocol):
    """What `open_control` gives for a cluster: redis-py's client, with its own way to read the map.

    Attributes:
        nodes_manager: redis-py's, with the owners of each slot.
    """

    nodes_manager: Any

    async def read_map(self) -> None:
        """Read who has which slots. Raises `Unavailable` if no node tells."""
        ...


def is_elsewhere(reply: object) -> bool:
    """Whether a command must be sent again, to this or another node: its slot moves, or the node is lost."""
    return isinstance(reply, _ELSEWHERE) and not isinstance(reply, AuthenticationError)


class Routes:
    """Which node of a cluster has which hash slots, as far as is known."""

    def __init__(self, client: ClusterClient) -> None:
        self._client = client
        self._read_s = -math.inf

    async def owner(self, slot: int) -> Any:
        """The node that has a slot, as far as is known.

        Raises:
            Unavailable: No node has it, or the map cannot be read.
        """
        await self._ready()
        owners = self._client.nodes_manager.slots_cache.get(slot)
        if not owners:
            raise Unavailable("no node of the Redis Cluster serves this slot: check CLUSTER INFO", slot=slot)
        return owners[0]

    async def primaries(self) -> list[Any]:
        """Every node that has slots."""
        await self._ready()
        return list({owners[0].name: owners[0] for owners in self._client.nodes_manager.slots_cache.values()}.values())

    def is_known(self, node: Any) -> bool:
        """Whether a node is in the map. If it left while a command waited for it, its connections are not closed with
        those of the others.
        """
        return self._client.nodes_manager.nodes_cache.get(node.name) is node

    async def read_again(self) -> None:
        """Read the map, unless it was read a moment ago: thousands of commands may be redirected at once."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._read_s > _READ_AGAIN_S:
            self._read_s = now_s
            await self._client.read_map()

    def named(self, reply: AskError, asked: Any) -> Any:
        """The node that a redirection names; `None` if it names none."""
        host = reply.host.strip("[]") or asked.host  # an empty host is the one that we used
        if host == "?":
            return None
        manager = self._client.nodes_manager
        node = ClusterNode(host, reply.port, **manager.connection_kwargs)
        return manager.nodes_cache.setdefault(node.name, node)

    async def _ready(self) -> None:
        if not self._client.nodes_manager.slots_cache:
            await self._client.read_map()


class Attempts:
    """Where one command is sent, until it is answered.

    Args:
        slot: Of its keys.
    """

    def __init__(self, routes: Routes, slot: int) -> None:
        self._routes = routes
        self._slot = slot
        self._num_rounds = 0
        self._num_lost = 0
        self._pause_s = _PAUSE_FIRST_S

    async def next(self, asked: Any, reply: object) -> tuple[Any, bool]:
        """The node to send the command to, and whether to send `ASKING` first.

        Args:
            asked: The node that sent `reply`; `None` at first.
            reply: An error with which the command must be sent elsewhere, see `is_elsewhere`.

        Raises:
            RedisError: The reply, since the command was sent often enough.
            Unavailable: No node has the slot, or the map cannot be read.
        """
        if isinstance(reply, Exception):
            self._num_rounds += 1
            self._num_lost += isinstance(reply, LOST)
            if self._num_rounds >= _ROUNDS_MAX or self._num_lost > _LOST_MAX:
                raise reply
        if isinstance(reply, LOST):
            await self._routes.read_again()
        elif isinstance(reply, AskError):  # also a `MovedError`
            has_moved = isinstance(reply, MovedError)
            if has_moved:
                await self._routes.read_again()
            if (node := self._routes.named(reply, asked)) is not None:
                return node, not has_moved
        elif reply is not None:
            await asyncio.sleep(self._pause_s)
            self._pause_s *= 2
        return await self._routes.owner(self._slot), False
