"""The catalog: what is stored at the shared levels, how large, how used, and why what left has left."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvstore.catalog.entry import EntryTable, Level
from kvstore.catalog.totals import LevelTotals, NamespaceTotals
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.model.layout import Layout
from kvstore.runtime.deadline import Deadline

__all__ = [
    "Addition",
    "BoundaryEntry",
    "Catalog",
    "LeaveReason",
    "Leaving",
    "LevelTotals",
    "NamespaceTotals",
    "Removal",
    "Step",
    "Tombstone",
    "Use",
]


class LeaveReason(IntEnum):
    """Why a record is no longer stored. The numbers are stored: they never change their meaning."""

    EVICTED = 1
    """A byte budget was reached."""
    QUOTA = 2
    """A tenant's quota was reached."""
    EXPIRED = 3
    """Its time to live had passed."""
    REMOVED = 4
    """Somebody asked for it."""
    CORRUPT = 5
    """It did not match its seal and was put aside."""
    LOST = 6
    """The medium let it go by itself: Redis evicted it, or was restarted."""
    SUPERSEDED = 7
    """A tail whose page is complete."""
    BROKEN = 8
    """It served no hit: a boundary below it, or a part of its own, was not there."""


@dataclass(frozen=True, slots=True)
class Addition:
    """A record that a level holds now.

    Attributes:
        key: The record.
        level: Where.
        num_bytes: Its bytes there, header included.
        tokens: The boundary, in tokens; 0: not known.
        parent: Hash of the prefix that ends where the record's cell starts; `None`: not known, or no tokens before.
    """

    key: RecordKey
    level: Level
    num_bytes: int
    tokens: int
    parent: PrefixHash | None = None


@dataclass(frozen=True, slots=True)
class Removal:
    """A record that a level holds no more.

    Attributes:
        key: The record.
        level: Where it was.
        num_bytes: Its bytes there; `None`: not known, its share of its group's bytes at the boundary is taken.
        reason: Why.
    """

    key: RecordKey
    level: Level
    num_bytes: int | None
    reason: LeaveReason


@dataclass(frozen=True, slots=True)
class Use:
    """Boundaries were read.

    Attributes:
        prefix: The boundary.
        hits: How often, since the last that was told.
        tokens: Its position, and
        parent: as in `Addition`: they fill in what was not known, as after a reindex.
    """

    prefix: PrefixHash
    hits: int
    tokens: int = 0
    parent: PrefixHash | None = None


@dataclass(frozen=True, slots=True)
class BoundaryEntry:
    """All that is known of one boundary.

    Attributes:
        namespace: Whose it is.
        prefix: The boundary's prefix hash.
        tokens: Its position; 0: not known, as after a reindex until it is read.
        parent: The page boundary before it; `None`: likewise, or there is none (`tokens` is at most one page).
        first_use_s: When its first record was stored, in seconds since the Unix epoch.
        last_use_s: When it was stored or read last.
        hits: How often it was read.
        pinned_until_s: A pin's end; 0: not pinned.
        slices: For each level, for each group a bit per slice that is there.
        group_bytes: For each level, for each group the bytes of those slices.
        leaving: Levels whose records are being deleted: lookups see nothing there.
    """

    namespace: NamespaceId
    prefix: PrefixHash
    tokens: int
    parent: PrefixHash | None
    first_use_s: int
    last_use_s: int
    hits: int
    pinned_until_s: int
    slices: tuple[tuple[int, ...], ...]
    group_bytes: tuple[tuple[int, ...], ...]
    leaving: frozenset[Level] = frozenset()

    def num_bytes(self, level: Level) -> int:
        """Bytes of the boundary's records at a level."""
        return sum(self.group_bytes[level])

    def num_records(self, level: Level) -> int:
        """Records of the boundary at a level."""
        return sum(bits.bit_count() for bits in self.slices[level])

    def keys(self, level: Level) -> list[RecordKey]:
        """The records at a level."""
        return [
            RecordKey(self.namespace, self.prefix, group, slice_)
            for group, bits in enumerate(self.slices[level])
            for slice_ in range(bits.bit_length())
            if bits >> slice_ & 1
        ]


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Something that left a level.

    Attributes:
        group: Group and slice of the one record that left; `None`: all of the boundary at this level.
        num_bytes: Bytes that left.
        at_s: When, in seconds since the Unix epoch.
    """

    namespace: NamespaceId
    prefix: PrefixHash
    level: Level
    group: int | None
    slice: int | None
    num_bytes: int
    reason: LeaveReason
    at_s: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """A boundary that is to leave, among others.

    Attributes:
        namespace: Whose it is.
        prefix: The boundary.
        unless_used_since_s: It stays when it was stored or read after this time.
        below: Index among the others of the boundary below it, which comes later and stays if this one does; `None`:
            that one does not leave.
    """

    namespace: NamespaceId
    prefix: PrefixHash
    unless_used_since_s: int
    below: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """A part of a namespace's entries.

    Attributes:
        prefixes: The boundaries, in the order of `table`; perhaps none.
        table: Their entries.
        cursor: Where the next step goes on; `None`: that was the last one.
    """

    prefixes: Sequence[PrefixHash]
    table: EntryTable
    cursor: str | None


class Catalog(ABC):
    """Keeps one entry per boundary. All methods belong to one event loop and may be called concurrently.

    A namespace is registered before anything else is said about it. Every change counts once, however often it is
    told, and changes entry and totals together, whatever other services do at the same time.

    Every method raises `Unavailable` at its deadline or when the catalog cannot be reached, `Closed` after `aclose`,
    `InvalidRequest` for a namespace that was not registered. If cancelled, a change is made or not, never in part.
    """

    @abstractmethod
    async def register(self, namespace: NamespaceId, layout: Layout, tenant: str, *, deadline: Deadline) -> None:
        """Make a namespace known, with the groups and slices that its entries have. Idempotent."""

    @abstractmethod
    async def is_complete(self, *, deadline: Deadline) -> bool:
        """Whether everything that is stored has an entry. If not, only what the catalog *has* may be believed."""

    @abstractmethod
    async def set_complete(self, complete: bool, *, deadline: Deadline) -> None:
        """Say so: true after a reindex, or where nothing was stored; false when changes may have been missed."""

    @abstractmethod
    async def lookup(self, namespace: NamespaceId, prefixes: Sequence[PrefixHash], *, deadline: Deadline) -> EntryTable:
        """The entries of many boundaries, in one round trip per node; absent ones are rows of zeros."""

    @abstractmethod
    async def get(self, namespace: NamespaceId, prefix: PrefixHash, *, deadline: Deadline) -> BoundaryEntry | None:
        """One entry; `None`: nothing is stored there."""

    @abstractmethod
    def iterate(self, namespace: NamespaceId) -> AsyncIterator[BoundaryEntry]:
        """Every entry of a namespace, in no order; ones that come or go meanwhile may or may not be seen."""

    @abstractmethod
    async def step(self, namespace: NamespaceId, cursor: str, *, count: int, deadline: Deadline) -> Step:
        """Some of a namespace's entries, about `count` at most: a walk over all of them, a bounded piece at a time, in
        no order. One that comes or goes meanwhile may or may not be seen, one may be seen twice.

        Args:
            namespace: Whose entries.
            cursor: From the last step; empty: from the start.
            count: How many are looked at; there may be none among them.
            deadline: When to give up.

        Raises:
            InvalidRequest: No cursor of this catalog, or not any more.
        """

    @abstractmethod
    async def namespaces(self, *, deadline: Deadline) -> Mapping[NamespaceId, str]:
        """Every namespace that was ever registered, and its tenant."""

    @abstractmethod
    async def totals(self, *, deadline: Deadline) -> Mapping[NamespaceId, NamespaceTotals]:
        """What every namespace holds, exact at some point during the call for each slot of the catalog."""

    @abstractmethod
    async def add(self, additions: Sequence[Addition], *, deadline: Deadline) -> list[bool]:
        """Tell what was stored. For each: false, when the boundary is leaving that level, so that the record just
        written may be deleted with it: it must be put and told again later.
        """

    @abstractmethod
    async def remove(self, removals: Sequence[Removal], *, deadline: Deadline) -> None:
        """Tell which single records are gone. An entry without records goes as well."""

    @abstractmethod
    async def use(self, namespace: NamespaceId, uses: Sequence[Use], *, deadline: Deadline) -> None:
        """Tell what was read, now. Boundaries without entry are ignored."""

    @abstractmethod
    async def start_leaving(
        self,
        namespace: NamespaceId,
        prefix: PrefixHash,
        level: Level,
        *,
        deadline: Deadline,
        unless_used_since_s: int | None = None,
        even_if_pinned: bool = False,
    ) -> BoundaryEntry | None:
        """Hide all records of a boundary at a level before they are deleted; returns the entry with what is to delete.

        Args:
            namespace: Whose it is.
            prefix: The boundary.
            level: Where the records are deleted.
            deadline: When to give up.
            unless_used_since_s: Leave it as it is when it was stored or read after this time.
            even_if_pinned: Take no notice of a pin.

        Returns:
            `None`: nothing is there, or it is pinned, or it was used. An entry that was leaving already is returned
            again: whoever started may have died.
        """

    async def start_leaving_all(
        self, leaving: Sequence[Leaving], level: Level, *, deadline: Deadline
    ) -> list[BoundaryEntry | None]:
        """`start_leaving` for many boundaries, ends of prefixes first: one stays when one above it does."""
        hidden: list[BoundaryEntry | None] = [None] * len(leaving)
        waves: list[list[int]] = []
        wave_of: dict[int, int] = {}
        for index, one in enumerate(leaving):  # ends come first, so this one's wave is final
            wave = wave_of.get(index, 0)
            if wave == len(waves):
                waves.append([])
            waves[wave].append(index)
            if one.below is not None:
                wave_of[one.below] = max(wave_of.get(one.below, 0), wave + 1)
        stay: set[int] = set()
        for indexes in waves:
            going = [index for index in indexes if index not in stay]
            found = await self._start_wave([leaving[index] for index in going], level, deadline)
            for index, entry in zip(going, found, strict=True):
                hidden[index] = entry
            stay.update(
                below for index in indexes if hidden[index] is None and (below := leaving[index].below) is not None
            )
        return hidden

    async def _start_wave(
        self, leaving: Sequence[Leaving], level: Level, deadline: Deadline
    ) -> list[BoundaryEntry | None]:
        """`start_leaving` for boundaries none of which stands on another one of them."""
        return await asyncio.gather(
            *(
                self.start_leaving(
                    one.namespace,
                    one.prefix,
                    level,
                    deadline=deadline,
                    unless_used_since_s=one.unless_used_since_s,
                )
                for one in leaving
            )
        )

    @abstractmethod
    async def finish_leaving(
        self, namespace: NamespaceId, prefix: PrefixHash, level: Level, reason: LeaveReason, *, deadline: Deadline
    ) -> int:
        """The records that `start_leaving` named are deleted: take them off the totals, write the tombstone. Returns
        their bytes; 0 when the boundary was not leaving.
        """

    async def finish_leaving_all(
        self, gone: Sequence[tuple[BoundaryEntry, LeaveReason]], level: Level, *, deadline: Deadline
    ) -> int:
        """`finish_leaving` for many boundaries."""
        calls = (self.finish_leaving(e.namespace, e.prefix, level, reason, deadline=deadline) for e, reason in gone)
        return sum(await asyncio.gather(*calls))

    @abstractmethod
    async def stop_leaving(
        self, namespace: NamespaceId, prefix: PrefixHash, level: Level, *, deadline: Deadline
    ) -> None:
        """Nothing was deleted after all: lookups see the records again."""

    @abstractmethod
    async def pin(
        self, namespace: NamespaceId, prefixes: Sequence[PrefixHash], until_s: int, *, deadline: Deadline
    ) -> int:
        """Protect boundaries from retention until a time (seconds since the Unix epoch; 0 unpins). Returns how many
        have an entry.
        """

    @abstractmethod
    async def tombstones(self, *, limit: int, deadline: Deadline) -> list[Tombstone]:
        """What left last, latest first; older ones are forgotten."""

    @abstractmethod
    async def clear(self, *, deadline: Deadline) -> None:
        """Forget everything but the namespaces: a reindex begins. The catalog is then not complete."""

    @abstractmethod
    async def aclose(self) -> None:
        """Release what the catalog itself opened. Idempotent."""
