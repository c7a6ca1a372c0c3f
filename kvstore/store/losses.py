"""What engines computed and did not save, by what a later request needs. Bounded, and apart for each tenant."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeVar

from kvstore.model.keys import Boundary, NamespaceId, PrefixHash
from kvstore.model.layout import MAX_GROUPS
from kvstore.model.outcome import Outcome
from kvstore.store.reasons import REASONS

__all__ = ["REPEATED_S", "Losses", "ToldLoss"]

Key = TypeVar("Key")
Value = TypeVar("Value")

_KEPT = 4096
"""Latest losses of each tenant."""

_REQUESTS_KEPT = 2048

_NAMESPACES_KEPT = 256

REPEATED_S = 300
"""What can never be saved is believed for so long: engines tell of it again every minute, while they run."""


@dataclass(frozen=True, slots=True)
class ToldLoss:
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
    records: OrderedDict[tuple[NamespaceId, PrefixHash, int], ToldLoss] = field(default_factory=OrderedDict)
    namespaces: OrderedDict[tuple[NamespaceId, int], ToldLoss] = field(default_factory=OrderedDict)
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
        loss = ToldLoss(outcome, at_ms)
        if outcome.stop is None:
            _put(kept.namespaces, (outcome.namespace, group), loss, _NAMESPACES_KEPT)
            return
        _put(kept.records, (outcome.namespace, outcome.stop.prefix, group), loss, _KEPT)
        mine = kept.requests.get(outcome.request) or _OfRequest(outcome.stop.tokens)
        mine.first_tokens = min(mine.first_tokens, outcome.stop.tokens)
        reason = outcome.reason if outcome.reason in REASONS else "other"
        mine.records[reason] = mine.records.get(reason, 0) + outcome.num_lost
        _put(kept.requests, outcome.request, mine, _REQUESTS_KEPT)

    def at(self, tenant: str, namespace: NamespaceId, stop: Boundary, groups: int, now_ms: int) -> ToldLoss | None:
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
