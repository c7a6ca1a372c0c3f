"""What engines computed and did not save, by what a later request needs. Bounded, and apart for each tenant."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from kvstore.model.keys import Boundary, NamespaceId, PrefixHash
from kvstore.model.layout import MAX_GROUPS
from kvstore.model.outcome import Outcome
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.store.explain.reasons import REASONS, result_of

__all__ = ["REPEATED_S", "WINDOW_S", "Losses", "Recent", "ReportedLoss"]

Key = TypeVar("Key")
Value = TypeVar("Value")

_KEPT = 4096
"""Latest losses of each tenant."""

_REQUESTS_KEPT = 2048

_NAMESPACES_KEPT = 256

REPEATED_S = 300
"""What can never be saved is believed for so long: engines tell of it again every minute, while they run."""


@dataclass(frozen=True, slots=True)
class ReportedLoss:
    """A loss as an engine reported it, and when, since the Unix epoch."""

    outcome: Outcome
    at_ms: int


@dataclass(slots=True)
class _OfRequest:
    """What of one request was not saved."""

    first_tokens: int
    records: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _OfTenant:
    num_groups: int = 0
    records: OrderedDict[tuple[NamespaceId, PrefixHash, int], ReportedLoss] = field(default_factory=OrderedDict)
    namespaces: OrderedDict[tuple[NamespaceId, int], ReportedLoss] = field(default_factory=OrderedDict)
    requests: OrderedDict[str, _OfRequest] = field(default_factory=OrderedDict)


class Losses:
    """Remembers losses; the latest one of a record takes the place of an earlier one."""

    def __init__(self) -> None:
        self._tenants: dict[str, _OfTenant] = {}

    def note(self, outcome: Outcome, at_ms: int) -> None:
        """Keep a loss."""
        if outcome.namespace is None or not 0 < outcome.groups < 1 << MAX_GROUPS:
            return
        group = outcome.groups.bit_length() - 1
        kept = self._tenants.setdefault(outcome.tenant, _OfTenant())
        kept.num_groups = max(kept.num_groups, group + 1)
        loss = ReportedLoss(outcome, at_ms)
        if outcome.stop is None:
            _put(kept.namespaces, (outcome.namespace, group), loss, _NAMESPACES_KEPT)
            return
        _put(kept.records, (outcome.namespace, outcome.stop.prefix, group), loss, _KEPT)
        mine = kept.requests.get(outcome.request) or _OfRequest(outcome.stop.tokens)
        mine.first_tokens = min(mine.first_tokens, outcome.stop.tokens)
        reason = outcome.reason if outcome.reason in REASONS else "other"
        mine.records[reason] = mine.records.get(reason, 0) + outcome.num_lost
        _put(kept.requests, outcome.request, mine, _REQUESTS_KEPT)

    def at(self, tenant: str, namespace: NamespaceId, stop: Boundary, groups: int, now_ms: int) -> ReportedLoss | None:
        """The loss of a record that was missing at a boundary, of whose groups those in the bits `groups` were there.

        What can never be saved comes first: whatever else happened to such a record, it would not be there.
        """
        kept = self._tenants.get(tenant)
        if kept is None:
            return None
        missing = [group for group in range(kept.num_groups) if not groups >> group & 1]
        never = (kept.namespaces.get((namespace, group)) for group in missing)
        lost = (kept.records.get((namespace, stop.prefix, group)) for group in missing)
        return next(
            (loss for loss in never if loss is not None and now_ms - loss.at_ms < REPEATED_S * 1000),
            next((loss for loss in lost if loss is not None), None),
        )

    def of_request(self, tenant: str, request: str) -> dict[str, object]:
        """What of a request was not saved, as details of its explanation."""
        kept = self._tenants.get(tenant)
        if kept is None or (mine := kept.requests.get(request)) is None:
            return {}
        told = ", ".join(f"{reason} {num}" for reason, num in sorted(mine.records.items()))
        return {"not_saved": told, "first_not_saved_tokens": mine.first_tokens}


def _put(kept: OrderedDict[Key, Value], key: Key, value: Value, most: int) -> None:
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > most:
        kept.popitem(last=False)


WINDOW_S = 300
_STEP_S = 10


@dataclass(slots=True)
class _Step:
    """Counts of one step, and for what can never be saved the `pinned_bytes` that would do and the one that is set."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    too_large: tuple[int, int] = (0, 0)


class Recent:
    """Counts what engines tell of, and forgets it after `WINDOW_S`, to a step of ten seconds.

    Args:
        clock: Tells the steps apart.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._steps: dict[int, _Step] = {}  # by number

    def count(self, outcome: Outcome, reason: str | None = None) -> None:
        """Add one request, or one loss, in the step in which it happened; `reason`: the one that was found, in place
        of the engine's own.
        """
        reason = outcome.reason if reason is None else reason
        first = self._first()
        number = self._step(outcome.age_ms / 1000)
        if number < first:
            return
        if number not in self._steps:
            self._steps = {old: step for old, step in self._steps.items() if old >= first}
            self._steps[number] = _Step()
        step = self._steps[number]
        counts = step.counts
        if outcome.is_loss:
            counts["losses", reason if reason in REASONS else "other"] += outcome.num_lost
            if outcome.reason == "save_too_large":
                sizes = (outcome.detail.get("needs_bytes"), outcome.detail.get("pinned_bytes"))
                step.too_large = max(step.too_large, (_whole(sizes[0]), _whole(sizes[1])))
            return
        local = min(outcome.local_tokens, outcome.resume_tokens)
        counts["requests", result_of(outcome)] += 1
        counts["tokens", "prompt"] += outcome.prompt_tokens
        counts["tokens", "resumed"] += outcome.resume_tokens - local
        counts["tokens", "local"] += local
        if reason:
            counts["reasons", reason if reason in REASONS else "other"] += 1

    def told(self) -> Mapping[str, object]:
        """`window_s`, and over it: `requests` by result, `tokens` by part, `reasons` why requests went no further,
        `losses`: records that engines computed and did not save, by the reason, `too_large`: of engines that can never
        save some records, the largest `needs_bytes`, with the `pinned_bytes` that they have. The words are those of the
        meters `requests`, `request_tokens` and `saves_lost`.
        """
        first = self._first()
        total: Counter[tuple[str, str]] = Counter()
        needs_bytes, pinned_bytes = 0, 0
        for number, step in self._steps.items():
            if number >= first:
                total += step.counts
                needs_bytes, pinned_bytes = max((needs_bytes, pinned_bytes), step.too_large)
        told: dict[str, dict[str, int]] = {
            "requests": dict.fromkeys(("hit", "part", "miss", "local"), 0),
            "tokens": dict.fromkeys(("prompt", "resumed", "local"), 0),
            "reasons": {},
            "losses": {},
            "too_large": {"needs_bytes": needs_bytes, "pinned_bytes": pinned_bytes} if needs_bytes else {},
        }
        for (of, name), amount in sorted(total.items()):
            told[of][name] = amount
        return {"window_s": WINDOW_S, **told}

    def _step(self, age_s: float = 0.0) -> int:
        """The number of the step `age_s` ago."""
        return int((self._clock.monotonic_s() - age_s) // _STEP_S)

    def _first(self) -> int:
        """The number of the oldest step that counts."""
        return self._step() - WINDOW_S // _STEP_S + 1


def _whole(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 62 else 0
