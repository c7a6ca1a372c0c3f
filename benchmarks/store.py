"""`python -m benchmarks.store`: Redis, the service over Redis, and S3, each beside raw sockets. See README.md."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import replace

import uvloop

from benchmarks.ceilings import tcp_peer
from benchmarks.measure import Amounts, Row
from benchmarks.node import Node, temporary_folder
from benchmarks.pages import VALUE_OVERHEAD_BYTES, benchmark_namespace
from benchmarks.program import Section, run_sections
from benchmarks.stores import SAVE_MEMORY_BYTES, RedisPy, ServiceOverTier, TierStore, fill, open_s3_tier, store_rows
from kvstore.client import ClientOptions, connect
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.io_loops import open_io_loops
from kvstore.testing.program import Say
from kvstore.testing.servers import RedisServer, ceph_rgw, redis_server

__all__ = ["main"]

_KIB, _MIB = 1 << 10, 1 << 20
_SIZES = (256 * _KIB, _MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB)
_S3_SIZES = (_MIB, 4 * _MIB, 16 * _MIB)
_IN_FLIGHTS = (1, 4, 16)
_S3_IN_FLIGHTS = (1, 4)
_S3_TOTAL_BYTES = 64 * _MIB
_WRITER_BYTES = 256 * _MIB
_NUM_CONNECTIONS = 4
"""Data connections of our Redis tier; redis-py makes as many as there are calls."""
_NUM_RANGED_CONNECTIONS = 2
"""Of raw gets in parts: the number of parts that the tier has in flight."""
_NUM_IO_THREADS = 2
_THREADED = f"redis {_NUM_IO_THREADS} threads"
_START_S = 20.0
_STALL_MS = 20_000
"""A gigabyte read from Redis at once may make no progress for longer than an engine should wait."""
_REDISPY_S = 120.0
"""Its own default is too short for 16 values of 64 MiB at a time."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; returns the exit status: 0, 1 where a section failed, 130 when interrupted."""
    return run_sections(
        "python -m benchmarks.store",
        "Measure the byte paths to Redis and S3, each figure beside raw sockets of the same minute.",
        arguments,
        sections=SECTIONS,
        defaults=Amounts(_SIZES, _IN_FLIGHTS, total_bytes=128 * _MIB, repetitions=3),
        as_named=_as_named,
    )


def _redis(amounts: Amounts, say: Say) -> list[Row]:
    """Our tier in turn with raw commands to the same Redis, redis-py, and the peer's client where it is installed."""
    say("redis: starting it")
    with temporary_folder() as folder, tcp_peer(folder) as peer, _full_redis() as server:

        async def run() -> list[Row]:
            from redis.asyncio import Redis
            from redis.exceptions import RedisError

            from benchmarks.redis_clients import RawRedis, open_lmcache
            from kvstore.tiers.redis import RedisTier
            from kvstore.tiers.redis.reading import PART_BYTES

            tier = RedisTier(server.url, num_connections=_NUM_CONNECTIONS)
            client = Redis.from_url(server.url, socket_timeout=_REDISPY_S)
            loops = AsyncExitStack()
            io_loops = await loops.enter_async_context(open_io_loops(_NUM_IO_THREADS))
            threaded = RedisTier(server.url, num_connections=_NUM_CONNECTIONS, io_loops=io_loops)
            beside = [
                TierStore(threaded, _NUM_CONNECTIONS, name=_THREADED),
                RawRedis(tier, server.port, _NUM_CONNECTIONS),
                RawRedis(tier, server.port, _NUM_RANGED_CONNECTIONS, PART_BYTES),
                RedisPy(client),
            ]
            store = TierStore(tier, _NUM_CONNECTIONS)
            lmcache = open_lmcache(server.port, _NUM_CONNECTIONS)
            peers = [] if lmcache is None else [lmcache]
            try:
                return _beside_raw(await store_rows(store, peer, amounts, say, [*beside, *peers]))
            except RedisError as error:
                raise RuntimeError(f"redis-py failed: {error}") from error
            finally:
                for closing in (*beside, *peers, store):
                    await closing.aclose()
                await client.aclose()
                await loops.aclose()

        return uvloop.run(run())


def _beside_raw(rows: Sequence[Row]) -> list[Row]:
    """The rows, with the fastest raw form of the same turns in those of our tier."""
    most: dict[tuple[str, int, int], float] = {}
    for row in rows:
        if row.what.startswith("redis raw"):
            case = (row.verb, row.size_bytes, row.in_flight)
            most[case] = max(most.get(case, 0.0), row.gb_s)
    return [
        replace(row, raw_gb_s=most[row.verb, row.size_bytes, row.in_flight])
        if row.what.rpartition(" ")[0] in ("redis", _THREADED)
        else row
        for row in rows
    ]


def _service(amounts: Amounts, say: Say) -> list[Row]:
    """A service between a client and Redis. Another one puts the records that it gets."""
    say("service: starting it, another one and a Redis")
    memory_bytes = 2 * max(amounts.total_bytes, max(amounts.sizes) * max(amounts.in_flights))
    with (
        temporary_folder() as folder,
        tcp_peer(folder) as peer,
        _full_redis() as server,
        Node(folder, "service", hot=server.url, memory_bytes=memory_bytes, stall_timeout_ms=str(_STALL_MS)) as node,
        Node(folder, "writer", hot=server.url, memory_bytes=_WRITER_BYTES) as other,
    ):

        async def run() -> list[Row]:
            patient = ClientOptions(stall_timeout_s=_STALL_MS / 1000, save_memory_bytes=SAVE_MEMORY_BYTES)
            tier, client, writer = _redis_tier(server.url), connect(node.url, options=patient), connect(other.url)
            try:
                for store in (client, writer):
                    await store.wait_ready(deadline=Deadline.after(_START_S))
                    await store.open_namespace(benchmark_namespace(), deadline=Deadline.after(_START_S))
                service = ServiceOverTier(client, node, writer, tier)
                say("service: filling its memory")  # a cache is full, except in its first minutes
                await fill(service, _MIB, memory_bytes)
                return await store_rows(service, peer, amounts, say)
            finally:
                await client.aclose()
                await writer.aclose()
                await tier.aclose()

        return uvloop.run(run())


def _full_redis() -> AbstractContextManager[RedisServer]:
    """A Redis whose memory was used before, as a full cache's. New memory, and what it gave back, costs a put more than
    all else.
    """
    return redis_server(keeps_memory=True)


def _redis_tier(url: str) -> TierStore:
    from kvstore.tiers.redis import RedisTier

    tier = RedisTier(url, num_connections=_NUM_CONNECTIONS)
    return TierStore(tier, _NUM_CONNECTIONS)


def _s3(amounts: Amounts, say: Say) -> list[Row]:
    """Our tier on a real gateway, the slowest by far: fewer sizes."""
    say("s3: starting a Ceph gateway")
    amounts = replace(
        amounts,
        sizes=tuple(size for size in amounts.sizes if size in _S3_SIZES) or amounts.sizes[-1:],
        in_flights=tuple(calls for calls in amounts.in_flights if calls in _S3_IN_FLIGHTS) or amounts.in_flights[-1:],
        total_bytes=min(amounts.total_bytes, _S3_TOTAL_BYTES),
    )
    with temporary_folder() as folder, tcp_peer(folder) as peer, ceph_rgw() as server:

        async def run() -> list[Row]:
            tier = await open_s3_tier(server)
            try:
                return await store_rows(TierStore(tier, max(amounts.in_flights)), peer, amounts, say)
            finally:
                await tier.aclose()

        return uvloop.run(run())


SECTIONS: dict[str, Section] = {"redis": _redis, "service": _service, "s3": _s3}


def _as_named(row: Row) -> Row:
    """The row under the name that programs search for, with its records' nominal size (they are 64 bytes shorter)."""
    what = row.what.replace("redis-py", "redispy").replace(" ", "_")
    return replace(row, what=what, size_bytes=row.size_bytes + VALUE_OVERHEAD_BYTES)


if __name__ == "__main__":
    sys.exit(main())
