"""What engines computed and did not save in the last minutes: `recent` of a service's status, in words."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.doctor.finding import Finding, ok, skipped, warning
from kvstore.store.explain.reasons import REASONS, UNKNOWN

__all__ = ["fixes_of", "judge_saves", "told_of"]

_MIB = 1 << 20


def judge_saves(status: Mapping[str, object]) -> Finding:
    """Judge whether engines save what they compute."""
    name, expected = "service.saves", "engines save all that they compute"
    recent = _mapping(status.get("recent"))
    if "losses" not in recent:
        return skipped(name, "this service does not tell: it is of an older release")
    if not recent["losses"] and not recent.get("too_large"):
        return ok(name, f"no record was lost in the last {_minutes(recent)} minutes", expected)
    return warning(name, told_of(recent), expected, "; ".join(fixes_of(recent)))


def told_of(recent: Mapping[str, object]) -> str:
    """What was lost, and what never can be saved."""
    losses = _losses(recent)
    told = []
    if losses:
        by_reason = ", ".join(f"{reason} {num:,}" for reason, num in losses)
        num = sum(num for _, num in losses)
        told.append(
            f"{num:,} records were computed in the last {_minutes(recent)} minutes, but not saved ({by_reason})"
        )
    if sizes := _mapping(recent.get("too_large")):
        told.append(
            f"an engine never saves some of its pages or states: they need {_mib(sizes.get('needs_bytes'))} of "
            f"pinned_bytes and it has {_mib(sizes.get('pinned_bytes'))}"
        )
    return "; ".join(told)


def fixes_of(recent: Mapping[str, object]) -> list[str]:
    """What to do about it, for each reason, the most frequent first."""
    fixes = []
    sizes = _mapping(recent.get("too_large"))
    if sizes:
        fixes.append(f'set "pinned_bytes":"{_mib(sizes.get("needs_bytes"))}" in kv_connector_extra_config of vLLM')
    for reason, _ in _losses(recent):
        if reason != "save_too_large" or not sizes:
            known = REASONS.get(reason, UNKNOWN)
            fixes.append(f"{reason}: {known.advice or known.why}")
    return fixes


def _losses(recent: Mapping[str, object]) -> list[tuple[str, int]]:
    found = [(str(reason), num) for reason, num in _mapping(recent.get("losses")).items() if isinstance(num, int)]
    return sorted(found, key=lambda one: -one[1])


def _minutes(recent: Mapping[str, object]) -> int:
    window_s = recent.get("window_s")
    return window_s // 60 if isinstance(window_s, int) else 5


def _mib(num_bytes: object) -> str:
    """Rounded up, so that a setting of this size is enough."""
    return f"{-(-num_bytes // _MIB)}MiB" if isinstance(num_bytes, int) else "more"


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}
