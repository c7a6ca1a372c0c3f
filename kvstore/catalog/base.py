"""The catalog interface: the boundaries at each shared level, their sizes and use, and why they were removed."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeVar

from kvstore.catalog.coordination import MarkBook, Ownership, TextStore, TextStoreKind
from kvstore.catalog.entry import LEAVING_AT, BoundaryEntry, EntryShape, EntryTable, Level, entry_of
from kvstore.errors import Closed, InvalidRequest, Unavailable
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.model.layout import Layout
from kvstore.runtime.clock import Clock
from kvstore.runtime.deadline import Deadline

TOMBSTONES_MAX = 16384
"""Tombstones that a catalog keeps; in a Redis Cluster up to four times as many, since each slot keeps 4 of its own."""
STEP_ENTRIES = 512
"""Entries per step of a walk. Between steps other users of this thread and of Python's lock get a turn."""
_STEP_S = 10.0
"""Time limit of each step of `Catalog.steps`."""

T = TypeVar("T")

Gate = Callable[[], None]
"""Called before each call to a shared server; raises `Unavailable` while the server must not be called."""


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
        num_bytes: Its bytes there; `None`: not known, so the mean of its group's records at the boundary is assumed.
    """

    key: RecordKey
    level: Level
    num_bytes: int | None
    reason: LeaveReason


@dataclass(frozen=True, slots=True)
class Use:
    """Reads of one boundary.

    Attributes:
        hits: Reads since the last report.
        tokens: As in `Addition`; replaces a position that is not known, as after a reindex. Likewise `parent`.
    """

    prefix: PrefixHash
    hits: int
    tokens: int = 0
    parent: PrefixHash | None = None


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A removal from a level: of one record, or of a whole boundary.

    Attributes:
        group: The removed record's group; `None`, as is `slice`: all records of the boundary at this level.
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
    """One boundary of a batch for `Catalog.start_leaving`.

    Attributes:
        unless_used_since_s: The boundary stays if it was stored or read after this time; by default it leaves anyway.
        below: Index in the batch of its parent, which comes later and stays if this one does; `None`: the parent is not
            in the batch.
    """

    namespace: NamespaceId
    prefix: PrefixHash
    unless_used_since_s: int = 0xFFFFFFFF
    below: int | None = None


@dataclass(frozen=True, slots=True)
class LevelTotals:
    """Sums over one level.

    Attributes:
        num_boundaries: Boundaries with at least one record there.
        num_bytes: Bytes of the records, headers included.
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
    """Sums over one namespace.

    Attributes:
        num_boundaries: Entries; one with records at both levels counts once.
        levels: Totals per `Level`.
    """

    tenant: str = ""
    num_boundaries: int = 0
    levels: tuple[LevelTotals, ...] = field(default_factory=lambda: tuple(LevelTotals() for _ in Level))


@dataclass(frozen=True, slots=True)
class Step:
    """Some of a namespace's entries: a step of a walk over all of them.

    Attributes:
        prefixes: The boundaries, in the order of `table`; there may be none.
        table: Their entries.
        cursor: Where the next step continues; `None`: this was the last one.
    """

    prefixes: Sequence[PrefixHash]
    table: EntryTable
    cursor: str | None


class Catalog(ABC):
    """Keeps one entry per boundary. All methods belong to one event loop and may be called concurrently.

    A namespace must be registered before any other call about it, and stays known here. Every change counts once,
    however often it is reported. It updates entry and totals together, also while other services change the same entry.

    Every method raises `Unavailable` at its deadline or when the catalog cannot be reached, `Closed` after `aclose`,
    `InvalidRequest` for a namespace that was not registered. If cancelled, a change is made or not, never in part.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock  # for first and last use
        self._shapes: dict[NamespaceId, EntryShape] = {}
        self._tenants: dict[NamespaceId, str] = {}
        self._closed = False

    @abstractmethod
    async def register(self, namespace: NamespaceId, layout: Layout, tenant: str, *, deadline: Deadline) -> None:
        """Register a namespace with its groups and slices. Idempotent."""

    def know(self, namespace: NamespaceId, layout: Layout, tenant: str) -> None:
        """Learn the groups and slices of a namespace that is registered already, so that its entries can be read.
        Writes nothing: a medium that is full can still be read.
        """
        self._shapes[namespace], self._tenants[namespace] = EntryShape.of(layout), tenant

    def knows(self, namespace: NamespaceId) -> bool:
        """Whether the groups and slices of a namespace are known, so that its entries can be read."""
        return namespace in self._shapes

    @abstractmethod
    async def is_complete(self, *, deadline: Deadline) -> bool:
        """Whether every stored record has an entry. If not, a record without an entry may still be stored."""

    @abstractmethod
    async def epoch(self, *, deadline: Deadline) -> bytes:
        """Names the present epoch. Another one begins when the catalog is marked incomplete, and when it loses its
        data.
        """

    async def complete_epoch(self, *, deadline: Deadline) -> bytes | None:
        """The epoch of a catalog that is complete; `None`: it is not, or this cannot be said since a server was
        restarted. To be asked before and after a walk that takes a missing entry for a record that is not stored.
        """
        epoch = await self.epoch(deadline=deadline)  # first: the catalog is complete in this one
        return epoch if await self.is_complete(deadline=deadline) else None

    @abstractmethod
    async def mark_incomplete(self, *, deadline: Deadline) -> None:
        """Say that changes may have been missed."""

    @abstractmethod
    async def mark_complete(self, epoch: bytes, *, deadline: Deadline) -> bool:
        """Say that every stored record has been added since this epoch began. False: another one has begun, and
        nothing is marked.
        """

    @abstractmethod
    async def lookup(self, namespace: NamespaceId, prefixes: Sequence[PrefixHash], *, deadline: Deadline) -> EntryTable:
        """Read the entries of many boundaries, in one round trip per node; absent ones are rows of zeros."""

    async def get(self, namespace: NamespaceId, prefix: PrefixHash, *, deadline: Deadline) -> BoundaryEntry | None:
        """Read one entry; `None`: nothing is stored there."""
        return next(iter(await self.entries(namespace, [prefix], deadline=deadline)), None)

    async def entries(
        self, namespace: NamespaceId, prefixes: Sequence[PrefixHash], *, deadline: Deadline
    ) -> list[BoundaryEntry]:
        """Read some entries, as values; boundaries where nothing is stored are left out."""
        table = await self.lookup(namespace, prefixes, deadline=deadline)
        return list(table.entries(namespace, prefixes))

    async def iterate(self, *namespaces: NamespaceId) -> AsyncIterator[BoundaryEntry]:
        """Yield every entry of some namespaces, step by step. Each step has 10 s."""
        async for namespace, step in self.walk(namespaces):
            for entry in step.table.entries(namespace, step.prefixes):
                yield entry

    async def leaving(self, namespaces: Collection[NamespaceId]) -> AsyncIterator[BoundaryEntry]:
        """Yield the entries of some namespaces whose records are being deleted. As there are few, this takes less time
        than `iterate`. It rests after each step for as long as reading that took, since requests use the catalog too.
        """
        started_s = self._clock.monotonic_s()
        async for namespace, step in self.walk(namespaces):
            indexes = step.table.data[:, LEAVING_AT].nonzero()[0]
            took_s = self._clock.monotonic_s() - started_s
            for index in indexes:
                if (data := step.table.entry(index)) is not None:
                    yield entry_of(step.table.shape, namespace, step.prefixes[index], data)
            await asyncio.sleep(took_s)
            started_s = self._clock.monotonic_s()

    async def steps(self, namespace: NamespaceId, start: str = "") -> AsyncIterator[Step]:
        """Yield the steps over the entries of a namespace from a cursor on, by default all. Each has 10 s.

        Raises:
            InvalidRequest: Of `start`, as `step`.
            Unavailable: The catalog does not answer, or its servers changed during the walk.
        """

        async def read(cursor: str, deadline: Deadline) -> tuple[Step, str | None]:
            step = await self.step(namespace, cursor, count=STEP_ENTRIES, deadline=deadline)
            return step, step.cursor

        async for step in self._walk(read, start):
            yield step

    async def walk(self, namespaces: Collection[NamespaceId]) -> AsyncIterator[tuple[NamespaceId, Step]]:
        """Yield the steps over all entries of some namespaces, each with its namespace. Raises as `steps`."""
        for namespace in namespaces:
            async for step in self.steps(namespace):
                yield namespace, step

    async def _walk(
        self, read: Callable[[str, Deadline], Awaitable[tuple[T, str | None]]], start: str = ""
    ) -> AsyncIterator[T]:
        """Yield what `read` answers, until it answers no cursor to continue at."""
        cursor: str | None = start
        while cursor is not None:
            try:
                found, after = await read(cursor, Deadline.after(_STEP_S, self._clock))
            except InvalidRequest as error:
                if cursor == start:
                    raise
                text = "the catalog's servers changed during a walk over its entries: repeat it"
                raise Unavailable(text) from error
            cursor = after
            yield found

    @abstractmethod
    async def step(self, namespace: NamespaceId, cursor: str, *, count: int, deadline: Deadline) -> Step:
        """Read about `count` of a namespace's entries, in no order; repeated with the returned cursor, all of them. An
        entry that is added or removed before the last step may be read or not. An entry may be read twice.

        Args:
            cursor: From the last step; empty: from the start.
            count: How many keys are read; none of them may be an entry.
            deadline: For the whole step.

        Raises:
            InvalidRequest: Not a cursor of this catalog, or one that is no longer valid.
        """

    @abstractmethod
    async def namespaces(self, *, deadline: Deadline) -> Mapping[NamespaceId, str]:
        """Every namespace that was ever registered, and its tenant."""

    @abstractmethod
    async def totals(self, *, deadline: Deadline) -> Mapping[NamespaceId, NamespaceTotals]:
        """Sums over every namespace. Each slot of the catalog is read at one point in time, the slots one by one."""

    @abstractmethod
    async def add(self, additions: Sequence[Addition], *, deadline: Deadline) -> list[bool]:
        """Report stored records. Per addition: false when the boundary is leaving that level. Then the record just
        written may be deleted too, and the caller must put and report it again later.
        """

    @abstractmethod
    async def remove(self, removals: Sequence[Removal], *, deadline: Deadline) -> None:
        """Report single records that are gone. An entry without records is dropped."""

    @abstractmethod
    async def use(self, namespace: NamespaceId, uses: Sequence[Use], *, deadline: Deadline) -> None:
        """Report reads that happened now. Boundaries without an entry are ignored."""

    @abstractmethod
    async def start_leaving(
        self, leaving: Sequence[Leaving], level: Level, *, deadline: Deadline
    ) -> list[BoundaryEntry | None]:
        """Hide all records of boundaries, longest prefixes first, at a level before they are deleted.

        Returns per boundary its entry, which names the records. `None`: it has no record there, is pinned, was used, or
        stays for a longer one that does. A boundary that is already leaving is returned again, since the service that
        started may have died.
        """

    @abstractmethod
    async def finish_leaving(
        self, gone: Sequence[tuple[BoundaryEntry, LeaveReason]], level: Level, *, deadline: Deadline
    ) -> int:
        """Report that the records of hidden boundaries are deleted: subtracts them from the totals and writes a
        tombstone each. Returns their bytes; boundaries that were not leaving count 0.
        """

    @abstractmethod
    async def stop_leaving(
        self, namespace: NamespaceId, prefix: PrefixHash, level: Level, *, deadline: Deadline
    ) -> None:
        """Undo `start_leaving` when nothing was deleted: lookups see the records again."""

    @abstractmethod
    async def pin(
        self, namespace: NamespaceId, prefixes: Sequence[PrefixHash], until_s: int, *, deadline: Deadline
    ) -> int:
        """Protect boundaries from retention until a time (seconds since the Unix epoch; 0 unpins). Returns how many it
        was set for: those that have an entry, and are not leaving a level, where their records are being deleted.
        """

    async def recount(self) -> int:
        """Make the totals equal to the sums of the entries, of all namespaces whose layout is known here. Services may
        keep running. Where totals and entries cannot be lost apart, nothing is done.

        Returns:
            How many totals differed; 0 if another recount began during this one: that one corrects them.

        Raises:
            Unavailable: The catalog does not answer.
        """
        return 0

    @abstractmethod
    async def tombstones(self, *, limit: int, deadline: Deadline) -> list[Tombstone]:
        """The most recent removals, latest first; a bounded number is kept."""

    @abstractmethod
    def ownership(self, lease_s: float) -> Ownership:
        """Leases among the services that share this catalog."""

    @abstractmethod
    def mark_book(self) -> MarkBook:
        """Marks of hints, for the one of these services that evicts."""

    @abstractmethod
    def text_store(self, kind: TextStoreKind) -> TextStore:
        """Texts of one kind, which are kept beside this catalog."""

    async def aclose(self) -> None:
        """Close the files that the catalog opened. Idempotent."""
        self._closed = True

    def _shape(self, namespace: NamespaceId) -> EntryShape:
        self._check_open()
        shape = self._shapes.get(namespace)
        if shape is None:
            raise InvalidRequest("the namespace is not known to the catalog: register it", namespace=namespace.hex())
        return shape

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the catalog is closed")

    def _now_s(self) -> int:
        return self._clock.wall_ms() // 1000
