"""`python -m benchmarks.io_threads`: what part of a byte's cost keeps Python's lock, and so what `io_threads` can gain.

The kernel's copies and the checksum run without the lock, so threads share them out; what is left runs in one thread at
a time. This needs no idle processors: it measures one thread's processor time, and computes the limit from it.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop

from benchmarks.measure import GB
from benchmarks.pages import RecordPages
from benchmarks.program import Column, count, run_rows, sizes
from benchmarks.stores import Store, TierStore
from kvstore.format.record import RunningChecksum
from kvstore.testing.program import Say
from kvstore.testing.servers import redis_server

__all__ = ["main"]

_MIB = 1 << 20
_TOTAL_BYTES = 256 * _MIB
_IN_FLIGHT = 4
_NUM_CONNECTIONS = 4
_PIECE_BYTES = 512 << 10
"""As much as the tier receives and sums at a time."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Processor seconds of the thread that moves a GB, all turns together.

    Attributes:
        verb: `put` or `get`.
        size_bytes: Nominal size of a record.
        system_s: In the kernel, which copies the bytes.
        checksum_s: For the checksum, of a get; measured alone, over bytes in the cache.
        lock_s: The rest, in which the thread has Python's lock.
    """

    verb: str
    size_bytes: int
    system_s: float
    checksum_s: float
    lock_s: float

    @property
    def total_s(self) -> float:
        return self.system_s + self.checksum_s + self.lock_s

    def gain(self, num_threads: int) -> float:
        """How many times as fast `num_threads` are at most, with a processor for each."""
        return min(num_threads, self.total_s / self.lock_s)


_COLUMNS: Sequence[Column[Shares]] = (
    ("redis", lambda row: row.verb),
    ("size", lambda row: f"{row.size_bytes / _MIB:.0f} MiB"),
    ("CPU s/GB", lambda row: f"{row.total_s:.3f}"),
    ("kernel", lambda row: f"{row.system_s:.3f}"),
    ("checksum", lambda row: f"{row.checksum_s:.3f}"),
    ("with the lock", lambda row: f"{row.lock_s:.3f}"),
    ("2 threads", lambda row: f"{row.gain(2):.1f} x"),
    ("4 threads", lambda row: f"{row.gain(4):.1f} x"),
    ("8 threads", lambda row: f"{row.gain(8):.1f} x"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.io_threads",
        description="What part of a byte's cost keeps Python's lock, and so the most that io_threads can gain.",
    )
    default = (_MIB, 4 * _MIB, 16 * _MIB)
    parser.add_argument("--sizes", type=sizes, default=default, metavar="BYTES", help="of records, like 1MiB,4MiB")
    parser.add_argument("--repetitions", type=count, default=8, metavar="COUNT", help="turns of each row")
    title = "one thread's processor time for a GB, and how many times as fast more threads are at most"
    return run_rows(parser, arguments, _measure, title, _COLUMNS)


def _measure(chosen: argparse.Namespace, say: Say) -> list[Shares]:
    say("starting a Redis")
    with redis_server(keeps_memory=True) as server:

        async def run() -> list[Shares]:
            from kvstore.tiers.redis import RedisTier

            store = TierStore(RedisTier(server.url, num_connections=_NUM_CONNECTIONS), _NUM_CONNECTIONS)
            try:
                rows = []
                for size_bytes in chosen.sizes:
                    say(f"records of {size_bytes:,} bytes")
                    rows += await _shares(store, size_bytes, chosen.repetitions)
                return rows
            finally:
                await store.aclose()

        return uvloop.run(run())


async def _shares(store: Store, size_bytes: int, repetitions: int) -> list[Shares]:
    pages = RecordPages(size_bytes, max(_TOTAL_BYTES // size_bytes, _IN_FLIGHT))
    used = {"put": [0.0, 0.0], "get": [0.0, 0.0]}  # user, system
    for turn in range(1 + repetitions):
        batch = pages.batch()
        for verb, seconds in used.items():
            before = resource.getrusage(resource.RUSAGE_THREAD)
            if verb == "put":
                await store.put_all(batch, _IN_FLIGHT)
            else:
                await store.get_all(batch, pages.targets, _IN_FLIGHT)
            after = resource.getrusage(resource.RUSAGE_THREAD)
            if turn > 0:
                seconds[0] += after.ru_utime - before.ru_utime
                seconds[1] += after.ru_stime - before.ru_stime
        await store.forget(batch)
    gb = repetitions * pages.num_bytes / GB
    rows = []
    for verb, (user_s, system_s) in used.items():
        checksum_s = _checksum_s() if verb == "get" else 0.0  # a record to put was summed when it was sealed
        lock_s = max(user_s / gb - checksum_s, 0.01)
        rows.append(Shares(verb, size_bytes, system_s / gb, checksum_s, lock_s))
    return rows


def _checksum_s() -> float:
    """Processor seconds for the checksum of a GB that is in the cache."""
    piece, total = memoryview(bytearray(b"\1") * _PIECE_BYTES), RunningChecksum()
    count = GB / 2 // _PIECE_BYTES
    started_s = time.thread_time()
    for _ in range(int(count)):
        total.update(piece)
    return (time.thread_time() - started_s) / (count * _PIECE_BYTES / GB)


if __name__ == "__main__":
    sys.exit(main())
