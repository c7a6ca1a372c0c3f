"""`make bench-quick`: codec, service, Redis and S3, each as a ratio to a ceiling of the same run. See README.md."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.ceilings import best_rate, loopback_rate, memcpy_rate, socket_pair_rate
from kvstore.api import Deadline
from kvstore.client import connect
from kvstore.codec import PLANES2, decode_into, encode, max_payload_bytes
from kvstore.format.record import Record
from kvstore.model.kinds import FullAttention
from kvstore.model.layout import GroupLayout, Layout
from kvstore.testing.prompts import Prompt
from kvstore.testing.records import make_record
from kvstore.testing.servers import ceph_rgw, redis_server
from kvstore.testing.servers.process import ServerProcess
from kvstore.tiers.base import Tier

PAGE_BYTES = 4 << 20
NUM_PAGES = 16
"""Pages of the codec rows: together larger than most caches, as pages are when an engine saves them."""
RECORD_BYTES = 2 << 20
NUM_RECORDS = 64
IN_FLIGHT = 4
RUNS = 3


@dataclass(frozen=True, slots=True)
class Figure:
    """One row: what ran, how fast, and beside which ceiling; `extra` holds what else was seen."""

    name: str
    gb_s: float
    ceiling: str
    ceiling_gb_s: float
    ratio: float
    extra: dict[str, float]


def figure(name: str, rate: float, ceiling: str, ceiling_rate: float, **extra: float) -> Figure:
    return Figure(
        name, round(rate / 1e9, 3), ceiling, round(ceiling_rate / 1e9, 3), round(rate / ceiling_rate, 3), extra
    )


def soon() -> Deadline:
    return Deadline.after(60.0)


def codec_figures() -> list[Figure]:
    """One core, one page of numbers as attention keys have them."""
    numbers = np.random.default_rng(5).standard_normal(PAGE_BYTES // 2).astype(np.float32)
    page = (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()  # the upper half of a float32 is a bfloat16
    target = bytearray(max_payload_bytes(len(page)))
    encoded = encode(PLANES2, page, target)
    payload = bytes(target[: encoded.payload_bytes])
    back = bytearray(len(page))
    decode_into(encoded.chain, payload, back)
    if back != page:
        raise RuntimeError("a page does not decode to itself")
    shrunk = round(len(payload) / len(page), 3)
    pages = [bytearray(page) for _ in range(NUM_PAGES)]
    targets = [bytearray(len(target)) for _ in range(NUM_PAGES)]
    payloads = [bytearray(payload) for _ in range(NUM_PAGES)]

    def encode_all() -> None:
        for source, into in zip(pages, targets, strict=True):
            encode(PLANES2, source, into)

    def decode_all() -> None:
        for source, into in zip(payloads, pages, strict=True):
            decode_into(encoded.chain, source, into)

    ceiling = memcpy_rate(NUM_PAGES * PAGE_BYTES)
    encoding = best_rate(encode_all, NUM_PAGES * PAGE_BYTES)
    decoding = best_rate(decode_all, NUM_PAGES * PAGE_BYTES)
    return [
        figure("encode", encoding, "memcpy", ceiling, stored_share=shrunk),
        figure("decode", decoding, "memcpy", ceiling, stored_share=shrunk),
    ]


async def timed(calls: Sequence[Callable[[], Awaitable[Any]]]) -> float:
    """Seconds for all calls, some of them in flight at a time."""
    room = asyncio.Semaphore(IN_FLIGHT)

    async def one(call: Callable[[], Awaitable[Any]]) -> None:
        async with room:
            await call()

    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for call in calls:
            group.create_task(one(call))
    return time.perf_counter() - started_s


async def service_rates(url: str) -> tuple[float, float]:
    """Bytes per second of saves into the service's memory, and of loads out of it."""
    layout = Layout(64, (GroupLayout(FullAttention(), 2),))
    saving, loading = [], []
    store = connect(url)
    try:
        await store.wait_ready(deadline=soon())
        for run in range(RUNS + 1):
            prompt = Prompt(layout, f"run {run}", NUM_RECORDS // 2 * 64, step_tokens=64, payload_bytes=RECORD_BYTES)
            await store.open_namespace(prompt.description, deadline=soon())
            records = prompt.records()
            saving.append(
                await timed([lambda record=record: store.save(record, deadline=soon()) for record in records])
            )
            staged = await store.stage(prompt.query(), deadline=soon())
            if len(staged.keys) != NUM_RECORDS or staged.lease is None:
                raise RuntimeError(f"of {NUM_RECORDS} saved records {len(staged.keys)} can be loaded")
            lease = staged.lease
            loads = [lambda key=key, lease=lease: store.load(lease, key, deadline=soon()) for key in staged.keys]
            loading.append(await timed(loads))
            await store.release(lease)
    finally:
        await store.aclose()
    num_bytes = NUM_RECORDS * RECORD_BYTES
    return num_bytes / median(saving[1:]), num_bytes / median(loading[1:])


def service_figures() -> list[Figure]:
    """A client and `kvstore serve`, with its memory tier alone."""
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        path = Path(folder) / "kvstore.sock"
        command = [sys.executable, "-m", "kvstore.cli", "serve", "--listen", f"unix:{path}"]
        command += ["--cold", "memory:", "--memory-bytes", "1GiB"]
        env = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        service = ServerProcess(command, Path(folder) / "service.log", env)
        try:
            service.start()
            service.wait_ready(lambda: _accepts(path), 20.0)
            put, get = uvloop.run(service_rates(f"unix:{path}"))
        finally:
            service.stop()
    ceiling = socket_pair_rate(NUM_RECORDS * RECORD_BYTES)
    return [
        figure("service put", put, "raw unix socket", ceiling),
        figure("service get", get, "raw unix socket", ceiling),
    ]


def _accepts(path: Path) -> bool:
    with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(path))
        return True
    return False


async def get_rate(tier: Tier, records: Sequence[Record]) -> float:
    """Bytes per second of verified reads from a tier that holds the records."""
    try:
        for record in records:
            await tier.put(record, deadline=soon())
        seconds = [
            await timed([lambda record=record: _get(tier, record) for record in records]) for _ in range(RUNS + 1)
        ]
    finally:
        await tier.aclose()
    return len(records) * RECORD_BYTES / median(seconds[1:])


async def _get(tier: Tier, record: Record) -> None:
    if await tier.get(record.header.key, deadline=soon()) is None:
        raise RuntimeError("a record that was put is not there")


def tier_figures() -> list[Figure]:
    """Redis and S3 as the service reads them."""
    records = [make_record(number, RECORD_BYTES) for number in range(NUM_RECORDS)]
    ceiling = loopback_rate(NUM_RECORDS * RECORD_BYTES)
    with redis_server() as redis:
        from_redis = uvloop.run(_redis_rate(redis.url, records))
    with ceph_rgw() as rgw:
        rgw.create_bucket("bench")
        os.environ |= {"AWS_ACCESS_KEY_ID": rgw.access_key, "AWS_SECRET_ACCESS_KEY": rgw.secret_key}
        from_s3 = uvloop.run(_s3_rate(rgw.endpoint_url, rgw.region, records))
    return [
        figure("redis get", from_redis, "raw tcp", ceiling),
        figure("s3 get", from_s3, "raw tcp", ceiling),
    ]


async def _redis_rate(url: str, records: Sequence[Record]) -> float:
    from kvstore.tiers.redis import RedisTier

    return await get_rate(RedisTier.from_url(url), records)


async def _s3_rate(endpoint_url: str, region: str, records: Sequence[Record]) -> float:
    from kvstore.tiers.s3 import S3Tier

    return await get_rate(await S3Tier.open("bench", "pages", endpoint_url=endpoint_url, region=region), records)


def main() -> int:
    console = Console(stderr=True)
    figures: list[Figure] = []
    for what, measure in (("codec", codec_figures), ("service", service_figures), ("Redis and S3", tier_figures)):
        with console.status(f"measuring {what}"):
            figures += measure()
    table = Table(title="GB/s, and the share of what this machine can do")
    for name in ("what", "GB/s", "ceiling", "GB/s", "ratio"):
        table.add_column(name, justify="right" if name in ("GB/s", "ratio") else "left")
    for row in figures:
        table.add_row(row.name, f"{row.gb_s:.2f}", row.ceiling, f"{row.ceiling_gb_s:.2f}", f"{row.ratio:.2f}")
    console.print(table)
    print("BENCH " + json.dumps([asdict(row) for row in figures]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
