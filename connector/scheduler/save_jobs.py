"""Save jobs from their order to the ranks' answers: host memory, waiting, pinned blocks, and what is lost."""

from __future__ import annotations

import math
from bisect import insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeAlias

from connector.canonical.attention import may_lose_blocks
from connector.identity import CacheShape
from connector.jobs import RankReport, SaveJob
from connector.logs import LOG
from connector.losses import LossReason, LossReporter
from connector.scheduler.cache_events import CacheEvents
from connector.scheduler.requests import RequestState
from kvstore.api import Retention
from kvstore.model.keys import Boundary, NamespaceId, PrefixHash
from kvstore.runtime.clock import Clock
from kvstore.runtime.instruments import Instruments

_WAIT_S = 5.0
"""A save that finds no host memory for this long is given up: the engine needs its blocks."""

_UNANSWERED_STEPS, _UNANSWERED_S = 1000, 60.0
"""A rank answers within its save's deadline, ten seconds. An idle engine makes a thousand steps in seconds, one that
stands still makes none: only both limits together show that no answer will come."""


_SAVED_MAX = 1 << 14
"""Saved records that are remembered: they matter to requests that were looked up before."""
_KNOWN_S = 30.0
"""After that a saved record is no longer taken for stored: the store may have dropped it."""

_Record: TypeAlias = tuple[NamespaceId, PrefixHash, int, Retention]
"""Where it is saved, whose prefix it belongs to, its group, and how it is kept."""


class BlockPins(Protocol):
    """Keeps blocks from being reused."""

    def pin(self, block_ids: Sequence[int]) -> None: ...

    def unpin(self, block_ids: Sequence[int]) -> None: ...


class Priority(IntEnum):
    """Who gets host memory first: the saves whose blocks are lost soonest."""

    STATE = 0
    """vLLM offers a recurrent state once."""
    WINDOW = 1
    """A window's blocks are freed after a few steps."""
    END = 2
    """The blocks of a request that has ended."""
    LASTING = 3
    """Pages of full attention: their blocks stay as long as the request runs."""


@dataclass(slots=True)
class _Job:
    """A job that the ranks have not answered.

    Attributes:
        num_bytes: Host memory that it takes on each rank.
        busy_ranks: Ranks that have not answered it.
        pinned: Blocks that its request may free before they are copied.
        waits_since_s: Monotonic time since which it waits, or waited, for host memory.
    """

    job: SaveJob
    num_bytes: int
    busy_ranks: int
    pinned: tuple[int, ...] = ()
    priority: Priority = Priority.LASTING
    waits_since_s: float = 0.0


class SaveJobs:
    """Gives the ranks' host memory to save jobs, by priority. Belongs to the engine's thread.

    A job that finds no memory may wait with its blocks pinned, for at most five seconds and with at most half of the
    engine's blocks. While a job waits, no job of a later priority gets memory.

    Args:
        num_ranks: Ranks that answer each job.
        limit_bytes: Host memory of a rank for saves in flight.
        num_blocks: Blocks of the engine's cache.
        losses: Reports what is computed and not saved.

    Attributes:
        pins: vLLM's block pool, once it is known. Without it no job waits, and nothing is saved of ended requests.
        cache_events: Set if cache events are published.
    """

    def __init__(
        self,
        shape: CacheShape,
        *,
        num_ranks: int,
        limit_bytes: int,
        num_blocks: int,
        requests: dict[str, RequestState],
        losses: LossReporter,
        instruments: Instruments,
    ) -> None:
        self._shape = shape
        self._num_ranks = num_ranks
        self._limit_bytes = limit_bytes
        self._waiting_blocks_max = num_blocks // 2
        self._requests = requests
        self._losses = losses
        self._meters = instruments.meters
        self._clock = instruments.clock
        self._jobs: dict[int, _Job] = {}
        self._in_flight_bytes = 0
        self._in_flight: dict[_Record, int] = {}  # the job that has host memory for it
        self._relying: dict[_Record, list[RequestState]] = {}  # requests that leave a record in flight to that job
        self._saved: OrderedDict[_Record, float] = OrderedDict()  # monotonic time of the last answer
        self._waiting: list[tuple[Priority, int]] = []  # jobs without host memory, by priority and id
        self._waiting_blocks = 0
        self.next_id = 0
        self.pins: BlockPins | None = None
        self.cache_events: CacheEvents | None = None

    def __len__(self) -> int:
        """Jobs that the ranks have not answered, or that wait for host memory."""
        return len(self._jobs)

    @property
    def oldest_id(self) -> int | None:
        """The id of the oldest job in `len(self)`; `None`: there is none."""
        return next(iter(self._jobs), None)

    def add(self, job: SaveJob, state: RequestState) -> None:
        """Take up a job with the id `next_id`; `admit` or `wait` follows."""
        assert job.job_id == self.next_id
        self.next_id += 1
        num_bytes = job.num_blocks * self._shape.groups[job.group].facts.rank_block_bytes
        self._jobs[job.job_id] = _Job(job, num_bytes, self._num_ranks)
        if self.cache_events is not None:
            self.cache_events.on_save_planned(job, state)

    def has_saved(self, record: _Record, since_s: float, state: RequestState) -> bool:
        """Whether a record is in flight for any request, or was saved in the last seconds and since a monotonic time.
        Requests with a common prefix that arrive together all find it missing in the store.

        If a save in flight fails, or is not made, `state` is as it was before: its page is planned again.
        """
        if record in self._in_flight:
            self._relying.setdefault(record, []).append(state)
            return True
        since_s = max(since_s, self._clock.monotonic_s() - _KNOWN_S)
        return self._saved.get(record, -math.inf) >= since_s

    def admit(self, job: SaveJob, priority: Priority) -> bool:
        """Reserve host memory on every rank. False: there is none, or a job of an earlier priority waits for it."""
        num_bytes = self._jobs[job.job_id].num_bytes
        if self._waiting and self._waiting[0][0] < priority:
            return False
        if self._in_flight_bytes + num_bytes > self._limit_bytes:
            return False
        self._in_flight_bytes += num_bytes
        self._in_flight.setdefault(_record_of(job), job.job_id)
        return True

    def wait(self, job: SaveJob, priority: Priority) -> bool:
        """Pin the job's blocks until there is host memory. False: too many wait already, and the job is lost."""
        blocks = tuple(block_id for ids in job.block_ids for block_id in ids)
        if self.pins is None or self._waiting_blocks + len(blocks) > self._waiting_blocks_max:
            self._lose(job.job_id)
            return False
        self.pins.pin(blocks)
        entry = self._jobs[job.job_id]
        entry.pinned, entry.priority = blocks, priority
        self._start_waiting(job.job_id)
        return True

    def _start_waiting(self, job_id: int) -> None:
        entry = self._jobs[job_id]
        entry.waits_since_s = self._clock.monotonic_s()
        self._waiting_blocks += len(entry.pinned)
        insort(self._waiting, (entry.priority, job_id))

    def _stop_waiting(self, job_id: int) -> None:
        entry = self._jobs[job_id]
        self._waiting.remove((entry.priority, job_id))
        self._waiting_blocks -= len(entry.pinned)

    def admit_waiting(self, last: Priority) -> list[SaveJob]:
        """Reserve host memory for waiting jobs up to a priority, the oldest first, as far as there is any."""
        admitted = []
        for priority, job_id in list(self._waiting):
            job = self._jobs[job_id].job
            if priority > last or not self.admit(job, priority):
                break
            self._stop_waiting(job_id)
            admitted.append(job)
        return admitted

    def drop_overdue(self) -> None:
        """Lose the jobs that have waited for too long."""
        now_s = self._clock.monotonic_s()
        for _, job_id in list(self._waiting):
            if now_s - self._jobs[job_id].waits_since_s > _WAIT_S:
                self._stop_waiting(job_id)
                self._lose(job_id)

    # ---- jobs that no rank has

    def cancel(self, job_id: int) -> None:
        """Forget a job that has no host memory and does not wait for it. It may be planned again."""
        self._end(job_id, cancelled=True)

    def cancel_from(self, first_id: int, *, waiting: bool) -> None:
        """Undo after an error: forget the jobs from this id on without host memory, also waiting ones if `waiting`."""
        is_waiting = {job_id for _, job_id in self._waiting}
        for job_id in range(first_id, self.next_id):
            if job_id in is_waiting:
                if not waiting:
                    continue
                self._stop_waiting(job_id)
            if job_id in self._jobs:
                self.cancel(job_id)

    def withdraw(self, jobs: Sequence[SaveJob]) -> None:
        """Take back jobs that were planned for a step and not sent, so that no rank will answer them.

        Jobs with pinned blocks wait again. Pages of running requests are planned again in the next step.
        """
        for job in jobs:
            entry = self._jobs.get(job.job_id)
            if entry is None:
                continue
            self._in_flight_bytes -= entry.num_bytes
            if entry.pinned:
                self._leave_flight(job)
                self._start_waiting(job.job_id)
            elif self._shape.groups[job.group].is_state:
                self._lose(job.job_id, LossReason.FAILED)  # vLLM does not offer it again, unless it is computed again
            else:
                if (state := self._requests.get(job.request_id)) is not None:
                    state.cursors[job.group] = min(state.cursors[job.group], job.start_tokens)
                    state.pages_delayed = True
                self.cancel(job.job_id)

    def abandon(self, reason: LossReason) -> int:
        """Lose all jobs, waiting ones included, and unpin their blocks; returns how many.

        Later answers of ranks to them are ignored.
        """
        self._waiting, self._waiting_blocks, self._in_flight_bytes = [], 0, 0
        job_ids = list(self._jobs)
        for job_id in job_ids:
            self._lose(job_id, reason)
        return len(job_ids)

    def give_blocks_back(self) -> None:
        """Hold no block any more. What waits is lost. What the ranks have is copied before a later step of the engine
        writes; it is held until they answer all the same, for others that write to blocks, as in a `MultiConnector`.
        """
        self.close()
        for entry in self._jobs.values():
            self._unpin(entry)

    def close(self) -> None:
        """Lose the jobs that wait for host memory: the engine stops, or drops its cache. Idempotent."""
        for _, job_id in list(self._waiting):
            self._stop_waiting(job_id)
            self._lose(job_id, LossReason.STOPPED)

    def _lose(self, job_id: int, reason: LossReason = LossReason.NO_ROOM) -> None:
        """Give up a job: its record will not be saved."""
        job = self._jobs[job_id].job
        self._end(job_id, cancelled=True)
        self._note_loss(job)
        num_records = self._shape.groups[job.group].slices.num_slices
        self._meters.add("connector_saves", num_records, outcome=reason.value.removeprefix("save_"))
        self._losses.report(
            request_id=job.request_id,
            namespace=job.namespace,
            boundary=Boundary(job.stop_tokens, job.prefix),
            group=job.group,
            reason=reason,
            records=num_records,
        )

    def _note_loss(self, job: SaveJob) -> None:
        """Save no more of a request after a hole in full attention: later pages could never be used."""
        state, group = self._requests.get(job.request_id), self._shape.groups[job.group]
        if state is None:
            return
        if group.is_state:
            state.note_not_stored(job.stop_tokens, job.group)
        elif not may_lose_blocks(group.facts.kind):
            state.save_stopped = True

    # ---- the ranks' answers

    def on_rank_report(self, report: RankReport) -> None:
        """Free the host memory of finished jobs, and stop saving after failed ones."""
        for job_id in report.saves_failed:
            if job_id in self._jobs:
                self._note_loss(self._jobs[job_id].job)
                self._leave_flight(self._jobs[job_id].job)
                if self.cache_events is not None:
                    self.cache_events.on_save_ended(job_id, stored=False)
        for job_id, ranks in report.saves_done.items():
            entry = self._jobs.get(job_id)
            if entry is None:
                continue
            entry.busy_ranks -= ranks
            if entry.busy_ranks <= 0:
                self._in_flight_bytes -= entry.num_bytes
                if self._in_flight.get(record := _record_of(entry.job)) == job_id:  # no rank has failed
                    self._note_saved(record)
                self._end(job_id)

    def _note_saved(self, record: _Record) -> None:
        self._relying.pop(record, None)
        self._saved[record] = self._clock.monotonic_s()
        self._saved.move_to_end(record)
        if len(self._saved) > _SAVED_MAX:
            self._saved.popitem(last=False)

    def _leave_flight(self, job: SaveJob) -> None:
        if self._in_flight.get(record := _record_of(job)) != job.job_id:
            return
        del self._in_flight[record]
        for state in self._relying.pop(record, ()):
            state.note_not_stored(job.stop_tokens, job.group)
            if not self._shape.groups[job.group].is_state:  # vLLM does not offer those again
                state.cursors[job.group] = min(state.cursors.get(job.group, 0), job.start_tokens)
                state.pages_delayed = True

    def _end(self, job_id: int, *, cancelled: bool = False) -> None:
        entry = self._jobs.pop(job_id)
        self._leave_flight(entry.job)
        if self.cache_events is not None:
            self.cache_events.on_save_ended(job_id, stored=not cancelled)
        self._unpin(entry)

    def _unpin(self, entry: _Job) -> None:
        pinned, entry.pinned = entry.pinned, ()
        if pinned and self.pins is not None:
            self.pins.unpin(pinned)


def _record_of(job: SaveJob) -> _Record:
    return job.namespace, job.prefix, job.group, job.retention


class Watchdog:
    """Ends saving on an engine whose ranks do not answer.

    A vLLM release may not call a rank's hooks as we expect. Then saves stay unanswered, and would keep the ranks' host
    memory and the engine's blocks for ever. This gives the blocks back.

    Attributes:
        has_ended_saves: Nothing may be saved any more.
    """

    def __init__(self, jobs: SaveJobs, clock: Clock) -> None:
        self._jobs = jobs
        self._clock = clock
        self._oldest_id: int | None = None
        self._steps = 0
        self._since_s = 0.0
        self.has_ended_saves = False

    def on_step(self) -> None:
        """Lose all saves if the oldest was not answered for 1,000 steps and a minute. Called once for each step."""
        oldest_id = self._jobs.oldest_id
        if oldest_id is None or oldest_id != self._oldest_id:
            self._oldest_id, self._steps, self._since_s = oldest_id, 0, self._clock.monotonic_s()
            return
        self._steps += 1
        if self._steps < _UNANSWERED_STEPS or self._clock.monotonic_s() - self._since_s < _UNANSWERED_S:
            return
        self.has_ended_saves = True
        num_lost = self._jobs.abandon(LossReason.UNANSWERED)
        LOG.error(
            "kvstore: saving has ended on this engine: the ranks did not answer %d saves in %d steps. This vLLM does"
            " not call the connector as expected; please report its version and how the engine is run",
            num_lost,
            self._steps,
        )
