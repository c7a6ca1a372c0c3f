"""Clients to compare our Redis tier with: raw commands on blocking sockets, and the client of LMCache."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.measure import windowed
from benchmarks.pages import Batch
from benchmarks.peer import receive, tune
from benchmarks.stores import Store, TierStore
from kvstore.format.header_v1 import HEADER_BYTES
from kvstore.format.names import format_name
from kvstore.format.record import Record
from kvstore.tiers.base import Tier
from kvstore.tiers.redis.reading import STRIPE_BYTES, is_striped, stripe_names, stripe_ranges
from kvstore.tiers.redis.resp import encode_command, joined

__all__ = ["LMCacheRedis", "RawRedis", "open_lmcache"]

_TIMEOUT_S = 20.0
_LINE_BYTES = 32
"""Read with the line in front of a value. Bytes of the value that come with it are copied."""

_Job = tuple[Sequence[bytes | memoryview], memoryview]
"""A request, and where its answer belongs: nowhere for a put."""


class RawRedis(TierStore):
    """Puts and gets without a client: a thread for each connection sends a request, takes the answer, sends the next.

    It verifies nothing, keeps no deadline and understands only the right answer: the least that a SET of a new name or
    a GET costs at this Redis.

    Args:
        tier: Puts the records that are got, and removes them.
        port: Of the same Redis, on this machine.
        num_connections_max: As the tier's.
        part_bytes: Bytes of a value that are read at a time, with GETRANGE; `None`: all of it, with GET.
    """

    def __init__(self, tier: Tier, port: int, num_connections_max: int, part_bytes: int | None = None) -> None:
        super().__init__(tier, num_connections_max, part_bytes or STRIPE_BYTES)
        self.name = "redis raw" if part_bytes is None else "redis raw ranged"
        self.verbs = ("put", "get") if part_bytes is None else ("get",)
        self._range_bytes = part_bytes
        self._port = port
        self._connections: list[socket.socket] = []
        self._threads = ThreadPoolExecutor(thread_name_prefix="raw Redis")

    async def put_all(self, batch: Batch, in_flight: int) -> None:
        jobs = [job for record in batch.records for job in _puts(record)]
        await self._run(_put_in_turn, jobs, self.num_connections(batch.records[0].num_bytes, in_flight))

    async def get_all(self, batch: Batch, targets: Sequence[memoryview], in_flight: int) -> list[memoryview]:
        jobs = [job for pair in zip(batch.records, targets, strict=True) for job in self._gets(*pair)]
        await self._run(_get_in_turn, jobs, self.num_connections(len(targets[0]), in_flight))
        return list(targets)

    async def _run(
        self, work: Callable[[socket.socket, Sequence[_Job]], None], jobs: Sequence[_Job], num_connections: int
    ) -> None:
        while len(self._connections) < num_connections:
            connection = socket.create_connection(("127.0.0.1", self._port), _TIMEOUT_S)
            tune(connection)
            self._connections.append(connection)
        loop = asyncio.get_running_loop()
        shares = [jobs[index::num_connections] for index in range(num_connections)]
        pairs = zip(self._connections, shares, strict=False)
        await asyncio.gather(*(loop.run_in_executor(self._threads, work, *pair) for pair in pairs))

    async def aclose(self) -> None:
        """Close the connections. The tier belongs to the caller."""
        self._threads.shutdown()
        for connection in self._connections:
            connection.close()

    def _gets(self, record: Record, target: memoryview) -> Iterator[_Job]:
        """A request for each value of a record, or for each part of one, and the target of its answer."""
        for name, start, stop in _values(record):
            if self._range_bytes is None:
                yield encode_command("GET", name), target[start:stop]
                continue
            for first in range(start, stop, self._range_bytes):
                end = min(first + self._range_bytes, stop)
                yield encode_command("GETRANGE", name, first - start, end - start - 1), target[first:end]


def _values(record: Record) -> Iterator[tuple[str, int, int]]:
    """The values that our tier makes of a record: the name of each, and its first and last byte in the record."""
    header, name = record.header, format_name(record.key)
    if not is_striped(header):
        yield name, 0, record.num_bytes
        return
    for stripe, span in zip(stripe_names(header), stripe_ranges(header), strict=True):
        yield stripe, *span
    yield name, 0, HEADER_BYTES


def _puts(record: Record) -> Iterator[_Job]:
    for name, start, stop in _values(record):
        yield encode_command("SET", name, record.data[start:stop]), memoryview(b"")


def _put_in_turn(connection: socket.socket, jobs: Sequence[_Job]) -> None:
    """Set one value after the other.

    Raises:
        RuntimeError: Redis gave another answer.
    """
    for request, _ in jobs:
        for part in joined([request]):
            connection.sendall(part)
        answer = connection.recv(_LINE_BYTES)
        if answer != b"+OK\r\n":
            raise RuntimeError(f"Redis answered a raw SET with {answer!r}")


def _get_in_turn(connection: socket.socket, jobs: Sequence[_Job]) -> None:
    """Get one value after the other; errors as `_put_in_turn`."""
    ending = memoryview(bytearray(2))
    for request, target in jobs:
        connection.sendall(b"".join(request))
        begun = b""
        while b"\r\n" not in begun:
            if not (more := connection.recv(_LINE_BYTES)):
                raise RuntimeError("Redis ended a connection")
            begun += more
        line, _, body = begun.partition(b"\r\n")
        if line != b"$%d" % len(target) or len(body) > len(target):
            raise RuntimeError(f"Redis answered a raw request with {line!r} for {len(target)} bytes")
        target[: len(body)] = body
        receive(connection, target[len(body) :])
        receive(connection, ending)


def open_lmcache(port: int, num_connections: int) -> LMCacheRedis | None:
    """LMCache's client of a Redis on this machine, on a running event loop; `None`: it is not installed."""
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    try:
        from lmcache.lmcache_redis import LMCacheRedisClient
    except ImportError:
        return None
    return LMCacheRedis(LMCacheRedisClient("127.0.0.1", port, num_connections, "", ""), num_connections)


class LMCacheRedis(Store):
    """The client of LMCache: C++ threads without its Python. Each record is one value of any size; it verifies nothing.

    Args:
        client: With as many threads as connections, one value at a time on each.
        num_connections: Of those.
    """

    name = "lmcache"
    verbs = ("get",)  # of a put it needs a copy that only this benchmark makes

    def __init__(self, client: Any, num_connections: int) -> None:
        self._client = client
        self._num_connections = num_connections
        self._calls: dict[int, asyncio.Future[None]] = {}
        asyncio.get_running_loop().add_reader(client.event_fd(), self._drain)

    def num_connections(self, size_bytes: int, in_flight: int) -> int:
        return min(self._num_connections, in_flight)

    async def put(self, record: Record) -> None:
        value = bytearray(record.data)  # its threads read it, and this reference alone keeps it until they have
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
        """Ends when the client reports it. This thread reads the reports, so none comes before the future exists."""
        self._calls[number] = done = asyncio.get_running_loop().create_future()
        return done

    def _drain(self) -> None:
        for number, is_done, error, each in self._client.drain_completions():
            call = self._calls.pop(number)
            if is_done and all(each or ()):
                call.set_result(None)
            else:
                call.set_exception(RuntimeError(f"lmcache failed: {error or 'a record was not there'}"))
