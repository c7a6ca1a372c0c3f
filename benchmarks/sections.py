"""The sections that need servers: each starts what it needs, measures, and ends all of it however it ends."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from benchmarks.ceilings import Peer, tcp_peer, unix_peer
from benchmarks.measure import Listener, Plan, Row
from benchmarks.pages import benchmark_namespace
from benchmarks.stores import RedisPy, Service, TierStore, fill, store_rows
from kvstore.client import connect
from kvstore.runtime.deadline import Deadline
from kvstore.testing.servers import CephRgw, RedisServer, ceph_rgw, redis_server
from kvstore.testing.servers.process import ServerProcess

if TYPE_CHECKING:
    from kvstore.tiers.s3 import S3Tier

__all__ = ["num_redis_rows", "num_s3_rows", "num_service_rows", "open_s3_tier", "redis_rows", "s3_rows", "service_rows"]

_ROOT = Path(__file__).resolve().parent.parent
_BUCKET = "kvstore-benchmark"
_MEMORY_BYTES_MIN = 512 << 20
_START_S = 20.0


def num_service_rows(plan: Plan) -> int:
    return 2 * len(plan.sizes) * len(plan.in_flights)


def service_rows(plan: Plan, listener: Listener) -> list[Row]:
    """A client and `kvstore serve` over a Unix socket."""
    listener.preparing("service: starting it")
    memory_bytes = max(_MEMORY_BYTES_MIN, 4 * plan.total_bytes)
    with _folder() as folder, unix_peer(folder) as peer, _service(folder, memory_bytes) as url:
        return uvloop.run(_service_rows(url, peer, memory_bytes, plan, listener))


async def _service_rows(url: str, peer: Peer, memory_bytes: int, plan: Plan, listener: Listener) -> list[Row]:
    store = connect(url)
    try:
        await store.wait_ready(deadline=Deadline.after(_START_S))
        await store.open_namespace(benchmark_namespace(), deadline=Deadline.after(_START_S))
        service = Service(store)
        listener.preparing("service: filling its memory")  # a cache is full all its life but the first minutes
        await fill(service, max(plan.sizes), memory_bytes)
        return await store_rows(service, peer, plan, listener)
    finally:
        await store.aclose()


def num_redis_rows(plan: Plan) -> int:
    return 4 * len(plan.sizes) * len(plan.in_flights)


def redis_rows(plan: Plan, listener: Listener) -> list[Row]:
    """Our tier, and redis-py beside it, on a real Redis."""
    listener.preparing("redis: starting it")
    with _folder() as folder, tcp_peer(folder) as peer, redis_server() as server:
        return uvloop.run(_redis_rows(server, peer, plan, listener))


async def _redis_rows(server: RedisServer, peer: Peer, plan: Plan, listener: Listener) -> list[Row]:
    from redis.asyncio import Redis

    from kvstore.tiers.redis import RedisTier

    tier = RedisTier(server.url)
    try:
        rows = await store_rows(TierStore(tier), peer, plan, listener)
    finally:
        await tier.aclose()
    async with Redis.from_url(server.url) as client:
        return rows + await store_rows(RedisPy(client), peer, plan, listener)


def num_s3_rows(plan: Plan) -> int:
    return 2


def s3_rows(plan: Plan, listener: Listener) -> list[Row]:
    """Our tier on a real Ceph RGW; the largest records and the most in flight only, it is the slowest by far."""
    listener.preparing("s3: starting a Ceph gateway")
    plan = replace(plan, sizes=(max(plan.sizes),), in_flights=(max(plan.in_flights),))
    with _folder() as folder, tcp_peer(folder) as peer, ceph_rgw() as server:
        return uvloop.run(_s3_rows(server, peer, plan, listener))


async def _s3_rows(server: CephRgw, peer: Peer, plan: Plan, listener: Listener) -> list[Row]:
    tier = await open_s3_tier(server)
    try:
        return await store_rows(TierStore(tier), peer, plan, listener)
    finally:
        await tier.aclose()


async def open_s3_tier(server: CephRgw) -> S3Tier:
    """Our tier in a bucket of its own, which is made."""
    from kvstore.tiers.s3 import S3Tier

    server.create_bucket(_BUCKET)
    return await S3Tier.open(server.location(_BUCKET, "benchmark"), credentials=server.credentials)


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def _service(folder: Path, memory_bytes: int) -> Iterator[str]:
    """`kvstore serve` with its memory tier alone; ends with the block."""
    path = folder / "kvstore.sock"
    command = [sys.executable, "-m", "kvstore.cli", "serve", "--listen", f"unix:{path}"]
    command += ["--memory-bytes", str(memory_bytes), "--hot", "memory:", "--cold", "memory:"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    env |= {"PYTHONPATH": str(_ROOT), "XDG_CACHE_HOME": str(folder)}
    process = ServerProcess(command, folder / "service.log", env)

    def answers() -> bool:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(path))
            return True
        return False

    try:
        process.start()
        process.wait_ready(answers, _START_S)
        yield f"unix:{path}"
    finally:
        process.stop()
