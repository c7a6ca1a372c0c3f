"""`python -m benchmarks.rounds`: how long a round of retention stops the event loop. See README.md."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.program import Column, counts, names_of, run_rows
from kvstore.catalog.base import Addition, Step
from kvstore.catalog.changes import packed_with
from kvstore.catalog.entry import EntryShape, EntryTable, Level
from kvstore.eviction.candidates import POLICIES, Candidate
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.model.kinds import FullAttention
from kvstore.model.layout import GroupLayout, Layout
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.store.recorder import Recorder
from kvstore.store.retention.owner import RetentionOwner
from kvstore.store.retention.policy_choice import PolicyChoice
from kvstore.store.retention.rules import RetentionRules
from kvstore.testing.dict_catalog import CatalogBooks, DictCatalog
from kvstore.testing.records import NAMESPACE
from kvstore.tiers.memory import MemoryTier

__all__ = ["main"]

_LAYOUT = Layout(64, tuple(GroupLayout(FullAttention(), 8) for _ in range(4)))
_PROMPT_BOUNDARIES = 64
_RECORD_BYTES = 1 << 20
_SPREAD_S = 3600
_TICK_S = 0.001


@dataclass(frozen=True, slots=True)
class Row:
    """One round.

    Attributes:
        policy: Who ranked.
        entries: Boundaries in the catalog.
        left: Boundaries that left.
        seconds: The whole round.
        stop_ms: The longest time in which the loop did nothing else.
        stop_cpu_ms: The longest that this process computed without a turn of the loop: without what others on the
            machine took away from it, or from the loop's thread alone.
    """

    policy: str
    entries: int
    left: int
    seconds: float
    stop_ms: float
    stop_cpu_ms: float


_TITLE = "a round of retention, and the longest time in which the event loop did nothing else"
_COLUMNS: tuple[Column[Row], ...] = (
    ("policy", lambda row: row.policy),
    ("entries", lambda row: f"{row.entries:,}"),
    ("left", lambda row: f"{row.left:,}"),
    ("s", lambda row: f"{row.seconds:.1f}"),
    ("longest stop, ms", lambda row: f"{row.stop_ms:.0f}"),
    ("of it computing, ms", lambda row: f"{row.stop_cpu_ms:.0f}"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; returns the exit status: 0, 1 after a failure, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rounds", description=__doc__)
    parser.add_argument("--entries", type=counts, default=(200_000, 1_000_000), metavar="COUNT,...")
    parser.add_argument("--policy", type=names_of(tuple(POLICIES)), default=tuple(POLICIES), metavar="NAME,...")
    return run_rows(parser, arguments, _measure, _TITLE, _COLUMNS)


def _measure(chosen: argparse.Namespace, say: Callable[[str], None]) -> list[Row]:
    rows = []
    for num_entries in chosen.entries:
        for policy in chosen.policy:
            say(f"{policy}: {num_entries:,} entries")
            rows.append(asyncio.run(_round(num_entries, policy)))
    return rows


class _Catalog(DictCatalog):
    """Answers as a server does: many entries at a time, and others have their turn before each answer."""

    def __init__(self, books: CatalogBooks) -> None:
        super().__init__(books)
        self._listed = list(books.entries.items())

    async def step(self, namespace: NamespaceId, cursor: str, *, count: int, deadline: Deadline) -> Step:
        await asyncio.sleep(0)
        start = int(cursor or 0)
        part = self._listed[start : start + count]
        table = EntryTable.of(self._shape(namespace), [data for _, data in part])
        after = str(start + count) if start + count < len(self._listed) else None
        return Step([prefix for (_, prefix), _ in part], table, after)


def _fill(books: CatalogBooks, num_entries: int) -> None:
    """Entries of whole prompts, used in the hour that ended a minute ago."""
    shape, now_s = EntryShape.of(_LAYOUT), SYSTEM_CLOCK.wall_ms() // 1000
    parent: PrefixHash | None = None
    places = [(group, slice_) for group in range(4) for slice_ in range(8)]
    for number in range(num_entries):
        prefix = PrefixHash(hashlib.sha256(b"%d" % number).digest())
        page = number % _PROMPT_BOUNDARIES
        parent = parent if page else None
        keys = (RecordKey(NAMESPACE, prefix, *place) for place in places[: 1 if number else 32])
        additions = [Addition(key, Level.COLD, _RECORD_BYTES, 64 * (page + 1), parent) for key in keys]
        used_s = now_s - 60 - number // _PROMPT_BOUNDARIES * 7919 % _SPREAD_S
        if number == 0:
            whole = packed_with(shape, additions, used_s)
        # 32 additions for each entry would take minutes: the sums and bits behind the head are those of the first
        head = packed_with(shape, additions[:1], used_s)[:56]
        books.entries[NAMESPACE, prefix] = head + whole[56:]
        parent = prefix
    books.count(NAMESPACE, -1, num_entries)
    books.count(NAMESPACE, Level.COLD, num_entries, 32 * num_entries, 32 * num_entries * _RECORD_BYTES)
    books.complete = True


class _Nothing(MemoryTier):
    """Holds nothing, so that deleting costs nothing."""

    async def delete_all(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        await asyncio.sleep(0)


def _queued_s() -> float:
    """How long this thread could have run so far, had a processor been free for it."""
    return int(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()[1]) / 1e9


async def _round(num_entries: int, policy: str) -> Row:
    books = CatalogBooks()
    _fill(books, num_entries)
    catalog = _Catalog(books)
    tier = _Nothing(1 << 20)
    deadline = Deadline.after(600.0)
    await catalog.register(NAMESPACE, _LAYOUT, "", deadline=deadline)
    instruments = Instruments()
    retention = RetentionOwner(
        tier,
        Recorder(catalog, instruments),
        catalog.ownership(60.0),
        RetentionRules(budget_bytes=32 * num_entries * _RECORD_BYTES, start_share=0.97, stop_share=0.92),
        choice=PolicyChoice([Candidate(policy)]),
        instruments=instruments,
    )
    stop_s = stop_cpu_s = 0.0

    async def tick() -> None:
        nonlocal stop_s, stop_cpu_s
        while True:
            before_s, before_cpu_s, before_queued_s = time.perf_counter(), time.process_time(), _queued_s()
            await asyncio.sleep(_TICK_S)
            took_s = time.perf_counter() - before_s - _TICK_S
            stop_s = max(stop_s, took_s)
            own_s = took_s - (_queued_s() - before_queued_s)
            stop_cpu_s = max(stop_cpu_s, min(own_s, time.process_time() - before_cpu_s))

    ticking = asyncio.ensure_future(tick())
    started_s = time.perf_counter()
    left_bytes = await retention.round()
    seconds = time.perf_counter() - started_s
    await asyncio.sleep(2 * _TICK_S)
    ticking.cancel()
    await retention.aclose()
    await tier.aclose()
    left = left_bytes // (32 * _RECORD_BYTES)
    return Row(policy, num_entries, left, round(seconds, 2), round(stop_s * 1e3, 1), round(stop_cpu_s * 1e3, 1))


if __name__ == "__main__":
    sys.exit(main())
