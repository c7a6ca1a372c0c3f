"""Chooses pages to audit: the first request that could restore them computes them, and the ranks compare the two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from connector.facts import EngineFacts
from connector.identity import CacheShape
from connector.jobs import AuditJob, BlockIds, LoadPiece, RankReport
from connector.logs import LOG
from connector.scheduler.hook_facts import StepFacts
from connector.scheduler.leases import Lease
from connector.scheduler.plans import blocks_of, state_blocks_of
from kvstore.api import Staged
from kvstore.errors import InternalError
from kvstore.model.keys import PrefixHash, RecordKey
from kvstore.runtime.meters import Meters

_SEEN_MAX = 1 << 16
"""Boundaries that are remembered as audited. Beyond that the oldest is forgotten and may be audited again."""

_OPEN_MAX = 64
"""Audits at a time: each keeps its records leased."""

TRIAL_POINTS = 3
"""Resume points that an engine of an untested vLLM computes again, and finds equal, before it loads anything. The same
number of its first loads are read back. Each costs one request its hit."""


@dataclass(slots=True)
class _Record:
    """A staged page, tail or state, all its slices."""

    group: int
    start_tokens: int
    stop_tokens: int
    keys: tuple[RecordKey, ...]

    @property
    def name(self) -> tuple[PrefixHash, int]:
        return self.keys[0].prefix, self.group


@dataclass(slots=True)
class _Audit:
    """Records of a hit that its request computes instead.

    Attributes:
        lease: Keeps the records readable.
        waiting: Records that are not computed yet.
        open_jobs: Unanswered comparisons: by id the number of ranks that have yet to answer.
        from_tokens: Where the request began to compute; it did not compute what is below.
        is_whole: All of its records were compared and are equal, as far as is known.
    """

    request_id: str
    lease: Lease
    waiting: list[_Record]
    open_jobs: dict[int, int] = field(default_factory=dict)
    from_tokens: int | None = None
    is_whole: bool = True


class Audits:
    """Belongs to the engine's thread. With a rate of 0 and a tested release it audits nothing.

    An engine audits a boundary once. If the request does not compute that far, another request may do it.

    Args:
        rate: Share of boundaries, chosen by their hash.
        facts: The engine. If its vLLM is of an untested release, its first resume points are all audited, and no hit
            is taken until enough of them were equal.

    Attributes:
        refusal: Why an engine of an untested release must not be cached: it does not compute what is stored.
    """

    def __init__(self, rate: float, shape: CacheShape, *, facts: EngineFacts, meters: Meters) -> None:
        self._rate = rate
        self._shape = shape
        self._num_ranks = facts.num_ranks
        self._untested_release = facts.untested_release
        self._meters = meters
        self._seen: dict[tuple[PrefixHash, int], None] = {}
        self._audits: list[_Audit] = []
        self._computing: set[str] = set()  # requests that have begun to compute for an audit
        self._next_id = 0
        self._points_left = self._read_backs_left = TRIAL_POINTS if facts.untested_release is not None else 0
        self.refusal: str | None = None

    # ---- hits

    def claim(self, request_id: str, staged: Staged, lease: Lease, local_tokens: int) -> int | None:
        """Take over a staged hit if some of it is to be audited.

        The rest of the hit is staged again and may have to be audited as well, until nothing is left or all of it was
        audited. A request that lost its blocks takes its hit: no request computes twice for an audit.

        Args:
            staged: The hit.
            lease: Its lease. If the hit is taken over, `Audits` renews and ends it.
            local_tokens: Tokens that the engine has itself.

        Returns:
            Up to where the request may still resume from the store, or `None`: the hit is not taken over.
        """
        is_trial = self._points_left > 0
        if not self._rate and not is_trial:
            return None
        due = []
        if request_id not in self._computing and len(self._audits) < _OPEN_MAX:
            due = [record for record in _records_of(staged) if self._is_due(record, local_tokens)]
        if not due:
            if not is_trial:
                return None
            lease.release()  # nothing is loaded before the trial has ended
            return 0
        for record in due:
            self._seen[record.name] = None
        while len(self._seen) > _SEEN_MAX:
            del self._seen[next(iter(self._seen))]
        self._audits.append(_Audit(request_id, lease, due))
        self._meters.add("connector_audits")
        # a state ends where it starts: it is computed from the boundary before
        step = self._shape.boundary_tokens
        return min(min(record.start_tokens, record.stop_tokens - step) for record in due)

    def _is_due(self, record: _Record, local_tokens: int) -> bool:
        return (
            record.stop_tokens > local_tokens
            and record.name not in self._seen
            and not self._shape.groups[record.group].facts.drafts  # they depend on a token that no hash covers
            and (self._points_left > 0 or is_sampled(record.name[0], self._rate))
        )

    def is_read_back(self, staged: Staged) -> bool:
        """Whether the ranks read the blocks of this hit back once they have loaded it."""
        if self._read_backs_left > 0:
            self._read_backs_left -= 1
            return True
        return self._rate > 0 and any(is_sampled(key.prefix, self._rate) for key in staged.keys)

    # ---- steps

    def plan_step(self, step: StepFacts) -> tuple[AuditJob, ...]:
        """What the ranks compare after a step's forward."""
        jobs = []
        for audit in self._audits:
            if audit.request_id in step.preempted and audit.from_tokens is not None:
                self._leave(audit, audit.waiting)
            final_tokens = step.final_tokens.get(audit.request_id)
            if final_tokens is not None:
                self._computing.add(audit.request_id)
                if audit.from_tokens is None:
                    audit.from_tokens = step.computed_tokens.get(audit.request_id, final_tokens)
                if pieces := self._pieces(audit, audit.from_tokens, final_tokens, step):
                    jobs.append(AuditJob(self._next_id, audit.lease.id, pieces))
                    audit.open_jobs[self._next_id] = self._num_ranks
                    self._next_id += 1
            audit.lease.renew_if_due()
        self._end_done()
        return tuple(jobs)

    def _pieces(self, audit: _Audit, from_tokens: int, final_tokens: int, step: StepFacts) -> tuple[LoadPiece, ...]:
        pieces: list[LoadPiece] = []
        for record in [record for record in audit.waiting if record.stop_tokens <= final_tokens]:
            placed = self._place(record, from_tokens, audit.request_id, step)
            if placed is None:
                self._leave(audit, [record])
            else:
                audit.waiting.remove(record)
                pieces += placed
        return tuple(pieces)

    def _place(self, record: _Record, from_tokens: int, request_id: str, step: StepFacts) -> list[LoadPiece] | None:
        """Where the computed content of a record is, or `None` if the engine did not compute or keep it."""
        group = self._shape.groups[record.group]
        block_tokens = group.facts.block_tokens
        block_ids: BlockIds | None
        if group.is_state:
            block_ids = state_blocks_of(group, step.offers.get(request_id, ()), record.stop_tokens)
            span_blocks, first_block = 1, 0
        else:
            first = -(-max(record.start_tokens, from_tokens) // block_tokens)
            last = record.stop_tokens // block_tokens
            if first >= last:
                return None
            try:
                block_ids = blocks_of(group, step.tables[request_id], first, last)
            except InternalError:
                return None
            span_blocks = (record.stop_tokens - record.start_tokens) // block_tokens
            first_block = first - record.start_tokens // block_tokens
        if block_ids is None or any(0 in ids for ids in block_ids):
            return None
        return [LoadPiece(key, span_blocks, first_block, block_ids) for key in record.keys]

    def on_finished(self, request_id: str) -> None:
        """Note that a request has ended."""
        self._computing.discard(request_id)
        for audit in self._audits:
            if audit.request_id == request_id:
                self._leave(audit, audit.waiting)
        self._end_done()

    def on_rank_report(self, report: RankReport) -> None:
        """Take the ranks' answers."""
        if report.audits_differ and self._untested_release is not None:
            self.refusal = (
                f"vLLM {self._untested_release} was not tested with this connector, and a stored page is not what it"
                " computes"
            )
        for audit in self._audits:
            if audit.open_jobs.keys() & (report.audits_partial | report.audits_differ):
                audit.is_whole = False
            for job_id in audit.open_jobs.keys() & report.audits_done.keys():
                audit.open_jobs[job_id] -= report.audits_done[job_id]
                if audit.open_jobs[job_id] <= 0:
                    del audit.open_jobs[job_id]
        self._end_done()

    @property
    def has_open_jobs(self) -> bool:
        """Whether ranks still compare, so that an engine without requests must keep stepping."""
        return any(audit.open_jobs for audit in self._audits)

    def stop(self) -> None:
        """Audit nothing any more. An engine of an untested release that has not ended its trial loads nothing."""
        self._rate = 0.0
        for audit in self._audits:
            audit.lease.release()
        self._audits.clear()

    def _leave(self, audit: _Audit, records: Sequence[_Record]) -> None:
        """Let another request audit these records, which this one does not."""
        for record in list(records):
            audit.is_whole = False
            audit.waiting.remove(record)
            self._seen.pop(record.name, None)
            self._meters.add("connector_audit_skipped")

    def _end_done(self) -> None:
        for audit in [audit for audit in self._audits if not audit.waiting and not audit.open_jobs]:
            self._audits.remove(audit)
            audit.lease.release()
            if self._points_left > 0 and audit.is_whole:
                self._points_left -= 1
                if self._points_left == 0:
                    LOG.info("kvstore: %d resume points were computed again and are equal: hits load", TRIAL_POINTS)


def is_sampled(prefix: PrefixHash, rate: float) -> bool:
    """Whether a boundary is in the audited share; the same in every engine, and included in any larger share."""
    return int.from_bytes(prefix[-8:], "little") < rate * (1 << 64)


def _records_of(staged: Staged) -> list[_Record]:
    def of_record(item: tuple[RecordKey, tuple[int, int]]) -> tuple[int, int, int, bytes]:
        key, (start, stop) = item
        return key.group, stop, start, key.prefix

    items = sorted(zip(staged.keys, staged.spans, strict=True), key=of_record)
    return [
        _Record(group, start, stop, tuple(key for key, _ in slices))
        for (group, stop, start, _), slices in groupby(items, key=of_record)
    ]
