"""The problems of a service, from the values of its status, each with the next step. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kvstore.cli.printing import bytes_text, share_text, span_text, time_text
from kvstore.doctor.service import judge_files, key_problems, loss_fixes, losses_text, reindex_step
from kvstore.errors import next_step
from kvstore.runtime.meters import name_and_labels
from kvstore.runtime.sizes import counted
from kvstore.store.explain.reasons import REASONS

LATE = ("deadline", "lookup_failed", "lookup_timeout", "stage_failed", "stage_timeout", "stall", "tier_failed")
"""Reasons for which a request was computed although its pages may have been stored: the store did not answer."""
_NO_ROOM = ("node_memory",)
"""Reasons for which a request was resumed only in part: the node had no room for what is stored."""
_CUT = ((LATE, 10, "got no answer in time"), (_NO_ROOM, 1, "resumed no further than memory has room for"))
"""Reasons, the requests below which they are no problem, and what happened. A prompt that is too large never fits."""
_CUT_SHARE = 0.2
_NEARLY_FULL, _NEARLY_LEASED = 0.75, 0.9

_SINCE_START = "since its start"
_OVER_S = 60
"""A problem is over if nothing was counted for so long: each request that still meets it is counted within seconds."""

_COUNTERS = (
    ("corrupt_records", "tier", "corrupt record", "{} found in {}; none was served", "kvstore verify"),
    ("discarded_records", "", "bad record", "engines found {}, now in quarantine", "kvstore verify, engines' logs"),
    ("write_back_dropped", "tier", "record", "{} not copied to {} ({})", "docs/durability.md explains these reasons"),
    ("encryption_refused_saves", "reason", "record", "{} not kept ({})", "kvstore doctor"),
    (
        "retention_failures",
        "at",
        "time",
        "eviction from the cold tier failed {} at {}",
        "kvstore doctor, the service's log",
    ),
    (
        "manifest_failures",
        "tier",
        "time",
        "writing descriptions of namespaces failed {} at {}, and is repeated until it succeeds",
        "the service's log",
    ),
    ("manifest_read_failures", "", "time", "descriptions of namespaces could not be read {}", "the service's log"),
    ("catalog_changes_lost", "", "change", "{} did not reach the catalog", "wait: a service adds what is stored"),
)
"""Counters that should not grow: name, a label, what is counted, what it means (with the number, the label's value, and
the number of each reason), the next step."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem in a sentence, and the next step.

    Attributes:
        past: When it happened, if it does not exist now; else empty.
    """

    what: str
    step: str
    past: str = ""


def problems_of(values: Mapping[str, Any]) -> list[Problem]:
    """All problems, the most expensive first; a service of a neighbouring release may lack some values."""
    counters, recent = values.get("counters", {}), values.get("recent", {})
    found = [*_of_tiers(values), *_of_catalog(values.get("catalog", {})), *_of_pending(counters), *_of_memory(values)]
    found += _of_files(values)
    found += [Problem(what, step) for what, step in key_problems(values.get("encryption", {}).get("problems", {}))]
    found += [*_of_requests(recent), *_of_losses(recent)]
    if counters.get("catalog_complete") == 0:
        what = "the catalog may be incomplete, so that lookups query the tiers too, which is slower"
        found.append(Problem(what, reindex_step(values)))
    return [*found, *_of_counters(counters, values.get("tiers", {}))]


def _of_tiers(values: Mapping[str, Any]) -> Iterator[Problem]:
    waiting = values.get("write_back", {})
    for name, tier in values.get("tiers", {}).items():
        queue = waiting.get(name, {})
        if not tier.get("healthy"):
            reason = str(tier.get("reason", "no reason given"))
            why = reason.partition(" reason=")[2] or reason  # if the tier is not used for now: the first failure
            cause, step = next_step(why)
            is_part = tier.get("is_part_down")
            who = f"a part of {name}" if is_part else name
            what = f"{who} does not answer ({cause}), and is used again as soon as it does"
            rest = "" if is_part else ": requests are served without it"
            yield Problem(what + rest, step or "kvstore doctor names the fix")
        elif tier.get("refuses_writes"):
            cause, step = next_step(tier["refuses_writes"])
            yield Problem(f"{name} accepts no writes: {cause}", step or "kvstore doctor")
        elif queue.get("failing"):
            yield Problem(f"writes to {name} fail and are tried again", "kvstore doctor, the service's log")
        if queue.get("paused"):
            step = "resume it on the dashboard, or by POST /v1/tiers/{hot|cold}/resume"
            yield Problem(f"the write-back to {name} is paused", step)


def _of_catalog(catalog: Mapping[str, Any]) -> Iterator[Problem]:
    if (since_ms := catalog.get("takes_none_since_ms")) is not None:
        cause, step = next_step(catalog.get("takes_none_reason", ""))
        what = waiting_text(catalog["waiting_changes"], since_ms // 1000) + (f" ({cause})" if cause else "")
        yield Problem(what, step or "kvstore doctor names the fix")
    if (since_ms := catalog.get("answers_none_since_ms")) is not None:
        cause, step = next_step(catalog["answers_none_reason"])
        what = f"the catalog has answered no lookups since {time_text(since_ms // 1000)} UTC ({cause})"
        yield Problem(f"{what}: the tiers are asked instead, which is slower", step or "kvstore doctor names the fix")


def waiting_text(num_changes: float, since_s: int) -> str:
    """That the catalog takes no changes, and what that means."""
    num = counted(num_changes, "change")
    return (
        f"the catalog has taken no changes since {time_text(since_s)} UTC: {num} of this service wait, and other "
        "services do not find what it has stored since"
    )


def _of_pending(counters: Mapping[str, float]) -> Iterator[Problem]:
    num_bytes, limit_bytes = counters.get("pending_bytes", 0), counters.get("pending_limit_bytes", 0)
    if not limit_bytes or num_bytes < _NEARLY_FULL * limit_bytes:
        return
    what = f"{bytes_text(num_bytes)} of at most {bytes_text(limit_bytes)} wait for the cold tier"
    if num_bytes >= limit_bytes:
        what += ", so new records are not written to the hot tier"
    yield Problem(what, "kvstore doctor shows whether the cold tier is slow or away; see pending_bytes")


def _of_memory(values: Mapping[str, Any]) -> Iterator[Problem]:
    leased_bytes = values.get("leases", {}).get("pinned_bytes", 0)
    limit_bytes = values.get("tiers", {}).get("memory", {}).get("limit_bytes") or 0
    if limit_bytes and leased_bytes >= _NEARLY_LEASED * limit_bytes:
        what = f"engines lease {share_text(leased_bytes, limit_bytes)} of the memory, so further hits are cut short"
        yield Problem(what, "set a larger memory_bytes")


def _of_files(values: Mapping[str, Any]) -> Iterator[Problem]:
    if not values.get("service", {}).get("not_reloaded"):
        return
    finding = judge_files(values)
    yield Problem(finding.seen, finding.fix)


def _of_requests(recent: Mapping[str, Any]) -> Iterator[Problem]:
    num_requests = sum(recent.get("requests", {}).values())
    for words, least, what in _CUT:
        cut = {word: num for word, num in recent.get("reasons", {}).items() if word in words}
        num_cut = sum(cut.values())
        if not num_cut or num_requests < least or num_cut < _CUT_SHARE * num_requests:
            continue
        worst = max(cut, key=lambda word: cut[word])
        who = "the last request" if num_requests == 1 else f"{num_cut:,} of the last {num_requests:,} requests"
        text = f"{who} {what} ({worst}: {REASONS[worst].why})"
        past = _over_since(recent, "reasons", cut)
        yield Problem(text, f"{REASONS[worst].advice or 'kvstore doctor'}; kvstore explain", past)


def _of_losses(recent: Mapping[str, Any]) -> Iterator[Problem]:
    if not recent.get("losses") and not recent.get("too_large"):
        return
    past = "" if recent.get("too_large") else _over_since(recent, "losses", recent["losses"])
    yield Problem(losses_text(recent), "; ".join(loss_fixes(recent)), past)


def _over_since(recent: Mapping[str, Any], of: str, words: Collection[str]) -> str:
    """`over for 2 min` if none of these reasons was counted for that long; empty: one was counted within a minute, or
    the service does not say.
    """
    last_s = recent.get("last_s", {}).get(of, {})
    quiet_s = min((last_s.get(word, 0) for word in words), default=0)
    return f"over for {span_text(quiet_s)}" if quiet_s >= _OVER_S else ""


def _of_counters(counters: Mapping[str, float], tiers: Collection[str]) -> Iterator[Problem]:
    places = {"catalog": "the catalog in redis" if "redis" in tiers else "the catalog"}
    for name, label, noun, text, step in _COUNTERS:
        for value, amount in by_label(counters, name, label).items():
            if amount:
                reasons = by_label(counters, name, "reason", {label: value})
                why = ", ".join(f"{reason} {num:,.0f}" for reason, num in reasons.items())
                yield Problem(text.format(counted(amount, noun), places.get(value, value), why), step, _SINCE_START)
    refused = by_label(counters, "saves", "outcome")
    for outcome, why in (("full", "the tiers were full"), ("busy", "too many saves were being received")):
        if amount := refused.get(outcome, 0):
            step = "kvstore top shows the tiers; see cold_bytes and pending_bytes"
            yield Problem(f"{counted(amount, 'save')} refused: {why}", step, _SINCE_START)


def by_label(
    samples: Mapping[str, float], name: str, label: str, only: Mapping[str, str] = MappingProxyType({})
) -> dict[str, float]:
    """A meter's values by one of its labels, summed over the others; values without that label under an empty text.

    Args:
        only: Leave out values with other labels than these.
    """
    found: dict[str, float] = {}
    for key, amount in samples.items():
        meter, labels = name_and_labels(key)
        if meter == name and all(labels.get(one, "") == value for one, value in only.items()):
            value = labels.get(label, "")
            found[value] = found.get(value, 0) + amount
    return found
