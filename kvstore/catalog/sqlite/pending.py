"""Pending writes in a SQLite file, for a store on one machine.

When a service dies, the records that were pending are lost with its memory. The file lists them for the next service of
the directory: without a scan, it finds out which of them arrived and which were lost.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from copy import copy
from pathlib import Path

from kvstore.catalog.pending import PendingEntry, PendingLog, PendingTotals
from kvstore.catalog.sqlite.file import SqliteFile, is_no_room
from kvstore.errors import Unavailable
from kvstore.format.names import pack_key, unpack_key
from kvstore.model.keys import RecordKey
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.deadline import Deadline

_SCHEMA = """
CREATE TABLE IF NOT EXISTS write_backs (
    key BLOB NOT NULL, owner BLOB NOT NULL, lease_end_ms INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL, stop_tokens INTEGER NOT NULL, PRIMARY KEY (key, owner)
) WITHOUT ROWID
"""
_RELEASED = bytes(16)
"""The owner of entries that were released."""
_FREE = """
SELECT key, max(num_bytes), max(stop_tokens) FROM write_backs
GROUP BY key HAVING max(lease_end_ms) <= ? ORDER BY max(stop_tokens) LIMIT ?
"""


class SqlitePendingLog(PendingLog):
    """Entries in one file of a directory with one service; made with `open`.

    A transaction that has returned survives the death of the process. A power failure may lose the last ones.

    Args:
        path: The file; see `open`.
        lease_s: Seconds that a lease lasts.
        clock: Measures the leases.
    """

    def __init__(self, path: Path, *, lease_s: float, clock: Clock = SYSTEM_CLOCK) -> None:
        script = f"{_SCHEMA}; UPDATE write_backs SET lease_end_ms = 0;"
        self._file = SqliteFile(path, script, 0, what="the list of pending writes", advice="check the disk")
        self._owner = secrets.token_bytes(16)
        self.lease_s = lease_s
        self._clock = clock

    @classmethod
    async def open(cls, path: Path, *, lease_s: float, clock: Clock = SYSTEM_CLOCK) -> SqlitePendingLog:
        """Open or create the file. The owner of its entries is dead, so they may be claimed at once.

        A file that is not a database is renamed and replaced by an empty one. On a full disk it is opened once there is
        room.

        Raises:
            Unavailable: The file cannot be used.
        """
        return await asyncio.to_thread(cls, path, lease_s=lease_s, clock=clock)

    def other_owner(self) -> SqlitePendingLog:
        other = copy(self)
        other._owner = secrets.token_bytes(16)
        return other

    async def add(self, entries: Sequence[PendingEntry], *, deadline: Deadline) -> bool:
        end_ms = self._lease_end_ms()
        rows = [(pack_key(e.key), self._owner, end_ms, e.num_bytes, e.stop_tokens) for e in entries]
        try:
            await self._change_all("REPLACE INTO write_backs VALUES (?, ?, ?, ?, ?)", rows, deadline)
        except Unavailable as error:
            if not is_no_room(error.__cause__):
                raise
            return False
        return True

    async def renew(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> list[int]:
        end_ms = self._lease_end_ms()

        def work() -> list[int]:
            return [self._renew_one(pack_key(key), end_ms) for key in keys]

        return await self._file.change(work, deadline)

    def _renew_one(self, key: bytes, end_ms: int) -> int:
        run = self._file.db.execute
        statement = "UPDATE write_backs SET lease_end_ms = ? WHERE key = ? AND owner = ?"
        if run(statement, (end_ms, key, self._owner)).rowcount == 0:
            return 0
        return int(run("SELECT count(*) FROM write_backs WHERE key = ?", (key,)).fetchone()[0])

    async def release(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        statement = "UPDATE OR REPLACE write_backs SET owner = ?, lease_end_ms = 0 WHERE key = ? AND owner = ?"
        await self._change_all(statement, [(_RELEASED, pack_key(key), self._owner) for key in keys], deadline)

    async def finish(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        statement = "DELETE FROM write_backs WHERE key = ? AND owner = ?"
        await self._change_all(statement, [(pack_key(key), self._owner) for key in keys], deadline)

    async def claim(self, limit: int, *, deadline: Deadline) -> list[PendingEntry]:
        end_ms, now_ms = self._lease_end_ms(), self._now_ms()

        def work() -> list[tuple[bytes, int, int]]:
            database = self._file.db
            free = database.execute(_FREE, (now_ms, limit)).fetchall()
            database.executemany("DELETE FROM write_backs WHERE key = ?", [(key,) for key, _, _ in free])
            rows = [(key, self._owner, end_ms, num_bytes, stop) for key, num_bytes, stop in free]
            database.executemany("INSERT INTO write_backs VALUES (?, ?, ?, ?, ?)", rows)
            return free

        rows = await self._file.change(work, deadline)
        return [PendingEntry(unpack_key(key), num_bytes, stop) for key, num_bytes, stop in rows]

    async def totals(self, *, deadline: Deadline) -> PendingTotals:
        def work() -> tuple[int, int]:
            row: tuple[int, int] = self._file.db.execute(
                "SELECT count(*), coalesce(sum(num_bytes), 0)"
                " FROM (SELECT max(num_bytes) AS num_bytes FROM write_backs GROUP BY key)"
            ).fetchone()
            return row

        return PendingTotals(*await self._file.run(work, deadline))

    async def aclose(self) -> None:
        await self._file.aclose()

    async def _change_all(self, statement: str, rows: Sequence[tuple[bytes | int, ...]], deadline: Deadline) -> None:
        """Run a statement for each row, in one transaction."""
        await self._file.change(lambda: self._file.db.executemany(statement, rows), deadline)

    def _lease_end_ms(self) -> int:
        return self._now_ms() + round(self.lease_s * 1000)

    def _now_ms(self) -> int:
        """Of a clock that does not jump: all leases in the file are this process's, since `open` ends the others."""
        return round(self._clock.monotonic_s() * 1000)
