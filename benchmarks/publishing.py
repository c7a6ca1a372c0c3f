"""`python -m benchmarks.publishing`: what a save costs more where the service publishes cache events. See README.md."""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop
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
_SMALL_BYTES = 64 << 10
"""Of a record whose save costs little, so that what publishing costs is a larger part."""
_MEMORY_RECORDS = 128
"""What the memory of a service holds. It is full when the first turn begins, so that each save evicts."""
_SEALED = 32
"""Records that are sealed together, between saves."""
_QUIET_S = 1.0
"""After the last save of a turn; what was saved is published by then."""
_TURNS = 3
"""Of one pair of services."""
_IDLE_S = 2.0

_spawn = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Row:
    """What saves cost in processor time: of all threads of a service and its client's process together.

    Attributes:
        what: Of the records, and what the second service does. Without publishing, the row shows the noise.
        size_bytes: Of a record.
        records: Of all turns, to each service.
        plain_ms: A save, to a service that publishes nothing: the median of pairs of services, in milliseconds.
        page_us: By which a page's saves and its publishing take more: the median of pairs, in microseconds.
        page_us_least, page_us_most: The middle half of the pairs.
        share: `page_us` as a share of what the saves of a page of the large records take, without publishing.
        share_least, share_most: The same, of the middle half.
        idle_ms_per_s: Milliseconds a second by which the second service takes more while nothing is saved: the median.
        batches: That a subscriber got.
    """

    what: str
    size_bytes: int
    records: int
    plain_ms: float
    page_us: float
    page_us_least: float
    page_us_most: float
    share: float
    share_least: float
    share_most: float
    idle_ms_per_s: float
    batches: int


_TITLE = "processor time of saves, beside a service that publishes nothing"
_COLUMNS: tuple[Column[Row], ...] = (
    ("what", lambda row: row.what),
    ("records", lambda row: str(row.records)),
    ("ms a save", lambda row: f"{row.plain_ms:.3f}"),
    ("more µs a page", lambda row: f"{row.page_us:.0f}"),
    ("middle half", lambda row: f"{row.page_us_least:.0f} to {row.page_us_most:.0f}"),
    ("of its saves", lambda row: f"{row.share:.2%}"),
    ("middle half", lambda row: f"{row.share_least:.2%} to {row.share_most:.2%}"),
    ("idle ms/s", lambda row: f"{row.idle_ms_per_s:.2f}"),
    ("batches", lambda row: str(row.batches)),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; returns the exit status: 0, 1 after a failure, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publishing", description=__doc__)
    parser.add_argument("--size", type=parse_bytes, default=4 << 20, metavar="BYTES", help="of a large record")
    parser.add_argument("--slices", type=count, default=8, help="records of a page, of which one names the page")
    parser.add_argument("--records", type=count, default=256, help="saved in one turn")
    parser.add_argument("--repetitions", type=count, default=7, help="pairs of fresh services, for each row")
    parser.add_argument("--in-flight", type=count, default=2, metavar="COUNT", help="saves at a time, to each service")
    return run_rows(parser, arguments, _measure, _TITLE, _COLUMNS)


# ---- a client, in a process of its own


@dataclass(frozen=True, slots=True)
class _Load:
    """What a client saves.

    Attributes:
        size_bytes: Of a record.
        slices: Records of a page, of which the first names it; 0: no page is named.
        in_flight: Saves at a time.
        period_s: From one record to the next at least; 0: as fast as the service takes them.
    """

    size_bytes: int
    slices: int
    in_flight: int
    period_s: float


def _client(url: str, load: _Load, orders: Connection) -> None:
    """Saves as many records as each order says, until an order of 0. At the end of a turn it answers with the seconds
    of processor time since the order, without those in which it made the records."""
    uvloop.run(_take_orders(url, load, orders))  # as an engine's client does


async def _take_orders(url: str, load: _Load, orders: Connection) -> None:
    store = connect(url)
    await store.open_namespace(benchmark_namespace(), deadline=Deadline.after(30.0))
    pages = RecordPages(load.size_bytes, _SEALED)
    orders.send(None)
    while num_records := await asyncio.to_thread(orders.recv):
        begun_s, making_s = time.process_time(), 0.0
        next_s = time.monotonic()
        for _ in range(num_records // _SEALED):
            before_s, before_wall_s = time.process_time(), time.monotonic()
            batch = pages.batch()
            making_s += time.process_time() - before_s
            next_s += time.monotonic() - before_wall_s
            due = [next_s + index * load.period_s for index in range(_SEALED)]
            saves = (partial(_save, store, load.slices, batch, index, due[index]) for index in range(_SEALED))
            await windowed(saves, load.in_flight)
            next_s = max(due[-1] + load.period_s, time.monotonic())
        orders.send(None)
        await asyncio.to_thread(orders.recv)
        orders.send(time.process_time() - begun_s - making_s)
    await store.aclose()


async def _save(store: RemoteStore, slices: int, batch: Batch, index: int, due_s: float) -> None:
    if (wait_s := due_s - time.monotonic()) > 0:
        await asyncio.sleep(wait_s)
    await Service(store).put(batch.records[index])
    if slices and index % slices == 0:
        store.name_blocks(_named(batch, index))


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


# ---- two services, each with a client, at the same time


class _Side:
    """A running service and its client. `order` and `taken_s` go together: what is between them is one turn."""

    def __init__(self, node: Node, load: _Load) -> None:
        self._node = node
        self._orders, theirs = _spawn.Pipe()
        self._process = _spawn.Process(target=_client, args=(node.url, load, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._before_s = 0.0

    def order(self, num_records: int) -> None:
        self._before_s = self._node.cpu_s()
        self._orders.send(num_records)

    def wait(self) -> None:
        """Return when it has done what the order says, or is ready for the first one.

        Raises:
            EOFError: It has ended.
        """
        self._orders.recv()

    def taken_s(self) -> float:
        """Processor time since the order."""
        service_s = self._node.cpu_s() - self._before_s
        self._orders.send(None)
        return service_s + float(self._orders.recv())

    def service_s(self) -> float:
        return self._node.cpu_s()

    def stop(self) -> None:
        self._process.terminate()
        self._process.join()


@dataclass(frozen=True, slots=True)
class _Pair:
    """Of two services that ran at the same time. Seconds of a record: of the processor, and of the clock."""

    plain_s: float
    other_s: float
    period_s: float
    idle_ms_per_s: float
    num_batches: int


def _compare(load: _Load, num_records: int, *, publishes: bool) -> _Pair:
    """Save the same to a service that publishes nothing and to another one, at the same time: what slows the
    machine slows both."""
    with temporary_folder() as folder, ExitStack() as stack:
        address = f"ipc://{folder}/events" if publishes else None
        num_batches = stack.enter_context(_subscriber(address)) if address is not None else lambda: 0
        sides = [_start(folder, name, which, load, stack) for name, which in (("plain", None), ("published", address))]
        for side in sides:
            side.wait()
        _turn(sides, 2 * _MEMORY_RECORDS)  # fills both memories
        before, begun_s = num_batches(), time.monotonic()
        turns = [_turn(sides, num_records) for _ in range(_TURNS)]
        period_s = (time.monotonic() - begun_s) / _TURNS / num_records
        num_batches_sent = num_batches() - before
        idle_s = [side.service_s() for side in sides]
        time.sleep(_IDLE_S)
        plain, other = (side.service_s() - since_s for side, since_s in zip(sides, idle_s, strict=True))
        of_record = [sum(turn[which] for turn in turns) / _TURNS / num_records for which in (0, 1)]
        return _Pair(of_record[0], of_record[1], period_s, (other - plain) / _IDLE_S * 1e3, num_batches_sent)


def _start(folder: Path, name: str, address: str | None, load: _Load, stack: ExitStack) -> _Side:
    memory_bytes = _MEMORY_RECORDS * load.size_bytes
    node = Node(folder, name, memory_bytes=max(memory_bytes, 1 << 20))
    if address is not None:
        node.process.command += ["--events-endpoint", address]
    stack.callback(node.stop)
    node.start()
    slices = load.slices if address is not None else 0
    side = _Side(node, _Load(load.size_bytes, slices, load.in_flight, load.period_s))
    stack.callback(side.stop)
    return side


def _turn(sides: Sequence[_Side], num_records: int) -> list[float]:
    """Processor time of both."""
    for side in sides:
        side.order(num_records)
    for side in sides:
        side.wait()
    time.sleep(_QUIET_S)
    return [side.taken_s() for side in sides]


def _measure(chosen: argparse.Namespace, say: Callable[[str], None]) -> list[Row]:
    num_records = _whole(chosen.records)
    large = _Load(chosen.size, chosen.slices, chosen.in_flight, 0.0)
    pairs: dict[tuple[bool, bool], list[_Pair]] = {}
    for repetition in range(chosen.repetitions):
        for publishes in (False, True) if repetition % 2 else (True, False):
            pairs.setdefault((True, publishes), []).append(_compare(large, num_records, publishes=publishes))
        # small records come at the pace of large ones, so that each message has as many pages
        period_s = min(pair.period_s for pair in pairs[True, True])
        small = _Load(_SMALL_BYTES, chosen.slices, chosen.in_flight, period_s)
        for publishes in (False, True) if repetition % 2 else (True, False):
            pairs.setdefault((False, publishes), []).append(_compare(small, num_records, publishes=publishes))
        more = ", ".join(
            f"{(of[-1].other_s - of[-1].plain_s) * chosen.slices * 1e6:.0f}" for _, of in sorted(pairs.items())
        )
        say(f"repetition {repetition + 1}: more us a page, small and large, not published and published: {more}")
    page_s = chosen.slices * statistics.median(pair.plain_s for pair in pairs[True, False] + pairs[True, True])
    return [
        _row(size, publishes, pairs[is_large, publishes], page_s, chosen)
        for is_large, size in ((True, chosen.size), (False, _SMALL_BYTES))
        for publishes in (False, True)
    ]


def _row(size: int, publishes: bool, pairs: Sequence[_Pair], page_s: float, chosen: argparse.Namespace) -> Row:
    more_s = sorted(chosen.slices * (pair.other_s - pair.plain_s) for pair in pairs)
    middle_s, quarter = statistics.median(more_s), len(more_s) // 4
    least_s, most_s = more_s[quarter], more_s[-1 - quarter]
    return Row(
        f"{size / 2**20:g} MiB, " + ("published" if publishes else "not published"),
        size,
        _whole(chosen.records) * _TURNS * len(pairs),
        plain_ms=round(statistics.median(pair.plain_s for pair in pairs) * 1e3, 4),
        page_us=round(middle_s * 1e6, 1),
        page_us_least=round(least_s * 1e6, 1),
        page_us_most=round(most_s * 1e6, 1),
        share=round(middle_s / page_s, 5),
        share_least=round(least_s / page_s, 5),
        share_most=round(most_s / page_s, 5),
        idle_ms_per_s=round(statistics.median(pair.idle_ms_per_s for pair in pairs), 3),
        batches=sum(pair.num_batches for pair in pairs),
    )


def _whole(num_records: int) -> int:
    """As many records in whole batches, at least one batch."""
    return max(1, num_records // _SEALED) * _SEALED


# ---- a subscriber


@contextmanager
def _subscriber(address: str) -> Iterator[Callable[[], int]]:
    """A subscriber in a process of its own, whose time is not counted; gives the number of batches that it has."""
    number = _spawn.Value("q", 0)
    process = _spawn.Process(target=_count_batches, args=(address, number), daemon=True)
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
