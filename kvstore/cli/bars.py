"""Progress bars: on a terminal, on standard error, removed at the end."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress, ProgressColumn

__all__ = ["bar_of"]


def bar_of(*columns: ProgressColumn, quiet: bool = False) -> Progress:
    """A bar with these columns; disabled where there is no terminal, since it would write empty lines into a log."""
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
