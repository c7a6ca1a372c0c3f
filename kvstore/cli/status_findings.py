"""What is wrong with a service, from what it tells of itself, each with the next step. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.cli.shown import bytes_text

__all__ = ["Finding", "by_label", "findings", "part_of"]

_SAMPLE = re.compile(r"([a-z0-9_]+)(?:\{(.*)\})?")
_LABEL = re.compile(r'([a-z_]+)="([^"]*)"')

_LATE = ("deadline", "lookup_failed", "lookup_timeout", "stage_failed", "stage_timeout", "stall", "tier_failed")
"""Reasons for which a request was computed although its pages may have been there: the store did not answer."""
_LATE_SHARE, _LATE_REQUESTS_MIN = 0.2, 10
_NEARLY_FULL, _NEARLY_LEASED = 0.75, 0.9

_NOTES = (
    ("corrupt_records", "tier", "damaged records were found in {}; none was served", "kvstore verify"),
    (
        "discarded_records",
        "",
        "records were found bad by engines; they are put aside",
        "kvstore verify, the engines' logs",
    ),
    ("write_back_dropped", "tier", "records are not copied to {}", "counters.write_back_dropped in --all says why"),
    ("encryption_refused_saves", "reason", "records were not kept ({})", "kvstore doctor"),
    ("retention_failures", "tier", "times retention could not remove what should leave {}", "the service's log"),
    ("manifest_failures", "tier", "descriptions of namespaces could not be written to {}", "the service's log"),
    ("catalog_changes_lost", "", "changes are unknown to the catalog", "kvstore reindex"),
)
"""Counters that should not grow: name, the label that tells which, what they say, what to do."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be.

    Attributes:
        what: In one sentence.
        step: What to do next.
        is_now: Whether it is so now; else it happened since the service's start.
    """

    what: str
    step: str
    is_now: bool = True


def findings(values: Mapping[str, Any]) -> list[Finding]:
    """All that is wrong, what costs most first; of a service of a neighbouring release, as far as it tells."""
    counters = values.get("counters", {})
    found = [*_of_tiers(values), *_of_pending(counters), *_of_memory(values)]
    recent = values.get("recent", {})
    found += [*_of_requests(recent), *_of_losses(recent)]
    if counters.get("catalog_complete") == 0:
        what = "the catalog may lack records: lookups ask the tiers as well, which is slower"
        found.append(Finding(what, "kvstore reindex, beside running services"))
    return [*found, *_of_counters(counters)]


def _of_tiers(values: Mapping[str, Any]) -> Iterator[Finding]:
    is_open = by_label(values.get("counters", {}), "tier_open", "tier")
    waiting = values.get("write_back", {})
    for name, tier in values.get("tiers", {}).items():
        queue = waiting.get(name, {})
        if not tier.get("healthy"):
            told = str(tier.get("reason", "no reason told"))
            why = told.partition(" reason=")[2] or told  # of a tier that is left alone, what was seen before that
            what = f"{name} does not answer ({why}): requests go on without it"
            yield Finding(what, "kvstore doctor names the fix; it is used again as soon as it answers")
        elif tier.get("refuses_writes"):
            yield Finding(f"{name} takes no writes: {tier['refuses_writes']}", "kvstore doctor")
        elif is_open.get(name):
            yield Finding(f"{name} failed and is left alone until a probe succeeds", "kvstore doctor")
        elif queue.get("failing"):
            yield Finding(f"writes to {name} fail and are tried again", "kvstore doctor, the service's log")
        if queue.get("paused"):
            step = "resume it on the dashboard, or by POST /v1/tiers/{hot|cold}/resume"
            yield Finding(f"the write-back to {name} is paused", step)


def _of_pending(counters: Mapping[str, float]) -> Iterator[Finding]:
    num_bytes, limit_bytes = counters.get("pending_bytes", 0), counters.get("pending_limit_bytes", 0)
    if not limit_bytes or num_bytes < _NEARLY_FULL * limit_bytes:
        return
    told = f"{bytes_text(num_bytes)} of at most {bytes_text(limit_bytes)} wait for the cold tier"
    if num_bytes >= limit_bytes:
        told += ", so that new records are not written to the hot tier"
    yield Finding(told, "is the cold tier slow or away? kvstore doctor; pending_bytes")


def _of_memory(values: Mapping[str, Any]) -> Iterator[Finding]:
    leased_bytes = values.get("leases", {}).get("pinned_bytes", 0)
    limit_bytes = values.get("tiers", {}).get("memory", {}).get("limit_bytes") or 0
    if limit_bytes and leased_bytes >= _NEARLY_LEASED * limit_bytes:
        what = f"engines hold {part_of(leased_bytes, limit_bytes)} of the memory: further hits are cut short"
        yield Finding(what, "a larger memory_bytes")


def _of_requests(recent: Mapping[str, Any]) -> Iterator[Finding]:
    num_requests = sum(recent.get("requests", {}).values())
    late = {word: num for word, num in recent.get("reasons", {}).items() if word in _LATE}
    num_late = sum(late.values())
    if num_requests < _LATE_REQUESTS_MIN or num_late < _LATE_SHARE * num_requests:
        return
    from kvstore.store.explain.reasons import REASONS  # with what it stands on, which probes need not load

    worst = max(late, key=lambda word: late[word])
    what = f"{num_late:,} of the last {num_requests:,} requests found no answer in time ({worst}: {REASONS[worst].why})"
    yield Finding(what, f"{REASONS[worst].advice or 'kvstore doctor'}; kvstore explain")


def _of_losses(recent: Mapping[str, Any]) -> Iterator[Finding]:
    losses, too_large = recent.get("losses", {}), recent.get("too_large", {})
    if not losses and not too_large:
        return
    from kvstore.doctor.saves import fixes_of, told_of  # with what they stand on, which probes need not load

    yield Finding(told_of(recent), "; ".join(fixes_of(recent)))


def _of_counters(counters: Mapping[str, float]) -> Iterator[Finding]:
    for name, label, says, step in _NOTES:
        for which, amount in by_label(counters, name, label).items():
            if amount:
                yield Finding(f"{amount:,.0f} {says.format(which)}", step, is_now=False)
    turned_away = by_label(counters, "saves", "outcome")
    for outcome, why in (("full", "there was no room"), ("busy", "too much was on its way")):
        if amount := turned_away.get(outcome, 0):
            step = "kvstore top shows the tiers; cold_bytes, pending_bytes"
            yield Finding(f"{amount:,.0f} saves were turned away: {why}", step, is_now=False)


def by_label(counters: Mapping[str, float], name: str, label: str) -> dict[str, float]:
    """A meter's values by one of its labels, summed over the others; one without that label by an empty text."""
    found: dict[str, float] = {}
    for key, amount in counters.items():
        if (match := _SAMPLE.fullmatch(key)) is not None and match[1] == name:
            which = dict(_LABEL.findall(match[2] or "")).get(label, "")
            found[which] = found.get(which, 0) + amount
    return found


def part_of(amount: float, whole: float) -> str:
    """A share as a percentage that is 0% and 100% only where that is true."""
    if not whole:
        return "-"
    share = 100 * amount / whole
    return f"{0 if share <= 0 else min(99, max(1, round(share))) if share < 100 else 100}%"
