"""Pending write-backs in a SQLite file, for a store on one machine.

A record that was pending when its service died was in that service's memory only: nobody can finish writing it. The
file tells the next service of the directory, without a scan, which records may have arrived and which were lost.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import TypeVar

from kvstore.catalog.pending_base import PendingEntry, PendingLog, PendingTotals, pack_key, unpack_key
from kvstore.catalog.sqlite_file import make_private
from kvstore.errors import Closed, Unavailable
from kvstore.model.keys import RecordKey
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.deadline import Deadline

__all__ = ["SqlitePendingLog"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS write_backs (
    key BLOB NOT NULL, owner BLOB NOT NULL, lease_end_ms INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL, stop_tokens INTEGER NOT NULL, PRIMARY KEY (key, owner)
) WITHOUT ROWID
"""
_NOBODY = bytes(16)
"""The owner of entries that were released."""
_FREE = """
SELECT key, max(num_bytes), max(stop_tokens) FROM write_backs
GROUP BY key HAVING max(lease_end_ms) <= ? ORDER BY max(stop_tokens) LIMIT ?
"""


class SqlitePendingLog(PendingLog):
    """Entries in one file of a directory with one service; made with `open`.

    A transaction that has returned survives the death of the process. A power failure may lose the last ones.

    Args:
        database: Used in one thread of its own.
        lease_s: Seconds that a lease lasts.
        clock: Measures the leases.
    """

    def __init__(self, database: sqlite3.Connection, *, lease_s: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._database = database
        self._owner = secrets.token_bytes(16)
        self._lease_s = lease_s
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pending")
        self._closed = False

    @classmethod
    async def open(cls, path: Path, *, lease_s: float, clock: Clock = SYSTEM_CLOCK) -> SqlitePendingLog:
        """Open or create the file. Its entries were left by a dead owner, so they may be claimed at once.

        A file that is not a database is renamed and replaced by an empty one: it is an accelerator, not the truth.

        Raises:
            Unavailable: The file cannot be used.
        """
        try:
            try:
                database = await asyncio.to_thread(_open, path)
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):  # no permission, no space: not the file's fault
                    raise
                aside = path.with_name(f"{path.name}.damaged-{clock.wall_ms()}")
                _log.warning("pending entries cannot be read; the file was renamed path=%s error=%s", aside, error)
                path.replace(aside)
                for suffix in ("-wal", "-shm"):
                    path.with_name(path.name + suffix).unlink(missing_ok=True)
                database = await asyncio.to_thread(_open, path)
        except (sqlite3.Error, OSError) as error:
            raise Unavailable("cannot open the pending entries: check the disk", path=path, error=error) from error
        return cls(database, lease_s=lease_s, clock=clock)

    @property
    def lease_s(self) -> float:
        return self._lease_s

    def other_owner(self) -> SqlitePendingLog:
        other = copy(self)
        other._owner = secrets.token_bytes(16)
        return other

    async def add(self, entries: Sequence[PendingEntry], *, deadline: Deadline) -> bool:
        end_ms = self._lease_end_ms()
        rows = [(pack_key(e.key), self._owner, end_ms, e.num_bytes, e.stop_tokens) for e in entries]

        def work() -> bool:
            try:
                with self._database:
                    self._database.executemany("REPLACE INTO write_backs VALUES (?, ?, ?, ?, ?)", rows)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                    return False
                raise
            return True

        return await self._run(work, deadline)

    async def renew(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> list[int]:
        end_ms = self._lease_end_ms()

        def work() -> list[int]:
            with self._database:
                return [self._renew_one(pack_key(key), end_ms) for key in keys]

        return await self._run(work, deadline)

    def _renew_one(self, key: bytes, end_ms: int) -> int:
        run = self._database.execute
        statement = "UPDATE write_backs SET lease_end_ms = ? WHERE key = ? AND owner = ?"
        if run(statement, (end_ms, key, self._owner)).rowcount == 0:
            return 0
        return int(run("SELECT count(*) FROM write_backs WHERE key = ?", (key,)).fetchone()[0])

    async def release(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        statement = "UPDATE OR REPLACE write_backs SET owner = ?, lease_end_ms = 0 WHERE key = ? AND owner = ?"
        rows = [(_NOBODY, pack_key(key), self._owner) for key in keys]

        def work() -> None:
            with self._database:
                self._database.executemany(statement, rows)

        await self._run(work, deadline)

    async def finish(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        rows = [(pack_key(key), self._owner) for key in keys]

        def work() -> None:
            with self._database:
                self._database.executemany("DELETE FROM write_backs WHERE key = ? AND owner = ?", rows)

        await self._run(work, deadline)

    async def claim(self, limit: int, *, deadline: Deadline) -> list[PendingEntry]:
        end_ms, now_ms = self._lease_end_ms(), self._clock.wall_ms()

        def work() -> list[tuple[bytes, int, int]]:
            run = self._database
            with run:
                free = run.execute(_FREE, (now_ms, limit)).fetchall()
                run.executemany("DELETE FROM write_backs WHERE key = ?", [(key,) for key, _, _ in free])
                rows = [(key, self._owner, end_ms, num_bytes, stop) for key, num_bytes, stop in free]
                run.executemany("INSERT INTO write_backs VALUES (?, ?, ?, ?, ?)", rows)
            return free

        rows = await self._run(work, deadline)
        return [PendingEntry(unpack_key(key), num_bytes, stop) for key, num_bytes, stop in rows]

    async def totals(self, *, deadline: Deadline) -> PendingTotals:
        def work() -> tuple[int, int]:
            row: tuple[int, int] = self._database.execute(
                "SELECT count(*), coalesce(sum(num_bytes), 0)"
                " FROM (SELECT max(num_bytes) AS num_bytes FROM write_backs GROUP BY key)"
            ).fetchone()
            return row

        return PendingTotals(*await self._run(work, deadline))

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            with suppress(sqlite3.Error):
                await asyncio.get_running_loop().run_in_executor(self._thread, self._database.close)
            self._thread.shutdown(wait=False)

    def _lease_end_ms(self) -> int:
        return self._clock.wall_ms() + round(self._lease_s * 1000)

    async def _run(self, work: Callable[[], T], deadline: Deadline) -> T:
        """Run `work` in the database's thread. If cancelled, it runs completely or not at all."""
        if self._closed:
            raise Closed("the pending entries are closed")
        async with deadline.scope("the file of pending entries"):
            try:
                return await asyncio.get_running_loop().run_in_executor(self._thread, work)
            except sqlite3.Error as error:
                raise Unavailable("the file of pending entries failed: check the disk", error=error) from error


def _open(path: Path) -> sqlite3.Connection:
    make_private(path)
    database = sqlite3.connect(path, check_same_thread=False, timeout=5.0)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        with database:
            database.execute(_SCHEMA)
            database.execute("UPDATE write_backs SET lease_end_ms = 0")
    except BaseException:
        database.close()
        raise
    return database
