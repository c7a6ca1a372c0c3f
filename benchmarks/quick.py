"""`python -m benchmarks.quick`: codec, service, loads, Redis and S3, each beside a ceiling. See README.md."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import uvloop

from benchmarks.ceilings import memcpy, tcp_peer, unix_peer
from benchmarks.loads import load_rows
from benchmarks.measure import Amounts, Row, Work, measure
from benchmarks.node import Node, temporary_folder
from benchmarks.pages import RecordPages, benchmark_namespace, bf16_page
from benchmarks.program import Section, run_sections
from benchmarks.stores import SAVE_MEMORY_BYTES, RedisPy, Service, TierStore, fill, open_s3_tier, store_rows
from kvstore.client import ClientOptions, connect
from kvstore.codec import PLANES2, Encoded, decode_into, encode, max_payload_bytes
from kvstore.format.record import verify_payload
from kvstore.runtime.deadline import Deadline
from kvstore.testing.program import Say
from kvstore.testing.servers import ceph_rgw, redis_server

__all__ = ["main"]

_MIB = 1 << 20
_MEMORY_BYTES_MIN = 512 * _MIB
_START_S = 20.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; returns the exit status: 0, 1 where a section failed, 130 when interrupted."""
    return run_sections(
        "python -m benchmarks.quick",
        "Measure the store, each figure beside a ceiling of this machine.",
        arguments,
        sections=SECTIONS,
        defaults=Amounts(sizes=(_MIB, 4 * _MIB), in_flights=(1, 4), total_bytes=64 * _MIB, repetitions=5),
    )


# ---- codec


class _Calls(Work):
    """Plain calls, one after the other."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    async def run(self) -> None:
        self._call()


def _codec(amounts: Amounts, say: Say) -> list[Row]:
    """Encode, decode and verify in one thread: pages of the largest size.

    Raises:
        RuntimeError: What was decoded is not what was encoded.
    """
    return asyncio.run(_codec_rows(max(amounts.sizes), amounts, say))


async def _codec_rows(size_bytes: int, amounts: Amounts, say: Say) -> list[Row]:
    say("codec: making pages")
    num_pages = amounts.num_pages(size_bytes)
    pages = [bytearray(bf16_page(size_bytes, seed=seed)) for seed in range(num_pages)]
    payloads = [memoryview(bytearray(b"\1") * max_payload_bytes(size_bytes)) for _ in range(num_pages)]
    decoded = [memoryview(bytearray(b"\1") * size_bytes) for _ in range(num_pages)]
    encodeds: list[Encoded] = []

    def encode_all() -> None:
        encodeds[:] = [encode(PLANES2, page, payload) for page, payload in zip(pages, payloads, strict=True)]

    def decode_all() -> None:
        for encoded, payload, target in zip(encodeds, payloads, decoded, strict=True):
            decode_into(encoded.chain, payload[: encoded.payload_bytes], target)

    async def row(what: str, call: Callable[[], None], ceiling_targets: list[memoryview]) -> Row:
        say(f"codec: {what}")
        ceiling = memcpy(pages, ceiling_targets)
        num_bytes = size_bytes * num_pages
        return await measure(
            what,
            _Calls(call),
            ceiling,
            size_bytes=size_bytes,
            num_bytes=num_bytes,
            in_flight=1,
            repetitions=amounts.repetitions,
        )

    rows = [await row("codec encode", encode_all, payloads)]
    copied = [memoryview(bytearray(b"\1") * size_bytes) for _ in range(num_pages)]
    rows.append(await row("codec decode", decode_all, copied))
    if any(target != page for target, page in zip(decoded, pages, strict=True)):
        raise RuntimeError("decoding did not give back what was encoded")
    return [*rows, await _verify_row(size_bytes, amounts, say)]


async def _verify_row(size_bytes: int, amounts: Amounts, say: Say) -> Row:
    say("codec: verify")
    pages = RecordPages(size_bytes, amounts.num_pages(size_bytes))
    records = pages.batch().records

    def verify_all() -> None:
        for record in records:
            verify_payload(record)

    return await measure(
        "verify",
        _Calls(verify_all),
        memcpy(pages.sources, pages.targets),
        size_bytes=pages.record_bytes,
        num_bytes=pages.num_bytes,
        in_flight=1,
        repetitions=amounts.repetitions,
    )


# ---- stores


def _service(amounts: Amounts, say: Say) -> list[Row]:
    """A client and `kvstore serve` over a Unix socket."""
    say("service: starting it")
    memory_bytes = max(_MEMORY_BYTES_MIN, 4 * amounts.total_bytes)

    async def run(url: str) -> list[Row]:
        store = connect(url, options=ClientOptions(save_memory_bytes=SAVE_MEMORY_BYTES))
        try:
            await store.wait_ready(deadline=Deadline.after(_START_S))
            await store.open_namespace(benchmark_namespace(), deadline=Deadline.after(_START_S))
            service = Service(store)
            say("service: filling its memory")  # a cache is full, except in its first minutes
            await fill(service, max(amounts.sizes), memory_bytes)
            return await store_rows(service, peer, amounts, say)
        finally:
            await store.aclose()

    with (
        temporary_folder() as folder,
        unix_peer(folder) as peer,
        Node(folder, "service", memory_bytes=memory_bytes) as node,
    ):
        return uvloop.run(run(node.url))


def _redis(amounts: Amounts, say: Say) -> list[Row]:
    """Our tier, and redis-py beside it, on a real Redis."""
    say("redis: starting it")

    async def run(url: str) -> list[Row]:
        from redis.asyncio import Redis

        from kvstore.tiers.redis import RedisTier

        tier = RedisTier(url)
        try:
            rows = await store_rows(TierStore(tier), peer, amounts, say)
        finally:
            await tier.aclose()
        async with Redis.from_url(url) as client:
            return rows + await store_rows(RedisPy(client), peer, amounts, say)

    with temporary_folder() as folder, tcp_peer(folder) as peer, redis_server() as server:
        return uvloop.run(run(server.url))


def _s3(amounts: Amounts, say: Say) -> list[Row]:
    """Our tier on a real Ceph RGW, the slowest by far: only the largest records and the most in flight."""
    say("s3: starting a Ceph gateway")
    amounts = replace(amounts, sizes=(max(amounts.sizes),), in_flights=(max(amounts.in_flights),))
    with temporary_folder() as folder, tcp_peer(folder) as peer, ceph_rgw() as server:

        async def run() -> list[Row]:
            tier = await open_s3_tier(server)
            try:
                return await store_rows(TierStore(tier), peer, amounts, say)
            finally:
                await tier.aclose()

        return uvloop.run(run())


SECTIONS: dict[str, Section] = {"codec": _codec, "service": _service, "load": load_rows, "redis": _redis, "s3": _s3}


if __name__ == "__main__":
    sys.exit(main())
