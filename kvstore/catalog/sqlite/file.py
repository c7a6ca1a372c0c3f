"""A SQLite file used by one thread. A damaged file is replaced; while the disk is full, opening it is retried."""

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

T = TypeVar("T")

_log = logging.getLogger(__name__)

_BUSY_S = 5.0
"""How long the thread waits for transactions of other processes that have the file open."""
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
"""Primary error codes on a full disk: SQLite creates a file for shared memory even to read."""


def make_private(path: Path) -> None:
    """Create a database's file if it does not exist. Only its owner may read and write it, and the files that SQLite
    keeps beside it. If the mode of an existing file cannot be changed, log a warning.

    Raises:
        OSError: The file cannot be created.
    """
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    for suffix in ("", "-wal", "-shm"):  # by name: closing a descriptor would drop SQLite's locks
        beside = path.with_name(path.name + suffix)
        try:
            if beside.stat().st_mode & 0o077:
                beside.chmod(0o600)
        except FileNotFoundError:
            continue
        except OSError as error:
            _log.warning("other users may read a file: run chmod 600 on it path=%s error=%s", beside, error.strerror)


class SqliteFile:
    """A database in WAL mode whose content can be rebuilt. A file that is damaged, or of another version, is renamed
    and replaced by an empty one.

    Args:
        path: The file; created when it does not exist, with its folder.
        schema: Statements that create the tables.
        version: Of the schema, stored in the file.
        on_recreated: Called in the thread after a damaged file was replaced while it was in use.
        is_guest: Another process owns the file. Then it is neither created nor renamed here, and it is opened again
            after its owner replaced it.
        what: Its content, for messages.
        advice: The next step when it cannot be used, for messages.

    Raises:
        Unavailable: The file cannot be opened. On a full disk the constructor succeeds, and every call tries again.
    """

    def __init__(
        self,
        path: Path,
        schema: str,
        version: int,
        *,
        on_recreated: Callable[[], None] = lambda: None,
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
                    _log.warning("%s is not used until its full disk has room path=%s error=%s", what, path, error)
                    return
                if is_guest or isinstance(error, sqlite3.OperationalError | OSError):  # like no permission: not damage
                    raise
                self._rename_damaged(error)
                self._db = self._connect()
        except (sqlite3.Error, OSError) as error:
            raise Unavailable(f"the file of {what} cannot be opened: {advice}", path=path, error=error) from error

    @property
    def db(self) -> sqlite3.Connection:
        """The connection, for the thread; opened now if it is not, like after a start with a full disk."""
        if self._db is None:
            self._db = self._connect()
            _log.info("%s is open again path=%s", self._what, self._path)
        return self._db

    def _connect(self) -> sqlite3.Connection:
        if not self._is_guest:
            make_private(self._path)
        inode = self._path.stat().st_ino
        database = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            (version,) = database.execute("PRAGMA user_version").fetchone()
            (num_tables,) = database.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            if version != self._version and (num_tables or self._is_guest):
                raise sqlite3.DatabaseError(f"version {version} of the catalog, expected {self._version}")
            if not self._is_guest:
                pragmas = f"PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA user_version={self._version};"
                database.executescript(pragmas + self._schema)
        except BaseException:
            database.close()
            raise
        self._inode = inode  # only now: a guest whose owner has yet to write the file tries again
        return database

    def _rename_damaged(self, error: sqlite3.Error) -> None:
        """Keep the file as `<name>.damaged`, for investigation; only the last one is kept."""
        renamed = self._path.with_name(f"{self._path.name}.damaged")
        for suffix in ("-wal", "-shm"):  # first: a new file must not get what is in them
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        self._path.replace(renamed)
        message = "%s cannot be read: renamed the file, an empty one takes its place renamed=%s error=%s"
        _log.warning(message, self._what, renamed, error)

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
            async with deadline.scope(f"reading or writing {self._what}"):
                return await asyncio.get_running_loop().run_in_executor(self._thread, self._guarded, work)
        except (sqlite3.Error, OSError) as error:
            raise Unavailable(
                f"the file of {self._what} cannot be used: {self._advice}", path=self._path, error=error
            ) from error

    def _guarded(self, work: Callable[[], T]) -> T:
        if self._is_guest and self._path.stat().st_ino != self._inode:  # the owner has replaced it
            self._close()
        try:
            return work()
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", None) in _DAMAGE and not self._is_guest:
                self._close()  # if renaming fails, the next call tries again
                self._rename_damaged(error)
                self._db = self._connect()
                self._on_recreated()
            raise

    async def aclose(self) -> None:
        """Wait for running work and close the file. Idempotent."""
        if not self._closed:
            self._closed = True
            await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
            self._thread.shutdown(wait=False)

    def _close(self) -> None:
        """In the thread, which may just have opened another one."""
        database, self._db = self._db, None
        if database is not None:
            with suppress(sqlite3.Error):
                database.close()


def is_no_room(error: BaseException | None) -> bool:
    """Whether SQLite failed because the disk is full, or cannot be written to at all."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _NO_ROOM
