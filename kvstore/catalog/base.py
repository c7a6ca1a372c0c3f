"""The catalog interface: what each shared level stores, its sizes and use, and why records were removed."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from kvstore.catalog.entry import EntryTable, Level
from kvstore.errors import InvalidRequest
from kvstore.model.keys import PREFIX_BYTES, NamespaceId, PrefixHash, RecordKey
from kvstore.model.layout import Layout
from kvstore.runtime.deadline import Deadline

__all__ = [
    "Addition",
    "BoundaryEntry",
    "Catalog",
    "Gate",
    "LeaveReason",
    "Leaving",
    "LevelTotals",
    "NamespaceTotals",
    "Removal",
    "Step",
    "Tombstone",
    "Use",
    "bytes_of_cursor",
]


Gate = Callable[[], None]
"""Asked before each call to a shared server; raises `Unavailable` while nothing may be asked of it."""


class LeaveReason(IntEnum):
    """Why a record is no longer stored. The numbers are stored: they never change meaning."""

    EVICTED = 1
    """A byte budget was reached."""
    QUOTA = 2
    """A tenant's quota was reached."""
    EXPIRED = 3
    """Its time to live had passed."""
    REMOVED = 4
    """A client or an operator deleted it."""
    CORRUPT = 5
    """It failed verification and was quarantined."""
    LOST = 6
    """The medium dropped it: Redis evicted it, or was restarted."""
    SUPERSEDED = 7
    """A tail whose page is complete."""
    BROKEN = 8
    """It could not serve a hit: a shorter prefix, or one of the boundary's own records, was missing."""


@dataclass(frozen=True, slots=True)
class Addition:
    """A record that was stored at a level.

    Attributes:
        key: The record.
        level: Where.
        num_bytes: Its bytes there, header included.
        tokens: The boundary's position in tokens; 0: not known.
        parent: Hash of the prefix that ends where the record's span starts; `None`: not known, or the span starts at 0.
    """

    key: RecordKey
    level: Level
    num_bytes: int
    tokens: int
    parent: PrefixHash | None = None


@dataclass(frozen=True, slots=True)
class Removal:
    """A record that a level no longer holds.

    Attributes:
        key: The record.
        level: Where it was.
        num_bytes: Its bytes there; `None`: not known; the mean of its group's records at the boundary is assumed.
        reason: Why.
    """

    key: RecordKey
    level: Level
    num_bytes: int | None
    reason: LeaveReason


@dataclass(frozen=True, slots=True)
class Use:
    """Reads of one boundary.

    Attributes:
        prefix: The boundary.
        hits: Reads since the last report.
        tokens: As in `Addition`; fills in a position that was not known, as after a reindex.
        parent: As in `Addition`; likewise.
    """

    prefix: PrefixHash
    hits: int
    tokens: int = 0
    parent: PrefixHash | None = None


@dataclass(frozen=True, slots=True)
class BoundaryEntry:
    """The catalog's entry of one boundary.

    Attributes:
        namespace: Its namespace.
        prefix: The boundary's prefix hash.
        tokens: Its position in tokens; 0: not known, as after a reindex until it is read.
        parent: The page boundary before it; `None`: not known, or there is none (`tokens` is at most one page).
        first_use_s: When its first record was stored, in seconds since the Unix epoch.
        last_use_s: When it was last stored or read.
        hits: How often it was read.
        pinned_until_s: When its pin ends; 0: not pinned.
        slices: Per level and group: a bit for each slice that is stored.
        group_bytes: Per level and group: the bytes of those slices.
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
    """A removal from a level: of one record, or of a whole boundary.

    Attributes:
        group: The removed record's group; `None`, as `slice`: all records of the boundary at this level.
        num_bytes: Bytes that were removed.
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
    """One boundary of a batch that `start_leaving_all` hides.

    Attributes:
        namespace: Its namespace.
        prefix: The boundary.
        unless_used_since_s: It stays when it was stored or read after this time.
        below: Index in the batch of its parent, which comes later and stays if this one does; `None`: the parent is not
            in the batch.
    """

    namespace: NamespaceId
    prefix: PrefixHash
    unless_used_since_s: int
    below: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One page of a namespace's entries.

    Attributes:
        prefixes: The boundaries, in the order of `table`; perhaps none.
        table: Their entries.
        cursor: Where the next step continues; `None`: this was the last one.
    """

    prefixes: Sequence[PrefixHash]
    table: EntryTable
    cursor: str | None


class Catalog(ABC):
    """Keeps one entry per boundary. All methods belong to one event loop and may be called concurrently.

    A namespace must be registered before any other call about it. Every change counts once, however often it is
    reported, and updates entry and totals together, whatever other services do at the same time.

    Every method raises `Unavailable` at its deadline or when the catalog cannot be reached, `Closed` after `aclose`,
    `InvalidRequest` for a namespace that was not registered. If cancelled, a change is made or not, never in part.
    """

    @abstractmethod
    async def register(self, namespace: NamespaceId, layout: Layout, tenant: str, *, deadline: Deadline) -> None:
        """Register a namespace with its groups and slices. Idempotent."""

    @abstractmethod
    async def is_complete(self, *, deadline: Deadline) -> bool:
        """Whether every stored record has an entry. If not, a missing entry does not mean that nothing is stored."""

    @abstractmethod
    async def set_complete(self, complete: bool, *, deadline: Deadline) -> None:
        """Set `is_complete`: true after a reindex, or for an empty store; false when changes may have been missed."""

    @abstractmethod
    async def lookup(self, namespace: NamespaceId, prefixes: Sequence[PrefixHash], *, deadline: Deadline) -> EntryTable:
        """Read the entries of many boundaries, in one round trip per node; absent ones are rows of zeros."""

    @abstractmethod
    async def get(self, namespace: NamespaceId, prefix: PrefixHash, *, deadline: Deadline) -> BoundaryEntry | None:
        """Read one entry; `None`: nothing is stored there."""

    @abstractmethod
    def iterate(self, namespace: NamespaceId) -> AsyncIterator[BoundaryEntry]:
        """Yield every entry of a namespace, in no order; those added or removed meanwhile may or may not be seen."""

    @abstractmethod
    async def step(self, namespace: NamespaceId, cursor: str, *, count: int, deadline: Deadline) -> Step:
        """Read about `count` of a namespace's entries: pages through all of them, in no order. One that is added or
        removed meanwhile may or may not be seen; one may be seen twice.

        Args:
            namespace: Whose entries.
            cursor: From the last step; empty: from the start.
            count: How many keys are looked at; there may be no entry among them.
            deadline: When to give up.

        Raises:
            InvalidRequest: Not a cursor of this catalog, or one that is no longer valid.
        """

    @abstractmethod
    async def namespaces(self, *, deadline: Deadline) -> Mapping[NamespaceId, str]:
        """Every namespace that was ever registered, and its tenant."""

    @abstractmethod
    async def totals(self, *, deadline: Deadline) -> Mapping[NamespaceId, NamespaceTotals]:
        """What every namespace holds. Each slot of the catalog is read at one point in time, the slots one by one."""

    @abstractmethod
    async def add(self, additions: Sequence[Addition], *, deadline: Deadline) -> list[bool]:
        """Report stored records. Per addition: false when the boundary is leaving that level, since the record just
        written may be deleted with it: the caller must put and report it again later.
        """

    @abstractmethod
    async def remove(self, removals: Sequence[Removal], *, deadline: Deadline) -> None:
        """Report single records that are gone. An entry without records is dropped."""

    @abstractmethod
    async def use(self, namespace: NamespaceId, uses: Sequence[Use], *, deadline: Deadline) -> None:
        """Report reads that happened now. Boundaries without an entry are ignored."""

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
        """Hide all records of a boundary at a level before they are deleted; returns the entry, which names them.

        Args:
            namespace: Its namespace.
            prefix: The boundary.
            level: Where the records are deleted.
            deadline: When to give up.
            unless_used_since_s: Do nothing when it was stored or read after this time.
            even_if_pinned: Ignore a pin.

        Returns:
            `None`: nothing is stored there, or it is pinned, or it was used. An entry that is leaving already is
            returned again: whoever started may have died.
        """

    async def start_leaving_all(
        self, leaving: Sequence[Leaving], level: Level, *, deadline: Deadline
    ) -> list[BoundaryEntry | None]:
        """`start_leaving` for many boundaries, longest prefixes first: one stays when a longer one of the batch stays.

        Works in waves: a boundary's wave comes after those of all longer ones that name it as `below`.
        """
        hidden: list[BoundaryEntry | None] = [None] * len(leaving)
        waves: list[list[int]] = []
        wave_of: dict[int, int] = {}
        for index, one in enumerate(leaving):  # longer prefixes come first, so this one's wave is final
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
        """`start_leaving` for boundaries none of which is the parent of another."""
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
        """Report that the records named by `start_leaving` are deleted: subtracts them from the totals and writes the
        tombstone. Returns their bytes; 0 when the boundary was not leaving.
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
        """Undo `start_leaving` when nothing was deleted: lookups see the records again."""

    @abstractmethod
    async def pin(
        self, namespace: NamespaceId, prefixes: Sequence[PrefixHash], until_s: int, *, deadline: Deadline
    ) -> int:
        """Protect boundaries from retention until a time (seconds since the Unix epoch; 0 unpins). Returns how many
        have an entry.
        """

    @abstractmethod
    async def tombstones(self, *, limit: int, deadline: Deadline) -> list[Tombstone]:
        """The most recent removals, latest first; a bounded number is kept."""

    @abstractmethod
    async def clear(self, *, deadline: Deadline) -> None:
        """Drop all entries and totals, but not the namespaces, before a reindex. The catalog is then not complete."""

    @abstractmethod
    async def aclose(self) -> None:
        """Release what the catalog itself opened. Idempotent."""


@dataclass(frozen=True, slots=True)
class LevelTotals:
    """What one level holds.

    Attributes:
        num_boundaries: Boundaries with at least one record there.
        num_records: Their records.
        num_bytes: Bytes of these records, headers included.
    """

    num_boundaries: int = 0
    num_records: int = 0
    num_bytes: int = 0

    def __add__(self, other: LevelTotals) -> LevelTotals:
        return LevelTotals(
            self.num_boundaries + other.num_boundaries,
            self.num_records + other.num_records,
            self.num_bytes + other.num_bytes,
        )


@dataclass(frozen=True, slots=True)
class NamespaceTotals:
    """What one namespace holds.

    Attributes:
        tenant: Its tenant.
        num_boundaries: Entries; one with records at both levels counts once.
        levels: Totals per `Level`.
    """

    tenant: str = ""
    num_boundaries: int = 0
    levels: tuple[LevelTotals, ...] = field(default_factory=lambda: tuple(LevelTotals() for _ in Level))


def bytes_of_cursor(cursor: str) -> bytes:
    """The prefix that the last step ended with; empty at the start.

    Raises:
        InvalidRequest: Not a cursor.
    """
    try:
        after = bytes.fromhex(cursor)
    except ValueError:
        after = b"?"
    if len(after) not in (0, PREFIX_BYTES):
        raise InvalidRequest("not a cursor of this catalog: start again without one", field="cursor", seen=cursor[:80])
    return after
