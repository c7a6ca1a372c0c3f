"""`python -m benchmarks.quick`: codec, service, Redis and S3, each beside a ceiling. See README.md."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.arguments import count, counts, names_of, sizes
from benchmarks.codec import codec_rows, num_codec_rows
from benchmarks.measure import Listener, Plan, Row
from benchmarks.report import as_line, as_table
from benchmarks.sections import num_redis_rows, num_s3_rows, num_service_rows, redis_rows, s3_rows, service_rows
from kvstore.errors import KVStoreError
from kvstore.runtime.sizes import parse_bytes
from kvstore.testing.servers import CannotInstall
from kvstore.testing.servers.process import ServerFailed

__all__ = ["main"]

Section = tuple[Callable[[Plan, Listener], list[Row]], Callable[[Plan], int]]
SECTIONS: dict[str, Section] = {
    "codec": (codec_rows, num_codec_rows),
    "service": (service_rows, num_service_rows),
    "redis": (redis_rows, num_redis_rows),
    "s3": (s3_rows, num_s3_rows),
}
"""What measures a section's rows, and how many there will be."""

INTERRUPTED = 130
LOG_COLUMNS = 150


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; returns the exit status: 0, 1 where a section failed, 130 when interrupted."""
    chosen = _parser().parse_args(arguments)
    plan = Plan(chosen.sizes, chosen.in_flight, chosen.total_bytes, chosen.repetitions)
    errors = Console(stderr=True)
    previous = signal.signal(signal.SIGTERM, _as_interrupt)  # whatever ends us, our blocks end what they started
    try:
        rows, failures = _measure(chosen.only, plan, errors, quiet=chosen.json)
    except KeyboardInterrupt:
        errors.print("interrupted; everything that was started has ended")
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, previous)
    if not chosen.json:
        console = Console()
        if not console.is_terminal:  # a log file: nothing to wrap for
            console.width = LOG_COLUMNS
        console.print(as_table(rows))
    for failure in failures:
        errors.print(f"bench: {failure}", markup=False, highlight=False)
    print(as_line(rows), flush=True)
    return 1 if failures else 0


def _measure(names: Sequence[str], plan: Plan, console: Console, *, quiet: bool) -> tuple[list[Row], list[str]]:
    """Rows of all sections, and what went wrong in those that have none."""
    rows: list[Row] = []
    failures: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet) as progress:
        bar = _Bar(progress, sum(SECTIONS[name][1](plan) for name in names))
        for name in names:
            try:
                rows += SECTIONS[name][0](plan, bar)
            except (CannotInstall, ServerFailed, KVStoreError, OSError, RuntimeError) as error:
                failures.append(f"{name}: {error}")
    return rows, failures


class _Bar:
    """A `Listener`."""

    def __init__(self, progress: Progress, num_rows: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=num_rows)
        self._num_begun = 0

    def preparing(self, text: str) -> None:
        self._progress.update(self._task, description=text, completed=self._num_begun)

    def measuring(self, text: str) -> None:
        self._progress.update(self._task, description=text, completed=self._num_begun)
        self._num_begun += 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quick",
        description="Measure the store, each figure beside a ceiling of this machine.",
    )
    parser.add_argument(
        "--only",
        type=names_of(SECTIONS),
        default=tuple(SECTIONS),
        metavar="NAMES",
        help=f"some of {','.join(SECTIONS)}",
    )
    parser.add_argument("--json", action="store_true", help="print the BENCH line alone")
    parser.add_argument(
        "--sizes", type=sizes, default=(1 << 20, 4 << 20), metavar="BYTES", help="of records, like 1MiB,4MiB"
    )
    parser.add_argument("--in-flight", type=counts, default=(1, 4), metavar="COUNTS", help="calls at a time, like 1,4")
    parser.add_argument("--total-bytes", type=parse_bytes, default=64 << 20, metavar="BYTES", help="moved in one turn")
    parser.add_argument("--repetitions", type=count, default=5, metavar="COUNT", help="turns of each row")
    return parser


def _as_interrupt(number: int, frame: FrameType | None) -> None:
    signal.raise_signal(signal.SIGINT)  # the event loop hears that one as a cancellation, in an orderly way


if __name__ == "__main__":
    sys.exit(main())
