"""From steps to save jobs: cursors, the ranks' room, pins, and the ranks' reports."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from connector.canonical.window import may_lose_blocks
from connector.identity import CacheShape
from connector.jobs import BlockIds, RankReport, SaveJob
from connector.losses import Losses, Lost
from connector.scheduler.announcements import Announcements
from connector.scheduler.ledger import Ledger, RequestState
from connector.scheduler.load_plan import blocks_of
from connector.scheduler.save_plan import PageToSave, final_pages
from kvstore.model.keys import Boundary, NamespaceId
from kvstore.model.layout import Span
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.meters import Meters

__all__ = ["BlockPins", "Offer", "Running", "Saves"]

_WAIT_S = 5.0
"""A save that finds no room for so long is given up: its blocks are the engine's, and the store does not keep up."""

_STATE, _WINDOW, _END, _LASTING = range(4)
"""Turns: who gets room first."""

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


@dataclass(frozen=True, slots=True)
class Running:
    """A running request of a step, whose prompt is hashed.

    Attributes:
        state: The request.
        namespace: Where its pages go.
        final_tokens: Tokens whose cache content is final after this step's forward.
        tables: Gives its block tables.
        offers: States that this step's forward writes.
    """

    state: RequestState
    namespace: NamespaceId
    final_tokens: int
    tables: Tables
    offers: Sequence[Offer] = ()


@dataclass(slots=True)
class _Saving:
    """A job.

    Attributes:
        job: What the ranks are told.
        num_bytes: What it takes on each rank.
        busy_ranks: Ranks that have not answered it.
        pinned: Blocks that its request may give back before they are copied.
        turn: When it gets room, if it had to wait.
        since_s: Monotonic time since which it waits, or waited.
    """

    job: SaveJob
    num_bytes: int
    busy_ranks: int
    pinned: tuple[int, ...] = ()
    turn: int = 0
    since_s: float = 0.0


class Saves:
    """Decides what of each step is saved, and in which order it gets the ranks' host memory.

    First what vLLM offers once: recurrent states, then pages whose blocks leave their window, then what is left of
    requests that have ended. Pages of full attention come last: their blocks stay. A state or an end that finds no room
    keeps its blocks pinned and waits, for at most five seconds and with at most half of the engine's blocks.

    Args:
        shape: The model's cache.
        num_ranks: Ranks that answer each job.
        limit_bytes: Host memory of a rank for pages in flight.
        num_blocks: Blocks of the engine's cache.
        ledger: The requests.
        meters: Counters.
        losses: Told what is computed and not saved.
        clock: Time.
    """

    def __init__(
        self,
        shape: CacheShape,
        *,
        num_ranks: int,
        limit_bytes: int,
        num_blocks: int,
        ledger: Ledger,
        meters: Meters,
        losses: Losses,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._shape = shape
        self._num_ranks = num_ranks
        self._limit_bytes = limit_bytes
        self._waiting_blocks_max = num_blocks // 2
        self._ledger = ledger
        self._meters = meters
        self._losses = losses
        self._clock = clock
        self._saving: dict[int, _Saving] = {}  # by job id
        self._in_flight_bytes = 0
        self._waiting: list[tuple[int, int]] = []  # jobs without room, by turn and id
        self._waiting_blocks = 0
        self._next_job_id = 0
        states = [index for index, group in enumerate(shape.groups) if group.is_state]
        fleeting = [index for index, group in enumerate(shape.groups) if may_lose_blocks(group.facts.kind)]
        self._states, self._fleeting = tuple(states), tuple(fleeting)
        self._lasting = tuple(index for index in range(len(shape.groups)) if index not in (*states, *fleeting))
        self.pins: BlockPins | None = None
        """Set once vLLM's block pool is known; without it nothing waits, and nothing is saved of ended requests."""
        self.announcements: Announcements | None = None
        """Set if cache events are published."""

    def __len__(self) -> int:
        """Jobs that the ranks have not answered, or that wait for room."""
        return len(self._saving)

    def plan_step(self, requests: Sequence[Running]) -> list[SaveJob]:
        """The jobs of one step.

        Costs next to nothing for a request that completes no block in it: all requests of every step are passed.

        If it raises, no job was planned, and the request that caused it is saved no further.
        """
        planned: list[SaveJob] = []
        current: RequestState | None = None
        first_job_id = self._next_job_id
        try:
            planned += self._admit_waiting(_STATE)
            for request in requests:
                current = request.state
                if self.announcements is not None:
                    self.announcements.on_presence(current)
                if request.offers and not current.save_stopped:
                    self._plan_states(request, planned)
            moving = [request for request in requests if self._has_pages(request)]
            was_delayed = [request.state.pages_delayed for request in moving]
            for request in moving:
                current = request.state
                current.extend_chain(request.final_tokens, self._shape.boundary_tokens)
                current.pages_delayed = False
                self._plan_pages(request, self._fleeting, _WINDOW, planned)
            current = None
            planned += self._admit_waiting(_END)
            self._drop_overdue()  # not earlier: a step may be longer than what waits may wait
            for request, delayed in zip(moving, was_delayed, strict=True):
                current = request.state
                self._plan_pages(request, self._lasting, _LASTING, planned)
                current.planned_tokens = self._final_tokens(request)
                if current.pages_delayed and not delayed:
                    self._meters.add("connector_saves_delayed")
        except BaseException:
            self.withdraw(planned)
            self._end_unfinished(first_job_id)
            for request in requests:
                request.state.pages_delayed = True  # some were not come to: the next step looks at all of them again
            if current is not None:
                current.save_stopped = True  # or it would fail in every step, and no load would ever reach the ranks
            raise
        return planned

    def plan_end(
        self, state: RequestState, namespace: NamespaceId, final_tokens: int, tables: Sequence[Sequence[int]]
    ) -> None:
        """Plan the last saves of a request that ended well, a tail included, for a later step.

        Its blocks are pinned until the ranks answer, since vLLM frees them now.
        """
        if self.pins is None or state.save_stopped:
            return
        boundary = self._shape.boundary_tokens
        request = Running(state, namespace, final_tokens, lambda: tables)
        final_tokens = self._final_tokens(request)
        state.extend_chain(final_tokens, boundary)
        first_job_id = self._next_job_id
        try:
            for index in (*self._fleeting, *self._lasting):
                for page, block_ids in self._final_pages(request, index, final_tokens // boundary * boundary):
                    job = self._job(request, index, Span(page.start_tokens, page.stop_tokens), block_ids)
                    if not self._wait(job, _END):
                        break
                    state.cursors[index] = page.stop_tokens
        except BaseException:
            for _, job_id in [each for each in self._waiting if each[1] >= first_job_id]:
                self._stop_waiting(job_id)
            self._end_unfinished(first_job_id)
            raise

    def _final_tokens(self, request: Running) -> int:
        return min(request.final_tokens, len(request.state.known))

    def _has_pages(self, request: Running) -> bool:
        """Whether pages of it may have become final, or are so and wait for room."""
        boundary, state = self._shape.boundary_tokens, request.state
        if state.save_stopped:
            return False
        return state.pages_delayed or self._final_tokens(request) // boundary != state.planned_tokens // boundary

    def _plan_pages(self, request: Running, groups: Sequence[int], turn: int, planned: list[SaveJob]) -> None:
        """Plan a running request's pages of some groups, as far as there is room."""
        state, boundary = request.state, self._shape.boundary_tokens
        for index in groups:
            for page, block_ids in self._final_pages(request, index, len(state.prompt) // boundary * boundary):
                job = self._job(request, index, Span(page.start_tokens, page.stop_tokens), block_ids)
                if not self._admit(job, turn):
                    # the blocks are mostly still held, so the next step tries again
                    self._end(job.job_id, withdrawn=True)
                    state.pages_delayed = True
                    break
                planned.append(job)
                state.cursors[index] = page.stop_tokens

    def _final_pages(self, request: Running, index: int, tail_tokens: int) -> Iterator[tuple[PageToSave, BlockIds]]:
        """A group's pages that are final and not saved, with their blocks; moves the cursor over all others."""
        state, group = request.state, self._shape.groups[index]
        pages, cursor = final_pages(
            saved_tokens=state.cursors.get(index, 0),
            final_tokens=min(self._final_tokens(request), state.hashed_tokens),
            tail_tokens=tail_tokens,
            page_tokens=self._shape.layout.page_tokens,
            is_stored=_stored(state, index),
        )
        for page in pages:
            block_tokens = group.facts.block_tokens
            first, last = page.start_tokens // block_tokens, page.stop_tokens // block_tokens
            block_ids = blocks_of(group, request.tables(), first, last)
            if any(0 in ids for ids in block_ids):
                # it left the window before its turn; later pages can be used without it
                assert may_lose_blocks(group.facts.kind), "a block of full attention is gone"
                self._meters.add("connector_saves", group.slices.num_slices, outcome="window_passed")
                state.cursors[index] = page.stop_tokens
                continue
            yield page, block_ids
        state.cursors[index] = max(state.cursors.get(index, 0), cursor)

    def _plan_states(self, request: Running, planned: list[SaveJob]) -> None:
        state, boundary = request.state, self._shape.boundary_tokens
        by_boundary: dict[int, dict[int, int]] = {}
        for offer in request.offers:
            by_boundary.setdefault(offer.boundary_tokens, {})[offer.vllm_group] = offer.block_id
        for tokens, blocks in sorted(by_boundary.items()):
            state.extend_chain(tokens, boundary)
            if tokens % boundary or tokens > state.hashed_tokens:
                continue  # inside a block, or of tokens not known yet
            for index in self._states:
                block_ids = tuple((blocks.get(feed, 0),) for feed in self._shape.groups[index].facts.feed_groups)
                if _stored(state, index)(tokens) or any(0 in ids for ids in block_ids):
                    continue
                job = self._job(request, index, Span(tokens, tokens), block_ids)
                if self._admit(job, _STATE):
                    planned.append(job)
                elif not self._wait(job, _STATE):
                    continue
                state.note_stored(tokens, index)  # vLLM offers a state again once it is loaded

    # ---- room

    def _job(self, request: Running, index: int, span: Span, block_ids: BlockIds) -> SaveJob:
        """A job without room yet: `_admit` or `_wait` follows."""
        state, job_id = request.state, self._next_job_id
        self._next_job_id += 1
        prefix = state.prefix_at(span.stop, self._shape.boundary_tokens)
        job = SaveJob(
            job_id,
            request.namespace,
            prefix,
            index,
            span.start,
            span.stop,
            block_ids,
            state.flags.retention,
            state.trace,
            state.request_id,
        )
        num_bytes = len(block_ids[0]) * self._shape.groups[index].facts.rank_block_bytes
        self._saving[job_id] = _Saving(job, num_bytes, self._num_ranks)
        if self.announcements is not None:
            self.announcements.planned(job, state)
        return job

    def _admit(self, job: SaveJob, turn: int) -> bool:
        """Reserve the job's room on every rank. False: there is none, or what goes first waits for it."""
        num_bytes = self._saving[job.job_id].num_bytes
        if self._waiting and self._waiting[0][0] < turn:
            return False
        if self._in_flight_bytes + num_bytes > self._limit_bytes:
            return False
        self._in_flight_bytes += num_bytes
        return True

    def _wait(self, job: SaveJob, turn: int) -> bool:
        """Pin the job's blocks until there is room. False: too many wait already, and it is lost."""
        blocks = tuple(block_id for ids in job.block_ids for block_id in ids)
        if self.pins is None or self._waiting_blocks + len(blocks) > self._waiting_blocks_max:
            self._lose(job.job_id)
            return False
        self.pins.pin(blocks)
        saving = self._saving[job.job_id]
        saving.pinned, saving.turn = blocks, turn
        self._start_waiting(job.job_id)
        return True

    def _start_waiting(self, job_id: int) -> None:
        saving = self._saving[job_id]
        saving.since_s = self._clock.monotonic_s()
        self._waiting_blocks += len(saving.pinned)
        insort(self._waiting, (saving.turn, job_id))

    def _stop_waiting(self, job_id: int) -> None:
        saving = self._saving[job_id]
        self._waiting.remove((saving.turn, job_id))
        self._waiting_blocks -= len(saving.pinned)

    def _admit_waiting(self, turn: int) -> list[SaveJob]:
        """Give room to what waits and has its turn, the oldest first, as far as there is any."""
        admitted = []
        for its_turn, job_id in list(self._waiting):
            job = self._saving[job_id].job
            if its_turn > turn or not self._admit(job, its_turn):
                break
            self._stop_waiting(job_id)
            admitted.append(job)
        return admitted

    def _drop_overdue(self) -> None:
        now_s = self._clock.monotonic_s()
        for _, job_id in list(self._waiting):
            if now_s - self._saving[job_id].since_s > _WAIT_S:
                self._stop_waiting(job_id)
                self._lose(job_id)

    def _lose(self, job_id: int, reason: Lost = Lost.NO_ROOM) -> None:
        """Give up a job that no rank has: its record will not be saved."""
        job = self._saving[job_id].job
        self._end(job_id, withdrawn=True)
        if (state := self._ledger.find(job.request_id)) is not None:
            self._note_loss(state, job)
        num_records = self._shape.groups[job.group].slices.num_slices
        self._meters.add("connector_saves", num_records, outcome=reason.value.removeprefix("save_"))
        self._losses.tell(
            request_id=job.request_id,
            namespace=job.namespace,
            boundary=Boundary(job.stop_tokens, job.prefix),
            group=job.group,
            reason=reason,
            records=num_records,
        )

    def _note_loss(self, state: RequestState, job: SaveJob) -> None:
        """Save no more of a request after a hole: what follows could never be used. Only full attention has holes."""
        if self._shape.groups[job.group].is_state:
            state.forget_stored(job.stop_tokens, job.group)
        elif job.group in self._lasting:
            state.save_stopped = True

    # ---- the ranks' answers

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

    def withdraw(self, jobs: Sequence[SaveJob]) -> None:
        """Take back jobs that were planned for a step and not sent, so that no rank will answer them.

        What has its blocks pinned waits again; pages of running requests are planned again in the next step.
        """
        for job in jobs:
            saving = self._saving.get(job.job_id)
            if saving is None:
                continue
            self._in_flight_bytes -= saving.num_bytes
            if saving.pinned:
                self._start_waiting(job.job_id)
                continue
            if self._shape.groups[job.group].is_state:
                self._lose(job.job_id, Lost.FAILED)  # unless it is computed again it is not offered a second time
                continue
            if (state := self._ledger.find(job.request_id)) is not None:
                state.cursors[job.group] = min(state.cursors[job.group], job.start_tokens)
                state.pages_delayed = True
            self._end(job.job_id, withdrawn=True)

    def abandon(self, reason: Lost) -> int:
        """Give up all jobs, those that wait for room included, and unpin their blocks; returns how many.

        What a rank still answers is ignored.
        """
        self._waiting, self._waiting_blocks, self._in_flight_bytes = [], 0, 0
        job_ids = list(self._saving)
        for job_id in job_ids:
            self._lose(job_id, reason)
        return len(job_ids)

    @property
    def oldest_job_id(self) -> int | None:
        """The job that waits longest, for room or for its ranks."""
        return next(iter(self._saving), None)

    def on_rank_report(self, report: RankReport) -> None:
        """Take the ranks' reports: free the room of finished jobs, and stop saving after failed ones."""
        if self.announcements is not None:
            self.announcements.on_rank_report(report)
        for job_id in report.saves_failed:
            saving = self._saving.get(job_id)
            if saving is not None and (state := self._ledger.find(saving.job.request_id)) is not None:
                self._note_loss(state, saving.job)
        for job_id, ranks in report.saves_done.items():
            saving = self._saving.get(job_id)
            if saving is None:
                continue
            saving.busy_ranks -= ranks
            if saving.busy_ranks <= 0:
                self._in_flight_bytes -= saving.num_bytes
                self._end(job_id)

    def close(self) -> None:
        """Give up what waits for room: the engine stops. Idempotent."""
        for _, job_id in list(self._waiting):
            self._stop_waiting(job_id)
            self._lose(job_id, Lost.STOPPED)

    def _end_unfinished(self, first_job_id: int) -> None:
        """End jobs from this id on that neither have room nor wait for it: an error came between."""
        waiting = {job_id for _, job_id in self._waiting}
        for job_id in range(first_job_id, self._next_job_id):
            if job_id in self._saving and job_id not in waiting:
                self._end(job_id, withdrawn=True)

    def _end(self, job_id: int, *, withdrawn: bool = False) -> None:
        saving = self._saving.pop(job_id)
        if withdrawn and self.announcements is not None:
            self.announcements.withdraw(job_id)
        if saving.pinned and self.pins is not None:
            self.pins.unpin(saving.pinned)


def _stored(state: RequestState, index: int) -> Callable[[int], bool]:
    present: Mapping[int, int] = state.present
    return lambda tokens: bool(present.get(tokens, 0) >> index & 1)
