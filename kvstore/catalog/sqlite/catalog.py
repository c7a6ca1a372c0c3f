"""The catalog of one node: a SQLite file beside the records."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from kvstore.catalog.base import (
    Addition,
    BoundaryEntry,
    Catalog,
    LeaveReason,
    Leaving,
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
from kvstore.catalog.sqlite.file import SqliteFile
from kvstore.errors import InvalidRequest
from kvstore.model.keys import NamespaceId, PrefixHash
from kvstore.model.layout import Layout
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.deadline import Deadline

__all__ = ["SCHEMA", "VERSION", "SqliteCatalog"]


_TOMBSTONES = 16384
_BATCH = 512
_PAGE_S = 10.0
_ENTRIES = -1
"""The pseudo-level in `totals` whose `boundaries` count a namespace's entries."""


class SqliteCatalog(Catalog):
    """A SQLite file in WAL mode, used by one thread of its own; other processes may have it open too. A power failure
    may lose the last changes, not the file; a reindex finds their records again. A file that is damaged, or of another
    version, is renamed and replaced by an empty one, which is not complete.

    Args:
        path: The file; created when it does not exist.
        clock: For first and last use.
        is_guest: Another process owns the file: it is neither created nor renamed here.

    Raises:
        Unavailable: The file cannot be opened.
    """

    def __init__(self, path: Path, *, clock: Clock = SYSTEM_CLOCK, is_guest: bool = False) -> None:
        self._clock = clock
        self._shapes: dict[NamespaceId, EntryShape] = {}
        self._tenants: dict[NamespaceId, str] = {}
        self._file = SqliteFile(path, SCHEMA, VERSION, self._restore_namespaces, is_guest=is_guest)

    @classmethod
    async def open(cls, path: Path, *, clock: Clock = SYSTEM_CLOCK, is_guest: bool = False) -> SqliteCatalog:
        """As the constructor, off the event loop."""
        return await asyncio.to_thread(cls, path, clock=clock, is_guest=is_guest)

    def _restore_namespaces(self) -> None:
        """Register all namespaces again, in a file that was just recreated."""
        self._file.db.executemany("INSERT INTO namespaces VALUES (?, ?)", list(self._tenants.items()))

    # reads

    async def is_complete(self, *, deadline: Deadline) -> bool:
        query = "SELECT 1 FROM facts WHERE name = 'complete'"
        return await self._file.run(lambda: self._file.db.execute(query).fetchone() is not None, deadline)

    async def set_complete(self, complete: bool, *, deadline: Deadline) -> None:
        def write() -> None:
            self._file.db.execute("DELETE FROM facts WHERE name = 'complete'")
            if complete:
                self._file.db.execute("INSERT INTO facts VALUES ('complete', ?)", (self._now_s(),))

        await self._file.change(write, deadline)

    async def lookup(self, namespace: NamespaceId, prefixes: Sequence[PrefixHash], *, deadline: Deadline) -> EntryTable:
        shape = self._shape(namespace)

        def read() -> EntryTable:
            found: dict[bytes, bytes] = {}
            for start in range(0, len(prefixes), _BATCH):
                batch = prefixes[start : start + _BATCH]
                marks = ",".join("?" * len(batch))
                query = f"SELECT prefix, data FROM entries WHERE namespace = ? AND prefix IN ({marks})"
                found.update(self._file.db.execute(query, (namespace, *batch)))
            return EntryTable.of(shape, [found.get(prefix) for prefix in prefixes])

        return await self._file.run(read, deadline)

    async def get(self, namespace: NamespaceId, prefix: PrefixHash, *, deadline: Deadline) -> BoundaryEntry | None:
        shape = self._shape(namespace)

        def read() -> BoundaryEntry | None:
            data = self._read(namespace, prefix)
            return None if data is None else entry_of(shape, namespace, prefix, data)

        return await self._file.run(read, deadline)

    async def iterate(self, namespace: NamespaceId) -> AsyncIterator[BoundaryEntry]:
        shape, after = self._shape(namespace), b""
        while True:
            read = partial(self._read_after, namespace, after, _BATCH)
            rows = await self._file.run(read, Deadline.after(_PAGE_S, self._clock))
            for prefix, data in rows:
                yield entry_of(shape, namespace, PrefixHash(prefix), data)
            if len(rows) < _BATCH:
                return
            after = rows[-1][0]

    async def step(self, namespace: NamespaceId, cursor: str, *, count: int, deadline: Deadline) -> Step:
        shape, after = self._shape(namespace), bytes_of_cursor(cursor)

        def read() -> Step:
            rows = self._read_after(namespace, after, count)
            table = EntryTable.of(shape, [data for _, data in rows])
            cursor = rows[-1][0].hex() if len(rows) == count else None
            return Step([PrefixHash(prefix) for prefix, _ in rows], table, cursor)

        return await self._file.run(read, deadline)

    async def namespaces(self, *, deadline: Deadline) -> Mapping[NamespaceId, str]:
        return await self._file.run(self._read_tenants, deadline)

    def _read_tenants(self) -> dict[NamespaceId, str]:
        rows = self._file.db.execute("SELECT namespace, tenant FROM namespaces")
        return {NamespaceId(namespace): tenant for namespace, tenant in rows}

    async def totals(self, *, deadline: Deadline) -> Mapping[NamespaceId, NamespaceTotals]:
        def read() -> dict[NamespaceId, NamespaceTotals]:
            rows = self._file.db.execute("SELECT namespace, level, boundaries, records, bytes FROM totals").fetchall()
            numbers = {(namespace, level): tuple(rest) for namespace, level, *rest in rows}
            return {
                namespace: NamespaceTotals(
                    tenant,
                    numbers.get((namespace, _ENTRIES), (0,))[0],
                    tuple(LevelTotals(*numbers.get((namespace, int(level)), (0, 0, 0))) for level in Level),
                )
                for namespace, tenant in self._read_tenants().items()
            }

        return await self._file.run(read, deadline)

    async def tombstones(self, *, limit: int, deadline: Deadline) -> list[Tombstone]:
        columns = 'namespace, prefix, level, "group", slice, bytes, reason, at_s'
        query = f"SELECT {columns} FROM tombstones ORDER BY number DESC LIMIT ?"

        def read() -> list[Tombstone]:
            return [
                Tombstone(NamespaceId(ns), PrefixHash(prefix), Level(level), group, slice_, num, LeaveReason(why), at_s)
                for ns, prefix, level, group, slice_, num, why, at_s in self._file.db.execute(query, (limit,))
            ]

        return await self._file.run(read, deadline)

    # changes

    async def register(self, namespace: NamespaceId, layout: Layout, tenant: str, *, deadline: Deadline) -> None:
        self._shapes[namespace] = EntryShape.of(layout)
        self._tenants[namespace] = tenant

        def write() -> None:
            self._file.db.execute("INSERT OR REPLACE INTO namespaces VALUES (?, ?)", (namespace, tenant))

        await self._file.change(write, deadline)

    async def add(self, additions: Sequence[Addition], *, deadline: Deadline) -> list[bool]:
        for one in additions:
            self._shape(one.key.namespace)
        return await self._file.change(lambda: [self._add(one) for one in additions], deadline)

    def _add(self, one: Addition) -> bool:
        namespace, prefix, now_s = one.key.namespace, one.key.prefix, self._now_s()
        edit = self._edit(namespace, prefix)
        if edit is None:
            data = packed_with(self._shapes[namespace], [one], now_s)
            self._write(namespace, prefix, data)
            self._count(namespace, _ENTRIES, 1)
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

        def write() -> None:
            for one in removals:
                self._remove(one)

        await self._file.change(write, deadline)

    def _remove(self, one: Removal) -> None:
        namespace, prefix, level = one.key.namespace, one.key.prefix, one.level
        edit = self._edit(namespace, prefix)
        num_bytes = edit.remove(one) if edit is not None else None
        if edit is None or num_bytes is None:
            return
        group, slice_ = one.key.group, one.key.slice
        self._bury(Tombstone(namespace, prefix, level, group, slice_, num_bytes, one.reason, self._now_s()))
        self._count(namespace, level, -int(edit.num_records(level) == 0), -1, -num_bytes)
        self._write_or_drop(namespace, prefix, edit)

    async def use(self, namespace: NamespaceId, uses: Sequence[Use], *, deadline: Deadline) -> None:
        self._shape(namespace)

        def write() -> None:
            for use in uses:
                if (edit := self._edit(namespace, use.prefix)) is not None:
                    edit.mark_used(self._now_s(), use.hits)
                    edit.fill(use.tokens, use.parent)
                    self._write(namespace, use.prefix, bytes(edit.data))

        await self._file.change(write, deadline)

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
        self._shape(namespace)
        return await self._file.change(
            lambda: self._hide(namespace, prefix, level, unless_used_since_s, even_if_pinned=even_if_pinned), deadline
        )

    async def start_leaving_all(
        self, leaving: Sequence[Leaving], level: Level, *, deadline: Deadline
    ) -> list[BoundaryEntry | None]:
        """As `Catalog.start_leaving_all`, in one transaction."""
        for one in leaving:
            self._shape(one.namespace)

        def write() -> list[BoundaryEntry | None]:
            hidden: list[BoundaryEntry | None] = []
            stay: set[int | None] = set()
            for index, one in enumerate(leaving):
                entry = None
                if index not in stay:
                    entry = self._hide(one.namespace, one.prefix, level, one.unless_used_since_s)
                if entry is None:
                    stay.add(one.below)
                hidden.append(entry)
            return hidden

        return await self._file.change(write, deadline)

    def _hide(
        self,
        namespace: NamespaceId,
        prefix: PrefixHash,
        level: Level,
        unless_used_since_s: int | None,
        *,
        even_if_pinned: bool = False,
    ) -> BoundaryEntry | None:
        edit = self._edit(namespace, prefix)
        if edit is None or edit.num_records(level) == 0:
            return None
        if not edit.leaves(level):
            if not even_if_pinned and edit.number(PINNED_AT) > self._now_s():
                return None
            if unless_used_since_s is not None and edit.number(LAST_USE_AT) > unless_used_since_s:
                return None
            edit.set_leaving(level, True)
            self._write(namespace, prefix, bytes(edit.data))
        return entry_of(self._shapes[namespace], namespace, prefix, bytes(edit.data))

    async def finish_leaving(
        self, namespace: NamespaceId, prefix: PrefixHash, level: Level, reason: LeaveReason, *, deadline: Deadline
    ) -> int:
        self._shape(namespace)
        return await self._file.change(lambda: self._finish(namespace, prefix, level, reason), deadline)

    async def finish_leaving_all(
        self, gone: Sequence[tuple[BoundaryEntry, LeaveReason]], level: Level, *, deadline: Deadline
    ) -> int:
        """As `Catalog.finish_leaving_all`, in one transaction."""
        return await self._file.change(
            lambda: sum(self._finish(one.namespace, one.prefix, level, reason) for one, reason in gone), deadline
        )

    def _finish(self, namespace: NamespaceId, prefix: PrefixHash, level: Level, reason: LeaveReason) -> int:
        edit = self._edit(namespace, prefix)
        if edit is None or not edit.leaves(level):
            return 0
        records = edit.num_records(level)
        num_bytes = edit.wipe(level)
        self._bury(Tombstone(namespace, prefix, level, None, None, num_bytes, reason, self._now_s()))
        self._count(namespace, level, -int(records > 0), -records, -num_bytes)
        self._write_or_drop(namespace, prefix, edit)
        return num_bytes

    async def stop_leaving(
        self, namespace: NamespaceId, prefix: PrefixHash, level: Level, *, deadline: Deadline
    ) -> None:
        self._shape(namespace)

        def write() -> None:
            if (edit := self._edit(namespace, prefix)) is not None:
                edit.set_leaving(level, False)
                self._write(namespace, prefix, bytes(edit.data))

        await self._file.change(write, deadline)

    async def pin(
        self, namespace: NamespaceId, prefixes: Sequence[PrefixHash], until_s: int, *, deadline: Deadline
    ) -> int:
        self._shape(namespace)

        def write() -> int:
            found = [(prefix, edit) for prefix in prefixes if (edit := self._edit(namespace, prefix)) is not None]
            for prefix, edit in found:
                edit.set_number(PINNED_AT, until_s)
                self._write(namespace, prefix, bytes(edit.data))
            return len(found)

        return await self._file.change(write, deadline)

    async def clear(self, *, deadline: Deadline) -> None:
        def write() -> None:
            for table in ("entries", "totals"):
                self._file.db.execute(f"DELETE FROM {table}")
            self._file.db.execute("DELETE FROM facts WHERE name = 'complete'")

        await self._file.change(write, deadline)

    async def aclose(self) -> None:
        await self._file.aclose()

    # helpers; they run on the file's thread

    def _read_after(self, namespace: NamespaceId, after: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """The next entries after a prefix, in the order of prefixes: `(prefix, data)`."""
        query = "SELECT prefix, data FROM entries WHERE namespace = ? AND prefix > ? ORDER BY prefix LIMIT ?"
        return self._file.db.execute(query, (namespace, after, limit)).fetchall()

    def _read(self, namespace: NamespaceId, prefix: PrefixHash) -> bytes | None:
        query = "SELECT data FROM entries WHERE namespace = ? AND prefix = ?"
        row = self._file.db.execute(query, (namespace, prefix)).fetchone()
        return None if row is None else bytes(row[0])

    def _edit(self, namespace: NamespaceId, prefix: PrefixHash) -> EntryEdit | None:
        data = self._read(namespace, prefix)
        return None if data is None else EntryEdit(self._shapes[namespace], data)

    def _write(self, namespace: NamespaceId, prefix: PrefixHash, data: bytes) -> None:
        self._file.db.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", (namespace, prefix, data))

    def _write_or_drop(self, namespace: NamespaceId, prefix: PrefixHash, edit: EntryEdit) -> None:
        if not edit.empty:
            self._write(namespace, prefix, bytes(edit.data))
            return
        self._file.db.execute("DELETE FROM entries WHERE namespace = ? AND prefix = ?", (namespace, prefix))
        self._count(namespace, _ENTRIES, -1)

    def _count(self, namespace: NamespaceId, level: int, boundaries: int, records: int = 0, num_bytes: int = 0) -> None:
        self._file.db.execute(
            "INSERT INTO totals VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET boundaries = boundaries + "
            "excluded.boundaries, records = records + excluded.records, bytes = bytes + excluded.bytes",
            (namespace, int(level), boundaries, records, num_bytes),
        )

    def _bury(self, one: Tombstone) -> None:
        values = (one.namespace, one.prefix, int(one.level), one.group, one.slice, one.num_bytes, int(one.reason))
        cursor = self._file.db.execute(
            "INSERT INTO tombstones VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?)", (*values, one.at_s)
        )
        self._file.db.execute("DELETE FROM tombstones WHERE number <= ?", ((cursor.lastrowid or 0) - _TOMBSTONES,))

    def _now_s(self) -> int:
        return self._clock.wall_ms() // 1000

    def _shape(self, namespace: NamespaceId) -> EntryShape:
        shape = self._shapes.get(namespace)
        if shape is None:
            raise InvalidRequest("the namespace is not known to the catalog: register it", namespace=namespace.hex())
        return shape


SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
  namespace BLOB, prefix BLOB, data BLOB NOT NULL, PRIMARY KEY (namespace, prefix)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS totals (
  namespace BLOB, level INTEGER, boundaries INTEGER, records INTEGER, bytes INTEGER, PRIMARY KEY (namespace, level)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS namespaces (namespace BLOB PRIMARY KEY, tenant TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tombstones (
  number INTEGER PRIMARY KEY, namespace BLOB, prefix BLOB, level INTEGER, "group" INTEGER, slice INTEGER,
  bytes INTEGER, reason INTEGER, at_s INTEGER
);
"""
VERSION = 1
"""A file of another version is renamed and replaced."""
