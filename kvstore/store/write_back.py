"""The queue in front of a slower tier: bounded in bytes, shortest prefix first, retries with back-off.

What must survive the process is in the pending log: see `journeys.py`.
"""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import dataclass, field

from kvstore.errors import KVStoreError, Unavailable
from kvstore.format.record import Record
from kvstore.model.keys import RecordKey
from kvstore.runtime.background import Background
from kvstore.runtime.clock import Clock
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters
from kvstore.runtime.tracing import Tracing
from kvstore.store.journeys import Journeys, Noted
from kvstore.store.limits import StoreLimits
from kvstore.tiers.base import PutOutcome, Tier

__all__ = ["WriteBack", "backoff_s"]

_WAVE_RECORDS = 64
"""Records that arrive together are written shortest prefix first, so that what a crash leaves behind is usable. A wave
is short, so that the end of a long prompt does not wait for the start of every later one."""


def backoff_s(failures: int, *, shortest_s: float, longest_s: float) -> float:
    """The pause after `failures` failures in a row (1 or more)."""
    return min(longest_s, shortest_s * 2.0 ** min(failures - 1, 60))


@dataclass(order=True, slots=True)
class _Job:
    """One record to write.

    Attributes:
        wave: Number of the wave it arrived in.
        stop: End of its span: within a wave the shortest prefix goes first.
        arrival: Breaks ties.
        attempts: Failed writes since it came or was set aside.
        aside_at: How many records had been written when it was set aside; `None`: it was not.
        may_be_there: The tier may have it: a write has begun.
        is_evictable: It was promised to nobody: the tier may evict it, and it needs no pending entry.
        trace: Trace of the save; empty: none.
    """

    wave: int
    stop: int
    arrival: int
    record: Record = field(compare=False)
    attempts: int = field(default=0, compare=False)
    aside_at: int | None = field(default=None, compare=False)
    may_be_there: bool = field(default=False, compare=False)
    is_evictable: bool = field(default=False, compare=False)
    trace: str = field(default="", compare=False)


class WriteBack:
    """Writes records to one tier in the background. The queue is bounded in bytes: what does not fit is dropped,
    counted as `write_back_dropped`, and stays in memory until it is evicted there.

    While a tier is down, one write probes it after a pause that doubles up to a limit; one success ends the pause. No
    outage, however long, drops what waits: a record is given up only if it fails while others are written.

    Args:
        tier: Where to write.
        journeys: Told of each write, before and after.
        is_hot: The tier is the hot one, else the cold one.
        background: Owns the workers.
        meters: Where to count.
        limits: Bounds and times.
        clock: For deadlines.
        tracing: Makes a span of each write, below the save's.

    Attributes:
        used_bytes: Bytes that wait or are being written.
        is_paused: No write begins until `resume`.
    """

    def __init__(
        self,
        tier: Tier,
        journeys: Journeys,
        *,
        is_hot: bool,
        background: Background,
        meters: Meters,
        limits: StoreLimits,
        clock: Clock,
        tracing: Tracing | None = None,
    ) -> None:
        self.used_bytes = 0
        self.is_paused = False
        self._tracing = tracing
        self._tier = tier
        self._journeys = journeys
        self._is_hot = is_hot
        self._background = background
        self._meters = meters
        self._limits = limits
        self._clock = clock
        self._heap: list[_Job] = []
        self._aside: list[_Job] = []  # failed often: written after all others
        self._pending: dict[RecordKey, _Job] = {}  # waiting or being written
        self._num_written = 0
        self._num_arrived = 0
        self._num_workers = 0
        self._failures = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        """Records that wait or are being written."""
        return len(self._pending)

    @property
    def failing(self) -> bool:
        """Whether the last write failed because of the tier."""
        return self._failures > 0

    def offer(self, record: Record, *, in_cold: bool = False, is_evictable: bool = False) -> bool:
        """Queue a verified record, once; False: dropped, the queue is full. Never waits.

        Args:
            record: What to write.
            in_cold: The cold tier has it: it was read from there.
            is_evictable: It goes no further than this tier, which may let it go whenever it needs the room.
        """
        if record.key in self._pending:
            return True
        if self.used_bytes + record.num_bytes > self._limits.write_back_bytes:
            self._drop("queue_full")
            return False
        job = _Job(self._num_arrived // _WAVE_RECORDS, record.header.span.stop, self._num_arrived, record)
        job.is_evictable = is_evictable
        if self._tracing is not None:
            job.trace = self._tracing.current()
        if not is_evictable:
            self._journeys.begin(record, in_cold=in_cold)
        self._num_arrived += 1
        self._pending[record.key] = job
        self.used_bytes += record.num_bytes
        self._empty.clear()
        heapq.heappush(self._heap, job)
        if not self.is_paused and self._num_workers < self._limits.write_back_in_flight:
            self._add_worker()
        return True

    def pause(self) -> None:
        """Begin no write until `resume`. What waits is kept, and what comes is queued while there is room."""
        self.is_paused = True

    def resume(self) -> None:
        """Write again. Idempotent."""
        self.is_paused = False
        if not self._num_workers and (self._heap or self._take_back()):
            self._add_worker()
            self._grow()

    @property
    def mark(self) -> int:
        """The number of records that have arrived so far, for `left_before`."""
        return self._num_arrived

    def left_before(self, mark: int) -> int:
        """How many of the records that had arrived at a mark still wait or are being written."""
        return sum(job.arrival < mark for job in self._pending.values())

    def forget(self, key: RecordKey) -> None:
        """Drop `key` from the queue: it is bad. A write that has begun may still complete."""
        job = self._pending.get(key)
        if job is None:
            return
        if job in self._heap:
            self._heap.remove(job)
            heapq.heapify(self._heap)
        elif job in self._aside:
            self._aside.remove(job)
        else:
            return
        self._end(job)

    async def drain(self, deadline: Deadline) -> int:
        """Wait until nothing is left to write, or until the deadline; returns how many records are left. Does not wait
        while paused.
        """
        if self.is_paused:
            return len(self._pending)
        try:
            async with deadline.scope("draining the write-back"):
                await self._empty.wait()
        except Unavailable:
            pass
        return len(self._pending)

    async def _work(self) -> None:
        """Write jobs until none waits. While the tier fails all workers but one end: one probe is enough."""
        try:
            while not self.is_paused and (self._heap or self._take_back()):
                if self._failures:
                    if self._num_workers > 1:
                        return
                    limits = self._limits
                    pause_s = backoff_s(self._failures, shortest_s=limits.backoff_s_min, longest_s=limits.backoff_s_max)
                    await asyncio.sleep(pause_s)
                    if self.is_paused or (not self._heap and not self._take_back()):
                        return
                await self._write(heapq.heappop(self._heap))
                self._grow()
        finally:
            self._num_workers -= 1

    def _grow(self) -> None:
        """Bring the other workers back after an outage."""
        while not self._failures and self._num_workers < min(self._limits.write_back_in_flight, len(self._heap)):
            self._add_worker()

    def _add_worker(self) -> None:
        self._num_workers += 1
        self._background.spawn(self._work(), f"write back to {self._tier.name}", is_shared=True)

    async def _write(self, job: _Job) -> None:
        job.attempts += 1
        try:
            if self._tracing is None:
                outcome = await self._put(job)
            else:
                with self._tracing.span("kvstore.write_back", job.trace, tier=self._tier.name):
                    outcome = await self._put(job)
        except Unavailable:
            self._failures += 1
            self._meters.add("write_back_failures", tier=self._tier.name)
            self._try_again(job)
            return
        except KVStoreError:  # the tier will never take this record, but may take the next one
            self._drop("refused")
            self._end(job)
            return
        except BaseException:
            self._end(job)
            raise
        if outcome is Noted.BUSY:  # says nothing about the tier
            self._drop("pending_full")
            self._end(job)
            return
        self._failures = 0
        self._num_written += 1
        self._take_back()
        if outcome is PutOutcome.STORED or outcome is PutOutcome.EXISTS:
            self._meters.add("write_back_records", tier=self._tier.name, outcome=outcome.value)
            self._meters.add("write_back_bytes", job.record.num_bytes, tier=self._tier.name)
            self._end(job, is_written=True)
        else:
            self._drop("tier_full")
            self._end(job)

    def _try_again(self, job: _Job) -> None:
        """Queue a failed job again, set it aside until all others were tried, or drop it. Whether the tier or the
        record is to blame shows in whether others were written meanwhile.
        """
        if job.attempts < self._limits.write_back_attempts:
            heapq.heappush(self._heap, job)
        elif job.aside_at is None or job.aside_at == self._num_written:
            job.aside_at, job.attempts = self._num_written, 0
            self._aside.append(job)
        else:
            self._drop("attempts")
            self._end(job)

    def _take_back(self) -> bool:
        """Queue again what was set aside. False: nothing was."""
        if not self._aside:
            return False
        for job in self._aside:
            heapq.heappush(self._heap, job)
        self._aside.clear()
        return True

    async def _put(self, job: _Job) -> PutOutcome | Noted:
        """Write the pending entry if one is needed, then the record. A `Noted` says why there could be no entry."""
        deadline = Deadline.after(self._limits.write_back_timeout_s, self._clock)
        key = job.record.key
        if job.is_evictable:
            return await self._tier.put_evictable(job.record, deadline=deadline)
        noted = await self._journeys.note(key, deadline, is_hot=self._is_hot)
        if noted is not Noted.YES:
            return noted
        job.may_be_there = True
        outcome = await self._tier.put(job.record, deadline=deadline)
        job.may_be_there = outcome is not PutOutcome.FULL
        if self._is_hot and job.may_be_there:
            await self._journeys.confirm(key, outcome, deadline)
        return outcome

    def _end(self, job: _Job, *, is_written: bool = False) -> None:
        if self._pending.pop(job.record.key, None) is not None:
            self.used_bytes -= job.record.num_bytes
            if not job.is_evictable:
                in_hot, in_cold = self._is_hot and job.may_be_there, is_written and not self._is_hot
                maybe_in_cold = job.may_be_there and not self._is_hot
                self._journeys.end(job.record.key, in_hot=in_hot, in_cold=in_cold, maybe_in_cold=maybe_in_cold)
        if not self._pending:
            self._empty.set()

    def _drop(self, reason: str) -> None:
        self._meters.add("write_back_dropped", tier=self._tier.name, reason=reason)
