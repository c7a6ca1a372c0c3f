"""Why a request was resumed no further: what its engine reported and, for what was not stored, why it was not."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from heapq import merge, nsmallest
from itertools import count, islice
from math import ceil

from kvstore.api import Outcome
from kvstore.errors import Closed, InvalidRequest, KVStoreError
from kvstore.model.keys import NamespaceId
from kvstore.runtime.background import gather_all
from kvstore.runtime.bounded_map import BoundedMap, Latest, SharedRoom, starting_with
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters
from kvstore.runtime.turns import PIECE, LongWork, Turns, who_asks
from kvstore.store.context import StoreContext, StorePart
from kvstore.store.explain.absence import Absence, AbsenceFinder, Removals
from kvstore.store.explain.reasons import REASONS, UNKNOWN, counted_as, result_of
from kvstore.store.explain.reports import Losses, Recent, ReportedLoss, bytes_of
from kvstore.store.hints.ended_prompts import HINT_NAME, KeptPrompt
from kvstore.store.hints.hints import Hints

_KEPT = 2048
"""Latest outcomes of each tenant; no tenant displaces those of another, unless all together exceed `_ROOM_BYTES`."""
_KEPT_BYTES, _ROOM_BYTES = 6 << 20, 64 << 20
"""Bytes of a tenant's outcomes, and of all reports of all tenants. As many as engines send them fit; of larger ones
fewer are kept."""
_LISTED = 100
_NAMES_KEPT = 1024
_REPORTED_WITHIN_S = 5
_WAITING_MAX, _TOGETHER = 256, 64
"""Requests that may wait for a search, and those whose reasons are found from one reading of the tombstones."""
_PAUSE_S, _PAUSE_S_MAX, _SHARE = 0.5, 300.0, 0.02
"""The shortest and longest pause between two batches. Between these bounds, searches take this share of the time. In a
Redis Cluster a batch takes seconds, since each slot is read alone, so batches are minutes apart."""
_SEARCH_S, _REMOVALS_S = 2.0, 10.0
_AT_ONCE = 8
"""Searches of a batch at a time: each may wait for a tier."""
_SEARCHES, _EXPLAIN_S = 4, 30.0
"""Explanations that read the catalog at a time, since each reads all tombstones; and how long one may take for it."""
_NOT_SAVED = ("never_stored", "group_incomplete", "stored_since", "nothing_stored", "catalog_incomplete")
"""Reasons behind which there may be a loss: the record is not stored, and it was not removed."""
_NOT_SEARCHED = ("nothing_stored", "not_looked_into")
"""Reasons of a request for which there was no search."""
_UNEXPLAINED = ("never_stored", "nothing_stored")
"""Reasons behind which there may be another one: the tenant's keys, or another request with the same tokens."""


@dataclass(eq=False, slots=True)
class ReportedOutcome:
    """An outcome as an engine reported it."""

    outcome: Outcome
    at_ms: int
    """When it happened, since the Unix epoch."""
    number: int
    """Sequence number of the report."""
    loss: ReportedLoss | None = None
    """The loss of a record that the request needed, known at that time."""
    reason: str = ""
    """Why the request was resumed no further, as its tenant may know it. Until the search: the engine's reason."""
    operators_reason: str = ""
    """Likewise, as an operator may know it, who sees other tenants' requests."""

    def reason_for(self, tenant: str | None) -> str:
        """The reason, for a tenant or, `None`, an operator."""
        return self.operators_reason if tenant is None else self.reason


def count_request(meters: Meters, outcome: Outcome, reason: str) -> None:
    """Count a request and its tokens.

    Args:
        reason: Why it was resumed no further, as those may know who read the meters.
    """
    local = min(outcome.local_tokens, outcome.resume_tokens)
    meters.add("requests", result=result_of(outcome), reason=counted_as(reason))
    meters.add("request_tokens", outcome.prompt_tokens, part="prompt")
    meters.add("request_tokens", local, part="local")
    meters.add("request_tokens", outcome.resume_tokens - local, part="resumed")


class Explainer(StorePart):
    """Keeps the latest outcomes, and finds out in the background why requests missed, a bounded number at a time, so
    that lists and counts have the reasons that `explain` gives. Recording an outcome costs next to nothing. The meters
    count a request once its reason is known.

    Args:
        absence: Finds out why something was not stored; `None`: there is no catalog.
        is_retired: Whether the weights of a namespace are retired.
        work: What may be long runs in its turns.

    Attributes:
        key_reason: Returns why a tenant's keys may cost hits, as a key of `REASONS`; empty: they do not.
        hints: What became of the hints for a request; `None`: there were none yet.
    """

    def __init__(
        self,
        context: StoreContext,
        absence: AbsenceFinder | None,
        is_retired: Callable[[NamespaceId], bool],
        work: LongWork,
    ) -> None:
        super().__init__(context)
        self._absence = absence
        self._work = work
        self._searches = Turns(_SEARCHES)
        self._is_retired = is_retired
        self._reported: dict[str, BoundedMap[str, ReportedOutcome]] = {}  # by tenant, by request
        self._waiting: deque[ReportedOutcome] = deque()
        self._searching: asyncio.Task[None] | None = None
        self._numbers = count()
        self._names = Latest[NamespaceId, str](_NAMES_KEPT)
        self._room = SharedRoom(_ROOM_BYTES)
        self._losses = Losses(self._room)
        self._recent: dict[str, Recent] = {"": Recent(context.clock)}  # of all, and of each tenant
        self.key_reason: Callable[[str], str] = lambda tenant: ""
        self.hints: Hints | None = None

    def name(self, namespace: NamespaceId, name: str) -> None:
        """Note the name that people use for a namespace. Those that were noted last are kept."""
        self._names[namespace] = name

    def recent(self, tenant: str = "") -> Mapping[str, object]:
        """The counts of the last minutes, as `Recent.counts`: of a tenant; empty: of all."""
        return self._recent.get(tenant, Recent(self._clock)).counts()

    def _count_recent(self, outcome: Outcome, reason: str, operators_reason: str) -> None:
        """Count in the last minutes: of all by the operators' reason, of the tenant by the one that it may know."""
        self._recent[""].add(outcome, operators_reason)
        if outcome.tenant:
            self._recent.setdefault(outcome.tenant, Recent(self._clock)).add(outcome, reason)

    def report(self, outcome: Outcome) -> None:
        """Keep an outcome in place of an earlier one of the same request. A loss is kept beside the outcomes."""
        at_ms = self._clock.wall_ms() - outcome.age_ms
        if outcome.is_loss:
            self._losses.note(outcome, at_ms)
            self._count_recent(outcome, outcome.reason, outcome.reason)
            if outcome.num_lost:
                self._meters.add("saves_lost", outcome.num_lost, reason=counted_as(outcome.reason))
            return
        kept = self._reported.get(outcome.tenant)
        if kept is None:
            kept = self._reported[outcome.tenant] = BoundedMap(self._room, _KEPT, _KEPT_BYTES)
        # now, since a request that misses for a loss may lose the same record itself, which is no reason for its miss
        loss = self._loss_of(outcome, at_ms)
        if loss is not None and loss.outcome.request == outcome.request and loss.at_ms > at_ms:
            loss = None  # reported first, since the two came from different processes
        reported = ReportedOutcome(outcome, at_ms, next(self._numbers), loss, outcome.reason, outcome.reason)
        # with the loss, which it keeps alive
        kept.put(outcome.request, reported, bytes_of(outcome) + (bytes_of(loss.outcome) if loss is not None else 0))
        if (known := self._known(outcome)) is not None:
            reported.reason = reported.operators_reason = known.reason
            self._count(reported)
        else:
            self._search_later(reported)

    def _known(self, outcome: Outcome) -> Absence | None:
        """The reason, where no search is needed."""
        # a tier that did not answer may have held it: then it is unknown whether it was stored
        if outcome.detail.get("silent"):
            return Absence("tier_failed")
        if outcome.stop is None:
            return Absence(outcome.reason)
        if outcome.namespace is not None and self._is_retired(outcome.namespace):
            return Absence("weights_retired")
        return None

    def _search_later(self, reported: ReportedOutcome) -> None:
        """Have the reason found. If too many wait it is not, and its reason says so: the others are a sample."""
        if len(self._waiting) >= _WAITING_MAX:
            reported.reason = reported.operators_reason = "not_looked_into"
            self._count(reported)
            return
        self._waiting.append(reported)
        if self._searching is None or self._searching.done():
            with suppress(Closed):
                self._searching = self._background.spawn(self._search_waiting(), "reasons", is_shared=True)

    async def _search_waiting(self) -> None:
        """Find the reasons of those that wait, in batches, for a small share of the time."""
        pause_s = _PAUSE_S
        while self._waiting:
            await asyncio.sleep(pause_s)
            started_s = self._clock.monotonic_s()
            batch = [self._waiting.popleft() for _ in range(min(_TOGETHER, len(self._waiting)))]
            try:
                removals = None
                if self._absence is not None:
                    removals = await self._absence.removals(deadline=Deadline.after(_REMOVALS_S, self._clock))
            except KVStoreError:  # read for each of them, they would take as long again
                for reported in batch:
                    reported.reason = reported.operators_reason = "no_answer"
                    self._count(reported)
            else:
                for start in range(0, len(batch), _AT_ONCE):
                    piece, deadline = batch[start : start + _AT_ONCE], Deadline.after(_SEARCH_S, self._clock)
                    all_found = await gather_all([self._search(one, deadline, removals) for one in piece])
                    for reported, found in zip(piece, all_found, strict=True):
                        reported.reason = self._judge(reported, found, reported.outcome.tenant).reason
                        reported.operators_reason = self._judge(reported, found, None).reason
                        self._count(reported)
                        await asyncio.sleep(0)
            took_s = self._clock.monotonic_s() - started_s
            pause_s = min(_PAUSE_S_MAX, max(_PAUSE_S, took_s / _SHARE))

    def _count(self, reported: ReportedOutcome) -> None:
        outcome, reason = reported.outcome, reported.operators_reason
        self._count_recent(outcome, reported.reason, reason)
        count_request(self._meters, outcome, reason)

    def latest(self, tenant: str | None) -> Iterator[ReportedOutcome]:
        """The outcomes of a tenant's requests, or of all tenants', newest first; while none is reported."""
        tenants = self._reported if tenant is None else (tenant,)
        kept = [self._reported[name].entries.values() for name in tenants if name in self._reported]
        return merge(*map(reversed, kept), key=lambda one: -one.number)  # each has its newest last

    async def explain(self, request: str, tenant: str | None, deadline: Deadline) -> Mapping[str, object]:
        """As `PageStore.explain`. It waits for its turn among tenants and connections, as lookups do."""
        if not request:
            async with self._work.turn(PIECE):
                return {"requests": [_summary(one, tenant) for one in islice(self.latest(tenant), _LISTED)]}
        reported = await self._find(request, tenant)
        outcome = reported.outcome
        if (found := self._known(outcome)) is None:
            async with self._searches.turn(who_asks()):
                searched = await self._search(reported, deadline.earlier(_EXPLAIN_S))
            async with self._work.turn(PIECE):
                found = self._judge(reported, searched, tenant)
            # what was stored since then may hide that the tiers held it all along, also one that did not answer
            is_late = found.reason == "never_stored" and "stored_after_s" in found.detail
            if (is_late or found.reason == "no_answer") and (
                before := reported.reason_for(tenant)
            ) not in _NOT_SEARCHED:
                found = Absence(before, found.detail)
        if found.reason == "node_memory":
            found = Absence(found.reason, self._room_for(outcome))
        if tenant is None:  # lists say the same from now on
            reported.operators_reason = found.reason
        else:
            reported.reason = found.reason
        reason = REASONS.get(found.reason, UNKNOWN)
        return {
            **_summary(reported, tenant),
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
            "hints": dict(self.hints.explain(outcome.tenant, outcome.request)) if self.hints is not None else {},
        }

    async def _find(self, request: str, tenant: str | None) -> ReportedOutcome:
        whose = list(self._reported) if tenant is None else [tenant]
        found: list[ReportedOutcome] = []
        for kept in [self._reported[name] for name in whose if name in self._reported]:
            async with self._work.turn(PIECE):
                found += starting_with(kept, request)
        found = [one for one in found if one.outcome.request == request] or found
        if not found and self.hints is not None and request.startswith(HINT_NAME):
            found = [_hinted(kept) for kept in self.hints.prompts.matching(request, tenant)]
        if not found:
            raise InvalidRequest(
                "unknown request: run `kvstore explain` without an id to list recent ones; a restart clears the list",
                seen=request,
            )
        if len(found) > 1:
            names = ", ".join(nsmallest(5, (one.outcome.request for one in found)))
            raise InvalidRequest("several requests start like that: write more of it", seen=request, requests=names)
        return found[0]

    async def _search(self, reported: ReportedOutcome, deadline: Deadline, removals: Removals | None = None) -> Absence:
        """Why what a request needed was not stored, by the catalog and the reported losses."""
        outcome = reported.outcome
        assert outcome.stop is not None
        if self._absence is None or outcome.namespace is None:
            return self._lost(reported, Absence(outcome.reason)) or Absence(outcome.reason)
        vanished = outcome.reason == "gone"  # between lookup and fetch: the catalog learns why at about this time
        try:
            found = await self._absence.find(
                outcome.namespace,
                outcome.stop.prefix,
                outcome.groups,
                reported.at_ms // 1000,
                late_s=_REPORTED_WITHIN_S if vanished else 0,
                deadline=deadline,
                removals=removals,
            )
        except InvalidRequest:  # the namespace was not opened here, and the catalog knows nothing about it
            found = Absence("never_stored" if outcome.reason == "nothing_stored" else outcome.reason)
            return self._lost(reported, found) or found
        except KVStoreError as error:
            return Absence("no_answer", {"no_answer": error.sentence()})
        if not vanished:
            return self._lost(reported, found) or found
        if "left" in found.detail and found.reason != "other_tier":
            return found
        return Absence("gone", {name: text for name, text in found.detail.items() if name.startswith("in_")})

    def _judge(self, reported: ReportedOutcome, found: Absence, tenant: str | None) -> Absence:
        """The reason to show: what was found, or what explains it better.

        Args:
            tenant: Who reads it, and may learn of its own requests only; `None`: an operator, who may learn of all.
        """
        has_catalog = self._absence is not None and reported.outcome.namespace is not None
        is_open = found.reason in (("never_stored", "catalog_incomplete") if has_catalog else _UNEXPLAINED)
        if is_open and (apart := self._kept_apart(reported, tenant)) is not None:
            return apart
        if found.reason in _UNEXPLAINED and (why := self.key_reason(reported.outcome.tenant)):
            return Absence(why, found.detail)
        return found

    def _room_for(self, outcome: Outcome) -> dict[str, object]:
        """The size of this node's memory; and about the size that holds all of a request's prompt, if nothing else is
        leased, where a part of the prompt was loaded: as if the rest were as large for its tokens.
        """
        room: dict[str, object] = {"memory_bytes": self._memory.limit_bytes}
        loaded_bytes, loaded_tokens = outcome.detail.get("bytes"), outcome.resume_tokens - outcome.local_tokens
        if isinstance(loaded_bytes, int) and loaded_bytes > 0 and loaded_tokens > 0:
            whole_bytes = loaded_bytes * (outcome.cap_tokens - outcome.local_tokens) / loaded_tokens
            room["memory_for_all_bytes"] = ceil(whole_bytes * self._memory.limit_bytes / self._limits.stage_bytes)
        return room

    def _loss_of(self, outcome: Outcome, now_ms: int) -> ReportedLoss | None:
        """The latest loss of a record that a request needed where it stopped."""
        if outcome.stop is None or outcome.namespace is None:
            return None
        return self._losses.at(outcome.tenant, outcome.namespace, outcome.stop, outcome.groups, now_ms)

    def _lost(self, reported: ReportedOutcome, found: Absence) -> Absence | None:
        """The loss behind what was found, if any: an engine computed what this request needed and did not save it. It
        may have come after the request, which then looked the record up before the loss.
        """
        if found.reason not in _NOT_SAVED or "left" in found.detail:
            return None
        loss = reported.loss
        if loss is None and (later := self._loss_of(reported.outcome, self._clock.wall_ms())) is not None:
            loss = later if later.outcome.request != reported.outcome.request else None
        if loss is None:
            return None
        mine = {"lost_at": _time(loss.at_ms)}
        if loss.outcome.stop is not None:
            mine["lost_by_request"] = loss.outcome.request
        detail = {name: value for name, value in loss.outcome.detail.items() if name != "records"}
        return Absence(loss.outcome.reason, {**found.detail, **detail, **mine})

    def _kept_apart(self, reported: ReportedOutcome, tenant: str | None) -> Absence | None:
        """Whether an earlier request had the same tokens under another salt, adapter or tenant, which share nothing."""
        mine = reported.outcome
        if not mine.content:
            return None
        for other in self.latest(tenant):
            theirs = other.outcome
            if other.number >= reported.number or theirs.content != mine.content:
                continue
            if theirs.tenant != mine.tenant:
                return Absence("other_tenant", {"other_request": theirs.request, "other_tenant": theirs.tenant})
            if theirs.first != mine.first:
                return Absence("other_salt", {"other_request": theirs.request})
        return None


def _summary(reported: ReportedOutcome, tenant: str | None) -> dict[str, object]:
    outcome = reported.outcome
    return {
        "request": outcome.request,
        "tenant": outcome.tenant,
        "at": _time(reported.at_ms),
        "prompt_tokens": outcome.prompt_tokens,
        "resume_tokens": outcome.resume_tokens,
        "result": result_of(outcome),
        "reason": reported.reason_for(tenant),
    }


def _hinted(kept: KeptPrompt) -> ReportedOutcome:
    """A prompt that hints named by its tokens, as if it were a request that resumed nothing."""
    prompt = kept.prompt
    cap_tokens = prompt.boundaries[-1].tokens if prompt.boundaries else 0
    outcome = Outcome(
        prompt.request, prompt.namespace, prompt.prompt_tokens, cap_tokens, 0, 0, "hinted", tenant=prompt.tenant
    )
    return ReportedOutcome(outcome, kept.at_ms, kept.number, reason="hinted", operators_reason="hinted")


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds")
