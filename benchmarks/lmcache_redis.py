"""The Redis client of LMCache, the peer, where that is installed beside us: its C++ threads without its Python."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from benchmarks.measure import windowed
from benchmarks.pages import Batch
from benchmarks.stores import Store
from kvstore.format.names import format_name
from kvstore.format.record import Record

__all__ = ["LMCacheRedis", "open_lmcache"]


def open_lmcache(port: int, num_connections: int) -> LMCacheRedis | None:
    """The peer's client of a Redis on this machine, on a running event loop; `None`: it is not installed."""
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    try:
        from lmcache.lmcache_redis import LMCacheRedisClient
    except ImportError:
        return None
    return LMCacheRedis(LMCacheRedisClient("127.0.0.1", port, num_connections, "", ""), num_connections)


class LMCacheRedis(Store):
    """The same records under the same names, each one value of whatever size. Nothing it got was verified by it.

    Args:
        client: With as many threads as connections, one value at a time on each.
        num_connections: Of those.
    """

    name = "lmcache"

    def __init__(self, client: Any, num_connections: int) -> None:
        self._client = client
        self._num_connections = num_connections
        self._calls: dict[int, asyncio.Future[None]] = {}
        asyncio.get_running_loop().add_reader(client.event_fd(), self._drain)

    def num_connections(self, size_bytes: int, in_flight: int) -> int:
        return min(self._num_connections, in_flight)

    async def put(self, record: Record) -> None:
        value = bytearray(record.data)  # its threads read it, and nothing but this keeps it until they have
        await self._call(self._client.submit_batch_set([format_name(record.key)], [memoryview(value)]))
        del value

    async def get_all(self, batch: Batch, targets: Sequence[memoryview], in_flight: int) -> list[memoryview]:
        def get(record: Record, target: memoryview) -> Callable[[], Awaitable[None]]:
            async def call() -> None:
                await self._call(self._client.submit_batch_get([format_name(record.key)], [target]))

            return call

        await windowed(map(get, batch.records, targets), in_flight)
        return list(targets)

    async def forget(self, batch: Batch) -> None:
        await self._call(self._client.submit_batch_delete([format_name(record.key) for record in batch.records]))

    async def aclose(self) -> None:
        """Close its connections. Idempotent."""
        asyncio.get_running_loop().remove_reader(self._client.event_fd())
        self._client.close()

    def _call(self, number: int) -> asyncio.Future[None]:
        """Ends when the client says so. Its answer is read by this thread, so none is early."""
        self._calls[number] = done = asyncio.get_running_loop().create_future()
        return done

    def _drain(self) -> None:
        for number, is_done, error, each in self._client.drain_completions():
            call = self._calls.pop(number)
            if is_done and all(each or ()):
                call.set_result(None)
            else:
                call.set_exception(RuntimeError(f"lmcache failed: {error or 'a record was not there'}"))
