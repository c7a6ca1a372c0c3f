"""Stage: bring what a resume point needs into memory, pinned as it arrives, and settle for what arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvstore.api import Progress
from kvstore.errors import Closed, CorruptRecord, Unavailable
from kvstore.format.record import Record
from kvstore.model.coverage import records_to_resume
from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.model.layout import Layout
from kvstore.runtime.background import Background
from kvstore.runtime.budget import ByteBudget
from kvstore.runtime.clock import Clock
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters
from kvstore.runtime.shared_calls import SingleFlight
from kvstore.runtime.turns import LongWork
from kvstore.store.absent import AbsentKeys
from kvstore.store.admission import affordable_resume, check_header
from kvstore.store.fetch_gate import FetchGate
from kvstore.store.limits import StoreLimits
from kvstore.store.placement import UNKNOWN_BYTES, Presence, Probe
from kvstore.store.stage_run import PINNED_AT_ONCE, Holding, StageRun, Wanted
from kvstore.tiers.base import PutOutcome, Tier
from kvstore.tiers.memory import RECORD_OVERHEAD_BYTES, MemoryTier

__all__ = ["Promotion"]

_REPLANS_MAX = 64
"""Each new plan drops at least one record that turned out to be missing, so this bounds how many holes a prefix has."""


@dataclass(frozen=True, slots=True)
class _Read:
    """A record that came from a slower tier."""

    record: Record
    tier: str


@dataclass(frozen=True, slots=True)
class _NotRead:
    """A record that no tier delivered, and why: as `Holding.cut`."""

    cut: str


@dataclass(slots=True)
class _Plan:
    """What a stage is to hold.

    Attributes:
        is_cut: Less than looked usable, for lack of memory.
        wanted: The records that are not pinned yet.
        useful: The keys of all; what else is pinned is unpinned, to make room.
    """

    is_cut: bool
    wanted: list[Wanted] = field(default_factory=list)
    useful: set[RecordKey] = field(default_factory=set)


class Promotion:
    """Reads records from the slower tiers into memory: each once, however many stages want it.

    Args:
        work: Runs what takes long for a long prompt.
        room_for: How many bytes more may be pinned now for a namespace.
        on_cold_hit: Called with each record that the cold tier delivered.
    """

    def __init__(
        self,
        memory: MemoryTier,
        hot: Tier | None,
        cold: Tier | None,
        *,
        absent: AbsentKeys,
        background: Background,
        meters: Meters,
        limits: StoreLimits,
        clock: Clock,
        work: LongWork,
        room_for: Callable[[NamespaceId], int],
        on_cold_hit: Callable[[Record], None],
    ) -> None:
        self._memory = memory
        self._hot = hot
        self._cold = cold
        self._absent = absent
        self._background = background
        self._meters = meters
        self._limits = limits
        self._clock = clock
        self._work = work
        self._room_for = room_for
        self._on_cold_hit = on_cold_hit
        self._flights: SingleFlight[RecordKey, _Read | _NotRead] = SingleFlight(background)
        self._in_flight = ByteBudget(limits.stage_bytes_in_flight)
        quick_s = limits.stall_timeout_s / 6
        self._gates = {
            tier.name: FetchGate(clock, quick_s=quick_s, limit=limits.stage_records_in_flight)
            for tier in (hot, cold)
            if tier is not None
        }
        self._runs: set[StageRun] = set()

    async def stage(self, presence: Presence, deadline: Deadline, progress: Progress | None = None) -> Holding:
        """Bring in what the longest resume point in `presence` needs, and return what arrived of it.

        Ends early when no record begins or ends to arrive for `stall_timeout_s`, and at the deadline; neither is an
        error.

        If cancelled, nothing stays pinned.
        """
        run = StageRun(presence.query, presence.layout, progress)
        self._runs.add(run)
        try:
            async with asyncio.timeout(None) as timer:
                run.watch(timer, self._limits.stall_timeout_s, deadline.remaining_s)
                await self._fetch_all(run, presence)
        except TimeoutError:
            reason = "deadline" if deadline.expired else "stall"
            run.cut_by(reason)
            self._meters.add("stages_cut", reason=reason)
        except BaseException:
            run.drop_pins(self._memory)
            raise
        finally:
            self._runs.discard(run)
        try:
            return await run.settle(self._memory, self._work)
        except BaseException:
            run.drop_pins(self._memory)
            raise

    def drop(self, holding: Holding) -> None:
        """Unpin a holding that nobody will lease."""
        for pin in holding.pins.values():
            self._memory.unpin(pin)

    async def _fetch_all(self, run: StageRun, presence: Presence) -> None:
        """Plan, fetch, and plan again without what turned out to be missing, until all of a plan is here."""
        bits = await self._work.run(presence.num_cells, presence.groups_present)
        for _ in range(_REPLANS_MAX):
            run.waits_for_nothing()
            free_bytes = self._room_for(presence.query.namespace) + run.pinned_bytes
            plan = await self._work.run(presence.num_cells, self._plan, run, presence, bits, free_bytes)
            if plan.is_cut:
                run.cut_by("node_memory")
            await run.drop_pins_in_pieces(self._memory, self._work, but=plan.useful)
            missed = await self._fetch(run, plan.wanted)
            if not missed:
                return
            for index, group in missed:
                bits[index] &= ~(1 << group)

    def _plan(self, run: StageRun, presence: Presence, bits: Sequence[int], free_bytes: int) -> _Plan:
        """The records of the longest resume point that this node can hold."""
        query, layout = presence.query, presence.layout
        group_bytes = [
            group.num_slices * (presence.mean_bytes(index, UNKNOWN_BYTES) + RECORD_OVERHEAD_BYTES)
            for index, group in enumerate(layout.groups)
        ]
        resume_tokens = affordable_resume(layout, query, bits, group_bytes=group_bytes, budget_bytes=max(0, free_bytes))
        plan = _Plan(resume_tokens < presence.resume_tokens(bits))
        if resume_tokens <= query.local_tokens:
            plan.useful.update(run.pins)
            return plan
        tokens = [boundary.tokens for boundary in query.boundaries]
        index_of = {count: index for index, count in enumerate(tokens)}
        for needed in records_to_resume(
            layout, tokens, bits, resume_tokens=resume_tokens, local_tokens=query.local_tokens
        ):
            probe = (index_of[needed.tokens], needed.group)
            size_bytes = presence.mean_bytes(needed.group, UNKNOWN_BYTES)
            for slice_, key in enumerate(presence.keys(probe)):
                plan.useful.add(key)
                if key not in run.pins:
                    places = self._places(presence, probe, slice_)
                    plan.wanted.append(Wanted(key, probe, needed.tokens, places, size_bytes))
        return plan

    def _places(self, presence: Presence, probe: Probe, slice_: int) -> tuple[Tier, ...]:
        said = ((self._hot, presence.hot), (self._cold, presence.cold))
        return tuple(tier for tier, found in said if tier is not None and found.get(probe, 0) >> slice_ & 1)

    async def _fetch(self, run: StageRun, wanted: Sequence[Wanted]) -> set[Probe]:
        """Bring records in, ascending, a few at a time; returns what is missing, and stops soon after the first."""
        missed: set[Probe] = set()
        for start in range(0, len(wanted), PINNED_AT_ONCE):
            async with self._work.turn(len(wanted)):
                for item in wanted[start : start + PINNED_AT_ONCE]:  # nothing may evict it while the rest is fetched
                    if item.key in self._memory and (cut := self._keep(run, item, None)):
                        run.cut_by(cut)
                        missed.add(item.probe)
        left = await self._work.run(len(wanted), lambda: [item for item in wanted if item.key not in run.pins])
        todo = iter(left)
        run.waiting = {item.key for item in left}
        run.touch()

        async def worker(items: Iterator[Wanted]) -> None:
            for item in items:
                if missed:
                    return
                try:
                    cut = await self._fetch_one(run, item)
                except Closed:  # the store is being closed under us: settle for what is here
                    cut = "closed"
                if cut:
                    run.cut_by(cut)
                    missed.add(item.probe)

        if not missed and run.waiting:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._limits.stage_records_in_flight, len(run.waiting))):
                    group.create_task(worker(todo))
        return missed

    async def _fetch_one(self, run: StageRun, item: Wanted) -> str:
        """Bring in one record; returns why that failed, or an empty string."""
        read = await self._flights.run(item.key, lambda: self._read(item, run.layout))
        run.waiting.discard(item.key)
        if isinstance(read, _NotRead):
            return read.cut if item.key not in self._memory else self._keep(run, item, None)
        return self._keep(run, item, read)

    def _keep(self, run: StageRun, item: Wanted, read: _Read | None) -> str:
        """Pin a record for this stage without suspending, so that nothing can evict it first; returns why that failed,
        or an empty string.
        """
        if read is not None and self._memory.insert(read.record) is PutOutcome.FULL:
            self._meters.add("stage_refused", reason="memory_full")
            return "node_memory"
        record = self._memory.peek(item.key)
        if record is None:
            return "gone"
        try:
            check_header(record.header, run.layout, item.tokens)
        except CorruptRecord as error:
            self._memory.remove(item.key)
            self._meters.add("corrupt_records", tier=self._memory.name, reason=str(error.message))
            return f"corrupt:{self._memory.name}"
        pinned_before, room_bytes = self._memory.pinned_bytes, self._room_for(item.key.namespace)
        pin = self._memory.pin([item.key])
        assert pin is not None
        added_bytes = self._memory.pinned_bytes - pinned_before
        if added_bytes > room_bytes:
            self._memory.unpin(pin)
            self._meters.add("stage_refused", reason="stage_bytes")
            return "node_memory"
        run.hold(item, pin, read.tier if read is not None else self._memory.name, added_bytes)
        return ""

    async def _read(self, item: Wanted, layout: Layout) -> _Read | _NotRead:
        """Read one record from the first place that has it. Runs once for all stages that want it."""
        cut = "gone"
        for number, tier in enumerate(item.places):
            is_last = number == len(item.places) - 1
            # A tier that hangs must leave time to read from the next one before the stage counts as stalled.
            seconds = self._limits.fetch_timeout_s if is_last else self._limits.stall_timeout_s / 2
            try:
                record = await self._read_from(tier, item, seconds)
            except (Unavailable, Closed):
                self._meters.add("stage_tier_failures", tier=tier.name)
                cut = f"tier_failed:{tier.name}"
                continue
            if record is None:
                continue
            try:
                check_header(record.header, layout, item.tokens)
            except CorruptRecord as error:
                cut = f"corrupt:{tier.name}"
                await self._put_aside(tier, record, str(error.message))
                continue
            self._meters.add("staged_records", tier=tier.name)
            self._meters.add("staged_bytes", record.num_bytes, tier=tier.name)
            self._memory.insert(record)  # every waiting stage pins it; until then it serves other readers
            if tier is self._cold:
                self._on_cold_hit(record)
            return _Read(record, tier.name)
        return _NotRead(cut)

    async def _read_from(self, tier: Tier, item: Wanted, seconds: float) -> Record | None:
        """Read a record once from one tier. `None`: it is not there, which is remembered for a while."""
        grant = await self._in_flight.take(min(item.size_bytes, self._in_flight.limit_bytes))
        try:
            async with self._gates[tier.name].turn():
                deadline = Deadline.after(seconds, self._clock)
                record = await tier.get(item.key, deadline=deadline, allocate=self._allocator(item.key))
        finally:
            self._in_flight.give_back(grant)
        if record is None:
            self._meters.add("stage_misses", tier=tier.name)
            self._absent.add(item.key, self._limits.absent_s)
        else:
            self._note_bytes(item.key)
        return record

    def _allocator(self, key: RecordKey) -> Callable[[int], memoryview]:
        def allocate(num_bytes: int) -> memoryview:
            self._note_bytes(key)  # the record's bytes begin to arrive
            return self._memory.buffer(num_bytes)

        return allocate

    def _note_bytes(self, key: RecordKey) -> None:
        """Restart the stall timer of every stage that waits for this record."""
        for run in self._runs:
            if key in run.waiting:
                run.touch()

    async def _put_aside(self, tier: Tier, record: Record, reason: str) -> None:
        self._meters.add("corrupt_records", tier=tier.name, reason=reason)
        self._absent.add(record.key, self._limits.absent_s)
        deadline = Deadline.after(self._limits.fetch_timeout_s, self._clock)
        try:
            await tier.quarantine(record.key, reason, seen=record, deadline=deadline)
        except (Unavailable, Closed):
            self._meters.add("stage_tier_failures", tier=tier.name)
