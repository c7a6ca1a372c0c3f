"""Stage: copy what a resume point needs into memory, pinned as it arrives, and return the part that arrived."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy.typing as npt

from kvstore.api import PrefixQuery, Progress
from kvstore.errors import Closed, CorruptRecord, Unavailable
from kvstore.format.record import Record
from kvstore.model.coverage import records_to_resume
from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.model.layout import Layout
from kvstore.runtime.budget import ByteBudget
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.io_loops import call_on
from kvstore.runtime.shared_calls import SingleFlight
from kvstore.runtime.turns import LongWork, Turns, who_asks
from kvstore.store.context import StoreContext, StorePart
from kvstore.store.leases import Unpinning
from kvstore.store.lookup import AbsentKeys
from kvstore.store.namespaces import check_header
from kvstore.store.presence import UNKNOWN_BYTES, Presence, Probe, affordable_resume, groups_present, resume_of
from kvstore.tiers.base import PutOutcome, Tier
from kvstore.tiers.memory import RECORD_OVERHEAD_BYTES, MemoryTier, Pin

_REPLANS_MAX = 64
"""Each new plan drops at least one record that turned out to be missing, so this bounds how many holes a prefix has."""
_READS_FIRST = 4
"""Reads of a tier at a time, before any has ended."""
_QUICK_SHARE = 1 / 6
"""Of the stall time: a read that takes less is quick."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What a stage holds when it ends; its receiver owns the pins."""

    resume_tokens: int
    """The resume point that the pinned records serve, or the local tokens."""
    pins: dict[RecordKey, Pin]
    """The records, in the order of their boundaries."""
    spans: tuple[tuple[int, int], ...]
    """Their tokens (start, stop), in this order."""
    sources: dict[str, int]
    """Number of records by tier that they were read from."""
    num_bytes: int
    """Bytes of the records, headers included."""
    cut: str = ""
    """Why it is less than looked usable, as `Staged.cut`."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One record to fetch."""

    key: RecordKey
    probe: Probe
    """Boundary and group that it is a slice of."""
    tokens: int
    """The boundary, which its header must agree with."""
    places: tuple[Tier, ...]
    """The slower tiers that should have it, in the order to try them."""
    size_bytes: int
    """Its estimated size."""


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
    """What a stage is to hold."""

    is_cut: bool
    """Less than looked usable, for lack of memory."""
    wanted: list[_Wanted] = field(default_factory=list)
    """The records that are not pinned yet."""
    useful: set[RecordKey] = field(default_factory=set)
    """The keys of all; what else is pinned is unpinned, to free memory."""


class Stager(StorePart):
    """Copies records from the slower tiers into memory: each once, however many stages want it.

    Args:
        absent: Learns of records that were missing or bad.
        work: Runs what takes long for a long prompt.
        unpinning: Where pins go that get no lease.
        free_for: Returns how many bytes more may be pinned now for a namespace.
        on_cold_hit: Called with each record that the cold tier delivered.
    """

    def __init__(
        self,
        context: StoreContext,
        *,
        absent: AbsentKeys,
        work: LongWork,
        unpinning: Unpinning,
        free_for: Callable[[NamespaceId], int],
        on_cold_hit: Callable[[Record], None],
    ) -> None:
        super().__init__(context)
        limits = context.limits
        self._absent = absent
        self._work = work
        self._unpinning = unpinning
        self._free_for = free_for
        self._on_cold_hit = on_cold_hit
        self._flights: SingleFlight[RecordKey, _Read | _NotRead] = SingleFlight(context.background)
        self._in_flight = ByteBudget(limits.stage_bytes_in_flight)
        # of each tier: a changing number of reads at a time, in turns among tenants and connections
        self._reads = {tier.name: Turns(min(_READS_FIRST, limits.stage_records_in_flight)) for tier in context.slower}
        self._quick_s = limits.stall_timeout_s * _QUICK_SHARE
        self._runs: set[_StageRun] = set()

    async def stage(
        self, presence: Presence, deadline: Deadline, progress: Progress | None = None, *, at_once: int | None = None
    ) -> Holding:
        """Fetch what the longest resume point in `presence` needs, and return what arrived of it.

        Ends early when no record begins or ends to arrive for `stall_timeout_s`, and at the deadline; neither is an
        error.

        Args:
            at_once: Records that it reads at a time, of those that all stages may; `None`: all of them.

        If cancelled, nothing stays pinned.
        """
        run = _StageRun(presence.query, presence.layout, progress, at_once or self._limits.stage_records_in_flight)
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
            self._unpinning.give_back(run.pins)
            raise
        finally:
            self._runs.discard(run)
        try:
            return await run.settle(self._memory, self._work)
        except BaseException:
            self._unpinning.give_back(run.pins)
            raise

    def drop(self, holding: Holding) -> None:
        """Unpin a holding that gets no lease."""
        self._unpinning.give_back(holding.pins)

    async def _fetch_all(self, run: _StageRun, presence: Presence) -> None:
        """Plan, fetch, and plan again without what turned out to be missing, until all of a plan is here."""
        bits = await self._work.run(presence.num_items, presence.groups_present)
        await self._unpinning.done()  # a lease that ended a moment ago takes no memory
        for _ in range(_REPLANS_MAX):
            run.expect_nothing()
            free_bytes = self._free_for(presence.query.namespace) + run.pinned_bytes
            plan = await self._work.run(presence.num_cells, self._plan, run, presence, bits, free_bytes)
            if plan.is_cut:
                run.cut_by("node_memory")
            await run.drop_pins_in_pieces(self._memory, self._work, but=plan.useful)
            missed = await self._fetch(run, plan.wanted)
            if not missed:
                return
            for index, group in missed:
                bits[index] &= ~(1 << group)

    def _plan(self, run: _StageRun, presence: Presence, bits: npt.NDArray[Any], free_bytes: int) -> _Plan:
        """The records of the longest resume point that this node can hold."""
        query, layout = presence.query, presence.layout
        resume_tokens = fitting_resume(presence, bits, max(0, free_bytes))
        plan = _Plan(resume_tokens < presence.resume_tokens(bits))
        if resume_tokens <= query.local_tokens:
            plan.useful.update(run.pins)
            return plan
        tokens = presence.tokens
        index_of = {count: index for index, count in enumerate(tokens.tolist())}
        for needed in records_to_resume(
            layout, tokens, bits, resume_tokens=resume_tokens, local_tokens=query.local_tokens
        ):
            probe = (index_of[needed.tokens], needed.group)
            size_bytes = presence.mean_bytes(needed.group, UNKNOWN_BYTES)
            for slice_ in range(layout.groups[needed.group].num_slices):
                key = presence.key(probe, slice_)
                if key in plan.useful:  # a caller's own keys may be named twice
                    continue
                plan.useful.add(key)
                if key not in run.pins:
                    places = self._places(presence, probe, slice_)
                    plan.wanted.append(_Wanted(key, probe, needed.tokens, places, size_bytes))
        return plan

    def _places(self, presence: Presence, probe: Probe, slice_: int) -> tuple[Tier, ...]:
        found_in = ((self._hot, presence.hot), (self._cold, presence.cold))
        return tuple(tier for tier, found in found_in if tier is not None and found.get(probe, 0) >> slice_ & 1)

    async def _fetch(self, run: _StageRun, wanted: Sequence[_Wanted]) -> set[Probe]:
        """Fetch records, ascending, a few at a time; returns what is missing, and stops soon after the first."""
        missed: set[Probe] = set()

        def pin(items: Sequence[_Wanted]) -> None:
            for item in items:
                if (cut := self._pin(run, item, self._memory.name)) not in ("", "gone"):
                    run.cut_by(cut)
                    missed.add(item.probe)

        await self._work.in_pieces(wanted, pin)  # first, so that nothing evicts what memory has
        left = await self._work.run(len(wanted), lambda: [item for item in wanted if item.key not in run.pins])
        todo = iter(left)
        run.waiting = await self._work.run(len(left), lambda: {item.key for item in left})
        run.touch()

        async def worker(items: Iterator[_Wanted]) -> None:
            for item in items:
                if missed:
                    return
                try:
                    cut = await self._fetch_one(run, item)
                except Closed:  # the store is being closed during the stage: return what is here
                    cut = "closed"
                if cut:
                    run.cut_by(cut)
                    missed.add(item.probe)

        if not missed and run.waiting:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(run.at_once, len(run.waiting))):
                    group.create_task(worker(todo))
        return missed

    async def _fetch_one(self, run: _StageRun, item: _Wanted) -> str:
        """Fetch one record; returns why that failed, or an empty string."""
        read = await self._flights.run(item.key, lambda: self._read(item, run.layout))
        run.waiting.discard(item.key)
        if isinstance(read, _NotRead):
            cut = self._pin(run, item, self._memory.name)  # it may have been saved while this waited
            return read.cut if cut == "gone" else cut
        if self._memory.insert(read.record) is PutOutcome.FULL:
            self._meters.add("stage_refused", reason="memory_full")
            return "node_memory"
        return self._pin(run, item, read.tier)

    def _pin(self, run: _StageRun, item: _Wanted, source: str) -> str:
        """Pin a record in memory for this stage; returns why that failed, or an empty string. "gone": it is not there.

        Args:
            source: The tier that it was read from.
        """
        free_bytes = self._free_for(item.key.namespace)
        pin = self._memory.pin(item.key)
        if pin is None:
            return "gone"
        try:
            check_header(pin.record.header, run.layout, item.tokens)
        except CorruptRecord as error:
            self._memory.unpin(pin)
            self._memory.remove(item.key)
            self._meters.add("corrupt_records", tier=self._memory.name, reason=str(error.message))
            return f"corrupt:{self._memory.name}"
        if pin.added_bytes > free_bytes:
            self._memory.unpin(pin)
            self._meters.add("stage_refused", reason="stage_bytes")
            return "node_memory"
        run.hold(item.key, pin, source)
        return ""

    async def _read(self, item: _Wanted, layout: Layout) -> _Read | _NotRead:
        """Read one record from the first place that has it. Runs once for all stages that want it."""
        cut = "gone"
        for number, tier in enumerate(item.places):
            is_last = number == len(item.places) - 1
            # A tier that hangs must leave time to read from the next one before the stage counts as stalled.
            seconds = self._limits.fetch_timeout_s if is_last else self._limits.stall_timeout_s / 2
            try:
                record = await self._read_from(tier, item, seconds)
            except (Unavailable, Closed):
                cut = f"tier_failed:{tier.name}"
                continue
            if record is None:
                continue
            try:
                check_header(record.header, layout, item.tokens)
            except CorruptRecord as error:
                cut = f"corrupt:{tier.name}"
                await self._quarantine(tier, record, str(error.message))
                continue
            self._meters.add("staged_records", tier=tier.name)
            self._memory.insert(record)  # every waiting stage pins it; until then it serves other readers
            if tier is self._cold:
                self._on_cold_hit(record)
            return _Read(record, tier.name)
        return _NotRead(cut)

    async def _read_from(self, tier: Tier, item: _Wanted, seconds: float) -> Record | None:
        """Read a record once from one tier. `None`: it is not there, which is remembered for a while."""
        tenant = self._memory.owner_of(item.key.namespace)
        grant = await self._in_flight.take(min(item.size_bytes, self._in_flight.limit_bytes), tenant)
        reads, most = self._reads[tier.name], self._limits.stage_records_in_flight
        try:
            async with reads.turn(who_asks()):
                started_s = self._clock.monotonic_s()
                deadline = Deadline.after(seconds, self._clock)
                try:
                    record = await tier.get(item.key, deadline=deadline, allocate=self._allocator(item.key))
                finally:
                    took_s = self._clock.monotonic_s() - started_s
                    reads.limit = next_window(reads.limit, took_s, quick_s=self._quick_s, limit=most)
        finally:
            self._in_flight.give_back(grant)
        if record is None:
            self._meters.add("stage_misses", tier=tier.name)
            self._absent.add(item.key, self._limits.absent_s)
        else:
            self._note_bytes(item.key)
        return record

    def _allocator(self, key: RecordKey) -> Callable[[int], memoryview]:
        """Returns a tier's `allocate`. The tier may call it in a thread that receives, and the stages belong here."""
        loop = asyncio.get_running_loop()

        def allocate(num_bytes: int) -> memoryview:
            call_on(loop, self._note_bytes, key)  # the record's bytes begin to arrive
            return self._memory.buffer(num_bytes)

        return allocate

    def _note_bytes(self, key: RecordKey) -> None:
        """Restart the stall timer of every stage that waits for this record."""
        for run in self._runs:
            if key in run.waiting:
                run.touch()

    async def _quarantine(self, tier: Tier, record: Record, reason: str) -> None:
        self._meters.add("corrupt_records", tier=tier.name, reason=reason)
        self._absent.add(record.key, self._limits.absent_s)
        deadline = Deadline.after(self._limits.fetch_timeout_s, self._clock)
        with suppress(Unavailable, Closed):
            await tier.quarantine(record.key, reason, seen=record, deadline=deadline)


@dataclass(eq=False, slots=True)
class _StageRun:
    """One stage while it runs: what it has pinned and what it waits for."""

    query: PrefixQuery
    layout: Layout
    progress: Progress | None
    at_once: int
    pins: dict[RecordKey, Pin] = field(default_factory=dict)
    sources: dict[RecordKey, str] = field(default_factory=dict)
    """The tier that each pinned record was read from."""
    pinned_bytes: int = 0
    """What its pins added to the memory tier's pinned bytes."""
    waiting: set[RecordKey] = field(default_factory=set)
    cut: str = ""
    """The first reason why it returns less than looked usable."""
    _num_bytes: int = 0
    _timer: asyncio.Timeout | None = None
    _stall_s: float = 0.0
    _ends_s: float = 0.0

    def watch(self, timer: asyncio.Timeout, stall_s: float, remaining_s: float) -> None:
        """Have `timer` expire when nothing arrives for `stall_s`, and after `remaining_s` in any case."""
        self._timer, self._stall_s = timer, stall_s
        self._ends_s = asyncio.get_running_loop().time() + remaining_s
        self.expect_nothing()

    def cut_by(self, reason: str) -> None:
        self.cut = self.cut or reason

    def expect_nothing(self) -> None:
        """Stop the stall timer: no record is expected now, so only the end counts."""
        if self._timer is not None and not self._timer.expired():
            self._timer.reschedule(self._ends_s)

    def touch(self) -> None:
        """Restart the stall timer: a record is expected, or has begun or ended to arrive."""
        if self._timer is not None and not self._timer.expired():
            now_s = asyncio.get_running_loop().time()
            self._timer.reschedule(min(self._ends_s, now_s + self._stall_s))

    def hold(self, key: RecordKey, pin: Pin, source: str) -> None:
        self.pins[key] = pin
        self.sources[key] = source
        self.pinned_bytes += pin.added_bytes
        self._num_bytes += pin.record.num_bytes
        if self.progress is not None:
            self.progress(self._num_bytes)

    async def drop_pins_in_pieces(self, memory: MemoryTier, work: LongWork, *, but: Collection[RecordKey]) -> None:
        """Unpin all but some records."""
        useless = await work.run(len(self.pins), lambda: [key for key in self.pins if key not in but])
        await work.in_pieces(useless, partial(self._drop, memory))

    def _drop(self, memory: MemoryTier, keys: Iterable[RecordKey]) -> None:
        before_bytes = memory.pinned_bytes
        for key in keys:
            memory.unpin(self.pins.pop(key))
        self.pinned_bytes -= before_bytes - memory.pinned_bytes

    async def settle(self, memory: MemoryTier, work: LongWork) -> Holding:
        """Keep the pins of the longest resume point whose records are all here; drop the others.

        If cancelled, the pins are still this run's.
        """
        num_items = len(self.pins) + len(self.query.boundaries)
        resume_tokens, kept = await work.run(num_items, self._usable)
        await self.drop_pins_in_pieces(memory, work, but=kept)
        return await work.run(len(kept), self._holding, resume_tokens, kept)

    def _holding(self, resume_tokens: int, kept: dict[RecordKey, Pin]) -> Holding:
        num_bytes = sum(pin.record.num_bytes for pin in kept.values())
        sources = dict(Counter(self.sources[key] for key in kept))
        spans = tuple(pin.record.header.span for pin in kept.values())
        return Holding(resume_tokens, kept, spans, sources, num_bytes, self.cut)

    def _usable(self) -> tuple[int, dict[RecordKey, Pin]]:
        """The longest resume point, and what it needs in the order of the boundaries."""
        index_of = {boundary.prefix: index for index, boundary in enumerate(self.query.boundaries)}
        held: dict[Probe, int] = {}
        for key in self.pins:
            probe = (index_of[key.prefix], key.group)
            held[probe] = held.get(probe, 0) | 1 << key.slice
        tokens = [boundary.tokens for boundary in self.query.boundaries]
        bits = groups_present(self.layout, len(tokens), (held,))
        resume_tokens = resume_of(self.layout, self.query, tokens, bits)
        kept: dict[RecordKey, Pin] = {}
        if resume_tokens > self.query.local_tokens:
            prefixes = {boundary.tokens: boundary.prefix for boundary in self.query.boundaries}
            for needed in records_to_resume(
                self.layout, tokens, bits, resume_tokens=resume_tokens, local_tokens=self.query.local_tokens
            ):
                for slice_ in range(self.layout.groups[needed.group].num_slices):
                    key = RecordKey(self.query.namespace, prefixes[needed.tokens], needed.group, slice_)
                    kept[key] = self.pins[key]
        return resume_tokens, kept


def next_window(window: int, took_s: float, *, quick_s: float, limit: int) -> int:
    """The number of concurrent reads to allow after one that took `took_s`.

    Reads share a link. With too many at once none of them ends for a long time, which a stage cannot tell from a tier
    that hangs. So the window grows while reads take less than `quick_s`, and shrinks when one takes twice that.
    """
    if took_s < quick_s:
        return min(limit, window + 1)
    if took_s > 2 * quick_s:
        return max(1, window - 1)
    return window


def slice_bytes(presence: Presence, group: int) -> int:
    """What one slice of a group's records takes of memory, by the mean of the known sizes."""
    return presence.mean_bytes(group, UNKNOWN_BYTES) + RECORD_OVERHEAD_BYTES


def fitting_resume(presence: Presence, bits: npt.NDArray[Any], budget_bytes: int) -> int:
    """As `affordable_resume`, of records as large in memory as those of their group are on average.

    Args:
        bits: For each boundary a bit per group that is present.
    """
    layout = presence.layout
    group_bytes = [group.num_slices * slice_bytes(presence, index) for index, group in enumerate(layout.groups)]
    return affordable_resume(layout, presence.query, bits, group_bytes=group_bytes, budget_bytes=budget_bytes)
