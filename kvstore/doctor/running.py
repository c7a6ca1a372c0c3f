"""Runs checks in parallel, each in a thread and under a deadline of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from kvstore.doctor.finding import Finding, failed, skipped
from kvstore.errors import KVStoreError
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline

__all__ = ["Check", "Report", "run_checks"]

Report = Callable[[Finding], None]

_GRACE_S = 0.5
"""Time after the deadline for a check to report what it was waiting for."""
_UNDO_S = 1.5
"""Time after that for a cancelled check to clean up."""


@dataclass(frozen=True, slots=True)
class Check:
    """The check of one subject.

    Attributes:
        names: Names of all its findings, in the order in which it reports them.
        run: Reports each of them once. If it raises or is late, the first missing finding fails. It may block: it has a
            thread and an event loop of its own.
        fix: The fix of that failed finding.
    """

    names: tuple[str, ...]
    run: Callable[[Report, Deadline], Awaitable[None]]
    fix: str


def run_checks(checks: Sequence[Check], *, timeout_s: float) -> list[Finding]:
    """Run all checks; returns their findings, in order, at most two seconds after `timeout_s`.

    A check that is late is cancelled, and cleans up. One that cannot be cancelled, as on a hanging network file system,
    is abandoned in its thread.
    """
    runs = [_Run(check, timeout_s) for check in checks]
    for run in runs:
        run.thread.start()
    ends = Deadline.after(timeout_s + _GRACE_S + _UNDO_S, SYSTEM_CLOCK)
    for run in runs:
        run.thread.join(ends.remaining_s)
    return [finding for run in runs for finding in run.findings()]


class _Run:
    def __init__(self, check: Check, timeout_s: float) -> None:
        self.thread = threading.Thread(target=self._main, name=f"doctor {check.names[0]}", daemon=True)
        self._check = check
        self._timeout_s = timeout_s
        self._reported: dict[str, Finding] = {}
        self._problem = f"no answer within {timeout_s:g} s"

    def findings(self) -> list[Finding]:
        """The reported findings; for missing ones, a failure with the reason and skipped ones."""
        reported = dict(self._reported)
        missing = [name for name in self._check.names if name not in reported]
        if missing:
            first = missing[0]
            reported[first] = failed(first, self._problem, "an answer", self._check.fix)
            reported |= {name: skipped(name, f"see {first}") for name in missing[1:]}
        return [reported[name] for name in self._check.names]

    def _main(self) -> None:
        asyncio.run(self._work())

    async def _work(self) -> None:
        deadline = Deadline.after(self._timeout_s)
        try:
            async with asyncio.timeout(self._timeout_s + _GRACE_S):
                (outcome,) = await asyncio.gather(self._check.run(self._report, deadline), return_exceptions=True)
        except TimeoutError:
            return
        if isinstance(outcome, KVStoreError | OSError):
            self._problem = str(outcome)
        elif outcome is not None:
            self._problem = f"a bug, please report it: {type(outcome).__name__}: {outcome}"

    def _report(self, finding: Finding) -> None:
        self._reported[finding.name] = finding
