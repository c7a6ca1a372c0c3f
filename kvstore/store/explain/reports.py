"""What engines report: records that they computed and did not save, and counts of the last minutes. Bounded."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.model.keys import Boundary, NamespaceId, PrefixHash
from kvstore.model.layout import MAX_GROUPS
from kvstore.model.outcome import Outcome
from kvstore.runtime.bounded_map import BoundedMap, SharedRoom
from kvstore.runtime.clock import Clock
from kvstore.store.explain.reasons import counted_as, result_of

WINDOW_S = 300
_STEP_S = 10
_RECORDS_KEPT = 4096
"""Latest losses of each tenant."""
_REQUESTS_KEPT = 2048
_NAMESPACES_KEPT = 256
_RECORDS_BYTES, _REQUESTS_BYTES, _NAMESPACES_BYTES = 6 << 20, 3 << 20, 1 << 20
"""Of each tenant. As many losses as engines report them fit; of the largest that a peer can send, some hundred."""
_ENTRY_BYTES = 768
"""About what a report takes without its texts."""
_NEVER_SAVED_S = 300
"""How long a report of records that can never be saved counts: engines repeat it every minute while they run."""


@dataclass(frozen=True, slots=True)
class ReportedLoss:
    """A loss as an engine reported it, and when it happened, since the Unix epoch."""

    outcome: Outcome
    at_ms: int


@dataclass(slots=True)
class _OfRequest:
    """What of one request was not saved: records by reason."""

    first_tokens: int
    records: dict[str, int] = field(default_factory=dict)


class _OfTenant:
    """The losses of one tenant: by record and by request, and by group where none of its records can ever be saved."""

    def __init__(self, room: SharedRoom) -> None:
        self.num_groups = 0
        self.records: BoundedMap[tuple[NamespaceId, PrefixHash, int], ReportedLoss]
        self.records = BoundedMap(room, _RECORDS_KEPT, _RECORDS_BYTES)
        self.namespaces: BoundedMap[tuple[NamespaceId, int], ReportedLoss]
        self.namespaces = BoundedMap(room, _NAMESPACES_KEPT, _NAMESPACES_BYTES)
        self.requests: BoundedMap[str, _OfRequest] = BoundedMap(room, _REQUESTS_KEPT, _REQUESTS_BYTES)


class Losses:
    """The latest loss of each record, kept apart for each tenant, to explain later requests that need it."""

    def __init__(self, room: SharedRoom) -> None:
        self._room = room
        self._tenants: dict[str, _OfTenant] = {}

    def note(self, outcome: Outcome, at_ms: int) -> None:
        """Keep a loss."""
        if outcome.namespace is None or not 0 < outcome.groups < 1 << MAX_GROUPS:
            return
        group = outcome.groups.bit_length() - 1
        kept = self._tenants.get(outcome.tenant)
        if kept is None:
            kept = self._tenants[outcome.tenant] = _OfTenant(self._room)
        kept.num_groups = max(kept.num_groups, group + 1)
        loss = ReportedLoss(outcome, at_ms)
        if outcome.stop is None:
            kept.namespaces.put((outcome.namespace, group), loss, bytes_of(outcome))
            return
        kept.records.put((outcome.namespace, outcome.stop.prefix, group), loss, bytes_of(outcome))
        mine = kept.requests.entries.get(outcome.request) or _OfRequest(outcome.stop.tokens)
        mine.first_tokens = min(mine.first_tokens, outcome.stop.tokens)
        reason = counted_as(outcome.reason)
        mine.records[reason] = mine.records.get(reason, 0) + outcome.num_lost
        kept.requests.put(outcome.request, mine, _ENTRY_BYTES + sys.getsizeof(outcome.request))

    def at(self, tenant: str, namespace: NamespaceId, stop: Boundary, groups: int, now_ms: int) -> ReportedLoss | None:
        """The reported loss of a record that a request missed at the boundary `stop`; `None`: none was reported.

        A report of records that can never be saved comes before one of a single record: those are missing in any case.

        Args:
            groups: A bit for each group whose record was there, so that it was not missed.
        """
        kept = self._tenants.get(tenant)
        if kept is None:
            return None
        missing = [group for group in range(kept.num_groups) if not groups >> group & 1]
        never = (kept.namespaces.entries.get((namespace, group)) for group in missing)
        lost = (kept.records.entries.get((namespace, stop.prefix, group)) for group in missing)
        return next(
            (loss for loss in never if loss is not None and now_ms - loss.at_ms < _NEVER_SAVED_S * 1000),
            next((loss for loss in lost if loss is not None), None),
        )

    def of_request(self, tenant: str, request: str) -> dict[str, object]:
        """What of a request was not saved, as details of its explanation."""
        kept = self._tenants.get(tenant)
        if kept is None or (mine := kept.requests.entries.get(request)) is None:
            return {}
        numbers = ", ".join(f"{reason} {num}" for reason, num in sorted(mine.records.items()))
        return {"not_saved": numbers, "first_not_saved_tokens": mine.first_tokens}


@dataclass(slots=True)
class _Step:
    """Counts of ten seconds and, for records that can never be saved, the `pinned_bytes` needed and set."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    too_large: tuple[int, int] = (0, 0)


class Recent:
    """Counts of requests and losses over the last `WINDOW_S`, in steps of ten seconds, without a task of its own."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._steps: dict[int, _Step] = {}  # by number

    def add(self, outcome: Outcome, reason: str) -> None:
        """Count one request, or one loss, in the step in which it happened, by the reason that was found."""
        first = self._first()
        number = self._number(outcome.age_ms / 1000)
        if number < first:
            return
        if number not in self._steps:
            self._steps = {old: step for old, step in self._steps.items() if old >= first}
            self._steps[number] = _Step()
        step = self._steps[number]
        counts = step.counts
        if outcome.is_loss:
            counts["losses", counted_as(reason)] += outcome.num_lost
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
            counts["reasons", counted_as(reason)] += 1

    def counts(self) -> Mapping[str, object]:
        """Over `window_s`: `requests` by result, `tokens` by part, `reasons` why requests were resumed no further, and
        `losses`: records that engines computed and did not save, by the reason. `last_s`: at most so long ago each of
        those reasons was counted last. `too_large`: of engines that can never save some records, the largest
        `needs_bytes`, with the `pinned_bytes` that they have. The words are those of the meters `requests`,
        `request_tokens` and `saves_lost`.
        """
        first, now_s = self._first(), self._clock.monotonic_s()
        total: Counter[tuple[str, str]] = Counter()
        needs_bytes, pinned_bytes = 0, 0
        last_s: dict[str, dict[str, int]] = {"reasons": {}, "losses": {}}
        for number, step in sorted(self._steps.items()):
            if number < first:
                continue
            total += step.counts
            needs_bytes, pinned_bytes = max((needs_bytes, pinned_bytes), step.too_large)
            for (of, name), amount in step.counts.items():
                if amount and of in last_s:
                    last_s[of][name] = max(0, int(now_s - number * _STEP_S))
        found: dict[str, dict[str, int]] = {
            "requests": dict.fromkeys(("hit", "part", "miss", "local"), 0),
            "tokens": dict.fromkeys(("prompt", "resumed", "local"), 0),
            "reasons": {},
            "losses": {},
            "too_large": {"needs_bytes": needs_bytes, "pinned_bytes": pinned_bytes} if needs_bytes else {},
        }
        for (of, name), amount in sorted(total.items()):
            found[of][name] = amount
        return {"window_s": WINDOW_S, **found, "last_s": last_s}

    def _number(self, age_s: float = 0.0) -> int:
        """The number of the step `age_s` ago."""
        return int((self._clock.monotonic_s() - age_s) // _STEP_S)

    def _first(self) -> int:
        """The number of the oldest step that counts."""
        return self._number() - WINDOW_S // _STEP_S + 1


def _whole(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 62 else 0


def bytes_of(outcome: Outcome) -> int:
    """About the memory that a report takes."""
    texts = [outcome.request, outcome.reason, *outcome.detail, *outcome.detail.values()]
    return _ENTRY_BYTES + sum(map(sys.getsizeof, texts))
