"""A node of a cluster behind its own breaker, so that a dead or frozen one costs only one call its deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.errors import Closed, Unavailable
from kvstore.runtime.deadline import Deadline
from kvstore.tiers.locations_redis import HostPort
from kvstore.tiers.redis.access import Access
from kvstore.tiers.redis.node import Node, at
from kvstore.tiers.redis.reading import Reading
from kvstore.tiers.redis.resp import Command, Reply
from kvstore.tiers.wrap.breaker import Breaker

__all__ = ["Member"]

_PROBE_S = 1.0


class Member:
    """One node of a cluster.

    Args:
        access: How to log in.
        address: Where it is.
        num_data_connections: Connections that carry pages.
        on_trouble: Called when a call to it fails or is refused.
    """

    def __init__(
        self, access: Access, address: HostPort, num_data_connections: int, on_trouble: Callable[[], None]
    ) -> None:
        self.address = address
        self.node = Node(access, at(address), str(address), num_data_connections)
        self._breaker = Breaker()
        self._on_trouble = on_trouble

    @property
    def is_left_alone(self) -> bool:
        """True while calls are refused."""
        return self._breaker.is_open

    async def control(self, *commands: Command, deadline: Deadline) -> list[Reply]:
        """As `Node.control`; refused at once while the node is left alone."""
        with self._call(deadline):
            return await self.node.control(*commands, deadline=deadline)

    async def data(self, *commands: Command, deadline: Deadline) -> list[Reply]:
        """As `Node.data`; refused at once while the node is left alone."""
        with self._call(deadline):
            return await self.node.data(*commands, deadline=deadline)

    async def read(self, reading: Reading, *, deadline: Deadline) -> None:
        """As `Node.read`; refused at once while the node is left alone."""
        with self._call(deadline):
            await self.node.read(reading, deadline=deadline)

    async def probe(self) -> None:
        """Ask whether the node is back; if so, calls are let through again. Never raises `Unavailable`."""
        try:
            await self.node.control(("PING",), deadline=Deadline.after(_PROBE_S))
        except Unavailable:
            self._breaker.probe_failed()
        else:
            self._breaker.probe_succeeded()

    @contextmanager
    def _call(self, deadline: Deadline) -> Iterator[None]:
        if self._breaker.is_open:
            self._on_trouble()
            raise Unavailable(
                "a node of the Redis Cluster failed and is left alone until it answers or another takes its slots",
                address=str(self.address),
            )
        now_s = asyncio.get_running_loop().time
        started_s = now_s()
        try:
            yield
        except Closed as error:  # it left between our look at the map and this call
            self._on_trouble()
            raise Unavailable("the node has just left the Redis Cluster", address=str(self.address)) from error
        except Unavailable:
            if deadline.expired:
                self._breaker.ran_out(started_s, now_s(), by_deadline=True)
            else:
                self._breaker.failed()
            self._on_trouble()
            raise
        except asyncio.CancelledError:
            if self._breaker.ran_out(started_s, now_s(), by_deadline=False):
                self._on_trouble()
            raise
        else:
            self._breaker.succeeded(now_s())
