"""A check, its findings, and running checks in parallel, each in a thread and under a deadline of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from kvstore.errors import KVStoreError
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline
from kvstore.service.hidden_secrets import without_secrets

_GRACE_S = 0.5
"""Time after the deadline for a check to report what it was waiting for."""
_UNDO_S = 1.5
"""Time after that for a cancelled check to clean up."""


class Verdict(Enum):
    """The verdict of a check, in the order of severity."""

    SKIPPED = "skipped"
    OK = "ok"
    WARNING = "warning"
    """It works, but costs hits, speed or safety."""
    FAILED = "failed"
    """It does not work, or it loses data that should be kept."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        name: Stable, subject first: `redis.policy`.
        verdict: Its verdict.
        seen: What was found, or why the check was skipped.
        expected: What should have been found.
        fix: A command or a setting that fixes it; for warnings and failures only.
    """

    name: str
    verdict: Verdict
    seen: str
    expected: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Criterion:
    """The name of a finding and what should be found; makes the finding from what was found."""

    name: str
    expected: str = ""

    def ok(self, seen: str) -> Finding:
        return Finding(self.name, Verdict.OK, seen, self.expected)

    def warning(self, seen: str, fix: str) -> Finding:
        return Finding(self.name, Verdict.WARNING, seen, self.expected, fix)

    def failed(self, seen: str, fix: str) -> Finding:
        return Finding(self.name, Verdict.FAILED, seen, self.expected, fix)

    def skipped(self, why: str) -> Finding:
        return Finding(self.name, Verdict.SKIPPED, why)


@dataclass(frozen=True, slots=True)
class Check:
    """The check of one subject.

    Attributes:
        names: Names of all its findings, in order.
        run: Yields each of them once. If it ends before, the rest is skipped; if it raises or is late, the first
            missing finding fails. It may block: it has a thread and an event loop of its own.
        fix: The fix of that failed finding.
        conclude: Called when all checks have ended, with all findings by name. It yields findings that replace its own,
            where those of other checks explain them better.
    """

    names: tuple[str, ...]
    run: Callable[[Deadline], AsyncIterator[Finding]]
    fix: str
    conclude: Callable[[Mapping[str, Finding]], Iterable[Finding]] = lambda _: ()


def single(finding: Finding) -> Check:
    """A check whose result is known already."""

    async def run(deadline: Deadline) -> AsyncIterator[Finding]:
        yield finding

    return Check((finding.name,), run, "")


def worst(findings: Sequence[Finding]) -> Finding:
    """The worst of several servers' findings on one subject; of equal ones the first."""
    order = list(Verdict)
    return max(findings, key=lambda finding: order.index(finding.verdict))


def without(finding: Finding, secrets: Sequence[str]) -> Finding:
    """The finding with every secret replaced by `***`: messages of servers and libraries may contain some."""
    seen, expected, fix = (without_secrets(text, secrets) for text in (finding.seen, finding.expected, finding.fix))
    return replace(finding, seen=seen, expected=expected, fix=fix)


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
    found = {finding.name: finding for run in runs for finding in run.findings()}
    for check in checks:
        found |= {finding.name: finding for finding in check.conclude(found)}
    return list(found.values())


class _Run:
    def __init__(self, check: Check, timeout_s: float) -> None:
        self.thread = threading.Thread(target=self._main, name=f"doctor {check.names[0]}", daemon=True)
        self._check = check
        self._timeout_s = timeout_s
        self._found: dict[str, Finding] = {}
        self._problem: str | None = f"no answer within {timeout_s:g} s"

    def findings(self) -> list[Finding]:
        """All findings; missing ones are skipped, after a failed one with the reason if the check did not end well."""
        names, found, see = self._check.names, dict(self._found), self._check.names[0]
        missing = [name for name in names if name not in found]
        if missing and self._problem is not None:
            see = missing[0]
            found[see] = Criterion(see, "an answer").failed(self._problem, self._check.fix)
        return [found.get(name) or Criterion(name).skipped(f"see {see}") for name in names]

    def _main(self) -> None:
        asyncio.run(self._work())

    async def _work(self) -> None:
        deadline = Deadline.after(self._timeout_s)
        try:
            async with asyncio.timeout(self._timeout_s + _GRACE_S):
                (error,) = await asyncio.gather(self._collect(deadline), return_exceptions=True)
        except TimeoutError:
            return
        if error is None:
            self._problem = None
        elif isinstance(error, KVStoreError | OSError):
            self._problem = error.sentence() if isinstance(error, KVStoreError) else str(error)
        else:
            self._problem = f"a bug, please report it: {type(error).__name__}: {error}"

    async def _collect(self, deadline: Deadline) -> None:
        async for finding in self._check.run(deadline):
            self._found[finding.name] = finding
