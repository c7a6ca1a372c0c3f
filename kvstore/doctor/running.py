"""Runs checks side by side, each in a thread and under a deadline of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from kvstore.doctor.finding import Finding, failed, skipped
from kvstore.errors import KVStoreError
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline

__all__ = ["Check", "Tell", "run_checks"]

Tell = Callable[[Finding], None]

_GRACE_S = 0.5
"""Behind its deadline: whoever knows what it waited for says so until then."""
_UNDO_S = 1.5


@dataclass(frozen=True, slots=True)
class Check:
    """A look at one subject.

    Attributes:
        names: Of all its findings, in the order in which it tells them.
        run: Tells each of them once. When it raises, or is late, the first that is missing failed. It may block: it has
            a thread and an event loop of its own.
        fix: For when it does not answer.
    """

    names: tuple[str, ...]
    run: Callable[[Tell, Deadline], Awaitable[None]]
    fix: str


def run_checks(checks: Sequence[Check], *, timeout_s: float) -> list[Finding]:
    """What all checks say, in their order, within two seconds of `timeout_s`.

    What it has begun is undone by each check that is late; one that does not even let go then, as on a network file
    system that hangs, is left behind in a thread that nobody waits for.
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
        self._told: dict[str, Finding] = {}
        self._problem = f"no answer within {timeout_s:g} s"

    def findings(self) -> list[Finding]:
        """Those told, and for those that are missing why they are."""
        told = dict(self._told)
        missing = [name for name in self._check.names if name not in told]
        if missing:
            first = missing[0]
            told[first] = failed(first, self._problem, "an answer", self._check.fix)
            told |= {name: skipped(name, f"see {first}") for name in missing[1:]}
        return [told[name] for name in self._check.names]

    def _main(self) -> None:
        asyncio.run(self._work())

    async def _work(self) -> None:
        deadline = Deadline.after(self._timeout_s)
        try:
            async with asyncio.timeout(self._timeout_s + _GRACE_S):
                (outcome,) = await asyncio.gather(self._check.run(self._tell, deadline), return_exceptions=True)
        except TimeoutError:
            return
        if isinstance(outcome, KVStoreError | OSError):
            self._problem = str(outcome)
        elif outcome is not None:
            self._problem = f"a bug, please report it: {type(outcome).__name__}: {outcome}"

    def _tell(self, finding: Finding) -> None:
        self._told[finding.name] = finding
