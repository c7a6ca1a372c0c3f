"""`python -m benchmarks.publishing`: what a save costs more where the service publishes cache events. See README.md."""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import zmq

from benchmarks.measure import windowed
from benchmarks.node import Node, temporary_folder
from benchmarks.pages import Batch, RecordPages, benchmark_namespace
from benchmarks.program import Column, count, run_rows
from benchmarks.stores import Service
from kvstore.client import RemoteStore, connect
from kvstore.model.page_blocks import BlockGroup, PageBlocks
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.sizes import parse_bytes

__all__ = ["main"]

_BLOCKS = 16
"""Of a page: 256 tokens in blocks of 16. With 8 billion parameters it has 32 MiB, in 8 slices of 4 MiB."""
_QUIET_S = 0.4
"""After the last save; what was saved is published by then."""
_SEALED = 64
"""Records that are sealed together, between saves."""


@dataclass(frozen=True, slots=True)
class Row:
    """What saves cost in processor time, of the service's threads and of the client's process together.

    Attributes:
        what: Of the records.
        size_bytes: Of a record.
        records: Of one turn.
        plain_ms: A save, to a service that publishes nothing: the median of the turns, in milliseconds.
        published_ms: The same where the pages are named and published, in turn with these.
        ratio: The median over pairs of turns.
        least: The smallest ratio of a pair.
        most: The largest.
        idle_ms_per_s: Milliseconds a second by which an idle service that publishes takes more than one that does not.
        events: Batches that a subscriber got.
    """

    what: str
    size_bytes: int
    records: int
    plain_ms: float
    published_ms: float
    ratio: float
    least: float
    most: float
    idle_ms_per_s: float
    events: int


_TITLE = "processor time of a save, published and not"
_COLUMNS: tuple[Column[Row], ...] = (
    ("what", lambda row: row.what),
    ("records", lambda row: str(row.records)),
    ("ms, plain", lambda row: f"{row.plain_ms:.3f}"),
    ("published", lambda row: f"{row.published_ms:.3f}"),
    ("ratio", lambda row: f"{row.ratio:.3f}"),
    ("of pairs", lambda row: f"{row.least:.3f} to {row.most:.3f}"),
    ("idle ms/s", lambda row: f"{row.idle_ms_per_s:.2f}"),
    ("batches", lambda row: str(row.events)),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; returns the exit status: 0, 1 after a failure, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publishing", description=__doc__)
    parser.add_argument("--size", type=parse_bytes, default=4 << 20, metavar="BYTES", help="of a record")
    parser.add_argument("--slices", type=count, default=8, help="records of a page, of which one names the page")
    parser.add_argument("--records", type=count, default=512, help="saved in one turn")
    parser.add_argument("--repetitions", type=count, default=9, help="pairs of turns")
    parser.add_argument("--memory", type=parse_bytes, default=1 << 30, metavar="BYTES", help="of each service")
    parser.add_argument("--in-flight", type=count, default=4, metavar="COUNT", help="saves at a time")
    return run_rows(parser, arguments, _measure, _TITLE, _COLUMNS)


class _Side:
    """A service, a client of it, and how many pages are named.

    Args:
        node: Is running.
        store: Is connected to it.
        slices: Records of a page, of which the first names it; 0: no page is named.
    """

    def __init__(self, node: Node, store: RemoteStore, slices: int) -> None:
        self._node = node
        self._store = store
        self._slices = slices
        self._service = Service(store)

    async def turn(self, pages: RecordPages, num_records: int, in_flight: int) -> float:
        """Save records; returns the processor time of that, also of what follows from it, but not of sealing them."""
        service_s, client_s = self._node.cpu_s(), 0.0
        for _ in range(num_records // len(pages.sources)):
            batch = pages.batch()
            before_s = time.process_time()
            await windowed((partial(self._save, batch, index) for index in range(len(batch.records))), in_flight)
            client_s += time.process_time() - before_s
        before_s = time.process_time()
        await asyncio.sleep(_QUIET_S)
        return self._node.cpu_s() - service_s + client_s + time.process_time() - before_s

    async def idle(self, seconds: float) -> float:
        """Processor time while nothing is saved."""
        before_s = self._node.cpu_s() + time.process_time()
        await asyncio.sleep(seconds)
        return self._node.cpu_s() + time.process_time() - before_s

    async def _save(self, batch: Batch, index: int) -> None:
        await self._service.put(batch.records[index])
        if self._slices and index % self._slices == 0:
            self._store.name_blocks(_named(batch, index))


def _named(batch: Batch, index: int) -> PageBlocks:
    """The blocks of a record's page, as an engine with `name_blocks` `hashes` names them."""
    header = batch.records[index].header
    prefix = header.key.prefix
    hashes = b"".join(bytes([number]) + prefix[:7] for number in range(_BLOCKS))
    return PageBlocks(
        namespace=header.key.namespace,
        boundary=batch.prompt.boundary(header.span.stop),
        group=0,
        model="benchmark",
        hash_bytes=8,
        hashes=hashes,
        parent=prefix[8:16] if index else b"",
        block_tokens=header.span.num_tokens // _BLOCKS,
        groups=(BlockGroup(0, "full_attention"),),
    )


def _measure(chosen: argparse.Namespace, say: Callable[[str], None]) -> list[Row]:
    return [asyncio.run(_compare(chosen, say))]


async def _compare(chosen: argparse.Namespace, say: Callable[[str], None]) -> Row:
    with temporary_folder() as folder:
        address = f"ipc://{folder}/events"
        nodes = [
            Node(folder, "plain", memory_bytes=chosen.memory),
            Node(folder, "published", memory_bytes=chosen.memory, events_endpoint=address),
        ]
        async with AsyncExitStack() as stack:
            num_batches = stack.enter_context(_subscriber(address))
            sides: list[_Side] = []
            for node, slices in zip(nodes, (0, chosen.slices), strict=True):
                stack.callback(node.stop)
                node.start()
                store = connect(node.url)
                stack.push_async_callback(store.aclose)
                await store.open_namespace(benchmark_namespace(), deadline=Deadline.after(30.0))
                sides.append(_Side(node, store, slices))
            return await _turns(sides, num_batches, chosen, say)


async def _turns(
    sides: Sequence[_Side], num_batches: Callable[[], int], chosen: argparse.Namespace, say: Callable[[str], None]
) -> Row:
    pages = RecordPages(chosen.size, min(chosen.records, _SEALED))
    num_records = chosen.records // len(pages.sources) * len(pages.sources)
    say("filling the memory of both services")
    for side in sides:
        await side.turn(pages, max(num_records, 2 * chosen.memory // pages.record_bytes), chosen.in_flight)
    num_before = num_batches()
    pairs: list[tuple[float, float]] = []
    for number in range(chosen.repetitions):
        took_s = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):  # in turn, so that a busy minute hits both
            took_s[which] = await sides[which].turn(pages, num_records, chosen.in_flight)
        pairs.append((took_s[0], took_s[1]))
        say(f"pair {number + 1}: {took_s[1] / took_s[0]:.3f}")
    idle_s = [await side.idle(2.0) for side in sides]
    plain_s, published_s = (statistics.median(pair[which] for pair in pairs) for which in (0, 1))
    ratios = sorted(published / plain for plain, published in pairs)
    return Row(
        f"save {chosen.size / 2**20:g} MiB",
        pages.record_bytes,
        num_records,
        round(plain_s / num_records * 1e3, 4),
        round(published_s / num_records * 1e3, 4),
        round(statistics.median(ratios), 4),
        round(ratios[0], 4),
        round(ratios[-1], 4),
        round((idle_s[1] - idle_s[0]) / 2.0 * 1e3, 3),
        num_batches() - num_before,
    )


@contextmanager
def _subscriber(address: str) -> Iterator[Callable[[], int]]:
    """A subscriber in a process of its own, whose time is not counted; gives the number of batches that it has."""
    spawn = multiprocessing.get_context("spawn")
    number = spawn.Value("q", 0)
    process = spawn.Process(target=_count_batches, args=(address, number), daemon=True)
    process.start()
    try:
        yield lambda: int(number.value)
    finally:
        process.terminate()
        process.join()


def _count_batches(address: str, number: Any) -> None:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    socket.set_hwm(0)
    socket.connect(address)
    socket.subscribe(b"")
    while True:
        socket.recv_multipart()
        number.value += 1


if __name__ == "__main__":
    sys.exit(main())
