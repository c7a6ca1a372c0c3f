"""The result of one check."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

__all__ = ["Finding", "Verdict", "failed", "ok", "skipped", "warning", "without", "worst"]


class Verdict(Enum):
    """The verdict of a check, in the order of severity."""

    SKIPPED = "skipped"
    OK = "ok"
    WARNING = "warning"
    """It works, but costs hits, speed or safety."""
    FAILED = "failed"
    """It does not work, or is going to lose data that should be kept."""


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


def ok(name: str, seen: str, expected: str = "") -> Finding:
    return Finding(name, Verdict.OK, seen, expected)


def skipped(name: str, why: str) -> Finding:
    return Finding(name, Verdict.SKIPPED, why)


def warning(name: str, seen: str, expected: str, fix: str) -> Finding:
    return Finding(name, Verdict.WARNING, seen, expected, fix)


def failed(name: str, seen: str, expected: str, fix: str) -> Finding:
    return Finding(name, Verdict.FAILED, seen, expected, fix)


def worst(findings: Sequence[Finding]) -> Finding:
    """The worst of several servers' findings on one subject; of equal ones the first."""
    order = list(Verdict)
    return max(findings, key=lambda finding: order.index(finding.verdict))


def without(finding: Finding, secrets: Iterable[str]) -> Finding:
    """The finding with every secret replaced by `***`: messages of servers and libraries may contain some."""
    for secret in secrets:
        if secret:
            texts = {field: getattr(finding, field).replace(secret, "***") for field in ("seen", "expected", "fix")}
            finding = replace(finding, **texts)
    return finding
