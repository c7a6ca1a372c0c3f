"""The queue in front of a slower tier: bounded in bytes, shortest prefix first, retries with back-off.

An engine saves faster than Redis or S3 writes. What finds no room in the queue waits in the memory tier, which has it
anyway, until there is room; tenants take turns. It does not wait for the cold tier any more once the hot one has
it: any service that has time copies it from there.

What must survive the process is in the pending log: see `pending_writes.py`.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import OrderedDict
from dataclasses import dataclass, field

from kvstore.errors import KVStoreError, Unavailable
from kvstore.format.record import Record
from kvstore.model.keys import RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.retries import backoff_s
from kvstore.store.context import StoreContext, StorePart
from kvstore.store.write_back.pending_writes import PendingWrites, TierWrite
from kvstore.tiers.base import PutOutcome, Tier

_log = logging.getLogger(__name__)

_FAILURES_LOGGED = 3
"""Failures in a row after which the log has a line."""
_LOGGED_AGAIN_S = 60.0
"""The time until it has another: where a part of a cluster is away, some writes fail and others do not."""
_WAVE_RECORDS = 64
"""Records that arrive together are written shortest prefix first, so that what a crash leaves behind is usable. A wave
is short, so that the end of a long prompt does not wait for the start of every later one."""

_BEHIND = 1 << 62
"""More than the end of any span."""


@dataclass(order=True, slots=True)
class _Job:
    """One record to write. Jobs are ordered by the first three fields."""

    wave: int
    """Number of the wave it was queued in, or put back into."""
    stop: int
    """End of its span: within a wave the shortest prefix comes first. Of failed ones, the one that failed first."""
    arrival: int
    key: RecordKey = field(compare=False)
    num_bytes: int = field(compare=False)
    is_evictable: bool = field(compare=False)
    """No caller relies on it: the tier may evict it, and it needs no pending entry."""
    in_cold: bool = field(compare=False)
    """The cold tier had it when it was queued."""
    trace: str = field(compare=False)
    """Trace of the save; empty: none."""
    tenant: str = field(compare=False)
    """Whose it is; empty: no tenant's."""
    record: Record | None = field(default=None, compare=False)
    """`None`: it waits in the memory tier for room in the queue."""
    write: TierWrite | None = field(default=None, compare=False)
    """`None`: it waits, or needs no pending entry."""
    is_being_written: bool = field(default=False, compare=False)
    attempts: int = field(default=0, compare=False)
    """Failed writes that are its own fault, rather than the tier's."""
    written_at_first: int | None = field(default=None, compare=False)
    """How many records had been written when it failed first; `None`: it has not failed."""
    written_at_last: int = field(default=0, compare=False)
    """The same, when it failed last."""


class _InMemory:
    """The jobs that wait in the memory tier for room in the queue. Tenants take turns, and of each the oldest job comes
    first: one tenant's long backlog delays another's job by one job of each tenant.
    """

    def __init__(self) -> None:
        self._num = 0
        self._by_tenant: OrderedDict[str, dict[RecordKey, _Job]] = OrderedDict()  # the one to come next first

    def __len__(self) -> int:
        return self._num

    def add(self, job: _Job) -> None:
        self._num += 1
        self._by_tenant.setdefault(job.tenant, {})[job.key] = job

    def first(self) -> _Job:
        """The job whose turn it is; there must be one."""
        of_tenant = next(iter(self._by_tenant.values()))
        return next(iter(of_tenant.values()))

    def remove(self, job: _Job, *, is_its_turn: bool = False) -> None:
        """Take a job out.

        Args:
            is_its_turn: It is queued now, and the next turn is another tenant's.
        """
        self._num -= 1
        of_tenant = self._by_tenant[job.tenant]
        del of_tenant[job.key]
        if not of_tenant:
            del self._by_tenant[job.tenant]
        elif is_its_turn:
            self._by_tenant.move_to_end(job.tenant)


class WriteBack(StorePart):
    """Writes records to one tier in the background. What is not written is counted as `write_back_dropped`.

    While a tier is down, one write probes it after a pause that doubles up to a limit; one success ends the pause. An
    outage drops nothing from the queue, however long it is: a record in it is dropped if the tier has no room or will
    never take it, or if it fails while others are written. What failed is tried again after all others: one record
    whose writes hang does not hold them up. A record that waits in memory is dropped if it is evicted there.

    Attributes:
        num_bytes: Bytes that wait or are being written, with those in the memory tier.
        queued_bytes: Those in the queue or being written, which `write_back_bytes` bounds.
        is_paused: No write begins until `resume`.
    """

    def __init__(self, tier: Tier, pending_writes: PendingWrites, context: StoreContext) -> None:
        super().__init__(context)
        self.num_bytes = self.queued_bytes = 0
        self.is_paused = False
        self._tier = tier
        self._pending_writes = pending_writes
        self._is_hot = tier is context.hot
        self._tracing = context.instruments.tracing
        self._heap: list[_Job] = []
        self._deferred: list[_Job] = []  # too much was pending for them
        self._jobs: dict[RecordKey, _Job] = {}  # all that wait or are being written
        self._in_memory = _InMemory()  # those without their record
        self._only_in_hot: set[RecordKey] = set()  # left memory before their turn, on their way to the hot tier
        self._num_written = 0
        self._num_failed = 0
        self._num_arrived = 0
        self._num_queued = 0
        self._num_workers = 0
        self._failures = 0
        self._probe_s = 0.0  # when a tier that failed is tried again
        self._logged_s = float("-inf")  # when the log had a line about failures
        self._busy_until_s = 0.0  # too much was pending over all services
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        """Records that wait or are being written, with those in the memory tier."""
        return len(self._jobs)

    @property
    def failing(self) -> bool:
        """Whether the last write failed because of the tier."""
        return self._failures > 0

    def offer(self, record: Record, *, in_cold: bool = False) -> bool:
        """Queue a verified record, once; False: dropped, the queue is full. Never waits.

        Args:
            in_cold: The cold tier has it: it was read from there.
        """
        if record.key in self._jobs:
            return True
        if self._in_memory or not self._has_room(record.num_bytes):  # what waits comes first
            self._count_drop("queue_full")
            return False
        self._queue(self._new_job(record, in_cold=in_cold), record)
        return True

    def offer_saved(self, record: Record, *, is_evictable: bool = False) -> None:
        """Queue a record that was just put into the memory tier. If there is no room for it, it waits there, and is
        dropped if it is evicted there before its turn.

        Args:
            is_evictable: It is written to no further tier, and this one may evict it at any time.
        """
        if record.key in self._jobs:
            return
        if record.num_bytes > self._limits.write_back_bytes:
            self._count_drop("too_large")
            return
        job = self._new_job(record, is_evictable=is_evictable)
        self._in_memory.add(job)
        self._queue_waiting()

    def left_memory(self, key: RecordKey) -> None:
        """Note that the memory tier has no record of this key any more."""
        if not self.leave(key):
            return
        if not self._is_hot and key in self._pending_writes:
            self._only_in_hot.add(key)
        else:
            self._count_drop("evicted")

    def pending_ended(self, key: RecordKey, *, is_kept: bool) -> None:
        """Note how the writes of a record have ended, as `PendingWrites.on_end` says it."""
        if is_kept:
            self.leave(key)
        if key in self._only_in_hot:
            self._only_in_hot.remove(key)
            if not is_kept:
                self._count_drop("evicted")

    def leave(self, key: RecordKey) -> bool:
        """Do not write what waits in memory under `key`, as the tier has it or will get it; False: nothing waits."""
        job = self._jobs.get(key)
        if job is None or job.record is not None:
            return False
        self._end(job)
        return True

    def _new_job(self, record: Record, *, is_evictable: bool = False, in_cold: bool = False) -> _Job:
        arrival, stop = self._num_arrived, record.header.span.stop
        self._num_arrived += 1
        trace = self._tracing.current() if self._tracing is not None else ""
        tenant = self._memory.owner_of(record.key.namespace)
        job = _Job(0, stop, arrival, record.key, record.num_bytes, is_evictable, in_cold, trace, tenant)
        self._jobs[job.key] = job
        self._only_in_hot.discard(job.key)
        self.num_bytes += job.num_bytes
        self._empty.clear()
        return job

    def _queue_waiting(self) -> None:
        """Queue what waits in the memory tier, as far as there is room; some of it, as the event loop has other work.

        To be called whenever a record has left the queue.
        """
        for _ in range(min(_WAVE_RECORDS, len(self._in_memory))):
            job = self._in_memory.first()
            if not self._has_room(job.num_bytes):
                break
            self._in_memory.remove(job, is_its_turn=True)
            record = self._memory.held(job.key)  # a mark as used would have others evicted that still wait
            assert record is not None, "`left_memory` was not called"
            self._queue(job, record)

    def _has_room(self, num_bytes: int) -> bool:
        return self.queued_bytes + num_bytes <= self._limits.write_back_bytes

    def _queue(self, job: _Job, record: Record) -> None:
        job.record, job.wave = record, self._num_queued // _WAVE_RECORDS
        self._num_queued += 1
        self.queued_bytes += job.num_bytes
        if not job.is_evictable:
            job.write = self._pending_writes.begin(record, self._tier, in_cold=job.in_cold)
        heapq.heappush(self._heap, job)
        if not self.is_paused and self._num_workers < self._limits.write_back_in_flight:
            self._add_worker()

    def pause(self) -> None:
        """Begin no write until `resume`. What waits is kept, and new records wait too."""
        self.is_paused = True

    def resume(self) -> None:
        """Write again. Idempotent."""
        self.is_paused = False
        if self._heap or self._requeue_deferred():
            if not self._num_workers:
                self._add_worker()
            self._grow()

    @property
    def mark(self) -> int:
        """The number of records that have arrived so far, for `left_before`."""
        return self._num_arrived

    def left_before(self, mark: int) -> int:
        """How many of the records that had arrived at a mark still wait or are being written."""
        return sum(job.arrival < mark for job in self._jobs.values())

    def forget(self, key: RecordKey) -> None:
        """Drop `key` from what waits: it is bad. A write that has begun may still complete, but is not repeated."""
        self._only_in_hot.discard(key)
        job = self._jobs.get(key)
        if job is None or self.leave(key):
            return
        if job.is_being_written:
            del self._jobs[key]  # it ends with its write, and what is saved from now on is another record
        else:
            self._end(job)
            job.record = None  # the heap has it until its turn, as a search for it takes long
            self._queue_waiting()

    async def drain(self, deadline: Deadline) -> int:
        """Wait until nothing is left to write, or until the deadline; returns how many records are left. Does not wait
        while paused.
        """
        if self.is_paused:
            return len(self)
        try:
            async with deadline.scope("draining the write-back"):
                await self._empty.wait()
        except Unavailable:
            pass
        return len(self)

    async def _work(self) -> None:
        """Write jobs until none waits. While the tier fails all workers but one end: one probe is enough."""
        try:
            while not self.is_paused and (self._heap or self._deferred):
                if not self._heap:
                    if self._is_busy:  # what is left needs pending entries
                        if self._num_workers > 1:
                            return
                        await self._sleep_until(self._busy_until_s)
                        self._busy_until_s = 0.0
                    self._requeue_deferred()
                    continue
                if self._failures:
                    if self._num_workers > 1:
                        return
                    await self._sleep_until(self._probe_s)
                    if self.is_paused or (not self._heap and not self._requeue_deferred()):
                        return
                job = heapq.heappop(self._heap)
                if self._is_forgotten(job):
                    continue
                job.is_being_written = True
                await self._write(job)
                job.is_being_written = False
                self._queue_waiting()
                self._grow()
        finally:
            self._num_workers -= 1

    @property
    def _is_busy(self) -> bool:
        return self._clock.monotonic_s() < self._busy_until_s

    async def _sleep_until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - self._clock.monotonic_s()))

    def _grow(self) -> None:
        """Start the other workers again after an outage."""
        while not self._failures and self._num_workers < min(self._limits.write_back_in_flight, len(self._heap)):
            self._add_worker()

    def _add_worker(self) -> None:
        self._num_workers += 1
        self._background.spawn(self._work(), f"write back to {self._tier.name}", is_shared=True)

    async def _write(self, job: _Job) -> None:
        try:
            if self._tracing is None:
                outcome = await self._put(job)
            else:
                with self._tracing.span("kvstore.write_back", job.trace, tier=self._tier.name):
                    outcome = await self._put(job)
        except Unavailable as error:
            self._failures += 1
            limits = self._limits
            pause_s = backoff_s(self._failures, shortest_s=limits.backoff_s_min, longest_s=limits.backoff_s_max)
            self._probe_s = self._clock.monotonic_s() + pause_s
            if self._failures == _FAILURES_LOGGED and self._clock.monotonic_s() >= self._logged_s + _LOGGED_AGAIN_S:
                self._logged_s = self._clock.monotonic_s()
                _log.warning("saved records cannot be written to %s, they are tried again: %s", self._tier.name, error)
            self._meters.add("write_back_failures", tier=self._tier.name)
            self._try_again(job)
            return
        except KVStoreError:  # the tier will never take this record, but may take the next one
            self._count_drop("refused")
            self._end(job)
            return
        except BaseException as error:
            self._end(job)
            if isinstance(error, Exception):  # a bug ends this worker; another one writes what is left
                self._count_drop("failed")
                self._queue_waiting()
                if self._heap and not self.is_paused:
                    self._add_worker()
            raise
        if outcome is None:  # says nothing about the tier
            if not self._is_busy:
                self._busy_until_s = self._clock.monotonic_s() + self._limits.backoff_s_max
            if self._is_forgotten(job):
                self._end(job)
            elif job.in_cold:
                # nothing is lost, and the cold tier may evict it while it waits
                self._count_drop("queue_full")
                self._end(job)
            else:
                self._deferred.append(job)
            await asyncio.sleep(0)  # thousands may follow, and none of them waits
            return
        self._failures = 0
        self._num_written += 1
        if not self._is_busy:
            self._requeue_deferred()
        if outcome is PutOutcome.FULL:
            self._count_drop("tier_full")
        else:
            self._meters.add("write_back_bytes", job.num_bytes, tier=self._tier.name)
        self._end(job)

    def _try_again(self, job: _Job) -> None:
        """Queue a failed job behind all that wait now, or drop it. The record is to blame, rather than the
        tier, if others were written since it failed last; or, when no other is left, since it failed first.
        """
        if self._is_forgotten(job):
            self._end(job)
            return
        self._num_failed += 1
        since = job.written_at_last if len(self) > 1 else job.written_at_first
        if job.written_at_first is None:
            job.written_at_first = self._num_written
        elif since != self._num_written and (job.write is None or job.write.may_be_there):
            job.attempts += 1  # the tier was asked, not the log of pending entries alone
        job.written_at_last = self._num_written
        if job.attempts >= self._limits.write_back_attempts:
            self._count_drop("attempts")
            self._end(job)
        else:
            job.wave = (self._num_queued + len(self._in_memory)) // _WAVE_RECORDS
            job.stop = _BEHIND + self._num_failed
            heapq.heappush(self._heap, job)

    def _is_forgotten(self, job: _Job) -> bool:
        """Whether `forget` was called for its key. Another job may have that now."""
        return self._jobs.get(job.key) is not job

    def _requeue_deferred(self) -> bool:
        """Queue the deferred jobs again. False: there are none."""
        if not self._deferred:
            return False
        for job in self._deferred:
            heapq.heappush(self._heap, job)
        self._deferred.clear()
        return True

    async def _put(self, job: _Job) -> PutOutcome | None:
        deadline = Deadline.after(self._limits.write_back_timeout_s, self._clock)
        if job.write is not None:
            return await self._pending_writes.put(job.write, deadline)
        assert job.record is not None, "it waits in memory"
        return await self._tier.put_evictable(job.record, deadline=deadline)

    def _end(self, job: _Job) -> None:
        if not self._is_forgotten(job):
            del self._jobs[job.key]
        self.num_bytes -= job.num_bytes
        if job.record is None:
            self._in_memory.remove(job)
        else:
            self.queued_bytes -= job.num_bytes
        if job.write is not None:
            self._pending_writes.end(job.write)
        if not self:
            self._empty.set()

    def _count_drop(self, reason: str) -> None:
        self._meters.add("write_back_dropped", tier=self._tier.name, reason=reason)
