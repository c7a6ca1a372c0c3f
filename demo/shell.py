"""What both demos do around their runs: progress on stderr, a table, a line for programs, and the exit status."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from kvstore.testing.engine import EngineFailed
from kvstore.testing.servers import CannotInstall
from kvstore.testing.servers.process import ServerFailed

__all__ = ["Say", "run_as_program"]

INTERRUPTED = 130
LOG_COLUMNS = 150

Say = Callable[[str], None]
Row = TypeVar("Row")


def run_as_program(
    run: Callable[[Say], Sequence[Row]],
    *,
    table: Callable[[Sequence[Row]], Table],
    line: Callable[[Sequence[Row]], str],
    failures: Callable[[Sequence[Row]], Sequence[str]],
) -> int:
    """Run, show the rows and return the exit status: 0, 1 for a failure, 130 when interrupted.

    Args:
        run: Does everything, and says what it does.
        table: Rows for people.
        line: Rows for programs; the last line on stdout.
        failures: What of the rows makes the demo fail.
    """
    console = Console(stderr=True)
    if not console.is_terminal:  # a log file: nothing to wrap for
        console.width = LOG_COLUMNS
    for number in (signal.SIGINT, signal.SIGTERM):  # so that whatever ends us, our blocks end what they started;
        signal.signal(number, _as_interrupt)  # a shell's background jobs would otherwise ignore SIGINT
    started_s = time.monotonic()
    try:
        with console.status("starting") as status:

            def say(text: str) -> None:
                status.update(text)
                console.print(f"[dim]{time.monotonic() - started_s:6.1f} s[/dim]  {text}", highlight=False)

            rows = run(say)
    except KeyboardInterrupt:
        console.print("interrupted; everything that was started has ended")
        return INTERRUPTED
    except (CannotInstall, EngineFailed, ServerFailed, TimeoutError) as error:
        console.print(f"demo: {error}", markup=False, highlight=False)
        return 1
    console.print(table(rows))
    found = failures(rows)
    for failure in found:
        console.print(f"[red]failed[/red]: {failure}")
    print(line(rows), flush=True)
    return 1 if found else 0


def _as_interrupt(number: int, frame: FrameType | None) -> Any:
    raise KeyboardInterrupt
