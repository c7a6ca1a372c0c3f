"""Why a request was resumed no further: what its engine reported and, for what was not stored, why it was not."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count

from kvstore.api import Outcome
from kvstore.errors import Closed, InvalidRequest, KVStoreError
from kvstore.model.keys import NamespaceId
from kvstore.runtime.background import Background
from kvstore.runtime.clock import Clock
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters
from kvstore.store.absence import Absence, AbsenceFinder, Removals
from kvstore.store.losses import Losses, ToldLoss
from kvstore.store.reasons import REASONS, UNKNOWN, result_of
from kvstore.store.recent import Recent

__all__ = ["Explainer", "ToldOutcome"]

_KEPT = 2048
"""Latest outcomes of each tenant; tenants do not push out each other's."""

_LISTED = 100
_NAMES_KEPT = 1024

_TOLD_WITHIN_S = 5

_WAITING_MAX, _TOGETHER = 256, 64
"""Requests whose reason is to be found; found from one reading of what left."""
_PAUSE_S, _PAUSE_S_MAX, _SHARE = 0.5, 300.0, 0.02
"""Between two batches: so long at least and at most; else finding reasons takes this share of the time. Of a cluster,
whose slots are read one by one, that is once in minutes."""
_LOOK_S, _REMOVALS_S = 2.0, 10.0

_NOT_SAVED = ("never_stored", "group_incomplete", "nothing_stored", "catalog_incomplete")
"""Reasons behind which there may be a loss: it is not stored, and nobody removed it."""

_UNKNOWN = ("never_stored", "nothing_stored")
"""Reasons that other requests, or the tenant's keys, may explain."""


@dataclass(eq=False, slots=True)
class ToldOutcome:
    """An outcome as an engine reported it.

    Attributes:
        outcome: What became of a request.
        at_ms: When it happened, since the Unix epoch.
        number: Sequence number of the report.
        loss: The loss of a record that it needed, known at that time.
        reason: Why the request was resumed no further, as its tenant may know it; until that was looked into, the
            engine's own word.
        operators_reason: Likewise, as an operator may know it, who sees what other tenants asked for.
    """

    outcome: Outcome
    at_ms: int
    number: int
    loss: ToldLoss | None = None
    reason: str = ""
    operators_reason: str = ""

    def reason_for(self, tenant: str | None) -> str:
        """The reason, for a tenant or, `None`, an operator."""
        return self.operators_reason if tenant is None else self.reason


class Explainer:
    """Keeps the latest outcomes, and finds out in the background why requests missed, a bounded number at a time, so
    that lists and counts have the reasons that `explain` gives. Recording an outcome costs next to nothing.

    Args:
        absence: Finds out why something was not stored; `None`: there is no catalog.
        clock: For the time of day.
        meters: Where to count: `requests{result,reason} request_tokens{part} saves_lost{reason}`. A request is counted
            once its reason is known.
        hides: Whether the weights of a namespace are retired.
        background: Owns the task that finds reasons.

    Attributes:
        key_reason: Why the keys of a tenant may cost hits, as a word of `REASONS`; empty: they do not.
    """

    def __init__(
        self,
        absence: AbsenceFinder | None,
        clock: Clock,
        meters: Meters,
        hides: Callable[[NamespaceId], bool] = lambda namespace: False,
        *,
        background: Background,
    ) -> None:
        self._absence = absence
        self._hides = hides
        self._clock = clock
        self._meters = meters
        self._background = background
        self._told: dict[str, OrderedDict[str, ToldOutcome]] = {}  # by tenant, by request
        self._waiting: deque[ToldOutcome] = deque()
        self._looking: asyncio.Task[None] | None = None
        self._numbers = count()
        self._names: OrderedDict[NamespaceId, str] = OrderedDict()
        self._losses = Losses()
        self._recent: dict[str, Recent] = {"": Recent(clock)}  # of all, and of each tenant
        self.key_reason: Callable[[str], str] = lambda tenant: ""

    def know(self, namespace: NamespaceId, name: str) -> None:
        """Note what people call a namespace."""
        self._names.pop(namespace, None)
        self._names[namespace] = name
        while len(self._names) > _NAMES_KEPT:
            self._names.popitem(last=False)

    def recent(self, tenant: str = "") -> Mapping[str, object]:
        """The counts of the last minutes, as `Recent.told`: of a tenant; empty: of all."""
        return self._recent.get(tenant, Recent(self._clock)).told()

    def _note(self, outcome: Outcome, reason: str, operators_reason: str) -> None:
        """Count in the last minutes: of all by the operators' reason, of the tenant by the one that it may know."""
        self._recent[""].count(outcome, operators_reason)
        if outcome.tenant:
            self._recent.setdefault(outcome.tenant, Recent(self._clock)).count(outcome, reason)

    def tell(self, outcome: Outcome) -> None:
        """Keep an outcome; a later one of the same request takes its place. A loss is kept beside the outcomes."""
        at_ms = self._clock.wall_ms() - outcome.age_ms
        if outcome.is_loss:
            self._losses.note(outcome, at_ms)
            self._note(outcome, outcome.reason, outcome.reason)
            if outcome.num_lost:
                reason = outcome.reason if outcome.reason in REASONS else "other"
                self._meters.add("saves_lost", outcome.num_lost, reason=reason)
            return
        kept = self._told.setdefault(outcome.tenant, OrderedDict())
        kept.pop(outcome.request, None)
        # now, since a request that misses for a loss may lose the same record itself, which is no reason for its miss
        loss = self._loss_of(outcome, at_ms)
        if loss is not None and loss.outcome.request == outcome.request and loss.at_ms > at_ms:
            loss = None  # told first, since the two came from different processes
        told = ToldOutcome(outcome, at_ms, next(self._numbers), loss, outcome.reason, outcome.reason)
        kept[outcome.request] = told
        if len(kept) > _KEPT:
            kept.popitem(last=False)
        if (known := self._known(outcome)) is not None:
            told.reason = told.operators_reason = known.reason
            self._count(told)
        else:
            self._look_later(told)

    def _known(self, outcome: Outcome) -> Absence | None:
        """The reason, where it need not be looked for."""
        # a tier that did not answer may have held it: nobody can say that it was not stored
        if outcome.detail.get("silent"):
            return Absence("tier_failed")
        if outcome.stop is None:
            return Absence(outcome.reason)
        if outcome.namespace is not None and self._hides(outcome.namespace):
            return Absence("weights_retired")
        return None

    def _look_later(self, told: ToldOutcome) -> None:
        """Have the reason found. With too many that wait it is not, which its reason says: the others are a sample."""
        if len(self._waiting) >= _WAITING_MAX:
            told.reason = told.operators_reason = "not_looked_into"
            self._count(told)
            return
        self._waiting.append(told)
        if self._looking is None or self._looking.done():
            with suppress(Closed):
                self._looking = self._background.spawn(self._look_into_waiting(), "reasons", is_shared=True)

    async def _look_into_waiting(self) -> None:
        """Find the reasons of those that wait, in batches, for a small share of the time."""
        pause_s = _PAUSE_S
        while self._waiting:
            await asyncio.sleep(pause_s)
            started_s = self._clock.monotonic_s()
            batch = [self._waiting.popleft() for _ in range(min(_TOGETHER, len(self._waiting)))]
            try:
                removals = await self._removals()
            except KVStoreError:  # read for each of them, they would take as long again
                for told in batch:
                    told.reason = told.operators_reason = "not_looked_into"
                    self._count(told)
            else:
                for told in batch:
                    found = await self._look(told, self._soon(), removals)
                    told.reason = self._judge(told, found, told.outcome.tenant).reason
                    told.operators_reason = self._judge(told, found, None).reason
                    self._count(told)
                    await asyncio.sleep(0)
            took_s = self._clock.monotonic_s() - started_s
            pause_s = min(_PAUSE_S_MAX, max(_PAUSE_S, took_s / _SHARE))

    async def _removals(self) -> Removals | None:
        if self._absence is None:
            return None
        return await self._absence.removals(deadline=Deadline.after(_REMOVALS_S, self._clock))

    def _soon(self) -> Deadline:
        return Deadline.after(_LOOK_S, self._clock)

    def _count(self, told: ToldOutcome) -> None:
        outcome, reason = told.outcome, told.operators_reason
        self._note(outcome, told.reason, reason)
        reason = reason if reason in REASONS else "other"  # a newer engine's words add no meters
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
            return {"requests": [_summary(told, tenant) for told in self.latest(tenant)[:_LISTED]]}
        told = self._find(request, tenant)
        outcome = told.outcome
        if (found := self._known(outcome)) is None:
            found = self._judge(told, await self._look(told, deadline), tenant)
        if tenant is None:  # lists say the same from now on
            told.operators_reason = found.reason
        else:
            told.reason = found.reason
        reason = REASONS.get(found.reason, UNKNOWN)
        return {
            **_summary(told, tenant),
            "namespace": outcome.namespace.hex() if outcome.namespace is not None else "",
            "namespace_name": self._names.get(outcome.namespace, "") if outcome.namespace is not None else "",
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

    async def _look(self, told: ToldOutcome, deadline: Deadline, removals: Removals | None = None) -> Absence:
        """Why what a request needed was not stored, as far as the catalog and losses tell."""
        outcome = told.outcome
        assert outcome.stop is not None
        if self._absence is None or outcome.namespace is None:
            return self._lost(told, Absence(outcome.reason)) or Absence(outcome.reason)
        vanished = outcome.reason == "gone"  # between lookup and fetch: the catalog learns why at about this time
        asked_s = told.at_ms // 1000 + (_TOLD_WITHIN_S if vanished else 0)
        try:
            found = await self._absence.find(
                outcome.namespace, outcome.stop.prefix, outcome.groups, asked_s, deadline=deadline, removals=removals
            )
        except KVStoreError as error:
            found = Absence(outcome.reason, {"catalog": str(error)})
            return self._lost(told, found) or found
        if vanished:
            return found if "left" in found.detail else Absence("gone")
        return self._lost(told, found) or found

    def _judge(self, told: ToldOutcome, found: Absence, tenant: str | None) -> Absence:
        """What was found, or what explains it: for a tenant or, `None`, an operator to know."""
        has_catalog = self._absence is not None and told.outcome.namespace is not None
        is_open = found.reason in ("never_stored", "catalog_incomplete") if has_catalog else found.reason in _UNKNOWN
        if is_open and (apart := self._apart(told, tenant)) is not None:
            return apart
        if found.reason in _UNKNOWN and (why := self.key_reason(told.outcome.tenant)):
            return Absence(why, found.detail)
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


def _summary(told: ToldOutcome, tenant: str | None) -> dict[str, object]:
    outcome = told.outcome
    return {
        "request": outcome.request,
        "tenant": outcome.tenant,
        "at": _time(told.at_ms),
        "prompt_tokens": outcome.prompt_tokens,
        "resume_tokens": outcome.resume_tokens,
        "result": result_of(outcome),
        "reason": told.reason_for(tenant),
    }


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds")
