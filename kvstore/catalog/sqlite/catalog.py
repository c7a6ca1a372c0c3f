"""The catalog of one node: a SQLite file beside the records."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from kvstore.catalog.base import TOMBSTONES_MAX, LeaveReason, Tombstone
from kvstore.catalog.coordination import FileTextStore, TextStore, TextStoreKind
from kvstore.catalog.entry import Level
from kvstore.catalog.local import LocalCatalog
from kvstore.catalog.sqlite.file import SqliteFile
from kvstore.model.keys import NamespaceId, PrefixHash
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.deadline import Deadline

T = TypeVar("T")

_SCHEMA = """
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
_VERSION = 1
"""A file of another version is renamed and replaced."""
_BATCH = 512
_EPOCH = "SELECT value FROM facts WHERE name = 'rebuild'"
_EPOCH_BITS = 62


class SqliteCatalog(LocalCatalog):
    """A SQLite file in WAL mode, used by one thread of its own; other processes may have it open too. A power failure
    may lose the last changes, not the file; a reindex finds their records again. A file that is damaged, or of another
    version, is renamed and replaced by an empty one, which is not complete.

    Args:
        path: The file; created when it does not exist.
        is_guest: Another process owns the file: it is neither created nor renamed here.

    Raises:
        Unavailable: The file cannot be opened.
    """

    def __init__(self, path: Path, *, clock: Clock = SYSTEM_CLOCK, is_guest: bool = False) -> None:
        super().__init__(clock)
        self._folder = path.parent
        self._file = SqliteFile(path, _SCHEMA, _VERSION, on_recreated=self._restore_namespaces, is_guest=is_guest)

    @classmethod
    async def open(cls, path: Path, *, clock: Clock = SYSTEM_CLOCK, is_guest: bool = False) -> SqliteCatalog:
        """As the constructor, off the event loop."""
        return await asyncio.to_thread(cls, path, clock=clock, is_guest=is_guest)

    def text_store(self, kind: TextStoreKind) -> TextStore:
        return FileTextStore(self._folder, kind)

    async def is_complete(self, *, deadline: Deadline) -> bool:
        query = "SELECT 1 FROM facts WHERE name = 'complete'"
        return await self._file.run(lambda: self._file.db.execute(query).fetchone() is not None, deadline)

    async def epoch(self, *, deadline: Deadline) -> bytes:
        def work() -> bytes:
            fresh = secrets.randbits(_EPOCH_BITS)
            self._file.db.execute("INSERT OR IGNORE INTO facts VALUES ('rebuild', ?)", (fresh,))
            return str(self._file.db.execute(_EPOCH).fetchone()[0]).encode()

        return await self._file.change(work, deadline)

    async def mark_incomplete(self, *, deadline: Deadline) -> None:
        def work() -> None:
            self._file.db.execute("DELETE FROM facts WHERE name IN ('complete', 'rebuild')")

        await self._file.change(work, deadline)

    async def mark_complete(self, epoch: bytes, *, deadline: Deadline) -> bool:
        def work() -> bool:
            found = self._file.db.execute(_EPOCH).fetchone()
            if found is None or str(found[0]).encode() != epoch:
                return False
            self._file.db.execute("INSERT OR REPLACE INTO facts VALUES ('complete', ?)", (self._now_s(),))
            return True

        return await self._file.change(work, deadline)

    async def tombstones(self, *, limit: int, deadline: Deadline) -> list[Tombstone]:
        columns = 'namespace, prefix, level, "group", slice, bytes, reason, at_s'
        query = f"SELECT {columns} FROM tombstones ORDER BY number DESC LIMIT ?"

        def work() -> list[Tombstone]:
            return [
                Tombstone(NamespaceId(ns), PrefixHash(prefix), Level(level), group, slice_, num, LeaveReason(why), at_s)
                for ns, prefix, level, group, slice_, num, why, at_s in self._file.db.execute(query, (limit,))
            ]

        return await self._file.run(work, deadline)

    async def aclose(self) -> None:
        await super().aclose()
        await self._file.aclose()

    # the medium; all of it runs on the file's thread

    def _restore_namespaces(self) -> None:
        """Register all namespaces again, in a file that was just recreated."""
        self._file.db.executemany("INSERT INTO namespaces VALUES (?, ?)", list(self._tenants.items()))

    async def _run(self, what: str, work: Callable[[], T], deadline: Deadline, *, changes: bool = False) -> T:
        return await (self._file.change if changes else self._file.run)(work, deadline)

    def _read(self, namespace: NamespaceId, prefixes: Sequence[PrefixHash]) -> list[bytes | None]:
        if len(prefixes) == 1:  # every change reads one entry
            query = "SELECT data FROM entries WHERE namespace = ? AND prefix = ?"
            row = self._file.db.execute(query, (namespace, *prefixes)).fetchone()
            return [None if row is None else row[0]]
        found: dict[bytes, bytes] = {}
        for start in range(0, len(prefixes), _BATCH):
            batch = prefixes[start : start + _BATCH]
            marks = ",".join("?" * len(batch))
            query = f"SELECT prefix, data FROM entries WHERE namespace = ? AND prefix IN ({marks})"
            found.update(self._file.db.execute(query, (namespace, *batch)))
        return [found.get(prefix) for prefix in prefixes]

    def _read_after(self, namespace: NamespaceId, after: bytes, count: int) -> list[tuple[bytes, bytes]]:
        query = "SELECT prefix, data FROM entries WHERE namespace = ? AND prefix > ? ORDER BY prefix LIMIT ?"
        return self._file.db.execute(query, (namespace, after, count)).fetchall()

    def _write(self, namespace: NamespaceId, prefix: PrefixHash, data: bytes | None) -> None:
        if data is None:
            self._file.db.execute("DELETE FROM entries WHERE namespace = ? AND prefix = ?", (namespace, prefix))
        else:
            self._file.db.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", (namespace, prefix, data))

    def _count(self, namespace: NamespaceId, level: int, boundaries: int, records: int = 0, num_bytes: int = 0) -> None:
        self._file.db.execute(
            "INSERT INTO totals VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET boundaries = boundaries + "
            "excluded.boundaries, records = records + excluded.records, bytes = bytes + excluded.bytes",
            (namespace, int(level), boundaries, records, num_bytes),
        )

    def _sums(self) -> dict[tuple[NamespaceId, int], tuple[int, int, int]]:
        rows = self._file.db.execute("SELECT namespace, level, boundaries, records, bytes FROM totals")
        return {(namespace, level): (boundaries, records, size) for namespace, level, boundaries, records, size in rows}

    def _read_tenants(self) -> dict[NamespaceId, str]:
        return dict(self._file.db.execute("SELECT namespace, tenant FROM namespaces").fetchall())

    def _write_tenant(self, namespace: NamespaceId, tenant: str) -> None:
        self._file.db.execute("INSERT OR REPLACE INTO namespaces VALUES (?, ?)", (namespace, tenant))

    def _add_tombstone(self, one: Tombstone) -> None:
        values = (one.namespace, one.prefix, int(one.level), one.group, one.slice, one.num_bytes, int(one.reason))
        cursor = self._file.db.execute(
            "INSERT INTO tombstones VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?)", (*values, one.at_s)
        )
        self._file.db.execute("DELETE FROM tombstones WHERE number <= ?", ((cursor.lastrowid or 0) - TOMBSTONES_MAX,))
