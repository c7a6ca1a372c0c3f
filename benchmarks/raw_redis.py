"""What a Redis gives at most: the values of our records, asked for on blocking sockets and received in place."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.pages import Batch
from benchmarks.peer import receive, tune
from benchmarks.stores import TierStore
from kvstore.format.names import format_name
from kvstore.format.record import HEADER_BYTES, Record
from kvstore.tiers.base import Tier
from kvstore.tiers.redis.reading import STRIPE_BYTES, is_striped, stripe_names, stripe_ranges
from kvstore.tiers.redis.resp import encode_command

__all__ = ["RawGets"]

_TIMEOUT_S = 20.0
_LINE_BYTES = 32
"""Asked for with the line in front of a value: what of the value comes with it is copied."""

_Job = tuple[bytes, memoryview]


class RawGets(TierStore):
    """Gets without a client: a thread for each connection sends a request, fills its target, sends the next one.

    Nothing is verified, no deadline is kept, no answer but the right one is understood: what a GET from this Redis
    costs at least.

    Args:
        tier: Puts the records that are got, and removes them.
        port: Of the same Redis, on this machine.
        num_connections_max: As the tier's.
        part_bytes: What of a value is asked for at a time, with GETRANGE; `None`: all of it, with GET.
    """

    def __init__(self, tier: Tier, port: int, num_connections_max: int, part_bytes: int | None = None) -> None:
        super().__init__(tier, num_connections_max, part_bytes or STRIPE_BYTES)
        self.name = "redis raw" if part_bytes is None else "redis raw ranged"
        self._range_bytes = part_bytes
        self._port = port
        self._connections: list[socket.socket] = []
        self._threads = ThreadPoolExecutor(thread_name_prefix="raw get")

    async def get_all(self, batch: Batch, targets: Sequence[memoryview], in_flight: int) -> list[memoryview]:
        jobs = [job for pair in zip(batch.records, targets, strict=True) for job in self._jobs(*pair)]
        num_connections = self.num_connections(len(targets[0]), in_flight)
        while len(self._connections) < num_connections:
            connection = socket.create_connection(("127.0.0.1", self._port), _TIMEOUT_S)
            tune(connection)
            self._connections.append(connection)
        loop = asyncio.get_running_loop()
        shares = [jobs[index::num_connections] for index in range(num_connections)]
        pairs = zip(self._connections, shares, strict=False)
        await asyncio.gather(*(loop.run_in_executor(self._threads, _fill_all, *pair) for pair in pairs))
        return list(targets)

    async def aclose(self) -> None:
        """Close the connections; the tier is somebody else's."""
        self._threads.shutdown()
        for connection in self._connections:
            connection.close()

    def _jobs(self, record: Record, target: memoryview) -> Iterator[_Job]:
        """A request for each value of a record, or for each part of one, and where its answer belongs."""
        header, values = record.header, [(format_name(record.key), 0, record.num_bytes)]
        if is_striped(header):
            stripes = zip(stripe_names(header), stripe_ranges(header), strict=True)
            values = [(values[0][0], 0, HEADER_BYTES), *((name, *span) for name, span in stripes)]
        for name, start, stop in values:
            if self._range_bytes is None:
                yield _request("GET", name), target[start:stop]
                continue
            for first in range(start, stop, self._range_bytes):
                end = min(first + self._range_bytes, stop)
                yield _request("GETRANGE", name, first - start, end - start - 1), target[first:end]


def _request(*arguments: str | int) -> bytes:
    return b"".join(bytes(part) for part in encode_command(*arguments))


def _fill_all(connection: socket.socket, jobs: Sequence[_Job]) -> None:
    """Ask for one value after the other.

    Raises:
        RuntimeError: Something else came.
    """
    ending = memoryview(bytearray(2))
    for request, target in jobs:
        connection.sendall(request)
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
