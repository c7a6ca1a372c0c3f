"""`python -m benchmarks.retention`: saves into a bounded cold tier beside the same without a bound. See README.md."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

from redis import Redis
from rich.console import Console
from rich.table import Table

from benchmarks.arguments import count, names_of
from benchmarks.node import temporary_folder
from benchmarks.shell import run_benchmark
from kvstore.api import Ack, SaveOutcome
from kvstore.catalog.entry import Level
from kvstore.compose import open_catalog, open_store
from kvstore.runtime.deadline import Deadline
from kvstore.settings import Settings, load_settings, parse_bytes
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import HYBRID, Prompt
from kvstore.testing.servers import ceph_rgw, redis_server

__all__ = ["main"]

_AT_ONCE = 8
_PAYLOAD_BYTES = 256 << 10
_PROMPT_TOKENS = 512
_MEMORY_BYTES = 256 << 20
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Place:
    """Where records go.

    Attributes:
        what: `directory`, or `s3`, which has a Redis beside it.
        hot: As the setting.
        cold: As the setting, with a place for the number of the run.
        bound: The setting that bounds it.
        no_bound: Its value without a bound; a directory always has one.
        clear: Make what runs share as it was at first: the catalog of one tells of what the next one does not have.
    """

    what: str
    hot: str
    cold: str
    bound: str
    no_bound: int | None
    clear: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Row:
    """What one place did; rates are medians over the repetitions.

    Attributes:
        what: The place.
        budget_bytes: What it may hold.
        written_bytes: Bytes of the records of one run.
        gb_s: Saved, acknowledged by the cold tier, with the bound, in 10^9 bytes a second.
        unbounded_gb_s: The same saves without it, in turn with these.
        ratio: Of the two.
        usage: The most that was held at any look, over the budget.
        refused: Saves that were not stored.
    """

    what: str
    budget_bytes: int
    written_bytes: int
    gb_s: float
    unbounded_gb_s: float
    ratio: float
    usage: float
    refused: int


@dataclass(frozen=True, slots=True)
class _Run:
    seconds: float
    num_bytes: int
    peak_bytes: int
    refused: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; returns the exit status: 0, 1 after a failure, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.retention", description=__doc__)
    parser.add_argument("--only", type=names_of(tuple(_PLACES)), default=tuple(_PLACES), metavar="NAME,...")
    parser.add_argument("--budget", type=parse_bytes, default=64 << 20, metavar="BYTES", help="what may be held")
    parser.add_argument("--times", type=count, default=10, help="so many budgets are written in each run")
    parser.add_argument("--repetitions", type=count, default=3, help="runs with and without the bound")
    parser.add_argument("--payload", type=parse_bytes, default=_PAYLOAD_BYTES, metavar="BYTES", help="of a record")
    parser.add_argument("--json", action="store_true", help="print the BENCH line alone")
    chosen = parser.parse_args(arguments)

    def measure(say: Callable[[str], None]) -> list[Row]:
        rows = []
        for what in chosen.only:
            say(f"{what}: starting what it needs")
            with temporary_folder() as folder, _PLACES[what](folder) as place:
                rows.append(_compare(place, chosen, say))
        return rows

    def report(rows: list[Row], console: Console | None) -> tuple[str, list[str]]:
        if console is not None:
            console.print(_table(rows))
        return "BENCH " + json.dumps([asdict(row) for row in rows]), []

    return run_benchmark(measure, report, quiet=chosen.json)


@contextmanager
def _directory(folder: Path) -> Iterator[Place]:
    yield Place("directory", "memory:", f"file://{folder}/{{}}", "disk_bytes", 1 << 50, lambda: None)


@contextmanager
def _s3(folder: Path) -> Iterator[Place]:
    with redis_server() as redis, ceph_rgw() as server:
        server.create_bucket("retention")
        keys = {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key}
        with patch.dict("os.environ", keys):
            cold = f"s3://retention/{{}}?endpoint_url={server.endpoint_url}&region={server.region}"
            with Redis(redis.host, redis.port) as client:
                yield Place("s3", redis.url, cold, "cold_bytes", None, client.flushall)


_PLACES = {"directory": _directory, "s3": _s3}


def _compare(place: Place, chosen: argparse.Namespace, say: Callable[[str], None]) -> Row:
    runs: dict[bool, list[_Run]] = {False: [], True: []}
    for number in range(chosen.repetitions):
        for is_bounded in (number % 2 == 0, number % 2 == 1):  # in turn, so that a busy minute hits both
            name = f"{'bounded' if is_bounded else 'unbounded'}-{number}"
            bound = {place.bound: chosen.budget if is_bounded else place.no_bound}
            flags = {"hot": place.hot, "cold": place.cold.format(name), "memory_bytes": _MEMORY_BYTES, **bound}
            place.clear()
            run = asyncio.run(_run(load_settings(flags), name, chosen))
            say(f"{place.what} {name}: {run.num_bytes / run.seconds / 1e6:.0f} MB/s, at most {run.peak_bytes:,} bytes")
            runs[is_bounded].append(run)
    bounded, unbounded = ([run.num_bytes / run.seconds / 1e9 for run in runs[which]] for which in (True, False))
    ratio = statistics.median(bounded) / statistics.median(unbounded)
    return Row(
        place.what,
        chosen.budget,
        runs[True][0].num_bytes,
        round(statistics.median(bounded), 4),
        round(statistics.median(unbounded), 4),
        round(ratio, 3),
        round(max(run.peak_bytes for run in runs[True]) / chosen.budget, 4),
        sum(run.refused for run in runs[True]),
    )


async def _run(settings: Settings, name: str, chosen: argparse.Namespace) -> _Run:
    """Look prompts up and save them, as engines do, each record acknowledged by the cold tier."""
    first = Prompt(HYBRID, name, _PROMPT_TOKENS, model=name, payload_bytes=chosen.payload)
    prompt_bytes = sum(record.num_bytes for record in first.records())
    num_prompts = -(-chosen.times * chosen.budget // prompt_bytes)
    refused, peak_bytes = 0, 0
    async with open_store(settings) as store:
        await store.open_namespace(first.description, deadline=_soon())
        async with open_catalog(settings) as catalog:

            async def watch() -> None:
                nonlocal peak_bytes
                while True:
                    totals = await catalog.totals(deadline=_soon())
                    told = totals[first.namespace].levels[Level.COLD].num_bytes if first.namespace in totals else 0
                    peak_bytes = max(peak_bytes, told, await _medium_bytes(store))
                    await asyncio.sleep(_LOOK_S)

            watching = asyncio.ensure_future(watch())
            seconds = 0.0
            for number in range(num_prompts):
                prompt = Prompt(HYBRID, f"{name} {number}", _PROMPT_TOKENS, model=name, payload_bytes=chosen.payload)
                records = prompt.records()  # made outside of what is measured
                started_s = time.perf_counter()
                await store.lookup(prompt.query(), deadline=_soon())
                for start in range(0, len(records), _AT_ONCE):
                    part = records[start : start + _AT_ONCE]
                    saves = (store.save(record, ack=Ack.COLD, deadline=_soon()) for record in part)
                    outcomes = await asyncio.gather(*saves)
                    refused += sum(outcome not in (SaveOutcome.STORED, SaveOutcome.EXISTS) for outcome in outcomes)
                seconds += time.perf_counter() - started_s
            watching.cancel()
    return _Run(seconds, num_prompts * prompt_bytes, peak_bytes, refused)


async def _medium_bytes(store: TieredStore) -> int:
    """What a directory says it holds, blocks and inodes counted; S3 does not know."""
    tiers = (await store.status(deadline=_soon()))["tiers"]
    assert isinstance(tiers, dict)
    return int(tiers.get("filesystem", {}).get("used_bytes") or 0)


def _soon() -> Deadline:
    return Deadline.after(60.0)


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title="saves into a bounded tier, beside the same saves without a bound")
    for name in ("what", "budget", "written", "MB/s", "unbounded", "ratio", "most held / budget", "refused"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for row in rows:
        table.add_row(
            row.what,
            f"{row.budget_bytes / 2**20:.0f} MiB",
            f"{row.written_bytes / 2**20:.0f} MiB",
            f"{row.gb_s * 1e3:.0f}",
            f"{row.unbounded_gb_s * 1e3:.0f}",
            f"{row.ratio:.2f}",
            f"{row.usage:.3f}",
            str(row.refused),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
