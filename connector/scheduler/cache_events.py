"""What the engine announces about pages in the store: which became readable, where, and which are gone.

Routers that listen to vLLM's cache events know blocks by vLLM's own hashes; pages are announced as runs of such blocks.
Used only if events are published, since hashes and tokens of every page are kept until its save is answered. All of it
happens here: the ranks' reports carry their answers, so no event has to travel from a worker.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from connector.bridge import result_or_none
from connector.identity import CacheShape
from connector.jobs import RankReport, SaveJob
from connector.scheduler.requests import RequestState
from kvstore.api import Staged
from kvstore.model.keys import PrefixHash
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock

__all__ = ["Announcement", "Announcements", "BlockRun", "RequestHashes"]

_ACKNOWLEDGED_IN = "memory"
"""The tier that acknowledges a save; write-back to the slower ones follows by itself."""

_REMEMBERED_PAGES = 16_384


@dataclass(frozen=True, slots=True)
class RequestHashes:
    """What vLLM's own events say of a request's blocks.

    Attributes:
        block_hashes: One for each `hash_tokens` tokens; vLLM appends to it.
        hash_tokens: Tokens per hash.
        lora_name: Name of its adapter, or `None`.
        lora_id: Id of its adapter, or `None`.
    """

    block_hashes: Sequence[bytes]
    hash_tokens: int
    lora_name: str | None = None
    lora_id: int | None = None


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks of one group.

    Attributes:
        group: Canonical group.
        hashes: vLLM's hash of each block.
        parent: Hash of the block before them, or `None` at the prompt's start.
        tokens: Tokens of all these blocks.
        block_tokens: Tokens per block.
        lora_name: Name of the adapter, or `None`.
        lora_id: Id of the adapter, or `None`.
    """

    group: int
    hashes: tuple[bytes, ...]
    parent: bytes | None = None
    tokens: tuple[int, ...] = ()
    block_tokens: int = 0
    lora_name: str | None = None
    lora_id: int | None = None


@dataclass(frozen=True, slots=True)
class Announcement:
    """A change: `run` became readable from a tier, or no longer is."""

    run: BlockRun
    tier: str
    removed: bool = False


@dataclass(slots=True)
class _Request:
    """An open request: when it came, and whether its lookup's answer was compared with what was announced."""

    hashes: RequestHashes
    born_s: float
    compared: bool = False


@dataclass(slots=True)
class _Told:
    """A page that was announced: in which tiers, and when it was last announced."""

    hashes: tuple[bytes, ...]
    tiers: set[str] = field(default_factory=set)
    told_s: float = 0.0


@dataclass(slots=True)
class _Pending:
    """A save on its way."""

    prefix: PrefixHash
    run: BlockRun
    busy_ranks: int


class Announcements:
    """Turns answers of ranks and of the store into announcements.

    A page is announced once per tier. What the store has dropped is noticed when a later prompt asks for it.

    Args:
        shape: The model's cache.
        num_ranks: Ranks that answer each save.
        clock: Time.
    """

    def __init__(self, shape: CacheShape, *, num_ranks: int, clock: Clock = SYSTEM_CLOCK) -> None:
        self.shape = shape
        self._num_ranks = num_ranks
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._pending: dict[int, _Pending] = {}
        self._told: OrderedDict[tuple[PrefixHash, int], _Told] = OrderedDict()
        self._ready: list[Announcement] = []

    def take(self) -> list[Announcement]:
        """The announcements since the last call, in order."""
        taken, self._ready = self._ready, []
        return taken

    def opened(self, request_id: str, hashes: RequestHashes) -> None:
        """Note that a request came."""
        self._requests[request_id] = _Request(hashes, self._clock.monotonic_s())

    def closed(self, request_id: str) -> None:
        """Note that a request is over and the last of its saves planned."""
        self._requests.pop(request_id, None)

    def planned(self, job: SaveJob, state: RequestState) -> None:
        """Note that a page, tail or state is being saved."""
        run = self._run(state, job.group, job.start_tokens, job.stop_tokens)
        if run is not None:
            self._pending[job.job_id] = _Pending(job.prefix, run, self._num_ranks)

    def withdraw(self, job_id: int) -> None:
        """Forget a job that was never sent."""
        self._pending.pop(job_id, None)

    @property
    def has_pending(self) -> bool:
        """Whether an idle engine must keep stepping, to announce saves that are on their way."""
        return bool(self._pending or self._ready)

    def on_rank_report(self, report: RankReport) -> None:
        """Take the ranks' answers: a page is readable once every rank's share of it is stored."""
        for job_id in report.saves_failed:
            self._pending.pop(job_id, None)
        for job_id, ranks in report.saves_done.items():
            entry = self._pending.get(job_id)
            if entry is None:
                continue
            entry.busy_ranks -= ranks
            if entry.busy_ranks <= 0:
                del self._pending[job_id]
                self._tell(entry.prefix, entry.run, _ACKNOWLEDGED_IN)

    def on_staged(self, state: RequestState, staged: Staged) -> None:
        """Announce the pages of a hit, if all of it was read from one tier: then they are known to be there."""
        if len(staged.sources) != 1:
            return
        (tier,) = staged.sources
        pages = {(key.prefix, key.group): span for key, span in zip(staged.keys, staged.spans, strict=True)}
        for (prefix, group), (start, stop) in pages.items():
            run = self._run(state, group, start, stop)
            if run is not None:
                self._tell(prefix, run, tier)

    def on_presence(self, state: RequestState) -> None:
        """Announce as removed what was announced before a prompt came and its lookup did not find.

        Called before a save of the request is planned; only the first call has an effect.
        """
        request = self._requests.get(state.request_id)
        if request is None or request.compared or not state.presence_known:
            return
        request.compared = True
        answer = result_or_none(state.lookup) if state.lookup is not None and state.lookup.done() else None
        if answer is None or state.chain is None:
            return
        # the chain may have grown since: its first boundaries are the ones that were asked for
        for boundary, groups in zip(state.chain.boundaries, answer.groups_present, strict=False):
            for group in range(len(self.shape.groups)):
                told = self._told.get((boundary.prefix, group))
                if told is None or groups >> group & 1 or told.told_s >= request.born_s:
                    continue
                del self._told[boundary.prefix, group]
                run = BlockRun(group, told.hashes)
                self._ready += [Announcement(run, tier, removed=True) for tier in sorted(told.tiers)]

    def _tell(self, prefix: PrefixHash, run: BlockRun, tier: str) -> None:
        told = self._told.setdefault((prefix, run.group), _Told(run.hashes))
        self._told.move_to_end((prefix, run.group))
        told.told_s = self._clock.monotonic_s()
        if tier not in told.tiers:
            told.tiers.add(tier)
            self._ready.append(Announcement(run, tier))
        if len(self._told) > _REMEMBERED_PAGES:
            self._told.popitem(last=False)

    def _run(self, state: RequestState, group: int, start_tokens: int, stop_tokens: int) -> BlockRun | None:
        """The blocks of a span, or the one block of a state; `None`: vLLM's hashes do not match them."""
        request, block_tokens = self._requests.get(state.request_id), self.shape.groups[group].facts.block_tokens
        if request is None or block_tokens % request.hashes.hash_tokens:
            return None
        known = request.hashes
        if start_tokens == stop_tokens:  # a state: vLLM keeps it in the block that ends there
            start_tokens = stop_tokens - block_tokens
        if stop_tokens > min(len(known.block_hashes) * known.hash_tokens, len(state.known)):
            return None
        ends = range(start_tokens + block_tokens, stop_tokens + 1, block_tokens)
        return BlockRun(
            group=group,
            hashes=tuple(known.block_hashes[end // known.hash_tokens - 1] for end in ends),
            parent=known.block_hashes[start_tokens // known.hash_tokens - 1] if start_tokens else None,
            tokens=tuple(state.known[start_tokens:stop_tokens]),
            block_tokens=block_tokens,
            lora_name=known.lora_name,
            lora_id=known.lora_id,
        )
