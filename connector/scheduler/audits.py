"""Chooses resume points to audit: the first request that would resume there computes instead, and both are compared."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from connector.bridge import Bridge
from connector.facts import EngineFacts
from connector.identity import CacheShape
from connector.jobs import AuditJob, AuditJobs, BlockIds, LoadPiece, RankReport
from connector.scheduler.audit_records import AuditRecord, records_of
from connector.scheduler.facts import StateOffer
from connector.scheduler.plans import blocks_of
from kvstore.api import Deadline, LeaseId, PageStore, Staged
from kvstore.errors import Closed, InternalError
from kvstore.model.keys import PrefixHash
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.meters import Meters

__all__ = ["TRIAL_POINTS", "Audits", "is_sampled"]

_log = logging.getLogger("vllm.kvstore")  # below vLLM's logger, so that its handlers and levels apply

_SEEN_MAX = 1 << 16
"""Boundaries that are remembered as audited; beyond, the oldest is forgotten and may be audited again."""

_OPEN_MAX = 64
"""Requests that compute for an audit at a time: each keeps its records leased."""

_RENEW_SHARE = 3

TRIAL_POINTS = 3
"""Resume points that an engine of an untested vLLM has to compute again, and find equal, before it loads anything; and
so many of its first loads are read back. Each costs one request its hit."""

Tables = Callable[[], Sequence[Sequence[int]]]


def is_sampled(prefix: PrefixHash, rate: float) -> bool:
    """Whether a boundary is in the audited share; the same in every engine, and included in any larger share."""
    return int.from_bytes(prefix[-8:], "little") < rate * (1 << 64)


@dataclass(slots=True)
class _Audit:
    """A hit that its request computes instead.

    Attributes:
        lease: Keeps the records readable.
        lease_s: How long, unless it is renewed.
        renewed_s: Monotonic time of the last renewal.
        waiting: Records that are not computed yet.
        open_jobs: Unanswered comparisons: by id the number of ranks that have yet to answer.
        from_tokens: Where the request began to compute; it did not compute what is below.
        is_whole: All of its records were compared, as far as is known.
    """

    lease: LeaseId
    lease_s: float
    renewed_s: float
    waiting: list[AuditRecord]
    open_jobs: dict[int, int] = field(default_factory=dict)
    from_tokens: int | None = None
    is_whole: bool = True


@dataclass(slots=True)
class _Loaded:
    """An audited load: where its request resumes, and whether vLLM allocated its blocks since the last step."""

    resume_tokens: int
    is_new: bool = True


class Audits:
    """Belongs to the engine's thread.

    An engine audits a boundary once. If the request does not compute that far, another request may do it.

    Args:
        rate: Share of boundaries, chosen by their hash.
        shape: The model's cache.
        bridge: To the store.
        facts: The engine. If its vLLM is of an untested release, its first resume points are all audited, and no hit
            is taken until enough of them were equal.
        meters: Counters.
        clock: Time.

    Attributes:
        refusal: Why an engine of an untested release must not be cached: what it computes is not what is stored.
    """

    def __init__(
        self,
        rate: float,
        shape: CacheShape,
        bridge: Bridge,
        *,
        facts: EngineFacts,
        meters: Meters,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._rate = rate
        self._shape = shape
        self._bridge = bridge
        self._num_ranks = facts.num_ranks
        self._untested_release = facts.untested_release
        self._meters = meters
        self._clock = clock
        self._seen: dict[tuple[PrefixHash, int], None] = {}
        self._audits: dict[str, list[_Audit]] = {}  # by request
        self._ending: list[_Audit] = []  # their requests have ended, ranks still compare
        self._computing: set[str] = set()  # requests with audits that have begun to compute
        self._loaded: dict[str, _Loaded] = {}  # by request, until its first forward
        self._gone: list[str] = []
        self._next_id = 0
        self._points_left = self._read_backs_left = TRIAL_POINTS if facts.untested_release is not None else 0
        self.refusal: str | None = None

    # ---- hits

    def claim(self, request_id: str, staged: Staged, local_tokens: int) -> int | None:
        """Take over a staged hit if some of it is to be audited.

        The rest of the hit is staged again and may have to be audited as well, until nothing is left or all of it was
        audited. A request that lost its blocks meanwhile takes its hit: no request is made to compute twice.

        Args:
            request_id: Whose hit.
            staged: The hit; if it is taken over, ending its lease is up to us.
            local_tokens: What the engine has itself.

        Returns:
            Up to where the request may still resume from the store, or `None`: the hit is not taken over.
        """
        assert staged.lease is not None
        on_trial = self._points_left > 0
        if request_id in self._computing or len(self._audits) + len(self._ending) >= _OPEN_MAX:
            return self._withhold(staged.lease) if on_trial else None
        due = [
            record
            for record in records_of(staged)
            if record.stop_tokens > local_tokens
            and record.name not in self._seen
            and not self._shape.groups[record.group].facts.drafts  # they depend on a token that no hash covers
            and (on_trial or is_sampled(record.name[0], self._rate))
        ]
        if not due:
            return self._withhold(staged.lease) if on_trial else None
        for record in due:
            self._remember(record)
        audit = _Audit(staged.lease, staged.lease_s, self._clock.monotonic_s(), due)
        self._audits.setdefault(request_id, []).append(audit)
        self._meters.add("connector_audits")
        # a state ends where it starts: it is computed from the boundary before
        step = self._shape.boundary_tokens
        return min(min(record.start_tokens, record.stop_tokens - step) for record in due)

    def _withhold(self, lease: LeaseId) -> int:
        """Take over a hit that nothing of is audited, so that nothing of it is loaded."""
        self._release(lease)
        return 0

    def _remember(self, record: AuditRecord) -> None:
        self._seen[record.name] = None
        while len(self._seen) > _SEEN_MAX:
            del self._seen[next(iter(self._seen))]

    # ---- loads

    def on_load(self, request_id: str, staged: Staged, resume_tokens: int) -> bool:
        """Note that a hit is being loaded; returns whether the ranks are to read its blocks back."""
        self._loaded.pop(request_id, None)
        if self._read_backs_left > 0:
            self._read_backs_left -= 1
        elif not any(is_sampled(key.prefix, self._rate) for key in staged.keys):
            return False
        self._loaded[request_id] = _Loaded(resume_tokens)
        return True

    def on_load_gone(self, request_id: str) -> None:
        """Note that a load failed, or that its blocks are gone."""
        if self._loaded.pop(request_id, None) is not None:
            self._gone.append(request_id)

    def on_load_lost(self, request_id: str) -> None:
        """A load ended that nothing will compute with: what the ranks remember of it since is forgotten as well."""
        self._loaded.pop(request_id, None)
        self._gone.append(request_id)

    def _read_backs(self, computed_tokens: Mapping[str, int]) -> tuple[str, ...]:
        """The requests with an audited load that compute for the first time in this step."""
        found = [request_id for request_id in self._loaded if request_id in computed_tokens]
        # a request that resumes inside its last block writes to that block
        whole = [name for name in found if computed_tokens[name] >= self._loaded[name].resume_tokens]
        self._gone += set(found) - set(whole)
        for request_id in found:
            del self._loaded[request_id]
        return tuple(whole)

    # ---- steps

    def plan_step(
        self,
        computed_tokens: Mapping[str, int],
        final_tokens: Mapping[str, int],
        tables: Mapping[str, Sequence[Sequence[int]]],
        offers: Mapping[str, Sequence[StateOffer]],
        preempted: Sequence[str],
    ) -> AuditJobs:
        """The audit's part of a step.

        Args:
            computed_tokens: By request, tokens that were computed before the step.
            final_tokens: By request, tokens whose cache content is final after its forward.
            tables: By request, its block ids for each of vLLM's groups.
            offers: By request, states that the forward writes.
            preempted: Requests that lost their blocks.
        """
        for request_id in preempted:
            self._on_blocks_lost(request_id)
        records: list[AuditJob] = []
        for request_id in final_tokens.keys() & self._audits.keys():
            self._computing.add(request_id)
            for audit in self._audits[request_id]:
                if audit.from_tokens is None:
                    audit.from_tokens = computed_tokens.get(request_id, final_tokens[request_id])
                pieces = self._pieces(
                    audit, final_tokens[request_id], partial(tables.__getitem__, request_id), offers.get(request_id, ())
                )
                if pieces:
                    records.append(AuditJob(self._next_id, audit.lease, pieces))
                    audit.open_jobs[self._next_id] = self._num_ranks
                    self._next_id += 1
            self._end_done(request_id)
        for audit in self._open():
            self._renew(audit)
        read_backs = self._read_backs(computed_tokens)
        for loaded in self._loaded.values():
            loaded.is_new = False
        gone, self._gone = tuple(self._gone), []
        return AuditJobs(tuple(records), read_backs, gone)

    def _pieces(
        self, audit: _Audit, final_tokens: int, tables: Tables, offers: Sequence[StateOffer]
    ) -> tuple[LoadPiece, ...]:
        assert audit.from_tokens is not None
        pieces: list[LoadPiece] = []
        for record in list(audit.waiting):
            if record.stop_tokens > final_tokens:
                continue
            audit.waiting.remove(record)
            placed = self._place(record, audit.from_tokens, tables, offers)
            if placed is None:
                self._leave(audit, [record])
            else:
                pieces += placed
        return tuple(pieces)

    def _place(
        self, record: AuditRecord, from_tokens: int, tables: Tables, offers: Sequence[StateOffer]
    ) -> list[LoadPiece] | None:
        """Where the computed content of a record is, or `None` if the engine did not compute or keep it."""
        group = self._shape.groups[record.group]
        block_tokens = group.facts.block_tokens
        block_ids: BlockIds
        if group.is_state:
            by_group = {offer.vllm_group: offer.block_id for offer in offers if _is_of(offer, record)}
            block_ids = tuple((by_group.get(feed, 0),) for feed in group.facts.feed_groups)
            span_blocks, first_block = 1, 0
        else:
            first = -(-max(record.start_tokens, from_tokens) // block_tokens)
            last = record.stop_tokens // block_tokens
            if first >= last:
                return None
            try:
                block_ids = blocks_of(group, tables(), first, last)
            except InternalError:
                return None
            span_blocks = (record.stop_tokens - record.start_tokens) // block_tokens
            first_block = first - record.start_tokens // block_tokens
        if any(0 in ids for ids in block_ids):
            return None
        return [LoadPiece(key, span_blocks, first_block, block_ids) for key in record.keys]

    def _on_blocks_lost(self, request_id: str) -> None:
        """Note that a request was preempted: another request may audit what this one has not computed yet.

        Blocks that it was given after the preemption, but before the step that reports it, it still has.
        """
        loaded = self._loaded.get(request_id)
        if loaded is not None and not loaded.is_new:
            self.on_load_gone(request_id)
        for audit in self._audits.get(request_id, ()):
            if audit.from_tokens is not None:
                self._leave(audit, audit.waiting)
                audit.waiting = []
        self._end_done(request_id)

    def on_finished(self, request_id: str) -> None:
        """Note that a request has ended."""
        self.on_load_gone(request_id)
        self._computing.discard(request_id)
        for audit in self._audits.pop(request_id, []):
            self._leave(audit, audit.waiting)
            audit.waiting = []
            self._ending.append(audit)
        self._ending = self._without_done(self._ending)

    def on_rank_report(self, report: RankReport) -> None:
        """Take the ranks' answers."""
        if report.audits_differ and self._untested_release is not None:
            self.refusal = (
                f"vLLM {self._untested_release} was not tested with this connector, and a stored page is not what it"
                " computes"
            )
        for audit in self._open():
            if audit.open_jobs.keys() & (report.audits_partial | report.audits_differ):
                audit.is_whole = False
            _count_down(audit, report.audits_done)
        for request_id in list(self._audits):
            self._end_done(request_id)
        self._ending = self._without_done(self._ending)

    def _open(self) -> list[_Audit]:
        return [*self._ending, *(audit for audits in self._audits.values() for audit in audits)]

    @property
    def has_open(self) -> bool:
        """Whether an engine without requests must keep stepping: ranks still compare, and leases wait for that."""
        return bool(self._ending)

    def _end_done(self, request_id: str) -> None:
        left = self._without_done(self._audits.pop(request_id, []))
        if left:
            self._audits[request_id] = left

    def _without_done(self, audits: Iterable[_Audit]) -> list[_Audit]:
        """The audits that still wait for something; the leases of the others are released."""
        left = []
        for audit in audits:
            if audit.waiting or audit.open_jobs:
                left.append(audit)
            else:
                self._release(audit.lease)
                self._count_point(audit)
        return left

    def _count_point(self, audit: _Audit) -> None:
        if self._points_left == 0 or not audit.is_whole:
            return
        self._points_left -= 1
        if self._points_left == 0:
            _log.info("kvstore: %d resume points were computed again and were equal: hits are loaded", TRIAL_POINTS)

    def _leave(self, audit: _Audit, records: Iterable[AuditRecord]) -> None:
        for record in records:
            audit.is_whole = False
            self._seen.pop(record.name, None)
            self._meters.add("connector_audit_skipped")

    # ---- leases

    def _renew(self, audit: _Audit) -> None:
        now = self._clock.monotonic_s()
        if now - audit.renewed_s <= audit.lease_s / _RENEW_SHARE:
            return
        audit.renewed_s = now

        async def renew(store: PageStore) -> None:
            await store.renew(audit.lease, deadline=Deadline.after(1.0))

        self._submit_quietly(renew)

    def _release(self, lease: LeaseId) -> None:
        async def release(store: PageStore) -> None:
            await store.release(lease)

        self._submit_quietly(release)

    def _submit_quietly(self, work: Callable[[PageStore], Coroutine[Any, Any, None]]) -> None:
        with suppress(Closed):  # at the very end: leases end with the connection
            self._bridge.submit(work)


def _is_of(offer: StateOffer, record: AuditRecord) -> bool:
    return offer.boundary_tokens == record.stop_tokens


def _count_down(audit: _Audit, done: Mapping[int, int]) -> None:
    for audit_id in audit.open_jobs.keys() & done.keys():
        audit.open_jobs[audit_id] -= done[audit_id]
        if audit.open_jobs[audit_id] <= 0:
            del audit.open_jobs[audit_id]
