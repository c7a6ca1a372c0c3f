"""`python -m benchmarks.store`: Redis, the service over Redis, and S3, each beside raw sockets. See README.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import uvloop
from rich.console import Console

from benchmarks.arguments import count, counts, names_of, sizes
from benchmarks.ceilings import tcp_peer
from benchmarks.measure import Listener, Plan, Row
from benchmarks.node import Node, temporary_folder
from benchmarks.pages import VALUE_OVERHEAD_BYTES, benchmark_namespace
from benchmarks.report import as_line, as_table
from benchmarks.sections import open_s3_tier
from benchmarks.shell import run_benchmark
from benchmarks.stores import RedisPy, ServiceOverTier, TierStore, fill, store_rows
from kvstore.client import ClientOptions, connect
from kvstore.errors import KVStoreError
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.sizes import parse_bytes
from kvstore.testing.servers import CannotInstall, ceph_rgw, redis_server
from kvstore.testing.servers.process import ServerFailed

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
"""Of raw gets in parts: as many parts as the tier has under way."""
_START_S = 20.0
_STALL_MS = 20_000
"""A gigabyte asked of Redis at once may stand still for longer than an engine should wait; a rate is measured here."""
_REDISPY_S = 120.0
"""Its own default is too short for 16 values of 64 MiB at a time."""


@dataclass(frozen=True, slots=True)
class _Results:
    """Rows of all sections, and what went wrong in those that have none."""

    rows: list[Row]
    failures: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; returns the exit status: 0, 1 where a section failed, 130 when interrupted."""
    chosen = _parser().parse_args(arguments)
    plan = Plan(chosen.sizes, chosen.in_flight, chosen.total_bytes, chosen.repetitions, chosen.verbs)

    def measure(say: Callable[[str], None]) -> _Results:
        results = _Results([], [])
        for name in chosen.only:
            try:
                results.rows.extend(map(_as_named, SECTIONS[name](plan, _Listener(say))))
            except (CannotInstall, ServerFailed, KVStoreError, OSError, RuntimeError) as error:
                results.failures.append(f"{name}: {error}")
        return results

    def report(results: _Results, console: Console | None) -> tuple[str, list[str]]:
        if console is not None:
            console.print(as_table(results.rows))
        return as_line(results.rows), results.failures

    return run_benchmark(measure, report, quiet=chosen.json)


def _redis(plan: Plan, listener: Listener) -> list[Row]:
    """Our tier in turn with raw gets from the same Redis, and the peer's where that is installed; then redis-py."""
    listener.preparing("redis: starting it")
    with temporary_folder() as folder, tcp_peer(folder) as peer, redis_server() as server:

        async def run() -> list[Row]:
            from redis.asyncio import Redis
            from redis.exceptions import RedisError

            from benchmarks.lmcache_redis import open_lmcache
            from benchmarks.raw_redis import RawGets
            from kvstore.tiers.redis import RedisTier
            from kvstore.tiers.redis.reading import PART_BYTES

            tier = RedisTier(server.url, num_connections=_NUM_CONNECTIONS)
            raws = [
                RawGets(tier, server.port, _NUM_CONNECTIONS),
                RawGets(tier, server.port, _NUM_RANGED_CONNECTIONS, PART_BYTES),
            ]
            store = TierStore(tier, _NUM_CONNECTIONS)
            lmcache = open_lmcache(server.port, _NUM_CONNECTIONS)
            peers = [] if lmcache is None else [lmcache]
            try:
                rows = _beside_raw(await store_rows(store, peer, plan, listener, [*raws, *peers]))
            finally:
                for closing in (*raws, *peers, store):
                    await closing.aclose()
            try:
                async with Redis.from_url(server.url, socket_timeout=_REDISPY_S) as other:
                    return rows + await store_rows(RedisPy(other), peer, plan, listener)
            except RedisError as error:
                raise RuntimeError(f"redis-py failed: {error}") from error

        return uvloop.run(run())


def _beside_raw(rows: Sequence[Row]) -> list[Row]:
    """The rows, with the faster raw get of the same turns in those of our gets."""
    most: dict[tuple[int, int], float] = {}
    for row in rows:
        if row.what.startswith("redis raw"):
            case = (row.size_bytes, row.in_flight)
            most[case] = max(most.get(case, 0.0), row.gb_s)
    return [
        replace(row, raw_get_gb_s=most[row.size_bytes, row.in_flight]) if row.what == "redis get" else row
        for row in rows
    ]


def _service(plan: Plan, listener: Listener) -> list[Row]:
    """A service between a client and Redis; another one puts there what it gets."""
    listener.preparing("service: starting it, another one and a Redis")
    memory_bytes = 2 * max(plan.total_bytes, max(plan.sizes) * max(plan.in_flights))
    with (
        temporary_folder() as folder,
        tcp_peer(folder) as peer,
        redis_server() as server,
        Node(folder, "service", hot=server.url, memory_bytes=memory_bytes, stall_timeout_ms=_STALL_MS) as node,
        Node(folder, "writer", hot=server.url, memory_bytes=_WRITER_BYTES) as other,
    ):

        async def run() -> list[Row]:
            patient = ClientOptions(stall_timeout_s=_STALL_MS / 1000)
            tier, client, writer = _redis_tier(server.url), connect(node.url, options=patient), connect(other.url)
            try:
                for store in (client, writer):
                    await store.wait_ready(deadline=Deadline.after(_START_S))
                    await store.open_namespace(benchmark_namespace(), deadline=Deadline.after(_START_S))
                service = ServiceOverTier(client, node, writer, tier)
                listener.preparing("service: filling its memory")  # a cache is full all its life but the first minutes
                await fill(service, _MIB, memory_bytes)
                return await store_rows(service, peer, plan, listener)
            finally:
                await client.aclose()
                await writer.aclose()
                await tier.aclose()

        return uvloop.run(run())


def _redis_tier(url: str) -> TierStore:
    from kvstore.tiers.redis import RedisTier

    tier = RedisTier(url, num_connections=_NUM_CONNECTIONS)
    return TierStore(tier, _NUM_CONNECTIONS)


def _s3(plan: Plan, listener: Listener) -> list[Row]:
    """Our tier on a real gateway, the slowest by far: fewer sizes."""
    listener.preparing("s3: starting a Ceph gateway")
    plan = replace(
        plan,
        sizes=tuple(size for size in plan.sizes if size in _S3_SIZES) or plan.sizes[-1:],
        in_flights=tuple(calls for calls in plan.in_flights if calls in _S3_IN_FLIGHTS) or plan.in_flights[-1:],
        total_bytes=min(plan.total_bytes, _S3_TOTAL_BYTES),
    )
    with temporary_folder() as folder, tcp_peer(folder) as peer, ceph_rgw() as server:

        async def run() -> list[Row]:
            tier = await open_s3_tier(server)
            try:
                return await store_rows(TierStore(tier, max(plan.in_flights)), peer, plan, listener)
            finally:
                await tier.aclose()

        return uvloop.run(run())


SECTIONS: dict[str, Callable[[Plan, Listener], list[Row]]] = {"redis": _redis, "service": _service, "s3": _s3}
"""What measures a section's rows."""


class _Listener:
    """A `Listener` of lines."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.preparing = say
        self.measuring = say


def _as_named(row: Row) -> Row:
    """The row under the name that programs look for, and its records' nominal size: they are 64 bytes shorter."""
    what = row.what.replace("redis-py", "redispy").replace(" ", "_")
    return replace(row, what=what, size_bytes=row.size_bytes + VALUE_OVERHEAD_BYTES)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.store",
        description="Measure the byte paths to Redis and S3, each figure beside raw sockets of the same minute.",
    )
    parser.add_argument(
        "--only", type=names_of(SECTIONS), default=tuple(SECTIONS), metavar="NAMES", help=f"of {','.join(SECTIONS)}"
    )
    parser.add_argument("--json", action="store_true", help="print the BENCH line alone")
    parser.add_argument("--sizes", type=sizes, default=_SIZES, metavar="BYTES", help="of records, like 1MiB,4MiB")
    parser.add_argument("--in-flight", type=counts, default=_IN_FLIGHTS, metavar="COUNTS", help="calls at a time")
    parser.add_argument(
        "--verbs", type=names_of(("put", "get")), default=("put", "get"), metavar="NAMES", help="put, get or both"
    )
    parser.add_argument("--total-bytes", type=parse_bytes, default=128 * _MIB, metavar="BYTES", help="moved in a turn")
    parser.add_argument("--repetitions", type=count, default=3, metavar="COUNT", help="turns of each row")
    return parser


if __name__ == "__main__":
    sys.exit(main())
