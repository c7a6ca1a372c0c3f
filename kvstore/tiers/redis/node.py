"""The connections to one Redis server: one for small commands, others for records. Lost ones are reopened."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from operator import attrgetter

from kvstore.errors import Closed, Unavailable
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.io_loops import IoLoop
from kvstore.runtime.turns import Turns
from kvstore.tiers.locations import HostPort
from kvstore.tiers.redis.access import Access
from kvstore.tiers.redis.connection import Connection, ConnectionOnLoop
from kvstore.tiers.redis.reading import PART_BYTES, Reading
from kvstore.tiers.redis.resp import Argument, ErrorReply, Reply

_CONNECT_S = 2.0
_BACKOFF_FIRST_S = 0.05
_BACKOFF_MAX_S = 0.5
_READS_BYTES = 4 * PART_BYTES
"""Bytes that all reads receive at a time, each a part of a record or a small record; as many again are requested ahead.
With fewer, Redis runs out of work between two replies and sleeps, and waking it costs both sides. With many more it
needs more processor time per byte, because it copies each reply before it sends it."""
_READS_MIN = 2
"""Reads at a time for any size: one runs while the other waits for the network or its caller."""

_num_in_flight = attrgetter("num_in_flight")


class Node:
    """The connections to one Redis server; after a failover, to the server that has taken its role.

    Small commands have a connection of their own, so that a lookup never waits for records. The next call reopens a
    lost connection. After a failed attempt, calls are refused at once for 0.05 s, growing to 0.5 s.

    Args:
        access: Opens connections.
        where: The server's address; or finds it for each connection attempt. When it has changed, connections to the
            old address are dropped.
        num_data_connections: Connections that carry records.
        name: For messages, until the address is known.
        io_loops: Where these connections move their bytes, in turn; none: on the caller's loop, as small commands do.

    Attributes:
        has_left: It is no longer part of its cluster. Once it is closed, calls raise `Unavailable` instead of `Closed`,
            which would tell their callers that the whole tier is closed.
    """

    def __init__(
        self,
        access: Access,
        where: HostPort | Callable[[Deadline], Awaitable[HostPort]],
        num_data_connections: int = 0,
        name: str = "",
        io_loops: Sequence[IoLoop] = (),
    ) -> None:
        self._access = access
        self._where = where
        self.address = name or str(where)
        self.has_left = False
        self._control = _Link(self)
        loops = io_loops or (None,)
        self._data = [_Link(self, loops[number % len(loops)]) for number in range(num_data_connections)]
        self._reads = Turns(_READS_MIN)
        self._read_bytes = PART_BYTES  # the largest part of recent reads

    @property
    def num_in_flight(self) -> int:
        """Calls that wait for a reply."""
        return sum(link.num_in_flight for link in (self._control, *self._data))

    async def control(self, *commands: Sequence[Argument], deadline: Deadline) -> list[Reply]:
        """Run small commands in one round trip; see `Connection.run`."""
        return await self._control.run(commands, deadline)

    async def data(self, *commands: Sequence[Argument], deadline: Deadline) -> list[Reply]:
        """Run commands that carry records, on the connection with the fewest calls; see `Connection.run`."""
        return await self._least_busy().run(commands, deadline)

    async def read(self, reading: Reading, *, deadline: Deadline) -> None:
        """Read a record on the connection with the fewest calls; see `Connection.read`.

        A few records are read at a time. Further reads wait within their deadline.
        """
        if not self._reads.try_begin():
            async with deadline.scope(f"waiting for other reads from Redis at {self.address} (check its load)"):
                await self._reads.begin()
        try:
            await self._least_busy().read(reading, deadline)
        finally:
            self._reads.end()
            self._read_bytes = max(min(reading.num_bytes, PART_BYTES), self._read_bytes * 7 // 8, 1)
            self._reads.limit = max(_READS_MIN, _READS_BYTES // self._read_bytes)

    def _least_busy(self) -> _Link:
        return min(self._data, key=_num_in_flight)

    async def connect(self, deadline: Deadline, io_loop: IoLoop | None) -> Connection | ConnectionOnLoop:
        """A new connection to the server's current address; connections to earlier ones are dropped.

        Args:
            io_loop: Where it moves its bytes; `None`: on the caller's loop.
        """
        address = self._where if isinstance(self._where, HostPort) else await self._where(deadline)
        connect = partial(self._access.connect, address, deadline)
        connection = await connect() if io_loop is None else await ConnectionOnLoop.open(connect, io_loop)
        if self.address != str(address):
            self.leave_all_but(address)
        return connection

    def leave_all_but(self, address: HostPort) -> None:
        """Drop connections to other addresses: the server is at `address` now."""
        self.address = str(address)
        for link in (self._control, *self._data):
            link.leave(self.address)

    async def aclose(self) -> None:
        """Drop all connections. Idempotent."""
        await asyncio.gather(*(link.aclose() for link in [self._control, *self._data]))


class _Link:
    """A connection that is reopened when it is lost."""

    def __init__(self, node: Node, io_loop: IoLoop | None = None) -> None:
        self.num_in_flight = 0
        self._node = node
        self._io_loop = io_loop
        self._connection: Connection | ConnectionOnLoop | None = None
        self._connecting = asyncio.Lock()
        self._closed = False
        self._backoff_s = 0.0
        self._refuse_until = 0.0
        self._last_error: Unavailable | None = None

    async def run(self, commands: Sequence[Sequence[Argument]], deadline: Deadline) -> list[Reply]:
        self.num_in_flight += 1
        try:
            connection = await self._living(deadline)
            replies = await connection.run(commands, deadline=deadline)
        finally:
            self.num_in_flight -= 1
        if any(isinstance(reply, ErrorReply) and reply.code == "READONLY" for reply in replies):
            connection.abort()  # the server was demoted: the next call looks for the primary again
        return replies

    async def read(self, reading: Reading, deadline: Deadline) -> None:
        self.num_in_flight += 1
        try:
            connection = await self._living(deadline)
            await connection.read(reading, deadline=deadline)
        finally:
            self.num_in_flight -= 1

    def leave(self, address: str) -> None:
        """Drop the connection unless it leads to `address`."""
        if self._connection is not None and self._connection.address != address:
            self._connection.abort()

    async def _living(self, deadline: Deadline) -> Connection | ConnectionOnLoop:
        """The connection, opened now if it is not alive."""
        if self._connection is not None and self._connection.alive and not self._connecting.locked():
            return self._connection
        async with deadline.scope(f"connecting to Redis at {self._node.address}"), self._connecting:
            if self._closed and self._node.has_left:
                raise Unavailable("the node has just left the Redis Cluster: try again", address=self._node.address)
            if self._closed:
                raise Closed("the connections to Redis are closed", address=self._node.address)
            if self._connection is not None and self._connection.alive:
                return self._connection
            loop = asyncio.get_running_loop()
            if self._last_error is not None and loop.time() < self._refuse_until:
                raise Unavailable(self._last_error.message, **self._last_error.details)
            try:
                self._connection = await self._node.connect(deadline.earlier(_CONNECT_S), self._io_loop)
            except Unavailable as error:
                self._last_error = error
                self._backoff_s = min(max(_BACKOFF_FIRST_S, 2 * self._backoff_s), _BACKOFF_MAX_S)
                self._refuse_until = loop.time() + self._backoff_s
                raise
            self._backoff_s, self._last_error = 0.0, None
            return self._connection

    async def aclose(self) -> None:
        self._closed = True
        async with self._connecting:
            if self._connection is not None:
                await self._connection.aclose()
