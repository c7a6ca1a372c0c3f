"""`python -m benchmarks.retention`: saves into a bounded cold tier beside the same without a bound. See README.md."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from redis import Redis

from benchmarks.node import cpu_s_with_children, temporary_folder
from benchmarks.program import Column, count, names_of, run_rows
from benchmarks.raw_places import RawDirectory, RawPlace, RawS3, raw_seconds
from kvstore.api import Ack, SaveOutcome
from kvstore.catalog.entry import Level
from kvstore.compose import open_catalog, open_store
from kvstore.format.names import format_name
from kvstore.runtime.sizes import parse_bytes
from kvstore.settings import Settings, load_settings
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import HYBRID, Prompt
from kvstore.testing.servers import ceph_rgw, redis_server
from kvstore.testing.waiting import soon

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
        raw: The same place without a store, names beginning with the number of the run.
        clear: Make all as it was at first, given the number of the run that ended and the names of all it wrote.
    """

    what: str
    hot: str
    cold: str
    bound: str
    no_bound: int | None
    raw: RawPlace
    clear: Callable[[str, Sequence[str]], None]


@dataclass(frozen=True, slots=True)
class Row:
    """What one place did; rates are medians over the repetitions, in 10^9 bytes a second.

    Attributes:
        what: The place.
        budget_bytes: What it may hold.
        written_bytes: Bytes of the records of one run.
        gb_s: Saved, acknowledged by the cold tier, with the bound.
        unbounded_gb_s: The same saves without it, in turn with these.
        ratio: Of the two.
        raw_gb_s: A plain loop puts objects of this size and removes the oldest beside it.
        raw_unbounded_gb_s: Only put.
        ceiling_ratio: The ratio of the two: what removing costs.
        cpu_s_per_gb: Seconds of processors with the bound, of this process and of the servers.
        unbounded_cpu_s_per_gb: Without it; the steadier figures on a busy machine.
        usage: The most that was held at any look, over the budget.
        refused: Saves that were not stored.
    """

    what: str
    budget_bytes: int
    written_bytes: int
    gb_s: float
    unbounded_gb_s: float
    ratio: float
    raw_gb_s: float
    raw_unbounded_gb_s: float
    ceiling_ratio: float
    cpu_s_per_gb: float
    unbounded_cpu_s_per_gb: float
    usage: float
    refused: int


@dataclass(frozen=True, slots=True)
class _Run:
    seconds: float
    cpu_s: float
    num_bytes: int
    peak_bytes: int = 0
    refused: int = 0


_TITLE = "saves into a bounded tier, beside the same saves without a bound"
_COLUMNS: tuple[Column[Row], ...] = (
    ("what", lambda row: row.what),
    ("budget", lambda row: f"{row.budget_bytes / 2**20:.0f} MiB"),
    ("written", lambda row: f"{row.written_bytes / 2**20:.0f} MiB"),
    ("MB/s", lambda row: f"{row.gb_s * 1e3:.0f}"),
    ("unbounded", lambda row: f"{row.unbounded_gb_s * 1e3:.0f}"),
    ("ratio", lambda row: f"{row.ratio:.2f}"),
    ("raw MB/s", lambda row: f"{row.raw_gb_s * 1e3:.0f}"),
    ("unbounded", lambda row: f"{row.raw_unbounded_gb_s * 1e3:.0f}"),
    ("ceiling", lambda row: f"{row.ceiling_ratio:.2f}"),
    ("CPU s/GB", lambda row: f"{row.cpu_s_per_gb:.1f}"),
    ("unbounded", lambda row: f"{row.unbounded_cpu_s_per_gb:.1f}"),
    ("most held / budget", lambda row: f"{row.usage:.3f}"),
    ("refused", lambda row: str(row.refused)),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; returns the exit status: 0, 1 after a failure, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.retention", description=__doc__)
    parser.add_argument("--only", type=names_of(tuple(_PLACES)), default=tuple(_PLACES), metavar="NAME,...")
    parser.add_argument("--budget", type=parse_bytes, default=64 << 20, metavar="BYTES", help="what may be held")
    parser.add_argument("--times", type=count, default=10, help="budgets that are written in each run")
    parser.add_argument("--repetitions", type=count, default=3, help="runs with and without the bound")
    parser.add_argument("--payload", type=parse_bytes, default=_PAYLOAD_BYTES, metavar="BYTES", help="of a record")
    parser.add_argument("--tokens", type=count, default=_PROMPT_TOKENS, help="of a prompt")
    return run_rows(parser, arguments, _measure, _TITLE, _COLUMNS)


def _measure(chosen: argparse.Namespace, say: Callable[[str], None]) -> list[Row]:
    rows = []
    for what in chosen.only:
        say(f"{what}: starting what it needs")
        with temporary_folder() as folder, _PLACES[what](folder) as place:
            rows.append(_compare(place, chosen, say))
    return rows


@contextmanager
def _directory(folder: Path) -> Iterator[Place]:
    def clear(name: str, _: Sequence[str]) -> None:
        shutil.rmtree(folder / name)

    yield Place("directory", "memory:", f"file://{folder}/{{}}", "disk_bytes", 1 << 50, RawDirectory(folder), clear)


@contextmanager
def _s3(folder: Path) -> Iterator[Place]:
    with redis_server() as redis, ceph_rgw() as server:
        server.create_bucket("retention")
        keys = {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key}
        with patch.dict("os.environ", keys), Redis(redis.host, redis.port) as client:
            cold = f"s3://retention/{{}}?endpoint_url={server.endpoint_url}&region={server.region}"
            raw = RawS3(server, "retention")

            def clear(_: str, names: Sequence[str]) -> None:
                client.flushall()  # the catalog of one run has entries that the next one does not have
                raw.remove(names)

            yield Place("s3", redis.url, cold, "cold_bytes", None, raw, clear)


_PLACES = {"directory": _directory, "s3": _s3}


def _compare(place: Place, chosen: argparse.Namespace, say: Callable[[str], None]) -> Row:
    runs: dict[tuple[bool, bool], list[_Run]] = {}
    for number in range(chosen.repetitions):
        kinds = [(is_raw, is_bounded) for is_raw in (False, True) for is_bounded in (True, False)]
        for is_raw, is_bounded in kinds[:: 1 - number % 2 * 2]:  # in turn, so that a busy minute hits all
            name = f"{'raw-' * is_raw}{'bounded' if is_bounded else 'unbounded'}-{number}"
            prompts = _prompts(name, chosen)
            names = [f"{name}/{format_name(key)}" for prompt in prompts for key in prompt.record_keys()]
            if is_raw:
                run = _run_raw(place.raw, names, prompts[0], chosen.budget if is_bounded else None)
            else:
                bound = {place.bound: chosen.budget if is_bounded else place.no_bound}
                flags = {"hot": place.hot, "cold": place.cold.format(name), "memory_bytes": _MEMORY_BYTES, **bound}
                run = asyncio.run(_run(load_settings(flags), prompts))
            place.clear(name, names)
            say(f"{place.what} {name}: {run.num_bytes / run.seconds / 1e6:.0f} MB/s, at most {run.peak_bytes:,} bytes")
            runs.setdefault((is_raw, is_bounded), []).append(run)
    rates = {which: statistics.median(run.num_bytes / run.seconds / 1e9 for run in runs[which]) for which in runs}
    cpu_s = {which: statistics.median(run.cpu_s / run.num_bytes * 1e9 for run in runs[which]) for which in runs}
    bounded = runs[False, True]
    return Row(
        place.what,
        chosen.budget,
        bounded[0].num_bytes,
        round(rates[False, True], 4),
        round(rates[False, False], 4),
        round(rates[False, True] / rates[False, False], 3),
        round(rates[True, True], 4),
        round(rates[True, False], 4),
        round(rates[True, True] / rates[True, False], 3),
        round(cpu_s[False, True], 2),
        round(cpu_s[False, False], 2),
        round(max(run.peak_bytes for run in bounded) / chosen.budget, 4),
        sum(run.refused for run in bounded),
    )


def _prompts(name: str, chosen: argparse.Namespace) -> list[Prompt]:
    """As many as make the bytes of a run."""

    def make(number: int) -> Prompt:
        return Prompt(HYBRID, f"{name} {number}", chosen.tokens, model=name, payload_bytes=chosen.payload)

    prompt_bytes = sum(record.num_bytes for record in make(0).records())
    return [make(number) for number in range(-(-chosen.times * chosen.budget // prompt_bytes))]


def _run_raw(place: RawPlace, names: Sequence[str], prompt: Prompt, budget_bytes: int | None) -> _Run:
    body = bytes(prompt.records()[0].data)
    num_held = None if budget_bytes is None else budget_bytes // len(body)
    before_cpu_s = cpu_s_with_children()
    seconds = raw_seconds(place, names, body, num_held=num_held, at_once=_AT_ONCE)
    return _Run(seconds, cpu_s_with_children() - before_cpu_s, len(names) * len(body))


async def _run(settings: Settings, prompts: Sequence[Prompt]) -> _Run:
    """Look prompts up and save them, as engines do, each record acknowledged by the cold tier."""
    namespace = prompts[0].namespace
    num_bytes = refused = peak_bytes = 0
    async with open_store(settings) as store:
        await store.open_namespace(prompts[0].description, deadline=soon())
        async with open_catalog(settings) as catalog:

            async def watch() -> None:
                nonlocal peak_bytes
                while True:
                    totals = await catalog.totals(deadline=soon())
                    told = totals[namespace].levels[Level.COLD].num_bytes if namespace in totals else 0
                    peak_bytes = max(peak_bytes, told, await _medium_bytes(store))
                    await asyncio.sleep(_LOOK_S)

            watching = asyncio.ensure_future(watch())
            seconds = cpu_s = 0.0
            for prompt in prompts:
                records = prompt.records()  # made outside of what is measured
                before_cpu_s = cpu_s_with_children()
                num_bytes += sum(record.num_bytes for record in records)
                started_s = time.perf_counter()
                await store.lookup(prompt.query(), deadline=soon())
                for start in range(0, len(records), _AT_ONCE):
                    part = records[start : start + _AT_ONCE]
                    saves = (store.save(record, ack=Ack.COLD, deadline=soon()) for record in part)
                    outcomes = await asyncio.gather(*saves)
                    refused += sum(outcome not in (SaveOutcome.STORED, SaveOutcome.EXISTS) for outcome in outcomes)
                seconds += time.perf_counter() - started_s
                cpu_s += cpu_s_with_children() - before_cpu_s
            watching.cancel()
    return _Run(seconds, cpu_s, num_bytes, peak_bytes, refused)


async def _medium_bytes(store: TieredStore) -> int:
    """What a directory says it holds, blocks and inodes counted; S3 does not know."""
    tiers = (await store.status(deadline=soon()))["tiers"]
    assert isinstance(tiers, dict)
    return int(tiers.get("filesystem", {}).get("used_bytes") or 0)


if __name__ == "__main__":
    sys.exit(main())
