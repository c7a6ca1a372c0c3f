"""`python -m benchmarks.quick`: the codec, the service and its tiers, each beside a ceiling. See README.md."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import uvloop

from benchmarks.ceilings import PlainFiles, memcpy, tcp_peer, unix_peer
from benchmarks.loads import load_rows
from benchmarks.measure import Amounts, Row, Work, measure, measure_in_turn
from benchmarks.node import Node, temporary_folder
from benchmarks.pages import RecordPages, benchmark_namespace, bf16_page
from benchmarks.program import Section, run_sections
from benchmarks.stores import SAVE_MEMORY_BYTES, RedisPy, Service, TierStore, fill, open_s3_tier, store_rows
from kvstore.client import ClientOptions, connect
from kvstore.codec import PLANES2, TILES, Encoded, decode_into, encode, max_payload_bytes
from kvstore.format.record import verify_payload
from kvstore.runtime.deadline import Deadline
from kvstore.testing.program import Say
from kvstore.testing.servers import ceph_rgw, redis_server
from kvstore.tiers.filesystem import FilesystemTier

__all__ = ["main"]

_MIB = 1 << 20
_MEMORY_BYTES_MIN = 512 * _MIB
_START_S = 20.0
_DISK_BYTES = 1 << 40
"""More than is written."""
_FILE_THREADS = 4
"""Those of the directory's tier."""


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
    copied = [memoryview(bytearray(b"\1") * size_bytes) for _ in range(num_pages)]
    chains = {"": _ChainPages(PLANES2, pages), ", tiles": _ChainPages(TILES, pages)}

    async def rows(what: str, calls: dict[str, Callable[[], None]]) -> list[Row]:
        say(f"codec: {what}")
        measured = await measure_in_turn(
            [(what + suffix, _Calls(call)) for suffix, call in calls.items()],
            memcpy(pages, copied),
            size_bytes=size_bytes,
            num_bytes=size_bytes * num_pages,
            in_flight=1,
            repetitions=amounts.repetitions,
        )
        return [
            replace(row, stored_ratio=chains[suffix].stored_ratio) for row, suffix in zip(measured, calls, strict=True)
        ]

    measured = await rows("codec encode", {suffix: chain.encode for suffix, chain in chains.items()})
    measured += await rows("codec decode", {suffix: chain.decode for suffix, chain in chains.items()})
    for chain in chains.values():
        chain.check()
    return [*measured, await _verify_row(size_bytes, amounts, say)]


class _ChainPages:
    """Pages, what a chain makes of them, and what that decodes to."""

    def __init__(self, chain: int, pages: Sequence[bytearray]) -> None:
        self._chain = chain
        self._pages = pages
        self._payloads = [memoryview(bytearray(b"\1") * max_payload_bytes(len(page))) for page in pages]
        self._decoded = [memoryview(bytearray(b"\1") * len(page)) for page in pages]
        self._encoded: list[Encoded] = []

    @property
    def stored_ratio(self) -> float:
        return sum(encoded.payload_bytes for encoded in self._encoded) / sum(map(len, self._pages))

    def encode(self) -> None:
        pairs = zip(self._pages, self._payloads, strict=True)
        self._encoded = [encode(self._chain, page, payload) for page, payload in pairs]

    def decode(self) -> None:
        for encoded, payload, target in zip(self._encoded, self._payloads, self._decoded, strict=True):
            decode_into(encoded.chain, payload[: encoded.payload_bytes], target)

    def check(self) -> None:
        """Compare.

        Raises:
            RuntimeError: What was decoded is not what was encoded.
        """
        if any(target != page for target, page in zip(self._decoded, self._pages, strict=True)):
            raise RuntimeError("decoding did not give back what was encoded")


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


def _directory(amounts: Amounts, say: Say) -> list[Row]:
    """Our tier in a directory, whose files are still in the system's memory when they are read."""
    say("directory: opening it")

    async def run(folder: Path) -> list[Row]:
        files = folder / "files"
        files.mkdir()
        tier = await FilesystemTier.open(folder / "records", budget_bytes=_DISK_BYTES)
        try:
            return await store_rows(TierStore(tier, _FILE_THREADS, name="directory"), PlainFiles(files), amounts, say)
        finally:
            await tier.aclose()

    with temporary_folder() as folder:
        return uvloop.run(run(folder))


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


SECTIONS: dict[str, Section] = {
    "codec": _codec,
    "service": _service,
    "load": load_rows,
    "directory": _directory,
    "redis": _redis,
    "s3": _s3,
}


if __name__ == "__main__":
    sys.exit(main())
