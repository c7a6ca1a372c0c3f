"""One stage while it runs: what it has pinned, what it waits for, and what it returns in the end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from kvstore.api import PrefixQuery, Progress
from kvstore.model.coverage import longest_resumable, records_to_resume
from kvstore.model.keys import RecordKey
from kvstore.model.layout import Layout
from kvstore.runtime.turns import LongWork
from kvstore.store.placement import Probe
from kvstore.tiers.base import Tier
from kvstore.tiers.memory import MemoryTier, Pin

__all__ = ["PINNED_AT_ONCE", "Holding", "StageRun", "Wanted"]

PINNED_AT_ONCE = 1024
"""Records that are pinned or unpinned before the event loop gets a turn: some milliseconds."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What a stage holds when it ends; whoever receives it owns the pins.

    Attributes:
        resume_tokens: The resume point that the pinned records serve, or the local tokens.
        pins: The records, in the order of their boundaries.
        spans: Their tokens (start, stop), in this order.
        sources: Number of records by tier that they were read from.
        num_bytes: Bytes of the records, headers included.
        cut: Why it is less than was promised, if it is: a word of docs/explain.md, perhaps with `:` and a tier's name.
    """

    resume_tokens: int
    pins: dict[RecordKey, Pin]
    spans: tuple[tuple[int, int], ...]
    sources: dict[str, int]
    num_bytes: int
    cut: str = ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One record to bring in.

    Attributes:
        key: The record.
        probe: Boundary and group that it is a slice of.
        tokens: The boundary, which its header must agree with.
        places: The slower tiers that should have it, in the order to try them.
        size_bytes: Its estimated size.
    """

    key: RecordKey
    probe: Probe
    tokens: int
    places: tuple[Tier, ...]
    size_bytes: int


@dataclass(eq=False, slots=True)
class StageRun:
    """One stage while it runs.

    Attributes:
        pins: What it holds so far.
        sources: The tier of each held record.
        pinned_bytes: What its pins added to the memory tier's pinned bytes.
        waiting: Keys that it still waits for.
        cut: The first reason why it returns less than was promised.
    """

    query: PrefixQuery
    layout: Layout
    progress: Progress | None
    pins: dict[RecordKey, Pin] = field(default_factory=dict)
    sources: dict[RecordKey, str] = field(default_factory=dict)
    pinned_bytes: int = 0
    waiting: set[RecordKey] = field(default_factory=set)
    cut: str = ""
    _num_bytes: int = 0
    _timer: asyncio.Timeout | None = None
    _stall_s: float = 0.0
    _ends_s: float = 0.0

    def watch(self, timer: asyncio.Timeout, stall_s: float, remaining_s: float) -> None:
        """Have `timer` expire when nothing arrives for `stall_s`, and after `remaining_s` in any case."""
        self._timer, self._stall_s = timer, stall_s
        self._ends_s = asyncio.get_running_loop().time() + remaining_s
        self.waits_for_nothing()

    def cut_by(self, reason: str) -> None:
        self.cut = self.cut or reason

    def waits_for_nothing(self) -> None:
        """No record is expected now, so only the end counts."""
        if self._timer is not None and not self._timer.expired():
            self._timer.reschedule(self._ends_s)

    def touch(self) -> None:
        """A record is expected, or has begun or ended to arrive: wait for the next one from now on."""
        if self._timer is not None and not self._timer.expired():
            now_s = asyncio.get_running_loop().time()
            self._timer.reschedule(min(self._ends_s, now_s + self._stall_s))

    def hold(self, item: Wanted, pin: Pin, source: str, added_bytes: int) -> None:
        self.pins[item.key] = pin
        self.sources[item.key] = source
        self.pinned_bytes += added_bytes
        self._num_bytes += pin.records[0].num_bytes
        if self.progress is not None:
            self.progress(self._num_bytes)

    def drop_pins(self, memory: MemoryTier) -> None:
        """Unpin everything at once."""
        self._drop(memory, list(self.pins))

    async def drop_pins_in_pieces(self, memory: MemoryTier, work: LongWork, *, but: Collection[RecordKey]) -> None:
        """Unpin what is not to be kept."""
        useless = await work.run(len(self.pins), lambda: [key for key in self.pins if key not in but])
        for start in range(0, len(useless), PINNED_AT_ONCE):
            async with work.turn(len(useless)):
                self._drop(memory, useless[start : start + PINNED_AT_ONCE])

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
        num_bytes = sum(pin.records[0].num_bytes for pin in kept.values())
        sources = dict(Counter(self.sources[key] for key in kept))
        spans = tuple((span.start, span.stop) for span in (pin.records[0].header.span for pin in kept.values()))
        return Holding(resume_tokens, kept, spans, sources, num_bytes, self.cut)

    def _usable(self) -> tuple[int, dict[RecordKey, Pin]]:
        """The longest resume point, and what it needs in the order of the boundaries."""
        bits = [0] * len(self.query.boundaries)
        index_of = {boundary.prefix: index for index, boundary in enumerate(self.query.boundaries)}
        held: dict[Probe, int] = {}
        for key in self.pins:
            probe = (index_of[key.prefix], key.group)
            held[probe] = held.get(probe, 0) | 1 << key.slice
        for (index, group), slices in held.items():
            if slices == (1 << self.layout.groups[group].num_slices) - 1:
                bits[index] |= 1 << group
        tokens = [boundary.tokens for boundary in self.query.boundaries]
        resume_tokens = longest_resumable(
            self.layout,
            tokens,
            bits,
            local_tokens=self.query.local_tokens,
            cap_tokens=self.query.cap_tokens,
            step_tokens=self.query.step_tokens,
        )
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
