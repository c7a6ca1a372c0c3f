"""The smallest honest `Catalog`, in dictionaries that outlive those who use them: no threads, no server, no time."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from kvstore.catalog.base import (
    Addition,
    BoundaryEntry,
    Catalog,
    LeaveReason,
    LevelTotals,
    NamespaceTotals,
    Removal,
    Step,
    Tombstone,
    Use,
    bytes_of_cursor,
)
from kvstore.catalog.changes import EntryEdit, entry_of, packed_with
from kvstore.catalog.entry import LAST_USE_AT, PINNED_AT, EntryShape, EntryTable, Level
from kvstore.errors import Closed, InvalidRequest
from kvstore.model.keys import NamespaceId, PrefixHash
from kvstore.model.layout import Layout
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.deadline import Deadline
from kvstore.tiers.verify import check_deadline

__all__ = ["Ask", "CatalogBooks", "DictCatalog", "at_once"]

T = TypeVar("T")

_TOMBSTONES = 16384
_BATCH = 512
_STEP_S = 5.0


class Ask(Protocol):
    """The way to the dictionaries: may be slow, may fail, before or after the work was done."""

    async def __call__(self, what: str, work: Callable[[], T], deadline: Deadline) -> T: ...


async def at_once(what: str, work: Callable[[], T], deadline: Deadline) -> T:
    """No way at all."""
    check_deadline(deadline, what)
    return work()


@dataclass
class CatalogBooks:
    """What several catalogs share: the server's side.

    Attributes:
        entries: Packed entries by namespace and prefix.
        totals: Boundaries, records and bytes by namespace and level; level -1 counts entries.
        tenants: Of every registered namespace.
        complete: Everything that is stored has an entry.
        tombstones: What left, latest first.
    """

    entries: dict[tuple[NamespaceId, PrefixHash], bytes] = field(default_factory=dict)
    totals: dict[tuple[NamespaceId, int], list[int]] = field(default_factory=dict)
    tenants: dict[NamespaceId, str] = field(default_factory=dict)
    complete: bool = False
    tombstones: deque[Tombstone] = field(default_factory=lambda: deque(maxlen=_TOMBSTONES))

    def lose_everything(self) -> None:
        """As a server that was emptied."""
        self.clear()
        self.tenants.clear()
        self.tombstones.clear()

    def clear(self) -> None:
        self.entries.clear()
        self.totals.clear()
        self.complete = False

    def count(self, namespace: NamespaceId, level: int, boundaries: int, records: int = 0, num_bytes: int = 0) -> None:
        row = self.totals.setdefault((namespace, level), [0, 0, 0])
        for index, change in enumerate((boundaries, records, num_bytes)):
            row[index] += change

    def write_or_drop(self, namespace: NamespaceId, prefix: PrefixHash, edit: EntryEdit) -> None:
        if edit.empty:
            del self.entries[namespace, prefix]
            self.count(namespace, -1, -1)
        else:
            self.entries[namespace, prefix] = bytes(edit.data)


class DictCatalog(Catalog):
    """One service's view of the books.

    Args:
        books: What is kept; stays the caller's.
        clock: For first and last use.
        ask: How to reach them.
    """

    def __init__(self, books: CatalogBooks, *, clock: Clock = SYSTEM_CLOCK, ask: Ask = at_once) -> None:
        self._books = books
        self._clock = clock
        self._ask = ask
        self._shapes: dict[NamespaceId, EntryShape] = {}
        self._closed = False

    # what is asked

    async def is_complete(self, *, deadline: Deadline) -> bool:
        return await self._run("is_complete", lambda: self._books.complete, deadline)

    async def set_complete(self, complete: bool, *, deadline: Deadline) -> None:
        await self._run("set_complete", lambda: setattr(self._books, "complete", complete), deadline)

    async def lookup(self, namespace: NamespaceId, prefixes: Sequence[PrefixHash], *, deadline: Deadline) -> EntryTable:
        shape, entries = self._shape(namespace), self._books.entries
        found = await self._run("lookup", lambda: [entries.get((namespace, prefix)) for prefix in prefixes], deadline)
        return EntryTable.of(shape, found)

    async def get(self, namespace: NamespaceId, prefix: PrefixHash, *, deadline: Deadline) -> BoundaryEntry | None:
        shape = self._shape(namespace)
        data = await self._run("get", lambda: self._books.entries.get((namespace, prefix)), deadline)
        return None if data is None else entry_of(shape, namespace, prefix, data)

    async def iterate(self, namespace: NamespaceId) -> AsyncIterator[BoundaryEntry]:
        shape, entries = self._shape(namespace), self._books.entries

        def listed() -> list[PrefixHash]:
            return [prefix for of, prefix in entries if of == namespace]

        prefixes = await self._run("iterate", listed, self._step())
        for start in range(0, len(prefixes), _BATCH):
            batch = prefixes[start : start + _BATCH]

            def read(batch: list[PrefixHash] = batch) -> list[bytes | None]:
                return [entries.get((namespace, prefix)) for prefix in batch]

            for prefix, data in zip(batch, await self._run("iterate", read, self._step()), strict=True):
                if data is not None:
                    yield entry_of(shape, namespace, prefix, data)

    async def step(self, namespace: NamespaceId, cursor: str, *, count: int, deadline: Deadline) -> Step:
        shape, entries, after = self._shape(namespace), self._books.entries, bytes_of_cursor(cursor)

        def read() -> Step:
            prefixes = sorted(prefix for of, prefix in entries if of == namespace and prefix > after)[:count]
            table = EntryTable.of(shape, [entries[namespace, prefix] for prefix in prefixes])
            return Step(prefixes, table, prefixes[-1].hex() if len(prefixes) == count else None)

        return await self._run("step", read, deadline)

    async def namespaces(self, *, deadline: Deadline) -> Mapping[NamespaceId, str]:
        return await self._run("namespaces", lambda: dict(self._books.tenants), deadline)

    async def totals(self, *, deadline: Deadline) -> Mapping[NamespaceId, NamespaceTotals]:
        return await self._run("totals", self._totals, deadline)

    async def tombstones(self, *, limit: int, deadline: Deadline) -> list[Tombstone]:
        return await self._run("tombstones", lambda: list(self._books.tombstones)[:limit], deadline)

    # what is told

    async def register(self, namespace: NamespaceId, layout: Layout, tenant: str, *, deadline: Deadline) -> None:
        self._shapes[namespace] = EntryShape.of(layout)
        await self._run("register", lambda: self._books.tenants.__setitem__(namespace, tenant), deadline)

    async def add(self, additions: Sequence[Addition], *, deadline: Deadline) -> list[bool]:
        for one in additions:
            self._shape(one.key.namespace).bit_at(one.level, one.key.group, one.key.slice)
        return await self._run("add", lambda: [self._add(one) for one in additions], deadline)

    async def remove(self, removals: Sequence[Removal], *, deadline: Deadline) -> None:
        for one in removals:
            self._shape(one.key.namespace)

        def work() -> None:
            for one in removals:
                self._remove(one)

        await self._run("remove", work, deadline)

    async def use(self, namespace: NamespaceId, uses: Sequence[Use], *, deadline: Deadline) -> None:
        shape = self._shape(namespace)

        def work() -> None:
            for use in uses:
                if (edit := self._edit(shape, namespace, use.prefix)) is not None:
                    edit.mark_used(self._now_s(), use.hits)
                    edit.fill(use.tokens, use.parent)
                    self._books.entries[namespace, use.prefix] = bytes(edit.data)

        await self._run("use", work, deadline)

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
        shape = self._shape(namespace)

        def work() -> BoundaryEntry | None:
            edit = self._edit(shape, namespace, prefix)
            if edit is None or edit.num_records(level) == 0:
                return None
            if not edit.leaves(level):
                if not even_if_pinned and edit.number(PINNED_AT) > self._now_s():
                    return None
                if unless_used_since_s is not None and edit.number(LAST_USE_AT) > unless_used_since_s:
                    return None
                edit.set_leaving(level, True)
                self._books.entries[namespace, prefix] = bytes(edit.data)
            return entry_of(shape, namespace, prefix, bytes(edit.data))

        return await self._run("start_leaving", work, deadline)

    async def finish_leaving(
        self, namespace: NamespaceId, prefix: PrefixHash, level: Level, reason: LeaveReason, *, deadline: Deadline
    ) -> int:
        shape = self._shape(namespace)

        def work() -> int:
            edit = self._edit(shape, namespace, prefix)
            if edit is None or not edit.leaves(level):
                return 0
            records = edit.num_records(level)
            num_bytes = edit.wipe(level)
            self._bury(Tombstone(namespace, prefix, level, None, None, num_bytes, reason, self._now_s()))
            self._books.count(namespace, level, -int(records > 0), -records, -num_bytes)
            self._books.write_or_drop(namespace, prefix, edit)
            return num_bytes

        return await self._run("finish_leaving", work, deadline)

    async def stop_leaving(
        self, namespace: NamespaceId, prefix: PrefixHash, level: Level, *, deadline: Deadline
    ) -> None:
        shape = self._shape(namespace)

        def work() -> None:
            if (edit := self._edit(shape, namespace, prefix)) is not None:
                edit.set_leaving(level, False)
                self._books.entries[namespace, prefix] = bytes(edit.data)

        await self._run("stop_leaving", work, deadline)

    async def pin(
        self, namespace: NamespaceId, prefixes: Sequence[PrefixHash], until_s: int, *, deadline: Deadline
    ) -> int:
        shape = self._shape(namespace)

        def work() -> int:
            edits = [(prefix, self._edit(shape, namespace, prefix)) for prefix in prefixes]
            found = [(prefix, edit) for prefix, edit in edits if edit is not None]
            for prefix, edit in found:
                edit.set_number(PINNED_AT, until_s)
                self._books.entries[namespace, prefix] = bytes(edit.data)
            return len(found)

        return await self._run("pin", work, deadline)

    async def clear(self, *, deadline: Deadline) -> None:
        await self._run("clear", self._books.clear, deadline)

    async def aclose(self) -> None:
        self._closed = True

    # how

    def _totals(self) -> dict[NamespaceId, NamespaceTotals]:
        books, none = self._books, (0, 0, 0)
        known = dict.fromkeys([*books.tenants, *(namespace for namespace, _ in books.totals)])
        return {
            namespace: NamespaceTotals(
                books.tenants.get(namespace, ""),
                books.totals.get((namespace, -1), none)[0],
                tuple(LevelTotals(*books.totals.get((namespace, int(level)), none)) for level in Level),
            )
            for namespace in known
        }

    def _add(self, one: Addition) -> bool:
        namespace, prefix, now_s = one.key.namespace, one.key.prefix, self._now_s()
        shape = self._shapes[namespace]
        edit = self._edit(shape, namespace, prefix)
        if edit is None:
            self._books.entries[namespace, prefix] = packed_with(shape, [one], now_s)
            self._books.count(namespace, -1, 1)
            self._books.count(namespace, one.level, 1, 1, one.num_bytes)
            return True
        if edit.leaves(one.level):
            return False
        edit.fill(one.tokens, one.parent)
        is_first = edit.num_records(one.level) == 0
        if num_bytes := edit.add(one):
            edit.mark_used(now_s)
            self._books.count(namespace, one.level, int(is_first), 1, num_bytes)
        self._books.entries[namespace, prefix] = bytes(edit.data)
        return True

    def _remove(self, one: Removal) -> None:
        namespace, prefix, level = one.key.namespace, one.key.prefix, one.level
        edit = self._edit(self._shapes[namespace], namespace, prefix)
        num_bytes = edit.remove(one) if edit is not None else None
        if edit is None or num_bytes is None:
            return
        group, slice_ = one.key.group, one.key.slice
        self._bury(Tombstone(namespace, prefix, level, group, slice_, num_bytes, one.reason, self._now_s()))
        self._books.count(namespace, level, -int(edit.num_records(level) == 0), -1, -num_bytes)
        self._books.write_or_drop(namespace, prefix, edit)

    def _edit(self, shape: EntryShape, namespace: NamespaceId, prefix: PrefixHash) -> EntryEdit | None:
        data = self._books.entries.get((namespace, prefix))
        return None if data is None else EntryEdit(shape, data)

    def _bury(self, one: Tombstone) -> None:
        self._books.tombstones.appendleft(one)

    def _now_s(self) -> int:
        return self._clock.wall_ms() // 1000

    def _step(self) -> Deadline:
        return Deadline.after(_STEP_S, self._clock)

    def _shape(self, namespace: NamespaceId) -> EntryShape:
        self._check_open()
        shape = self._shapes.get(namespace)
        if shape is None:
            raise InvalidRequest("the namespace is not known to the catalog: register it", namespace=namespace.hex())
        return shape

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the catalog is closed")

    async def _run(self, what: str, work: Callable[[], T], deadline: Deadline) -> T:
        self._check_open()
        return await self._ask(what, work, deadline)
