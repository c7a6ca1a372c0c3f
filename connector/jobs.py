"""The jobs of a step, from the scheduler side to the ranks, and the ranks' reports: plain values that pickle."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.api import Retention
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey

BlockIds = tuple[tuple[int, ...], ...]
"""For each feed of a group the blocks of one span in token order; the same number for each feed."""


@dataclass(frozen=True, slots=True)
class SaveJob:
    """One page, tail or state of one group, all its slices.

    Attributes:
        job_id: Unique in this engine; every rank answers it once.
        prefix: Hash of the tokens up to `stop_tokens`.
        group: Canonical group.
        start_tokens: First token of the span; `stop_tokens` for a state.
        stop_tokens: End of the span; its blocks are final when this step's forward is done.
        block_ids: The span's blocks, or the one block that holds the state.
        trace: Passed to the store with each save; empty: none.
        request_id: vLLM's, of the request that computed it.
        adapter: The folder of the request's adapter, and the identities that its files had before vLLM read them.
    """

    job_id: int
    namespace: NamespaceId
    prefix: PrefixHash
    group: int
    start_tokens: int
    stop_tokens: int
    block_ids: BlockIds
    retention: Retention = Retention.NORMAL
    trace: str = ""
    request_id: str = ""
    adapter: tuple[str, tuple[str, ...]] | None = None

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids[0])


@dataclass(frozen=True, slots=True)
class LoadPiece:
    """Part of one leased record and the blocks to which it is written.

    Attributes:
        span_blocks: Blocks that the whole record spans; 1 for a state.
        first_block: Index in the record of the first block to write.
        block_ids: Where to write.
    """

    key: RecordKey
    span_blocks: int
    first_block: int
    block_ids: BlockIds

    @property
    def num_blocks(self) -> int:
        """Blocks to write, in each feed."""
        return len(self.block_ids[0])


@dataclass(frozen=True, slots=True)
class LoadJob:
    """All records for which one request waits.

    Attributes:
        request_id: vLLM's; reported as finished exactly once by every rank.
        lease: Keeps the records readable.
        pieces: All slices; a rank loads its own. `None`: the load could not be planned. Ranks report it as failed,
            since vLLM waits for their report.
        read_back: The blocks are read back and compared before the load is reported.
        trace: Passed to the store with each load; empty: none.
    """

    request_id: str
    lease: bytes
    pieces: tuple[LoadPiece, ...] | None
    read_back: bool = False
    trace: str = ""


@dataclass(frozen=True, slots=True)
class AuditJob:
    """Leased records to compare with blocks that the engine has computed itself.

    Attributes:
        audit_id: Unique in this engine; every rank answers it once.
        lease: Keeps the records readable.
        pieces: All slices; a rank compares its own. The blocks are final when this step's forward is done.
    """

    audit_id: int
    lease: bytes
    pieces: tuple[LoadPiece, ...]


@dataclass(frozen=True, slots=True)
class StepJobs:
    """The work of one engine step; never changed once built, since ranks of one process get it by reference.

    Attributes:
        saves: Pages to save, final after this step's forward.
        computes: Whether the step has a forward.
        audits: Stored records to compare with pages that are final after this step's forward.
        may_wait: Nothing computes while this step is executed, so that a moment's wait in it delays no token.
    """

    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()
    computes: bool = True
    audits: tuple[AuditJob, ...] = ()
    may_wait: bool = False


@dataclass(slots=True)
class RankReport:
    """The jobs that ranks finished since their last report; reports of several ranks add up.

    Attributes:
        saves_done: For each finished save job the number of ranks that are done with its buffers, stored or not.
        saves_failed: Jobs of which a slice was not stored: a hole in their prefix.
        audits_done: For each finished audit job the number of ranks that are done with its records.
        audits_partial: Finished audit jobs of which a record was not compared.
        audits_differ: Finished audit jobs of which a record is not what was computed.
        refusal: Why a rank loads and saves nothing any more; empty: all do.
    """

    saves_done: dict[int, int] = field(default_factory=dict)
    saves_failed: set[int] = field(default_factory=set)
    audits_done: dict[int, int] = field(default_factory=dict)
    audits_partial: set[int] = field(default_factory=set)
    audits_differ: set[int] = field(default_factory=set)
    refusal: str = ""

    def merge(self, other: RankReport) -> RankReport:
        """The sum of two reports."""
        return RankReport(
            _add_up(self.saves_done, other.saves_done),
            self.saves_failed | other.saves_failed,
            _add_up(self.audits_done, other.audits_done),
            self.audits_partial | other.audits_partial,
            self.audits_differ | other.audits_differ,
            self.refusal or other.refusal,
        )


def _add_up(left: dict[int, int], right: dict[int, int]) -> dict[int, int]:
    return {job_id: left.get(job_id, 0) + right.get(job_id, 0) for job_id in left.keys() | right.keys()}
