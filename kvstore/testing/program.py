"""What demos and benchmarks are as programs: progress, interrupts, failures, a table, and a last line for programs."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TypeVar

from rich.console import Console

from kvstore.errors import KVStoreError
from kvstore.testing.engine import EngineFailed
from kvstore.testing.servers import CannotInstall
from kvstore.testing.servers.process import ServerFailed

_INTERRUPTED = 130
_LOG_COLUMNS = 150

Say = Callable[[str], None]
"""Prints a line of progress."""
Result = TypeVar("Result")


def open_console(*, stderr: bool = False) -> Console:
    """The terminal; or a log file, whose lines are not wrapped."""
    console = Console(stderr=stderr)
    if not console.is_terminal:
        console.width = _LOG_COLUMNS
    return console


def run_program(
    name: str,
    run: Callable[[Say], Result],
    report: Callable[[Result, Console | None], tuple[str, Sequence[str]]],
    *,
    quiet: bool = False,
) -> int:
    """Run, then show a table and print the last line; returns the exit status: 0, 1 after a failure, 130 interrupted.

    Args:
        name: Precedes each failure.
        run: Does everything. What it starts must end with it, also when it is interrupted.
        report: Shows a table on the console, if there is one; returns the last line and the failures.
        quiet: Print the line alone.
    """
    errors, out = open_console(stderr=True), open_console()
    started_s = time.monotonic()

    def say(text: str) -> None:
        if not quiet:
            errors.print(f"[dim]{time.monotonic() - started_s:6.1f} s[/dim]  {text}", highlight=False)

    # a shell's background jobs would otherwise ignore SIGINT
    previous = [(number, signal.signal(number, _interrupt)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        result = run(say)
    except KeyboardInterrupt:
        errors.print("interrupted; everything that was started has ended")
        return _INTERRUPTED
    except (CannotInstall, EngineFailed, ServerFailed, KVStoreError, RuntimeError, TimeoutError) as error:
        errors.print(f"{name}: {error}", markup=False, highlight=False)
        return 1
    finally:
        for number, handler in previous:
            signal.signal(number, handler)
    line, failures = report(result, None if quiet else out)
    for failure in failures:
        errors.print(f"{name}: {failure}", markup=False, highlight=False)
    print(line, flush=True)
    return 1 if failures else 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
