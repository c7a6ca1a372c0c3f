"""What one check says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

__all__ = ["Finding", "Verdict", "failed", "ok", "skipped", "warning", "without", "worst"]


class Verdict(Enum):
    """How it is; later ones are worse, but for the first, which says nothing."""

    SKIPPED = "skipped"
    OK = "ok"
    WARNING = "warning"
    """It works, and costs hits, speed or safety."""
    FAILED = "failed"
    """It does not work, or is going to lose what was promised to stay."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check says.

    Attributes:
        name: Stable, subject first: `redis.policy`.
        verdict: How it is.
        seen: What was seen; why it was skipped.
        expected: What should have been.
        fix: A command or a setting that mends it; for warnings and failures only.
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
    """One finding for several that are about the same of several servers: the worst, the first of these."""
    order = list(Verdict)
    return max(findings, key=lambda finding: order.index(finding.verdict))


def without(finding: Finding, secrets: Iterable[str]) -> Finding:
    """The finding with every secret hidden, whatever a server or library put into its message."""
    for secret in secrets:
        if secret:
            texts = {field: getattr(finding, field).replace(secret, "***") for field in ("seen", "expected", "fix")}
            finding = replace(finding, **texts)
    return finding
