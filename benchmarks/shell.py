"""What benchmarks share of being a program: progress, interrupts, failures, a last line."""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console

from benchmarks.report import Column, table_of
from kvstore.errors import KVStoreError
from kvstore.testing.engine import EngineFailed
from kvstore.testing.servers import CannotInstall
from kvstore.testing.servers.process import ServerFailed

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["run_benchmark", "run_rows"]

_INTERRUPTED = 130
_LOG_COLUMNS = 150

Result = TypeVar("Result")
Row = TypeVar("Row", bound="DataclassInstance")


def run_rows(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    measure: Callable[[argparse.Namespace, Callable[[str], None]], list[Row]],
    title: str,
    columns: Sequence[Column[Row]],
) -> int:
    """`run_benchmark` for figures that are rows: a table of some of their fields, a line with all of them.

    Args:
        parser: Knows the flags; `--json` is added.
        arguments: By default those of the command line.
        measure: Told the flags, and how to say how far it is.
        title: Of the table.
        columns: Of the table.
    """
    parser.add_argument("--json", action="store_true", help="print the BENCH line alone")
    chosen = parser.parse_args(arguments)

    def report(rows: list[Row], console: Console | None) -> tuple[str, list[str]]:
        if console is not None:
            console.print(table_of(title, columns, rows))
        return "BENCH " + json.dumps([asdict(row) for row in rows]), []

    return run_benchmark(lambda say: measure(chosen, say), report, quiet=chosen.json)


def run_benchmark(
    measure: Callable[[Callable[[str], None]], Result],
    report: Callable[[Result, Console | None], tuple[str, list[str]]],
    *,
    quiet: bool,
) -> int:
    """Measure, then show a table and print the line; returns the exit status: 0, 1 after a failure, 130 interrupted.

    Args:
        measure: Told how to say how far it is.
        report: Shows a table on the console, if there is one; returns the last line and what is wrong.
        quiet: Print the line alone.
    """
    errors, out = Console(stderr=True), Console()
    for console in (errors, out):
        if not console.is_terminal:  # a log file: nothing to wrap for
            console.width = _LOG_COLUMNS
    started_s = time.monotonic()

    def say(text: str) -> None:
        if not quiet:
            errors.print(f"[dim]{time.monotonic() - started_s:6.1f} s[/dim]  {text}", highlight=False)

    previous = [(number, signal.signal(number, _interrupt)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        result = measure(say)
    except KeyboardInterrupt:
        errors.print("interrupted; everything that was started has ended")
        return _INTERRUPTED
    except (CannotInstall, EngineFailed, ServerFailed, KVStoreError, RuntimeError, TimeoutError) as error:
        errors.print(f"bench: {error}", markup=False, highlight=False)
        return 1
    finally:
        for number, handler in previous:
            signal.signal(number, handler)
    line, failures = report(result, None if quiet else out)
    for failure in failures:
        errors.print(f"bench: {failure}", markup=False, highlight=False)
    print(line, flush=True)
    return 1 if failures else 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
