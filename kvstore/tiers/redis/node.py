"""The connections to one Redis server: control apart from data, made again when lost, errors with the next step."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from kvstore.errors import Closed, Unavailable
from kvstore.runtime.deadline import Deadline
from kvstore.tiers.redis.connection import Connection, Sink
from kvstore.tiers.redis.resp import Argument, ErrorReply, Reply
from kvstore.tiers.redis.url import RedisUrl

__all__ = ["Node", "check_replies", "check_reply"]

_CONNECT_S = 2.0
_BACKOFF_FIRST_S = 0.05
_BACKOFF_MAX_S = 2.0

_NEXT_STEP = {
    "NOAUTH": "put user and password into the url",
    "WRONGPASS": "check user and password in the url",
    "NOPERM": "give the user the commands and keys that it lacks (ACL SETUSER)",
    "LOADING": "wait until it has read its data set",
    "READONLY": "name the primary, not a replica",
    "MISCONF": "make room for its snapshots or switch them off",
    "MOVED": "this is a Redis Cluster: name a standalone server",
    "CLUSTERDOWN": "bring the cluster's missing nodes back",
    "MASTERDOWN": "bring its primary back",
}


class Node:
    """One server.

    Small commands use a connection of their own, so that a lookup never queues behind pages. A lost connection is made
    again by the next call; after a failure calls are refused at once for a time that grows from 0.05 to 2 s.

    Args:
        url: Where, and how to log in.
        num_data_connections: Connections that pages travel on.
    """

    def __init__(self, url: RedisUrl, num_data_connections: int) -> None:
        self._url = url
        self._control = _Link(url)
        self._data = [_Link(url) for _ in range(num_data_connections)]

    @property
    def address(self) -> str:
        return self._url.address

    async def control(self, *commands: Sequence[Argument], deadline: Deadline) -> list[Reply]:
        """Run small commands in one round trip; see `Connection.run`."""
        connection = await self._control.connection(deadline)
        return await connection.run(commands, deadline=deadline)

    async def data(self, *commands: Sequence[Argument], deadline: Deadline, sink: Sink | None = None) -> list[Reply]:
        """Run commands that carry pages, on the connection with the least in flight; see `Connection.run`."""
        link = min(self._data, key=lambda link: link.num_in_flight)
        link.num_in_flight += 1
        try:
            connection = await link.connection(deadline)
            return await connection.run(commands, deadline=deadline, sink=sink)
        finally:
            link.num_in_flight -= 1

    async def aclose(self) -> None:
        """Drop all connections. Idempotent."""
        await asyncio.gather(*(link.aclose() for link in [self._control, *self._data]))


class _Link:
    """A connection that is made again when it is lost."""

    def __init__(self, url: RedisUrl) -> None:
        self.num_in_flight = 0
        self._url = url
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()
        self._closed = False
        self._backoff_s = 0.0
        self._refuse_until = 0.0
        self._last_error: Unavailable | None = None

    async def connection(self, deadline: Deadline) -> Connection:
        """The living connection, made now if there is none."""
        if self._connection is not None and self._connection.alive and not self._connecting.locked():
            return self._connection
        async with deadline.scope(f"connecting to Redis at {self._url.address}"), self._connecting:
            if self._closed:
                raise Closed("the connections to Redis are closed", address=self._url.address)
            if self._connection is not None and self._connection.alive:
                return self._connection
            loop = asyncio.get_running_loop()
            if self._last_error is not None and loop.time() < self._refuse_until:
                raise Unavailable(self._last_error.message, **self._last_error.details)
            try:
                self._connection = await self._connect(deadline.earlier(_CONNECT_S))
            except Unavailable as error:
                self._last_error = error
                self._backoff_s = min(max(_BACKOFF_FIRST_S, 2 * self._backoff_s), _BACKOFF_MAX_S)
                self._refuse_until = loop.time() + self._backoff_s
                raise
            self._backoff_s, self._last_error = 0.0, None
            return self._connection

    async def _connect(self, deadline: Deadline) -> Connection:
        url = self._url
        try:
            async with asyncio.timeout(deadline.remaining_s):
                transport, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(url.address), url.host, url.port
                )
        except TimeoutError as error:
            raise Unavailable(
                "Redis does not answer a connection attempt: check that it is not frozen and that no firewall drops us",
                address=url.address,
            ) from error
        except OSError as error:
            raise Unavailable(
                "cannot connect to Redis: check that a server runs there and that the url names it",
                address=url.address,
                error=error.strerror or error,
            ) from error
        try:
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            greeting: list[Sequence[Argument]] = [("PING",)]
            if url.database:
                greeting.insert(0, ("SELECT", url.database))
            if url.password is not None:
                login = (url.username, url.password) if url.username is not None else (url.password,)
                greeting.insert(0, ("AUTH", *login))
            check_replies(await connection.run(greeting, deadline=deadline), url.address)
        except BaseException:
            connection.abort()
            raise
        return connection

    async def aclose(self) -> None:
        self._closed = True
        async with self._connecting:
            if self._connection is not None:
                await self._connection.aclose()


def check_replies(replies: Sequence[Reply], address: str) -> None:
    """Raise `Unavailable` for the first error among replies."""
    for reply in replies:
        check_reply(reply, address)


def check_reply(reply: Reply, address: str) -> None:
    """Raise `Unavailable` with the next step when a reply is an error."""
    if isinstance(reply, ErrorReply):
        next_step = _NEXT_STEP.get(reply.code, "see its message")
        raise Unavailable(f"Redis refused a command: {next_step}", address=address, seen=reply.message[:200])
