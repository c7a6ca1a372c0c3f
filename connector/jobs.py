"""What the scheduler side tells the ranks to do in a step, and what they answer: plain values that pickle."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey

__all__ = ["LoadJob", "LoadPiece", "RankReport", "SaveJob", "StepJobs"]


@dataclass(frozen=True, slots=True)
class SaveJob:
    """One page or tail of one group, all its slices.

    Attributes:
        job_id: Unique in this engine; every rank answers it once.
        namespace: Where it goes.
        prefix: Hash of the tokens up to `stop_tokens`.
        group: Canonical group.
        start_tokens: First token of the span.
        stop_tokens: End of the span; its blocks are final when this step's forward is done.
        block_ids: The span's blocks in token order.
    """

    job_id: int
    namespace: NamespaceId
    prefix: PrefixHash
    group: int
    start_tokens: int
    stop_tokens: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadPiece:
    """Part of one leased record and the blocks it goes to.

    Attributes:
        key: The record.
        span_blocks: Blocks that the whole record spans.
        first_block: Index in the record of the first block to write.
        block_ids: Where to write, in token order.
    """

    key: RecordKey
    span_blocks: int
    first_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Everything one request waits for.

    Attributes:
        request_id: vLLM's; reported as finished exactly once by every rank.
        lease: Keeps the records readable.
        pieces: All slices; a rank loads its own. `None`: the load could not be planned; ranks report it as failed,
            since vLLM waits for their report.
    """

    request_id: str
    lease: bytes
    pieces: tuple[LoadPiece, ...] | None


@dataclass(frozen=True, slots=True)
class StepJobs:
    """The work of one engine step; never changed once built, since ranks of one process get it by reference.

    Attributes:
        loads: Requests to load for.
        saves: Pages to save, final after this step's forward.
        computes: Whether the step has a forward at all.
    """

    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()
    computes: bool = True


@dataclass(slots=True)
class RankReport:
    """What ranks did since their last report; reports of several ranks add up.

    Attributes:
        saves_done: For each finished save job the number of ranks that are done with its buffers, stored or not.
        saves_failed: Jobs of which a slice was not stored: a hole in their prefix.
    """

    saves_done: dict[int, int] = field(default_factory=dict)
    saves_failed: set[int] = field(default_factory=set)

    def merge(self, other: RankReport) -> RankReport:
        """The sum of two reports."""
        merged = dict(self.saves_done)
        for job_id, ranks in other.saves_done.items():
            merged[job_id] = merged.get(job_id, 0) + ranks
        return RankReport(merged, self.saves_failed | other.saves_failed)
