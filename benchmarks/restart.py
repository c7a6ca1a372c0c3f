"""`python -m benchmarks.restart`: how long a directory with many records takes to open. See README.md."""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.program import count, run_benchmark
from kvstore.format.names import format_name
from kvstore.runtime.deadline import Deadline
from kvstore.testing.records import make_key, make_record
from kvstore.tiers.filesystem import FilesystemTier

__all__ = ["main"]

_BUDGET_BYTES = 1 << 60
_PAYLOAD_BYTES = 8


@dataclass(frozen=True, slots=True)
class Opening:
    """One way to open the directory.

    Attributes:
        what: Which.
        records: Records that are there.
        seconds: Until the tier could be used.
        max_rss_bytes: The most memory this process ever had.
    """

    what: str
    records: int
    seconds: float
    max_rss_bytes: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; returns the exit status: 0, 1 after a failure, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.restart", description=__doc__)
    parser.add_argument(
        "--records", type=count, default=1_000_000, metavar="COUNT", help="files to make and find again"
    )
    parser.add_argument("--folder", type=Path, default=None, help="where to make them; by default a temporary one")
    parser.add_argument("--json", action="store_true", help="print the BENCH line alone")
    chosen = parser.parse_args(arguments)

    def measure(say: Callable[[str], None]) -> list[Opening]:
        say(f"making {chosen.records:,} files")
        _fill(root, chosen.records)
        return asyncio.run(_open_all(root, chosen.records, say))

    def report(openings: list[Opening], console: Console | None) -> tuple[str, list[str]]:
        if console is not None:
            console.print(_table(openings))
        return "BENCH " + json.dumps([asdict(opening) for opening in openings]), []

    with tempfile.TemporaryDirectory(dir=chosen.folder, prefix="kvstore-restart-") as folder:
        root = Path(folder) / "records"
        return run_benchmark(measure, report, quiet=chosen.json)  # the report comes before a million files are removed


def _fill(root: Path, num_records: int) -> None:
    """Record files as an earlier owner left them, without its index."""
    for number in range(num_records):
        path = root / format_name(make_key(number))
        if number < 1000 or not path.parent.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(make_record(number, _PAYLOAD_BYTES).data)


async def _open_all(root: Path, num_records: int, say: Callable[[str], None]) -> list[Opening]:
    openings = []
    for what in ("without an index", "after a clean end", "after a kill"):
        say(f"opening it {what}")
        started_s = time.perf_counter()
        tier = await FilesystemTier.open(root, budget_bytes=_BUDGET_BYTES)
        seconds = time.perf_counter() - started_s
        usage = await tier.usage(deadline=Deadline.after(10))
        if usage.num_records != num_records:
            raise RuntimeError(f"{usage.num_records} records were found of {num_records}")
        rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        say(f"{seconds:.2f} s")
        openings.append(Opening(what, num_records, round(seconds, 3), rss_bytes))
        if what == "after a clean end":  # as a kill leaves it: the lock is free, the log was not ended
            tier._files.close()
        else:
            await tier.aclose()
    return openings


def _table(openings: Sequence[Opening]) -> Table:
    table = Table("opened", "records", "seconds", "us a record", title="a directory and its owner's start")
    for opening in openings:
        each_us = opening.seconds / opening.records * 1e6
        table.add_row(opening.what, f"{opening.records:,}", f"{opening.seconds:.2f}", f"{each_us:.1f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
