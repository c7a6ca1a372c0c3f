"""A database that is damaged while it is in use, or that is closed while it is opened."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path

import pytest

from kvstore.catalog.sqlite.file import SqliteFile
from kvstore.errors import Unavailable
from kvstore.testing.waiting import soon

_SCHEMA = "CREATE TABLE IF NOT EXISTS words (word TEXT)"


async def test_a_damaged_file_that_cannot_be_renamed_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While the disk refuses that, calls say why; once it does not, an empty file takes its place, with no restart."""
    path, recreated = tmp_path / "words.db", list[bool]()
    file = SqliteFile(path, _SCHEMA, 1, on_recreated=lambda: recreated.append(True))
    rows = [("word" * 1000,)] * 100
    await file.change(lambda: file.db.executemany("INSERT INTO words VALUES (?)", rows), soon())
    await file.run(lambda: file.db.executescript("PRAGMA wal_checkpoint(TRUNCATE); PRAGMA cache_size=1"), soon())
    with path.open("r+b") as raw:
        raw.seek(4096)
        raw.write(os.urandom(path.stat().st_size - 4096))

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def count() -> object:
        return file.db.execute("SELECT count(*), sum(length(word)) FROM words").fetchall()

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.replace", refuse)
        for _ in range(2):
            with pytest.raises(Unavailable, match="Read-only file system"):
                await file.run(count, soon())
    assert "renamed the file" not in caplog.text
    with pytest.raises(Unavailable, match="malformed"):
        await file.run(count, soon())
    assert recreated and "renamed the file" in caplog.text
    assert await file.run(count, soon()) == [(0, None)]
    await file.aclose()


async def test_a_file_that_a_running_call_has_just_opened_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full at the start, and has room by the call during which the store is closed."""
    path, has_begun, may_go_on = tmp_path / "words.db", threading.Event(), threading.Event()

    def refuse(_: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("kvstore.catalog.sqlite.file.make_private", refuse)
        file = SqliteFile(path, _SCHEMA, 1)

    def write() -> None:
        has_begun.set()
        may_go_on.wait(10)
        file.db.execute("INSERT INTO words VALUES ('word')")

    writing = asyncio.create_task(file.run(write, soon()))
    await asyncio.to_thread(has_begun.wait)
    closing = asyncio.create_task(file.aclose())
    await asyncio.sleep(0)
    may_go_on.set()
    await asyncio.gather(writing, closing)
    assert path.exists() and not path.with_name("words.db-wal").exists()
