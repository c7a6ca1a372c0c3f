"""A catalog's file that another process owns: read, never created or renamed, and followed when it is replaced."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvstore.catalog.base import Addition
from kvstore.catalog.entry import Level
from kvstore.catalog.sqlite.catalog import SqliteCatalog
from kvstore.errors import Unavailable
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.waiting import soon

PROMPT = Prompt(ATTENTION, "a", 256)


async def keeper_with(path: Path, *tokens: int) -> SqliteCatalog:
    keeper = SqliteCatalog(path)
    await keeper.register(PROMPT.namespace, ATTENTION, "", deadline=soon())
    await keeper.add([Addition(PROMPT.key(at), Level.COLD, 100, at) for at in tokens], deadline=soon())
    return keeper


async def held(guest: SqliteCatalog) -> int:
    return (await guest.totals(deadline=soon()))[PROMPT.namespace].num_boundaries


async def test_a_guest_follows_a_file_that_was_begun_anew(tmp_path: Path) -> None:
    """The owner finds its file damaged and creates another one: the guest opens that one, and both may write."""
    path = tmp_path / "catalog.db"
    keeper = await keeper_with(path, 64, 128)
    guest = SqliteCatalog(path, is_guest=True)
    assert await held(guest) == 2
    await keeper.aclose()
    path.replace(tmp_path / "catalog.db.damaged")
    keeper = await keeper_with(path, 64)
    assert await held(guest) == 1
    await guest.register(PROMPT.namespace, ATTENTION, "", deadline=soon())
    pins = (guest.pin(PROMPT.namespace, [PROMPT.boundary(64).prefix], at, deadline=soon()) for at in (5, 6))
    assert await asyncio.gather(*pins, keeper.is_complete(deadline=soon())) == [1, 1, False]
    await guest.aclose()
    await keeper.aclose()


async def test_a_guest_that_comes_before_the_new_file_has_its_tables(tmp_path: Path) -> None:
    """The owner has created the file and not yet written to it: the guest reads it as soon as it can be read."""
    path = tmp_path / "catalog.db"
    keeper = await keeper_with(path, 64, 128)
    guest = SqliteCatalog(path, is_guest=True)
    await keeper.aclose()
    path.replace(tmp_path / "catalog.db.damaged")
    path.touch()
    with pytest.raises(Unavailable):
        await held(guest)
    keeper = await keeper_with(path, 64)
    assert await held(guest) == 1
    await guest.aclose()
    await keeper.aclose()


async def test_a_guest_makes_and_moves_nothing(tmp_path: Path) -> None:
    """No file, another version, or no database: it raises, and changes nothing."""
    path = tmp_path / "folder" / "catalog.db"
    with pytest.raises(Unavailable):
        SqliteCatalog(path, is_guest=True)
    assert not path.parent.exists()
    path.parent.mkdir()
    for content in (b"no database at all" * 100, b""):
        path.write_bytes(content)
        with pytest.raises(Unavailable):
            SqliteCatalog(path, is_guest=True)
        assert [(one.name, one.read_bytes()) for one in path.parent.iterdir()] == [(path.name, content)]
