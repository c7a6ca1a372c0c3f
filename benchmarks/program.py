"""What benchmarks share as programs: flags, tables, sections, the last line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.table import Table

from benchmarks.measure import Amounts, Row
from kvstore.errors import KVStoreError
from kvstore.runtime.sizes import parse_bytes
from kvstore.testing.program import Say, open_console, run_program
from kvstore.testing.servers import CannotInstall
from kvstore.testing.servers.process import ServerFailed

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["Column", "Section", "count", "counts", "names_of", "run_benchmark", "run_rows", "run_sections", "sizes"]

SIZE_BYTES_MIN = 1024

T = TypeVar("T")
Result = TypeVar("Result")
DataRow = TypeVar("DataRow", bound="DataclassInstance")
Column = tuple[str, Callable[[T], str]]
"""Its heading, and how it shows a row."""
Section = Callable[[Amounts, Say], list[Row]]
"""Measures the rows of one section."""


def run_benchmark(
    measure: Callable[[Say], Result], report: Callable[[Result, Console | None], tuple[str, list[str]]], *, quiet: bool
) -> int:
    """`run_program` for a benchmark; returns the exit status."""
    return run_program("bench", measure, report, quiet=quiet)


def run_rows(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    measure: Callable[[argparse.Namespace, Say], list[DataRow]],
    title: str,
    columns: Sequence[Column[DataRow]],
) -> int:
    """`run_benchmark` for figures that are rows: a table of some of their fields, a line with all of them.

    Args:
        parser: Knows the flags; `--json` is added.
        arguments: By default those of the command line.
        measure: Receives the flags, and a function that prints a line of progress.
        title: Of the table.
        columns: Of the table.
    """
    parser.add_argument("--json", action="store_true", help="print the BENCH line alone")
    chosen = parser.parse_args(arguments)

    def report(rows: list[DataRow], console: Console | None) -> tuple[str, list[str]]:
        if console is not None:
            console.print(_table_of(title, columns, rows))
        return "BENCH " + json.dumps([asdict(row) for row in rows]), []

    return run_benchmark(lambda say: measure(chosen, say), report, quiet=chosen.json)


def run_sections(
    program: str,
    description: str,
    arguments: Sequence[str] | None,
    *,
    sections: Mapping[str, Section],
    defaults: Amounts,
    as_named: Callable[[Row], Row] = lambda row: row,
) -> int:
    """`run_benchmark` for sections of rows beside their ceilings. A section that fails does not end the others.

    Args:
        program: As it is called.
        description: For `--help`.
        arguments: By default those of the command line.
        sections: By name what measures its rows.
        defaults: Of the flags.
        as_named: Changes a row before it is shown.
    """
    parser = argparse.ArgumentParser(prog=program, description=description)
    verbs = names_of(("put", "get"))
    for flag, read, default, metavar, text in (
        ("--only", names_of(sections), tuple(sections), "NAMES", f"some of {','.join(sections)}"),
        ("--sizes", sizes, defaults.sizes, "BYTES", "of records, like 1MiB,4MiB"),
        ("--in-flight", counts, defaults.in_flights, "COUNTS", "calls at a time, like 1,4"),
        ("--verbs", verbs, defaults.verbs, "NAMES", "what stores are measured at: put, get or both"),
        ("--total-bytes", parse_bytes, defaults.total_bytes, "BYTES", "moved in one turn"),
        ("--repetitions", count, defaults.repetitions, "COUNT", "turns of each row"),
    ):
        parser.add_argument(flag, type=read, default=default, metavar=metavar, help=text)
    parser.add_argument("--json", action="store_true", help="print the BENCH line alone")
    chosen = parser.parse_args(arguments)
    amounts = Amounts(chosen.sizes, chosen.in_flight, chosen.total_bytes, chosen.repetitions, chosen.verbs)
    failures: list[str] = []

    def measure(say: Say) -> list[Row]:
        rows: list[Row] = []
        for name in chosen.only:
            try:
                rows += map(as_named, sections[name](amounts, say))
            except (CannotInstall, ServerFailed, KVStoreError, OSError, RuntimeError) as error:
                failures.append(f"{name}: {error}")
            except KeyboardInterrupt:
                if rows and not chosen.json:
                    open_console().print(_table_of("the sections that had ended", _ROW_COLUMNS, rows))
                raise
        return rows

    def report(rows: list[Row], console: Console | None) -> tuple[str, list[str]]:
        if console is not None:
            console.print(_table_of("each figure beside a ceiling of the same minute", _ROW_COLUMNS, rows))
        return "BENCH " + json.dumps([row.as_json() for row in rows]), failures

    return run_benchmark(measure, report, quiet=chosen.json)


_ROW_COLUMNS: Sequence[Column[Row]] = (
    ("what", lambda row: row.what),
    ("size", lambda row: _size(row.size_bytes)),
    ("in flight", lambda row: str(row.in_flight)),
    ("GB/s", lambda row: f"{row.gb_s:.2f}"),
    ("ceiling", lambda row: row.ceiling),
    ("its GB/s", lambda row: f"{row.ceiling_gb_s:.2f}"),
    ("ratio", lambda row: f"{row.ratio:.2f}"),
    ("of raw Redis", lambda row: f"{row.raw_ratio:.2f}" if row.raw_ratio is not None else ""),
    ("CPU s/GB", lambda row: f"{row.cpu_s_per_gb:.2f}"),
    ("stored", lambda row: f"{row.stored_ratio:.3f}" if row.stored_ratio is not None else ""),
)


def _table_of(title: str, columns: Sequence[Column[T]], rows: Iterable[T]) -> Table:
    """A table whose first column names the rows; the others are figures."""
    table = Table(title=title)
    for index, (heading, _) in enumerate(columns):
        table.add_column(heading, justify="right" if index else "left")
    for row in rows:
        table.add_row(*(show(row) for _, show in columns))
    return table


def _size(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.2f} MiB" if size_bytes >= 1 << 18 else f"{size_bytes:,} B"


# ---- types of flags


def names_of(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Reads some of `known`, separated by commas."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := sorted(set(names) - set(known)):
            raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}: choose from {', '.join(known)}")
        return names

    return read


def sizes(text: str) -> tuple[int, ...]:
    """Bytes of records, like 1MiB,4MiB."""
    read = tuple(parse_bytes(part) for part in text.split(","))
    if min(read) < SIZE_BYTES_MIN:
        raise argparse.ArgumentTypeError(f"sizes are {SIZE_BYTES_MIN} bytes or more")
    return read


def counts(text: str) -> tuple[int, ...]:
    """Counts, like 1,4."""
    return tuple(count(part) for part in text.split(","))


def count(text: str) -> int:
    """One count."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("counts are one or more")
    return number
