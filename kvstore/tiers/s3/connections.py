"""A pool of connections to one S3 endpoint."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.tiers.s3.http import HttpConnection

__all__ = ["Connections"]

_CONNECT_S = 3.0
_IDLE_S = 15.0
"""Servers close connections that were idle for 20 s or more; a request sent at that moment fails."""


class Connections:
    """As many connections as there are concurrent requests; the most recently used one is used first.

    Args:
        endpoint: `http://host:port` or `https://host`.
        tls: How to check an `https` endpoint.
        num_idle_max: Idle connections to keep; further ones are closed after use.
        clock: For the time that connections were idle.
    """

    def __init__(self, endpoint: str, tls: ssl.SSLContext, *, num_idle_max: int, clock: Clock = SYSTEM_CLOCK) -> None:
        parts = urlsplit(endpoint)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = tls if parts.scheme == "https" else None
        self._num_idle_max = num_idle_max
        self._clock = clock
        self._idle: list[tuple[HttpConnection, float]] = []

    @asynccontextmanager
    async def one(self) -> AsyncIterator[tuple[HttpConnection, bool]]:
        """A connection for one request, and whether it was used before.

        Raises:
            OSError: No connection could be opened within 3 s.

        If cancelled during the request, the connection is dropped.
        """
        connection = self._take()
        is_used = connection is not None
        if connection is None:
            connection = await self._connect()
        try:
            yield connection, is_used
        finally:
            if connection.reusable and len(self._idle) < self._num_idle_max:
                self._idle.append((connection, self._clock.monotonic_s()))
            else:
                connection.abort()

    def _take(self) -> HttpConnection | None:
        while self._idle:
            connection, since_s = self._idle.pop()
            if connection.reusable and self._clock.monotonic_s() - since_s < _IDLE_S:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> HttpConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, connection = await loop.create_connection(HttpConnection, self._host, self._port, ssl=self._tls)
        except TimeoutError as error:
            raise ConnectionError("no answer to a connection attempt") from error
        return connection

    async def aclose(self) -> None:
        """Drop idle connections and wait until they are gone. Idempotent."""
        idle, self._idle = self._idle, []
        await asyncio.gather(*(connection.aclose() for connection, _ in idle))
