"""From steps to save jobs: which pages, tails and states of each request are final and not stored yet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from connector.canonical.attention import may_lose_blocks
from connector.identity import CacheShape
from connector.jobs import BlockIds, SaveJob
from connector.scheduler.hook_facts import StateOffer
from connector.scheduler.plans import blocks_of, final_pages, state_blocks_of
from connector.scheduler.requests import RequestState
from connector.scheduler.save_jobs import Priority, SaveJobs
from kvstore.model.keys import NamespaceId
from kvstore.model.layout import Span
from kvstore.runtime.meters import Meters


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request of a step, whose prompt is hashed.

    Attributes:
        namespace: Where its pages are saved.
        final_tokens: Tokens whose cache content is final after this step's forward.
        tables: Returns, for each of vLLM's groups, its block ids; called only when a page is saved.
        offers: States that this step's forward writes.
    """

    state: RequestState
    namespace: NamespaceId
    final_tokens: int
    tables: Callable[[], Sequence[Sequence[int]]]
    offers: Sequence[StateOffer] = ()


class Saves:
    """Decides what of each step is saved. Belongs to the engine's thread.

    A page of a running request that finds no host memory is tried again in the next step. A state, or a page of a
    request that has ended, waits with its blocks pinned.
    """

    def __init__(self, shape: CacheShape, jobs: SaveJobs, meters: Meters) -> None:
        self._shape = shape
        self._boundary_tokens = shape.boundary_tokens
        self.jobs = jobs
        self._meters = meters
        indexes = range(len(shape.groups))
        self._states = [index for index in indexes if shape.groups[index].is_state]
        pages = [index for index in indexes if not shape.groups[index].is_state]
        self._windows = [index for index in pages if may_lose_blocks(shape.groups[index].facts.kind)]
        self._lasting = [index for index in pages if index not in self._windows]

    def plan_step(self, requests: Sequence[RunningRequest]) -> list[SaveJob]:
        """The jobs of one step. All its requests are passed: one that completes no block costs next to nothing.

        If it raises, no job was planned, and the request that caused it is saved no further.
        """
        planned: list[SaveJob] = []
        current: RequestState | None = None
        first_id = self.jobs.next_id
        try:
            planned += self.jobs.admit_waiting(Priority.STATE)
            for request in requests:
                current = request.state
                if self.jobs.cache_events is not None:
                    self.jobs.cache_events.on_lookup(current)
                if request.offers and not current.save_stopped:
                    self._plan_states(request, planned)
            moving = [request for request in requests if self._may_have_pages(request)]
            was_delayed = [request.state.pages_delayed for request in moving]
            for request in moving:
                current = request.state
                current.extend_chain(request.final_tokens, self._boundary_tokens)
                current.pages_delayed = False
                self._plan_pages(request, self._windows, Priority.WINDOW, planned)
            current = None
            planned += self.jobs.admit_waiting(Priority.END)
            self.jobs.drop_overdue()  # not earlier: one step may be longer than the longest wait
            for request, delayed in zip(moving, was_delayed, strict=True):
                current = request.state
                self._plan_pages(request, self._lasting, Priority.LASTING, planned)
                current.planned_tokens = _final_tokens(request)
                if current.pages_delayed and not delayed:
                    self._meters.add("connector_saves_delayed")
        except BaseException:
            self.jobs.withdraw(planned)
            self.jobs.cancel_from(first_id, waiting=False)
            for request in requests:
                request.state.pages_delayed = True  # some were not reached: the next step checks all of them again
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
        if self.jobs.pins is None or state.save_stopped:
            return
        request = RunningRequest(state, namespace, final_tokens, lambda: tables)
        last_boundary = _final_tokens(request) // self._boundary_tokens * self._boundary_tokens
        state.extend_chain(last_boundary, self._boundary_tokens)
        first_id = self.jobs.next_id
        try:
            for index in (*self._windows, *self._lasting):
                for page, block_ids in self._final_pages(request, index, last_boundary):
                    if not self.jobs.wait(self._new_job(request, index, page, block_ids), Priority.END):
                        break
                    state.cursors[index] = page.stop
        except BaseException:
            self.jobs.cancel_from(first_id, waiting=True)
            raise

    def promised_tokens(self, state: RequestState) -> int:
        """How many tokens of a request are in the store or on their way, by this engine's saves alone."""
        cursors = [state.cursors.get(index, 0) for index in (*self._windows, *self._lasting)]
        reached = min(cursors, default=state.hashed_tokens) // self._boundary_tokens * self._boundary_tokens
        if not self._states:
            return reached
        resumable = (
            tokens
            for tokens in state.stored_groups
            if tokens <= reached and all(state.is_stored(tokens, index) for index in self._states)
        )
        return max(resumable, default=0)

    def _may_have_pages(self, request: RunningRequest) -> bool:
        """Whether pages of it may have become final, or wait for host memory."""
        state, boundary = request.state, self._boundary_tokens
        if state.save_stopped:
            return False
        return state.pages_delayed or _final_tokens(request) // boundary != state.planned_tokens // boundary

    def _plan_pages(
        self, request: RunningRequest, groups: Sequence[int], priority: Priority, planned: list[SaveJob]
    ) -> None:
        """Plan a running request's pages of some groups, as far as there is host memory."""
        state = request.state
        tail_tokens = len(state.prompt) // self._boundary_tokens * self._boundary_tokens
        for index in groups:
            for page, block_ids in self._final_pages(request, index, tail_tokens):
                job = self._new_job(request, index, page, block_ids)
                if not self.jobs.admit(job, priority):
                    # the request mostly still holds the blocks, so the next step tries again
                    self.jobs.cancel(job.job_id)
                    state.pages_delayed = True
                    break
                planned.append(job)
                state.cursors[index] = page.stop

    def _final_pages(self, request: RunningRequest, index: int, tail_tokens: int) -> Iterator[tuple[Span, BlockIds]]:
        """A group's pages that are final and not saved, with their blocks; moves the cursor over all others.

        None is looked at before it is asked for: while host memory is full, many wait and each step asks for the first.
        """
        state, group = request.state, self._shape.groups[index]
        block_tokens = group.facts.block_tokens
        pages = final_pages(
            saved_tokens=state.cursors.get(index, 0),
            final_tokens=min(_final_tokens(request), state.hashed_tokens),
            tail_tokens=tail_tokens,
            page_tokens=self._shape.layout.page_tokens,
        )
        for page in pages:
            if self._is_saved(request, index, page.stop):
                state.cursors[index] = page.stop
                continue
            block_ids = blocks_of(group, request.tables(), page.start // block_tokens, page.stop // block_tokens)
            if any(0 in ids for ids in block_ids):
                # it left the window before it found host memory; later pages can be used without it
                assert may_lose_blocks(group.facts.kind), "a block of full attention is gone"
                self._meters.add("connector_saves", group.slices.num_slices, outcome="window_passed")
                state.cursors[index] = page.stop
                continue
            yield page, block_ids

    def _is_saved(self, request: RunningRequest, index: int, tokens: int) -> bool:
        """Whether the group's record at a boundary is stored or on its way, by this request or another one."""
        state = request.state
        if not state.is_stored(tokens, index):
            prefix = state.prefix_at(tokens, self._boundary_tokens)
            since_s = state.lookup_started_s if state.lookup is not None else math.inf
            record = request.namespace, prefix, index, state.flags.save_retention
            if not self.jobs.has_saved(record, since_s, state):
                return False
            state.note_stored(tokens, index)
        return True

    def _plan_states(self, request: RunningRequest, planned: list[SaveJob]) -> None:
        """Plan the states that vLLM offers in this step, each with the blocks of all its feeds or not at all."""
        state = request.state
        for tokens in sorted({offer.boundary_tokens for offer in request.offers}):
            state.extend_chain(tokens, self._boundary_tokens)
            if tokens % self._boundary_tokens or tokens > state.hashed_tokens:
                continue  # inside a block, or of tokens that are not known yet
            for index in self._states:
                block_ids = state_blocks_of(self._shape.groups[index], request.offers, tokens)
                if block_ids is None or self._is_saved(request, index, tokens):
                    continue
                job = self._new_job(request, index, Span(tokens, tokens), block_ids)
                if self.jobs.admit(job, Priority.STATE):
                    planned.append(job)
                elif not self.jobs.wait(job, Priority.STATE):
                    continue
                state.note_stored(tokens, index)  # vLLM offers a state again once it is loaded

    def _new_job(self, request: RunningRequest, index: int, span: Span, block_ids: BlockIds) -> SaveJob:
        """A job without host memory yet: `admit` or `wait` follows."""
        state = request.state
        adapter = state.adapter
        job = SaveJob(
            job_id=self.jobs.next_id,
            namespace=request.namespace,
            prefix=state.prefix_at(span.stop, self._boundary_tokens),
            group=index,
            start_tokens=span.start,
            stop_tokens=span.stop,
            block_ids=block_ids,
            retention=state.flags.save_retention,
            trace=state.trace,
            request_id=state.request_id,
            adapter=(adapter.path, adapter.identities) if adapter is not None and adapter.identities else None,
        )
        self.jobs.add(job, state)
        return job


def _final_tokens(request: RunningRequest) -> int:
    return min(request.final_tokens, len(request.state.tokens))
