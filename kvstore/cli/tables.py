"""Tables for people: as wide as the terminal, or, without one, as wide as they need."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["console_of", "print_table", "table_of"]

_WIDTH_MIN = 160


def table_of(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table whose cells are wrapped, never truncated, so that names can be copied."""
    table = Table(title=escape(title), title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def console_of() -> Console:
    """The terminal; without one, an output that is wide enough for all columns."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, _WIDTH_MIN))


def print_table(table: Table) -> None:
    """Print a table on `console_of()`."""
    console_of().print(table)
