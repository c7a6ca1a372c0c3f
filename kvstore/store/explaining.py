"""Why a request was resumed no further: what its engine reported and, for what was not stored, why it was not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count

from kvstore.api import Outcome
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.model.keys import NamespaceId
from kvstore.runtime.clock import Clock
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters
from kvstore.store.absence import Absence, AbsenceFinder
from kvstore.store.losses import Losses, ToldLoss
from kvstore.store.reasons import REASONS, UNKNOWN

__all__ = ["Explainer", "ToldOutcome", "result_of"]

_KEPT = 2048
"""Latest outcomes of each tenant; tenants do not push out each other's."""

_LISTED = 100

_TOLD_WITHIN_S = 5

_NOT_SAVED = ("never_stored", "group_incomplete", "nothing_stored", "catalog_incomplete")
"""Reasons behind which there may be a loss: it is not stored, and nobody removed it."""


@dataclass(frozen=True, slots=True)
class ToldOutcome:
    """An outcome as an engine reported it.

    Attributes:
        outcome: What became of a request.
        at_ms: Time of the report, since the Unix epoch.
        number: Sequence number of the report.
        loss: The loss of a record that it needed, known at that time.
    """

    outcome: Outcome
    at_ms: int
    number: int
    loss: ToldLoss | None = None


class Explainer:
    """Keeps the latest outcomes, and explains them on demand: recording one costs next to nothing.

    Args:
        absence: Finds out why something was not stored; `None`: there is no catalog.
        clock: For the time of day.
        meters: Where to count: `requests{result,reason} request_tokens{part} saves_lost{reason}`.
        hides: Whether the weights of a namespace are retired.
    """

    def __init__(
        self,
        absence: AbsenceFinder | None,
        clock: Clock,
        meters: Meters,
        hides: Callable[[NamespaceId], bool] = lambda namespace: False,
    ) -> None:
        self._absence = absence
        self._hides = hides
        self._clock = clock
        self._meters = meters
        self._told: dict[str, OrderedDict[str, ToldOutcome]] = {}  # by tenant, by request
        self._numbers = count()
        self._losses = Losses()

    def tell(self, outcome: Outcome) -> None:
        """Keep an outcome; a later one of the same request takes its place. A loss is kept beside the outcomes."""
        now_ms = self._clock.wall_ms()
        if outcome.is_loss:
            self._losses.note(outcome, now_ms)
            if outcome.num_lost:
                reason = outcome.reason if outcome.reason in REASONS else "other"
                self._meters.add("saves_lost", outcome.num_lost, reason=reason)
            return
        told = self._told.setdefault(outcome.tenant, OrderedDict())
        told.pop(outcome.request, None)
        # now, since a request that misses for a loss may lose the same record itself, which is no reason for its miss
        told[outcome.request] = ToldOutcome(outcome, now_ms, next(self._numbers), self._loss_of(outcome, now_ms))
        if len(told) > _KEPT:
            told.popitem(last=False)
        self._count(outcome)

    def _count(self, outcome: Outcome) -> None:
        reason = outcome.reason if outcome.reason in REASONS else "other"  # a newer engine's words add no meters
        local = min(outcome.local_tokens, outcome.resume_tokens)
        self._meters.add("requests", result=result_of(outcome), reason=reason)
        self._meters.add("request_tokens", outcome.prompt_tokens, part="prompt")
        self._meters.add("request_tokens", local, part="local")
        self._meters.add("request_tokens", outcome.resume_tokens - local, part="resumed")

    def latest(self, tenant: str | None) -> list[ToldOutcome]:
        """The outcomes of a tenant's requests, or of all tenants', newest first."""
        tenants = self._told if tenant is None else (tenant,)
        told = [one for name in tenants for one in self._told.get(name, {}).values()]
        return sorted(told, key=lambda one: -one.number)

    async def explain(self, request: str, tenant: str | None, deadline: Deadline) -> Mapping[str, object]:
        """As `PageStore.explain`."""
        if not request:
            return {"requests": [_summary(told) for told in self.latest(tenant)[:_LISTED]]}
        told = self._find(request, tenant)
        outcome = told.outcome
        found = Absence(outcome.reason)
        # a tier that did not answer may have held it: nobody can say that it was not stored
        if outcome.detail.get("silent"):
            found = Absence("tier_failed")
        elif outcome.stop is not None and outcome.namespace is not None and self._hides(outcome.namespace):
            found = Absence("weights_retired")
        elif outcome.stop is not None:
            found = await self._look(told, tenant, deadline)
        reason = REASONS.get(found.reason, UNKNOWN)
        return {
            **_summary(told),
            "namespace": outcome.namespace.hex() if outcome.namespace is not None else "",
            "cap_tokens": outcome.cap_tokens,
            "local_tokens": outcome.local_tokens,
            "stopped_at_tokens": outcome.stop.tokens if outcome.stop is not None else None,
            "reason": found.reason,
            "why": reason.why,
            "advice": reason.advice,
            "detail": {
                **outcome.detail,
                **found.detail,
                **self._losses.of_request(outcome.tenant, outcome.request),
            },
        }

    def _find(self, request: str, tenant: str | None) -> ToldOutcome:
        mine = self.latest(tenant)
        exact = [told for told in mine if told.outcome.request == request]
        found = exact or [told for told in mine if told.outcome.request.startswith(request)]
        if not found:
            raise InvalidRequest(
                "no such request was told of lately: ask without one for the latest, a restart forgets them",
                field="request",
                seen=request,
                kept=len(mine),
            )
        if len(found) > 1:
            names = ", ".join(sorted(told.outcome.request for told in found)[:5])
            raise InvalidRequest(
                "several requests start like that: write more of it", field="request", seen=request, requests=names
            )
        return found[0]

    async def _look(self, told: ToldOutcome, tenant: str | None, deadline: Deadline) -> Absence:
        outcome = told.outcome
        assert outcome.stop is not None
        if self._absence is None or outcome.namespace is None:
            return self._lost(told, Absence(outcome.reason)) or self._apart(told, tenant) or Absence(outcome.reason)
        vanished = outcome.reason == "gone"  # between lookup and fetch: the catalog learns why at about this time
        asked_s = told.at_ms // 1000 + (_TOLD_WITHIN_S if vanished else 0)
        try:
            found = await self._absence.find(
                outcome.namespace, outcome.stop.prefix, outcome.groups, asked_s, deadline=deadline
            )
        except KVStoreError as error:
            found = Absence(outcome.reason, {"catalog": str(error)})
            return self._lost(told, found) or found
        if vanished:
            return found if "left" in found.detail else Absence("gone")
        if (lost := self._lost(told, found)) is not None:
            return lost
        if found.reason in ("never_stored", "catalog_incomplete"):
            return self._apart(told, tenant) or found
        return found

    def _loss_of(self, outcome: Outcome, now_ms: int) -> ToldLoss | None:
        """The latest loss of a record that a request needed where it stopped."""
        if outcome.stop is None or outcome.namespace is None:
            return None
        return self._losses.at(outcome.tenant, outcome.namespace, outcome.stop, outcome.groups, now_ms)

    def _lost(self, told: ToldOutcome, found: Absence) -> Absence | None:
        """The loss behind what was found, if any: that an engine computed what this request needed and did not save it.
        It may have come after the request, which then asked while the record was on its way.
        """
        if found.reason not in _NOT_SAVED or "left" in found.detail:
            return None
        loss = told.loss
        if loss is None and (later := self._loss_of(told.outcome, self._clock.wall_ms())) is not None:
            loss = later if later.outcome.request != told.outcome.request else None
        if loss is None:
            return None
        mine = {"lost_at": _time(loss.at_ms)}
        if loss.outcome.stop is not None:
            mine["lost_by_request"] = loss.outcome.request
        detail = {name: value for name, value in loss.outcome.detail.items() if name != "records"}
        return Absence(loss.outcome.reason, {**found.detail, **detail, **mine})

    def _apart(self, told: ToldOutcome, tenant: str | None) -> Absence | None:
        """Whether an earlier request had the same tokens under another salt, adapter or tenant, which share nothing."""
        mine = told.outcome
        if not mine.content:
            return None
        for other in self.latest(tenant):
            its = other.outcome
            if other.number >= told.number or its.content != mine.content:
                continue
            if its.tenant != mine.tenant:
                return Absence("other_tenant", {"other_request": its.request, "other_tenant": its.tenant})
            if its.first != mine.first:
                return Absence("other_salt", {"other_request": its.request})
        return None


def _summary(told: ToldOutcome) -> dict[str, object]:
    outcome = told.outcome
    return {
        "request": outcome.request,
        "tenant": outcome.tenant,
        "at": _time(told.at_ms),
        "prompt_tokens": outcome.prompt_tokens,
        "resume_tokens": outcome.resume_tokens,
        "result": result_of(outcome),
        "reason": outcome.reason,
    }


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds")


def result_of(outcome: Outcome) -> str:
    """`hit`, `part`, `miss` or `local`, as docs/explain.md tells them apart."""
    if outcome.resume_tokens <= outcome.local_tokens:
        return "local" if outcome.local_tokens and outcome.reason == "held_by_engine" else "miss"
    return "hit" if outcome.resume_tokens >= outcome.cap_tokens else "part"
