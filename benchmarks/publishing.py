"""`python -m benchmarks.publishing`: what a save costs more if its page is published. See README.md."""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import uvloop
import zmq

from benchmarks.measure import windowed
from benchmarks.node import Node, temporary_folder
from benchmarks.pages import RecordPages, benchmark_namespace
from benchmarks.program import Column, count, run_rows
from benchmarks.stores import SAVE_MEMORY_BYTES
from kvstore.api import SaveOutcome
from kvstore.client import ClientOptions, RemoteStore, connect
from kvstore.codec.chains import RAW, encode
from kvstore.format.header_v1 import HEADER_BYTES
from kvstore.format.record import Record, seal
from kvstore.model.keys import Boundary
from kvstore.model.page_blocks import BlockGroup, PageBlocks
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.sizes import format_bytes, parse_bytes

__all__ = ["main"]

_BLOCKS = 16
"""Of a page: 256 tokens in blocks of 16. With 8 billion parameters it has 32 MiB, in 8 slices of 4 MiB."""
_SMALL_BYTES = 64 << 10
"""Of a record whose save costs little and leaves the processor's caches as they are."""
_SEALED = 32
"""Records that are sealed together, between saves."""
_QUIET_S = 1.6
"""After the last save; what was saved is published by then."""
_WARMING_TURNS = 2
_GROUPS = (BlockGroup(0, "full_attention"),)
_SHARED_WAIT_S = 0.001

_spawn = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Row:
    """What saves cost in processor time: of all threads of a service and its client's process together.

    Attributes:
        what: The records of a page, and how fast pages come.
        pages: That were named, saved and evicted.
        plain_ms: A save whose page is not named: the median of turns, in milliseconds.
        page_us: By which naming a page and publishing that it came and left takes more: the median of pairs of turns,
            in microseconds.
        page_us_least, page_us_most: The middle half of the pairs.
        share: `page_us` as a share of what the saves of a page of large records take without it, at full speed.
        share_least, share_most: The same, of the middle half.
        batches: That a subscriber got.
    """

    what: str
    pages: int
    plain_ms: float
    page_us: float
    page_us_least: float
    page_us_most: float
    share: float
    share_least: float
    share_most: float
    batches: int


_TITLE = "processor time of saves, beside saves whose pages are not named"
_COLUMNS: tuple[Column[Row], ...] = (
    ("what", lambda row: row.what),
    ("pages", lambda row: str(row.pages)),
    ("ms a save", lambda row: f"{row.plain_ms:.3f}"),
    ("more µs a page", lambda row: f"{row.page_us:.0f}"),
    ("middle half", lambda row: f"{row.page_us_least:.0f} to {row.page_us_most:.0f}"),
    ("of its saves", lambda row: f"{row.share:.2%}"),
    ("middle half", lambda row: f"{row.share_least:.2%} to {row.share_most:.2%}"),
    ("batches", lambda row: str(row.batches)),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; returns the exit status: 0, 1 after a failure, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publishing", description=__doc__)
    parser.add_argument("--size", type=parse_bytes, default=4 << 20, metavar="BYTES", help="of a large record")
    parser.add_argument("--slices", type=int, choices=(1, 2, 4, 8, 16, 32), default=8, help="records of a page")
    parser.add_argument("--pages", type=count, default=64, help="saved in one turn, in whole batches of 32")
    parser.add_argument("--turns", type=count, default=8, help="pairs of turns of each pair of services")
    parser.add_argument("--repetitions", type=count, default=3, help="pairs of fresh services, for each row")
    parser.add_argument("--in-flight", type=count, default=2, metavar="COUNT", help="saves at a time, to each service")
    return run_rows(parser, arguments, _measure, _TITLE, _COLUMNS)


# ---- a client, in a process of its own


@dataclass(frozen=True, slots=True)
class _Load:
    """What a client saves.

    Attributes:
        size_bytes: Of a record.
        slices: Records of a page.
        in_flight: Saves at a time.
        period_s: From one record to the next at least; 0: as fast as the service takes them.
    """

    size_bytes: int
    slices: int
    in_flight: int
    period_s: float


@dataclass(frozen=True, slots=True)
class _Order:
    """What a client is to save next, and whether it names the pages."""

    num_records: int
    names: bool


def _client(url: str, load: _Load, orders: Connection) -> None:
    """Saves what each order says, until there is none. At the end of each it answers with the seconds of processor time
    since the order, without those in which it made up names and bytes."""
    uvloop.run(_take_orders(url, load, orders))  # as an engine's client does


async def _take_orders(url: str, load: _Load, orders: Connection) -> None:
    store = connect(url, options=ClientOptions(save_memory_bytes=SAVE_MEMORY_BYTES))
    await store.open_namespace(benchmark_namespace(), deadline=Deadline.after(30.0))
    pages = RecordPages(load.size_bytes, _SEALED)
    orders.send(None)
    while (order := await asyncio.to_thread(orders.recv)) is not None:
        begun_s, preparing_s = time.process_time(), 0.0
        next_s = time.monotonic()
        for _ in range(order.num_records // _SEALED):
            before_s, before_wall_s = time.process_time(), time.monotonic()
            batch = pages.batch()
            hashes = [_block_hashes(record) for record in batch.records]
            preparing_s += time.process_time() - before_s
            next_s += time.monotonic() - before_wall_s
            due = [next_s + index * load.period_s for index in range(_SEALED)]
            named = range(0, _SEALED, load.slices) if order.names else ()
            saves = (
                partial(_save, store, batch.records[index], hashes[index] if index in named else (), due[index])
                for index in range(_SEALED)
            )
            await windowed(saves, load.in_flight)
            next_s = max(due[-1] + load.period_s, time.monotonic())
        orders.send(None)
        await asyncio.to_thread(orders.recv)
        orders.send(time.process_time() - begun_s - preparing_s)
    await store.aclose()


async def _save(store: RemoteStore, record: Record, hashes: Sequence[bytes], due_s: float) -> None:
    if (wait_s := due_s - time.monotonic()) > 0:
        await asyncio.sleep(wait_s)
    outcome = await store.save(await _made(store, record), deadline=Deadline.after(30.0))
    if outcome is not SaveOutcome.STORED:
        raise RuntimeError(f"the service did not store a record: {outcome.value}")
    if hashes:
        store.name_blocks(_named(record, hashes))


async def _made(store: RemoteStore, record: Record) -> Record:
    """The record made again as an engine does whose GPU has encoded the page: its payload is copied behind a header, in
    memory that the service reads, and sealed there. Small records are sent."""
    while (buffer := store.shared_buffer(record.num_bytes)) is None and store.shares(record.num_bytes):
        await asyncio.sleep(_SHARED_WAIT_S)
    if buffer is None:
        buffer = memoryview(bytearray(record.num_bytes))
    encode(RAW, record.payload, buffer[HEADER_BYTES:])
    return seal(record.header, buffer[: record.num_bytes])


def _block_hashes(record: Record) -> list[bytes]:
    """What an engine has anyway: the hash of each block of a record's page."""
    return [bytes([number]) + record.key.prefix[:7] for number in range(_BLOCKS)]


def _named(record: Record, hashes: Sequence[bytes]) -> PageBlocks:
    """The blocks of a record's page, as an engine with `name_blocks` `hashes` names them."""
    key, span = record.key, record.header.span
    return PageBlocks(
        namespace=key.namespace,
        boundary=Boundary(span.stop, key.prefix),
        group=0,
        model="benchmark",
        hash_bytes=len(hashes[0]),
        hashes=b"".join(hashes),
        parent=b"",
        block_tokens=span.num_tokens // _BLOCKS,
        groups=_GROUPS,
    )


# ---- two services, each with a client, at the same time


class _Side:
    """A running service and its client. `order` and `taken_s` go together: what is between them is counted."""

    def __init__(self, node: Node, load: _Load) -> None:
        self._node = node
        self._orders, theirs = _spawn.Pipe()
        self._process = _spawn.Process(target=_client, args=(node.url, load, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._before_s = 0.0

    def order(self, order: _Order) -> None:
        self._before_s = self._node.cpu_s()
        self._orders.send(order)

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

    def stop(self) -> None:
        self._process.terminate()
        self._process.join()


@dataclass(frozen=True, slots=True)
class _Turn:
    """Of two services that took the same saves at the same time, of which one got the names of their pages.

    Attributes:
        more_s: Seconds of the processor that a page took more with its name.
        plain_s: Those that its saves took without.
        period_s: Seconds from one page to the next.
    """

    more_s: float
    plain_s: float
    period_s: float


@dataclass(frozen=True, slots=True)
class _Pair:
    """Of two turns. Each service got the names in one of them: so neither what slows the machine nor what makes
    one process slower than another counts."""

    turns: tuple[_Turn, _Turn]

    @property
    def more_s(self) -> float:
        return sum(turn.more_s for turn in self.turns) / 2


def _compare(load: _Load, num_pages: int, num_turns: int) -> tuple[list[_Pair], int]:
    """The pairs of turns of two fresh services, and the batches that their subscribers got."""
    with temporary_folder() as folder, ExitStack() as stack:
        addresses = [f"ipc://{folder}/{name}-events" for name in ("first", "second")]
        counters = [stack.enter_context(_subscriber(address)) for address in addresses]
        memory_bytes = num_pages * load.slices * load.size_bytes  # so no page is evicted before it is published
        nodes = [
            Node(folder, f"service-{index}", memory_bytes=memory_bytes, events_endpoint=address)
            for index, address in enumerate(addresses)
        ]
        sides = [_start(node, load, stack) for node in nodes]
        for side in sides:
            side.wait()
        for index in range(_WARMING_TURNS):
            _turn(sides, index, load, num_pages)
        before = [number() for number in counters]
        pairs = [_Pair((_turn(sides, 0, load, num_pages), _turn(sides, 1, load, num_pages))) for _ in range(num_turns)]
        return pairs, sum(number() - since for number, since in zip(counters, before, strict=True))


def _start(node: Node, load: _Load, stack: ExitStack) -> _Side:
    stack.callback(node.stop)
    node.start()
    side = _Side(node, load)
    stack.callback(side.stop)
    return side


def _turn(sides: Sequence[_Side], named: int, load: _Load, num_pages: int) -> _Turn:
    """Save to both services as much as their memories hold. Then save as much without names, so that all of it is
    evicted.

    Args:
        named: The index of the service that gets the names.
    """
    begun_s = time.monotonic()
    order = _Order(num_pages * load.slices, names=True)
    saving = _saved(sides, order, named)
    period_s = (time.monotonic() - begun_s - _QUIET_S) / num_pages
    evicting = _saved(sides, replace(order, names=False), named)
    plain = 1 - named
    more_s = sum(part[named] - part[plain] for part in (saving, evicting))
    return _Turn(more_s / num_pages, saving[plain] / num_pages, period_s)


def _saved(sides: Sequence[_Side], order: _Order, named: int) -> list[float]:
    """Processor time in which both save and publish all. At most one gets names."""
    for index, side in enumerate(sides):
        side.order(order if index == named else replace(order, names=False))
    for side in sides:
        side.wait()
    time.sleep(_QUIET_S)
    return [side.taken_s() for side in sides]


@dataclass(slots=True)
class _Figures:
    """Of records of one size."""

    pairs: list[_Pair] = field(default_factory=list)
    num_batches: int = 0

    def add(self, load: _Load, num_pages: int, num_turns: int) -> None:
        """Measure two fresh services."""
        pairs, num_batches = _compare(load, num_pages, num_turns)
        self.pairs += pairs
        self.num_batches += num_batches

    def middle(self, read: Callable[[_Turn], float]) -> float:
        """The median of turns."""
        return statistics.median(read(turn) for pair in self.pairs for turn in pair.turns)


def _measure(chosen: argparse.Namespace, say: Callable[[str], None]) -> list[Row]:
    num_pages = max(1, chosen.pages // _SEALED) * _SEALED
    full_speed, small, large = _Figures(), _Figures(), _Figures()
    for repetition in range(chosen.repetitions):
        load = _Load(chosen.size, chosen.slices, chosen.in_flight, 0.0)
        full_speed.add(load, num_pages, max(1, chosen.turns // 4))
        # One record of each page at the pace of whole pages: as many names in each message, and the other saves, which
        # take some percent more or less from turn to turn, do not hide what a name takes.
        load = replace(load, slices=1, period_s=full_speed.middle(lambda turn: turn.period_s))
        small.add(replace(load, size_bytes=_SMALL_BYTES), num_pages, chosen.turns)
        large.add(load, num_pages, chosen.turns)
        more = " and ".join(
            f"{statistics.median(pair.more_s for pair in of.pairs[-chosen.turns :]) * 1e6:.0f}" for of in (small, large)
        )
        say(f"repetition {repetition + 1}: more us a page, of small and of large records: {more}")
    page_s = full_speed.middle(lambda turn: turn.plain_s)
    large_name = format_bytes(chosen.size)
    return [
        _row(f"1 of {format_bytes(_SMALL_BYTES)}, paced", small, num_pages, slices=1, page_s=page_s),
        _row(f"1 of {large_name}, paced", large, num_pages, slices=1, page_s=page_s),
        _row(f"{chosen.slices} of {large_name}", full_speed, num_pages, slices=chosen.slices, page_s=page_s),
    ]


def _row(what: str, figures: _Figures, num_pages: int, *, slices: int, page_s: float) -> Row:
    more_s = sorted(pair.more_s for pair in figures.pairs)
    middle_s, quarter = statistics.median(more_s), len(more_s) // 4
    least_s, most_s = more_s[quarter], more_s[-1 - quarter]
    return Row(
        what,
        2 * len(figures.pairs) * num_pages,
        plain_ms=round(figures.middle(lambda turn: turn.plain_s) / slices * 1e3, 4),
        page_us=round(middle_s * 1e6, 1),
        page_us_least=round(least_s * 1e6, 1),
        page_us_most=round(most_s * 1e6, 1),
        share=round(middle_s / page_s, 5),
        share_least=round(least_s / page_s, 5),
        share_most=round(most_s / page_s, 5),
        batches=figures.num_batches,
    )


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
