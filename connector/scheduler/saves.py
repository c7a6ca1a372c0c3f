"""From steps to save jobs: cursors, the ranks' room, pins, and the ranks' reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from connector.canonical.window import may_lose_blocks
from connector.identity import CacheShape
from connector.jobs import BlockIds, RankReport, SaveJob
from connector.scheduler.announcements import Announcements
from connector.scheduler.ledger import Ledger, RequestState
from connector.scheduler.load_plan import blocks_of
from connector.scheduler.save_plan import final_pages
from kvstore.model.keys import NamespaceId
from kvstore.model.spans import Span
from kvstore.runtime.meters import Meters

__all__ = ["BlockPins", "Offer", "Saves"]


Tables = Callable[[], Sequence[Sequence[int]]]
"""Returns, for each of vLLM's groups, a request's block ids; called only when a page is saved."""


class BlockPins(Protocol):
    """Keeps blocks from being reused."""

    def pin(self, block_ids: Sequence[int]) -> None: ...

    def unpin(self, block_ids: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class Offer:
    """A recurrent state that vLLM just made: in one step's forward, at a boundary, in one of its groups."""

    vllm_group: int
    block_id: int
    boundary_tokens: int


@dataclass(slots=True)
class _Saving:
    """A job in flight: what it holds on each rank, how many ranks still hold it, and the blocks pinned for it."""

    request_id: str
    num_bytes: int
    busy_ranks: int
    pinned: tuple[int, ...] = ()


class Saves:
    """Decides what of each step is saved.

    Args:
        shape: The model's cache.
        num_ranks: Ranks that answer each job.
        limit_bytes: Host memory of a rank for pages in flight.
        ledger: The requests.
        meters: Counters.
    """

    def __init__(self, shape: CacheShape, *, num_ranks: int, limit_bytes: int, ledger: Ledger, meters: Meters) -> None:
        self._shape = shape
        self._num_ranks = num_ranks
        self._limit_bytes = limit_bytes
        self._ledger = ledger
        self._meters = meters
        self._saving: dict[int, _Saving] = {}  # by job id
        self._in_flight_bytes = 0
        self._next_job_id = 0
        self._ended: list[SaveJob] = []  # of requests that ended, for the next step
        self.pins: BlockPins | None = None
        """Set once vLLM's block pool is known; without it nothing is saved of requests that have ended."""
        self.announcements: Announcements | None = None
        """Set if cache events are published."""

    def __len__(self) -> int:
        return len(self._saving)

    def plan_step(
        self,
        state: RequestState,
        namespace: NamespaceId,
        final_tokens: int,
        tables: Tables,
        offers: Sequence[Offer] = (),
    ) -> list[SaveJob]:
        """The jobs of one running request, whose prompt is hashed.

        Costs next to nothing in a step that completes no block: it is called for every request of every step.

        Args:
            state: The request.
            namespace: Where its pages go.
            final_tokens: Tokens whose cache content is final after this step's forward.
            tables: Gives its block tables.
            offers: States that this step's forward writes.
        """
        if self.announcements is not None:
            self.announcements.on_presence(state)
        boundary = self._shape.boundary_tokens
        final_tokens = min(final_tokens, len(state.known))
        jobs: list[SaveJob] = []
        if state.pages_delayed or final_tokens // boundary != state.planned_tokens // boundary:
            tail_tokens = len(state.prompt) // boundary * boundary
            was_delayed = state.pages_delayed
            jobs = self._plan_pages(state, namespace, final_tokens, tail_tokens, tables)
            if state.pages_delayed and not was_delayed:
                self._meters.add("connector_saves_delayed")
            state.planned_tokens = final_tokens
        if offers and not state.save_stopped:
            jobs += self._plan_states(state, namespace, offers)
        return jobs

    def plan_end(
        self, state: RequestState, namespace: NamespaceId, final_tokens: int, tables: Sequence[Sequence[int]]
    ) -> None:
        """Plan the last saves of a request that ended well, a tail included, for the next step.

        Its blocks are pinned until the ranks answer, since vLLM frees them now.
        """
        if self.pins is None or state.save_stopped:
            return
        boundary = self._shape.boundary_tokens
        final_tokens = min(final_tokens, len(state.known))
        tail_tokens = final_tokens // boundary * boundary
        first_job_id = self._next_job_id
        try:
            for job in self._plan_pages(state, namespace, final_tokens, tail_tokens, lambda: tables):
                block_ids = tuple(block_id for ids in job.block_ids for block_id in ids)
                self.pins.pin(block_ids)
                self._saving[job.job_id].pinned = block_ids
                self._ended.append(job)
            if state.pages_delayed:  # there is no next step to try it in
                self._meters.add("connector_saves", outcome="no_room")
        except BaseException:
            self.withdraw(first_job_id)
            raise

    def take_ended(self) -> list[SaveJob]:
        """Jobs of requests that ended since the last step."""
        jobs, self._ended = self._ended, []
        return jobs

    def _plan_pages(
        self,
        state: RequestState,
        namespace: NamespaceId,
        final_tokens: int,
        tail_tokens: int,
        tables: Tables,
    ) -> list[SaveJob]:
        jobs: list[SaveJob] = []
        state.pages_delayed = False
        state.extend_chain(final_tokens, self._shape.boundary_tokens)
        final_tokens = min(final_tokens, state.hashed_tokens)
        for index, group in enumerate(self._shape.groups):
            if group.is_state:
                continue
            pages, cursor = final_pages(
                saved_tokens=state.cursors.get(index, 0),
                final_tokens=final_tokens,
                tail_tokens=tail_tokens,
                page_tokens=self._shape.layout.page_tokens,
                is_stored=_stored(state, index),
            )
            for page in pages:
                block_tokens = group.facts.block_tokens
                first, last = page.start_tokens // block_tokens, page.stop_tokens // block_tokens
                block_ids = blocks_of(group, tables(), first, last)
                if any(0 in ids for ids in block_ids):
                    # it left the window before its turn; later pages can be used without it
                    assert may_lose_blocks(group.facts.kind), "a block of full attention is gone"
                    self._meters.add("connector_saves", outcome="window_passed")
                    continue
                job = self._job(state, namespace, index, Span(page.start_tokens, page.stop_tokens), block_ids)
                if job is None:
                    # the ranks have no room; the blocks are mostly still held, so the next step tries again
                    cursor = page.start_tokens
                    state.pages_delayed = True
                    break
                jobs.append(job)
            state.cursors[index] = max(state.cursors.get(index, 0), cursor)
        return jobs

    def _plan_states(self, state: RequestState, namespace: NamespaceId, offers: Sequence[Offer]) -> list[SaveJob]:
        by_boundary: dict[int, dict[int, int]] = {}
        for offer in offers:
            by_boundary.setdefault(offer.boundary_tokens, {})[offer.vllm_group] = offer.block_id
        jobs: list[SaveJob] = []
        for boundary_tokens, blocks in sorted(by_boundary.items()):
            state.extend_chain(boundary_tokens, self._shape.boundary_tokens)
            if boundary_tokens % self._shape.boundary_tokens or boundary_tokens > state.hashed_tokens:
                continue  # inside a block, or of tokens not known yet
            for index, group in enumerate(self._shape.groups):
                if not group.is_state or _stored(state, index)(boundary_tokens):
                    continue
                block_ids = tuple((blocks.get(feed, 0),) for feed in group.facts.feed_groups)
                if any(0 in ids for ids in block_ids):
                    continue
                job = self._job(state, namespace, index, Span(boundary_tokens, boundary_tokens), block_ids)
                if job is None:  # nor is a state offered a second time
                    self._meters.add("connector_saves", outcome="no_room")
                else:
                    state.note_stored(boundary_tokens, index)  # vLLM offers a state again once it is loaded
                    jobs.append(job)
        return jobs

    def _job(
        self, state: RequestState, namespace: NamespaceId, index: int, span: Span, block_ids: BlockIds
    ) -> SaveJob | None:
        """A job, with its room on every rank reserved, or `None` if there is no room."""
        group = self._shape.groups[index]
        num_bytes = len(block_ids[0]) * group.facts.rank_block_bytes
        if self._in_flight_bytes and self._in_flight_bytes + num_bytes > self._limit_bytes:
            return None
        job_id = self._next_job_id
        self._next_job_id += 1
        self._saving[job_id] = _Saving(state.request_id, num_bytes, self._num_ranks)
        self._in_flight_bytes += num_bytes
        prefix = state.prefix_at(span.stop, self._shape.boundary_tokens)
        hints = state.flags.retention, state.trace
        job = SaveJob(job_id, namespace, prefix, index, span.start, span.stop, block_ids, *hints)
        if self.announcements is not None:
            self.announcements.planned(job, state)
        return job

    def promised_tokens(self, state: RequestState) -> int:
        """How many tokens of a request are in the store or on their way, as far as this engine's saves go."""
        attention = [
            state.cursors.get(index, 0) for index, group in enumerate(self._shape.groups) if not group.is_state
        ]
        states = [index for index, group in enumerate(self._shape.groups) if group.is_state]
        reached = (
            min(attention, default=state.hashed_tokens) // self._shape.boundary_tokens * self._shape.boundary_tokens
        )
        if not states:
            return reached
        return max(
            (
                tokens
                for tokens in state.present
                if tokens <= reached and all(_stored(state, i)(tokens) for i in states)
            ),
            default=0,
        )

    def withdraw(self, first_job_id: int) -> None:
        """Forget jobs from this id on and free their room: they were never sent, so no rank will."""
        for job_id in range(first_job_id, self._next_job_id):
            if not any(job.job_id == job_id for job in self._ended):
                self._end(job_id)
                if self.announcements is not None:
                    self.announcements.withdraw(job_id)

    @property
    def next_job_id(self) -> int:
        return self._next_job_id

    def on_rank_report(self, report: RankReport) -> None:
        """Take the ranks' reports: free the room of finished jobs, and stop saving after failed ones."""
        if self.announcements is not None:
            self.announcements.on_rank_report(report)
        for job_id in report.saves_failed:
            saving = self._saving.get(job_id)
            if saving is not None and (state := self._ledger.find(saving.request_id)) is not None:
                state.save_stopped = True
        for job_id, ranks in report.saves_done.items():
            saving = self._saving.get(job_id)
            if saving is None:
                continue
            saving.busy_ranks -= ranks
            if saving.busy_ranks <= 0:
                self._end(job_id)

    def _end(self, job_id: int) -> None:
        saving = self._saving.pop(job_id, None)
        if saving is None:
            return
        self._in_flight_bytes -= saving.num_bytes
        if saving.pinned and self.pins is not None:
            self.pins.unpin(saving.pinned)


def _stored(state: RequestState, index: int) -> Callable[[int], bool]:
    present: Mapping[int, int] = state.present
    return lambda tokens: bool(present.get(tokens, 0) >> index & 1)
