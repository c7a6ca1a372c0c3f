"""A catalog whose changes this process computes: entries, totals and tombstones in a medium that it alone changes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from kvstore.catalog.base import (
    Addition,
    Catalog,
    LeaveReason,
    Leaving,
    LevelTotals,
    NamespaceTotals,
    Removal,
    Step,
    Tombstone,
    Use,
)
from kvstore.catalog.changes import EntryEdit, packed_with
from kvstore.catalog.coordination import LocalMarkBook, MarkBook, Ownership, SoleOwnership
from kvstore.catalog.entry import LAST_USE_AT, PINNED_AT, BoundaryEntry, EntryTable, Level, entry_of
from kvstore.errors import InvalidRequest
from kvstore.model.keys import PREFIX_BYTES, NamespaceId, PrefixHash
from kvstore.model.layout import Layout
from kvstore.runtime.deadline import Deadline

T = TypeVar("T")

ENTRIES = -1
"""The pseudo-level of the totals whose boundaries count a namespace's entries."""


class LocalCatalog(Catalog):
    """Implements every change of entries, totals and tombstones. A subclass implements the medium: reading and writing
    single entries, sums and tombstones, and running a piece of work on it.
    """

    def ownership(self, lease_s: float) -> Ownership:
        return SoleOwnership()

    def mark_book(self) -> MarkBook:
        return LocalMarkBook()

    # the medium

    @abstractmethod
    async def _run(self, what: str, work: Callable[[], T], deadline: Deadline, *, changes: bool = False) -> T:
        """Run `work`, which calls the methods below, on the medium: as a whole or, if it fails, not at all. `what` is
        the operation's name; `changes` says whether it writes.
        """

    @abstractmethod
    def _read(self, namespace: NamespaceId, prefixes: Sequence[PrefixHash]) -> Sequence[bytes | None]:
        """The entries of boundaries, in order."""

    @abstractmethod
    def _read_after(self, namespace: NamespaceId, after: bytes, count: int) -> Sequence[tuple[bytes, bytes]]:
        """The next entries after a prefix, in the order of prefixes: `(prefix, data)`."""

    @abstractmethod
    def _write(self, namespace: NamespaceId, prefix: PrefixHash, data: bytes | None) -> None:
        """Store an entry; `None` drops it."""

    @abstractmethod
    def _count(self, namespace: NamespaceId, level: int, boundaries: int, records: int = 0, num_bytes: int = 0) -> None:
        """Add to the sums of a namespace at a level."""

    @abstractmethod
    def _sums(self) -> Mapping[tuple[NamespaceId, int], tuple[int, int, int]]:
        """All sums: boundaries, records and bytes per namespace and level."""

    @abstractmethod
    def _read_tenants(self) -> Mapping[NamespaceId, str]:
        """The registered namespaces, and their tenants."""

    @abstractmethod
    def _write_tenant(self, namespace: NamespaceId, tenant: str) -> None:
        """Store a namespace's tenant."""

    @abstractmethod
    def _add_tombstone(self, one: Tombstone) -> None:
        """Store a tombstone, and drop the oldest beyond `TOMBSTONES_MAX`."""

    # reads

    async def lookup(self, namespace: NamespaceId, prefixes: Sequence[PrefixHash], *, deadline: Deadline) -> EntryTable:
        shape = self._shape(namespace)
        return await self._run("lookup", lambda: EntryTable.of(shape, list(self._read(namespace, prefixes))), deadline)

    async def step(self, namespace: NamespaceId, cursor: str, *, count: int, deadline: Deadline) -> Step:
        shape, after = self._shape(namespace), _prefix_of(cursor)

        def work() -> Step:
            rows = self._read_after(namespace, after, count)
            table = EntryTable.of(shape, [data for _, data in rows])
            cursor = rows[-1][0].hex() if len(rows) == count else None
            return Step([PrefixHash(prefix) for prefix, _ in rows], table, cursor)

        return await self._run("step", work, deadline)

    async def namespaces(self, *, deadline: Deadline) -> Mapping[NamespaceId, str]:
        return await self._run("namespaces", lambda: dict(self._read_tenants()), deadline)

    async def totals(self, *, deadline: Deadline) -> Mapping[NamespaceId, NamespaceTotals]:
        def work() -> dict[NamespaceId, NamespaceTotals]:
            sums, none = self._sums(), (0, 0, 0)
            return {
                namespace: NamespaceTotals(
                    tenant,
                    sums.get((namespace, ENTRIES), none)[0],
                    tuple(LevelTotals(*sums.get((namespace, int(level)), none)) for level in Level),
                )
                for namespace, tenant in self._read_tenants().items()
            }

        return await self._run("totals", work, deadline)

    # changes

    async def register(self, namespace: NamespaceId, layout: Layout, tenant: str, *, deadline: Deadline) -> None:
        self.know(namespace, layout, tenant)
        await self._run("register", lambda: self._write_tenant(namespace, tenant), deadline, changes=True)

    async def add(self, additions: Sequence[Addition], *, deadline: Deadline) -> list[bool]:
        for one in additions:
            self._shape(one.key.namespace).bit_at(one.level, one.key.group, one.key.slice)
        return await self._run("add", lambda: [self._add(one) for one in additions], deadline, changes=True)

    def _add(self, one: Addition) -> bool:
        namespace, prefix, now_s = one.key.namespace, one.key.prefix, self._now_s()
        edit = self._edit(namespace, prefix)
        if edit is None:
            self._write(namespace, prefix, packed_with(self._shapes[namespace], [one], now_s))
            self._count(namespace, ENTRIES, 1)
            self._count(namespace, one.level, 1, 1, one.num_bytes)
            return True
        if edit.leaves(one.level):
            return False
        edit.fill(one.tokens, one.parent)
        is_first = edit.num_records(one.level) == 0
        if num_bytes := edit.add(one):
            edit.mark_used(now_s)
            self._count(namespace, one.level, int(is_first), 1, num_bytes)
        self._write(namespace, prefix, bytes(edit.data))
        return True

    async def remove(self, removals: Sequence[Removal], *, deadline: Deadline) -> None:
        for one in removals:
            self._shape(one.key.namespace)

        def work() -> None:
            for one in removals:
                self._remove(one)

        await self._run("remove", work, deadline, changes=True)

    def _remove(self, one: Removal) -> None:
        key, level = one.key, one.level
        edit = self._edit(key.namespace, key.prefix)
        num_bytes = edit.remove(one) if edit is not None else None
        if edit is None or num_bytes is None:
            return
        self._add_tombstone(
            Tombstone(key.namespace, key.prefix, level, key.group, key.slice, num_bytes, one.reason, self._now_s())
        )
        self._count(key.namespace, level, -int(edit.num_records(level) == 0), -1, -num_bytes)
        self._write_or_drop(key.namespace, key.prefix, edit)

    async def use(self, namespace: NamespaceId, uses: Sequence[Use], *, deadline: Deadline) -> None:
        self._shape(namespace)

        def work() -> None:
            for use in uses:
                if (edit := self._edit(namespace, use.prefix)) is not None:
                    edit.mark_used(self._now_s(), use.hits)
                    edit.fill(use.tokens, use.parent)
                    self._write(namespace, use.prefix, bytes(edit.data))

        await self._run("use", work, deadline, changes=True)

    async def start_leaving(
        self, leaving: Sequence[Leaving], level: Level, *, deadline: Deadline
    ) -> list[BoundaryEntry | None]:
        for one in leaving:
            self._shape(one.namespace)

        def work() -> list[BoundaryEntry | None]:
            hidden: list[BoundaryEntry | None] = []
            stay: set[int | None] = set()
            for index, one in enumerate(leaving):
                entry = self._hide(one, level) if index not in stay else None
                if entry is None:
                    stay.add(one.below)
                hidden.append(entry)
            return hidden

        return await self._run("start_leaving", work, deadline, changes=True)

    def _hide(self, one: Leaving, level: Level) -> BoundaryEntry | None:
        edit = self._edit(one.namespace, one.prefix)
        if edit is None or edit.num_records(level) == 0:
            return None
        if not edit.leaves(level):
            if edit.number(PINNED_AT) > self._now_s() or edit.number(LAST_USE_AT) > one.unless_used_since_s:
                return None
            edit.set_leaving(level, True)
            self._write(one.namespace, one.prefix, bytes(edit.data))
        return entry_of(edit.shape, one.namespace, one.prefix, bytes(edit.data))

    async def finish_leaving(
        self, gone: Sequence[tuple[BoundaryEntry, LeaveReason]], level: Level, *, deadline: Deadline
    ) -> int:
        for one, _ in gone:
            self._shape(one.namespace)

        def work() -> int:
            return sum(self._finish(one.namespace, one.prefix, level, reason) for one, reason in gone)

        return await self._run("finish_leaving", work, deadline, changes=True)

    def _finish(self, namespace: NamespaceId, prefix: PrefixHash, level: Level, reason: LeaveReason) -> int:
        edit = self._edit(namespace, prefix)
        if edit is None or not edit.leaves(level):
            return 0
        records = edit.num_records(level)
        num_bytes = edit.wipe(level)
        self._add_tombstone(Tombstone(namespace, prefix, level, None, None, num_bytes, reason, self._now_s()))
        self._count(namespace, level, -int(records > 0), -records, -num_bytes)
        self._write_or_drop(namespace, prefix, edit)
        return num_bytes

    async def stop_leaving(
        self, namespace: NamespaceId, prefix: PrefixHash, level: Level, *, deadline: Deadline
    ) -> None:
        self._shape(namespace)

        def work() -> None:
            if (edit := self._edit(namespace, prefix)) is not None:
                edit.set_leaving(level, False)
                self._write(namespace, prefix, bytes(edit.data))

        await self._run("stop_leaving", work, deadline, changes=True)

    async def pin(
        self, namespace: NamespaceId, prefixes: Sequence[PrefixHash], until_s: int, *, deadline: Deadline
    ) -> int:
        self._shape(namespace)

        def work() -> int:
            edits = [(prefix, self._edit(namespace, prefix)) for prefix in prefixes]
            found = [(prefix, edit) for prefix, edit in edits if edit is not None and not any(map(edit.leaves, Level))]
            for prefix, edit in found:
                edit.set_number(PINNED_AT, until_s)
                self._write(namespace, prefix, bytes(edit.data))
            return len(found)

        return await self._run("pin", work, deadline, changes=True)

    def _edit(self, namespace: NamespaceId, prefix: PrefixHash) -> EntryEdit | None:
        (data,) = self._read(namespace, [prefix])
        return None if data is None else EntryEdit(self._shapes[namespace], data)

    def _write_or_drop(self, namespace: NamespaceId, prefix: PrefixHash, edit: EntryEdit) -> None:
        self._write(namespace, prefix, None if edit.empty else bytes(edit.data))
        if edit.empty:
            self._count(namespace, ENTRIES, -1)


def _prefix_of(cursor: str) -> bytes:
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
