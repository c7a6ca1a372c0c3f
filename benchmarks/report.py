"""What the benchmark tells: a table for people, one line for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from rich.table import Table

from benchmarks.measure import Row

__all__ = ["Column", "as_line", "as_table", "table_of"]

T = TypeVar("T")
Column = tuple[str, Callable[[T], str]]
"""Its heading, and how it shows a row."""


def table_of(title: str, columns: Sequence[Column[T]], rows: Iterable[T]) -> Table:
    """A table whose first column names the rows; the others are figures."""
    table = Table(title=title)
    for index, (heading, _) in enumerate(columns):
        table.add_column(heading, justify="right" if index else "left")
    for row in rows:
        table.add_row(*(show(row) for _, show in columns))
    return table


def as_line(rows: Sequence[Row]) -> str:
    """The last line."""
    return "BENCH " + json.dumps([row.as_json() for row in rows])


def as_table(rows: Sequence[Row]) -> Table:
    table = Table(title="each figure beside a ceiling of the same minute")
    for name in ("what", "size", "in flight", "GB/s", "ceiling", "its GB/s", "ratio", "of raw GET", "CPU s/GB"):
        table.add_column(name, justify="left" if name in ("what", "ceiling") else "right")
    for row in rows:
        table.add_row(
            row.what,
            _size(row.size_bytes),
            str(row.in_flight),
            f"{row.gb_s:.2f}",
            row.ceiling,
            f"{row.ceiling_gb_s:.2f}",
            f"{row.ratio:.2f}",
            f"{row.raw_get_ratio:.2f}" if row.raw_get_ratio is not None else "",
            f"{row.cpu_s_per_gb:.2f}",
        )
    return table


def _size(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.2f} MiB" if size_bytes >= 1 << 18 else f"{size_bytes:,} B"
