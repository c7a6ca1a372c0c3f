"""A SQLite file that one thread uses, that is recreated when it is damaged, and opened later when its disk is full."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from kvstore.errors import Closed, Unavailable
from kvstore.runtime.deadline import Deadline

__all__ = ["SqliteFile", "is_no_room", "make_private"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_BUSY_S = 5.0
"""How long the thread waits for transactions of other processes that have the file open."""
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
"""Primary codes of what SQLite says on a full disk: even to read it has to make a file for shared memory."""


def make_private(path: Path) -> None:
    """Make a database's file if it is not there. Others than its owner may neither read nor write it, whatever its
    folder allows, nor the files that SQLite keeps beside it. If an existing file's mode cannot be changed, only warn.

    Raises:
        OSError: It cannot be made.
    """
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    for suffix in ("", "-wal", "-shm"):  # by name: to close a descriptor would drop the locks of SQLite
        beside = path.with_name(path.name + suffix)
        try:
            if beside.stat().st_mode & 0o077:
                beside.chmod(0o600)
        except FileNotFoundError:
            continue
        except OSError as error:
            _log.warning("others may read a file: chmod 600 it path=%s error=%s", beside, error.strerror)


class SqliteFile:
    """A database in WAL mode whose content can be rebuilt: a file that is damaged, or of another version, is renamed
    and replaced by an empty one.

    Args:
        path: The file; created when it does not exist, with its folder.
        schema: Statements that create the tables.
        version: Of the schema, kept in the file.
        on_recreated: Called in the thread after a damaged file was replaced while it was in use.
        is_guest: Another process owns the file: it is neither created nor renamed here, and reopened when it was
            replaced.
        what: What it is, for messages.
        advice: What to do when it cannot be used.

    Raises:
        Unavailable: The file cannot be opened. Not for want of room: then every call tries again to open it.
    """

    def __init__(
        self,
        path: Path,
        schema: str,
        version: int,
        on_recreated: Callable[[], None],
        *,
        is_guest: bool = False,
        what: str = "the catalog",
        advice: str = "check the disk, or delete it and run `kvstore reindex`",
    ) -> None:
        self._what = what
        self._advice = advice
        self._db: sqlite3.Connection | None = None
        self._path = path
        self._schema = schema
        self._version = version
        self._on_recreated = on_recreated
        self._is_guest = is_guest
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvstore-catalog")
        self._closed = False
        try:
            if not is_guest:
                path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._db = self._connect()
            except (sqlite3.DatabaseError, OSError) as error:
                if not is_guest and is_no_room(error):
                    told = (
                        "%s cannot be opened on a full disk, going on without it until there is room path=%s error=%s"
                    )
                    _log.warning(told, what, path, error)
                    return
                if is_guest or isinstance(error, sqlite3.OperationalError | OSError):  # no permission: not its fault
                    raise
                self._rename_damaged(error)
                self._db = self._connect()
        except (sqlite3.Error, OSError) as error:
            raise Unavailable(f"the file of {what} cannot be opened: {advice}", path=path, error=error) from error

    @property
    def db(self) -> sqlite3.Connection:
        """The connection, for the thread; opened now if there was no room before."""
        if self._db is None:
            self._db = self._connect()
            _log.info("%s is open: its disk has room again path=%s", self._what, self._path)
        return self._db

    def _connect(self) -> sqlite3.Connection:
        if self._is_guest:
            self._inode = self._path.stat().st_ino
        if not self._is_guest:
            make_private(self._path)
        database = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            (version,) = database.execute("PRAGMA user_version").fetchone()
            (num_tables,) = database.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            if version != self._version and (num_tables or self._is_guest):
                raise sqlite3.DatabaseError(f"version {version} of the catalog, expected {self._version}")
            if self._is_guest:
                return database
            pragmas = f"PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA user_version={self._version};"
            database.executescript(pragmas + self._schema)
        except BaseException:
            database.close()
            raise
        return database

    def _rename_damaged(self, error: sqlite3.Error) -> None:
        """Keep the file as `<name>.damaged`, for investigation; only the last one is kept."""
        aside = self._path.with_name(f"{self._path.name}.damaged")
        _log.warning(
            "%s cannot be read; it was renamed and replaced by an empty one path=%s error=%s", self._what, aside, error
        )
        self._path.replace(aside)
        for suffix in ("-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)

    async def change(self, write: Callable[[], T], deadline: Deadline) -> T:
        """Run `write` as one transaction."""

        def transaction() -> T:
            self.db.execute("BEGIN IMMEDIATE")
            try:
                result = write()
                self.db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    self.db.execute("ROLLBACK")
                raise
            return result

        return await self.run(transaction, deadline)

    async def run(self, work: Callable[[], T], deadline: Deadline) -> T:
        """Run `work` in the thread. If cancelled, it runs completely or not at all.

        Raises:
            Unavailable: The file cannot be used, was damaged, or the deadline came first.
            Closed: After `aclose`.
        """
        if self._closed:
            raise Closed(f"{self._what} is closed")
        try:
            async with deadline.scope(f"asking {self._what}"):
                return await asyncio.get_running_loop().run_in_executor(self._thread, self._guarded, work)
        except (sqlite3.Error, OSError) as error:
            raise Unavailable(
                f"the file of {self._what} cannot be used: {self._advice}", path=self._path, error=error
            ) from error

    def _guarded(self, work: Callable[[], T]) -> T:
        if self._is_guest and self._path.stat().st_ino != self._inode:  # the owner has replaced it
            self.db.close()
            self._db = self._connect()
        try:
            return work()
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", None) in _DAMAGE and not self._is_guest:
                with suppress(sqlite3.Error):
                    self.db.close()
                self._rename_damaged(error)
                self._db = None
                self._db = self._connect()
                self._on_recreated()
            raise

    async def aclose(self) -> None:
        """Wait for running work and close the file. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._db is not None:
                with suppress(sqlite3.Error):
                    await asyncio.get_running_loop().run_in_executor(self._thread, self._db.close)
            self._thread.shutdown(wait=False)


def is_no_room(error: BaseException | None) -> bool:
    """Whether SQLite failed for want of room on the disk, or could not write to it at all."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _NO_ROOM
