"""A store of memory and a directory, as the embedded one is: its directory is bounded by whole boundaries."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from kvstore.catalog.entry import Level
from kvstore.compose import open_catalog, open_store, open_tier
from kvstore.model.keys import PrefixHash
from kvstore.settings import Settings
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import HYBRID, Prompt
from kvstore.testing.waiting import soon, until
from tests.integration.bounded_store import check_whole, directory_settings, entries_of, settled, write

PAYLOAD_BYTES = 20_000
PROMPT_BYTES = 25 * 20_992
"""Of the directory: five boundaries of five records, each in whole blocks and an inode."""


def prompts_named(*names: str) -> list[Prompt]:
    return [Prompt(HYBRID, name, 300, payload_bytes=PAYLOAD_BYTES) for name in names]


async def used_bytes(store: TieredStore) -> int:
    status = await store.status(deadline=soon())
    return int(status["tiers"]["filesystem"]["used_bytes"])  # type: ignore[index]


async def until_complete(settings: Settings) -> None:
    """The store makes its catalog anew in the background."""
    async with open_catalog(settings) as catalog:
        await until(lambda: catalog.is_complete(deadline=soon()), 30)


@pytest.mark.parametrize("times", [10, pytest.param(100, marks=pytest.mark.full)])
async def test_many_times_the_budget_is_written(tmp_path: Path, times: int) -> None:
    """Usage never passes the budget, nothing is refused, nothing dropped by the directory itself; what is left is whole
    prefixes, the pinned one and all that is guaranteed to a tenant among them.
    """
    budget = 8 * PROMPT_BYTES
    settings = directory_settings(tmp_path, disk_bytes=budget, quotas=f"paying={PROMPT_BYTES}:")
    paid = Prompt(HYBRID, "paid", 300, payload_bytes=PAYLOAD_BYTES, tenant="paying")
    prompts = prompts_named(*(f"prompt {number}" for number in range(6 * times)))
    last = PrefixHash(prompts[0].query().boundaries[-1].prefix)
    peak = 0

    async with open_store(settings) as store:

        async def look() -> None:
            nonlocal peak
            peak = max(peak, await used_bytes(store))

        await write(store, [paid, prompts[0]], look)
        async with open_catalog(settings) as catalog:
            await entries_of(catalog, prompts[0])
            assert await catalog.pin(prompts[0].namespace, [last], 1 << 31, deadline=soon()) == 1
        await write(store, prompts[1:], look)
        async with open_catalog(settings) as catalog:
            await settled(catalog, prompts[0])
        dropped = [tombstone async for tombstone in _lost(settings)]
    assert 0.8 * budget < peak <= budget
    assert dropped == []
    async with open_tier(settings.cold, settings) as tier, open_catalog(settings) as catalog:
        assert last in await entries_of(catalog, prompts[0])
        assert len(await entries_of(catalog, paid)) == 5
        assert await check_whole(tier, catalog, [paid, *prompts]) >= 20


async def _lost(settings: Settings):  # type: ignore[no-untyped-def]
    """Records that the directory's own bound took, one by one."""
    async with open_catalog(settings) as catalog:
        for tombstone in await catalog.tombstones(limit=1 << 14, deadline=soon()):
            if tombstone.group is not None:
                yield tombstone


@pytest.mark.parametrize("damage", ["missing", "garbage", "page", "version", "behind"])
async def test_a_catalog_that_is_lost_is_made_anew(tmp_path: Path, damage: str) -> None:
    """The file is gone, no database, damaged within, of another version, or tells less than there is: the store starts
    and hits as before, and its catalog tells of everything again.
    """
    settings = directory_settings(tmp_path, disk_bytes="64MiB")
    prompts = prompts_named("a", "b", "c")
    async with open_store(settings) as store:
        await write(store, prompts, _nothing)
    path = tmp_path / "records" / "catalog.db"
    _damage(path, damage)
    async with open_store(settings) as store:
        await store.open_namespace(prompts[0].description, deadline=soon())
        for prompt in prompts:
            assert (await store.lookup(prompt.query(), deadline=soon())).resume_tokens == 288
        await until_complete(settings)
        async with open_catalog(settings) as catalog, open_tier(settings.cold, settings) as tier:
            totals = await catalog.totals(deadline=soon())
            told = totals[prompts[0].namespace].levels[Level.COLD]
            sizes = [entry.num_bytes async for entry in tier.scan()]
            assert (told.num_records, told.num_bytes) == (len(sizes), sum(sizes)) == (75, sum(sizes))


def _damage(path: Path, damage: str) -> None:
    if damage == "missing":
        path.unlink()
    elif damage == "garbage":
        path.write_bytes(b"not a database" * 1000)
    elif damage == "page":
        data = bytearray(path.read_bytes())
        data[4096:] = b"\xff" * (len(data) - 4096)
        path.write_bytes(data)
    else:
        statement = {"version": "PRAGMA user_version=77", "behind": "DELETE FROM totals"}[damage]
        with sqlite3.connect(path) as database:
            database.execute(statement)
            if damage == "behind":
                database.execute("DELETE FROM entries")
        database.close()


async def _nothing() -> None:
    pass


async def test_what_the_directory_drops_by_itself_is_told(tmp_path: Path) -> None:
    """While the catalog is not complete nothing is evicted, so the directory's own bound holds: the catalog learns of
    each record that it took, and both agree.
    """
    budget = 2 * PROMPT_BYTES
    settings = directory_settings(tmp_path, disk_bytes=budget)
    prompts = prompts_named(*"abcd")
    async with open_store(settings) as store, open_catalog(settings) as catalog:
        keep = asyncio.ensure_future(_keep_incomplete(settings))
        await asyncio.sleep(0)
        await write(store, prompts, _nothing)
        keep.cancel()
        assert await used_bytes(store) <= budget
        await until_complete(settings)
        told = (await catalog.totals(deadline=soon()))[prompts[0].namespace].levels[Level.COLD]
        async with open_tier(settings.cold, settings) as tier:
            sizes = [entry.num_bytes async for entry in tier.scan()]
        assert (told.num_records, told.num_bytes) == (len(sizes), sum(sizes))


async def _keep_incomplete(settings: Settings) -> None:
    async with open_catalog(settings) as catalog:
        while True:
            await catalog.mark_incomplete(deadline=soon())
            await asyncio.sleep(0.001)
