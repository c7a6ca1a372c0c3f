"""A tier that a newer release has taken over is not written to, whenever that happens: its version is not only looked
at when a service starts."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from kvstore.compose import open_store
from kvstore.errors import KVStoreError
from kvstore.format.manifest import STORE_VERSION, STORE_VERSION_PLACE
from kvstore.format.names import manifest_name
from kvstore.runtime.deadline import Deadline
from kvstore.settings import Settings, load_settings
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.servers import RedisServer, redis_server
from kvstore.testing.waiting import soon, until
from kvstore.tiers import guarded

pytestmark = pytest.mark.servers

NOTE = manifest_name(STORE_VERSION_PLACE)


def settings_of(server: RedisServer, folder: Path) -> Settings:
    flags = {"hot": server.url, "cold": f"file://{folder}", "memory_bytes": 64 << 20, "catalog_look_s": 0.2}
    return load_settings({**flags, "listen": f"unix:{folder}.sock"})


@asynccontextmanager
async def client_of(server: RedisServer) -> AsyncIterator[Redis]:
    async with Redis(host=server.host, port=server.port) as client:
        yield client


async def take_over(server: RedisServer) -> None:
    """As a newer release does: whoever has seen the version may have stored anything in any form."""
    async with client_of(server) as client:
        await client.set(NOTE, b'{"kvstore_store_version": %d}' % (STORE_VERSION + 1))


async def start_taken_over(server: RedisServer, folder: Path) -> None:
    """Start a server that was killed with what a newer release has left there, so that nobody sees it before."""
    with redis_server() as newer:
        await take_over(newer)
        async with client_of(newer) as client:
            await client.save()
            dump = Path((await client.config_get("dir"))["dir"], "dump.rdb")
        shutil.copy(dump, folder)
    server.start()


async def folder_of(server: RedisServer) -> Path:
    async with client_of(server) as client:
        return Path((await client.config_get("dir"))["dir"])


async def all_keys(server: RedisServer) -> set[bytes]:
    async with client_of(server) as client:
        return {name async for name in client.scan_iter(count=1000)}


async def use(store: TieredStore, name: str, seconds: float) -> None:
    """Save and look up for a while, as engines do that know nothing of tiers."""
    await store.open_namespace(Prompt(ATTENTION, name, 64).description, deadline=soon())
    deadline = Deadline.after(seconds)
    number = 0
    while not deadline.expired:
        number += 1
        prompt = Prompt(ATTENTION, f"{name} {number} {time.monotonic()}", 64)
        try:
            for record in prompt.records():
                await store.save(record, deadline=soon())
            await store.lookup(prompt.query(), deadline=soon())
        except KVStoreError:
            pass
        await asyncio.sleep(0.02)


async def is_used(store: TieredStore) -> bool:
    (state,) = [tier for tier in await store.operations.tiers(deadline=soon()) if tier.name == "redis"]
    return state.usage is not None and not state.is_open


async def until_used(store: TieredStore) -> None:
    await until(lambda: is_used(store), 20)


async def test_it_was_taken_over_during_an_outage(tmp_path: Path) -> None:
    """The service saw it go. It comes back with a newer version: not one key is written, of records, of the catalog,
    of pending writes or of leases. When the newer release gives it back it is used again.
    """
    with redis_server() as server:
        async with open_store(settings_of(server, tmp_path / "cold")) as store:
            await use(store, "before", 0.5)
            assert await is_used(store)
            folder = await folder_of(server)
            server.kill9()
            await use(store, "away", 1.0)
            assert not await is_used(store)
            await start_taken_over(server, folder)
            await use(store, "after", 3.0)
            await until(lambda: is_used(store), 20, holds=lambda used: not used)
            assert await all_keys(server) == {NOTE.encode()}
            async with client_of(server) as client:
                await client.delete(NOTE)
            await until_used(store)
            async with asyncio.timeout(30):
                while not any(name.startswith(b"v1/") for name in await all_keys(server)):
                    await use(store, "again", 0.5)


async def test_it_was_away_when_the_service_started(tmp_path: Path) -> None:
    """It was not there to be looked at: the look is made up for."""
    with redis_server() as server:
        folder = await folder_of(server)
        server.kill9()
        async with open_store(settings_of(server, tmp_path / "cold")) as store:
            await use(store, "away", 0.5)
            await start_taken_over(server, folder)
            await use(store, "after", 3.0)
            assert await all_keys(server) == {NOTE.encode()}


async def test_it_was_taken_over_without_an_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing failed, so nothing told the service. Seconds later it has seen it all the same, and writes no more."""
    monkeypatch.setattr(guarded, "_VERSION_S", 0.3)
    with redis_server() as server:
        async with open_store(settings_of(server, tmp_path / "cold")) as store:
            await use(store, "before", 0.3)
            await take_over(server)
            async with asyncio.timeout(20):
                while await is_used(store):
                    await use(store, "while", 0.2)
            before = await all_keys(server)
            await use(store, "after", 1.5)
            assert await all_keys(server) == before


async def test_a_short_outage_between_two_calls_is_noticed(tmp_path: Path) -> None:
    """It went and came back too quickly for the service to leave it alone: the first write looks all the same."""
    with redis_server() as server:
        async with open_store(settings_of(server, tmp_path / "cold")) as store:
            await use(store, "before", 0.3)
            folder = await folder_of(server)
            server.kill9()
            with pytest.raises(KVStoreError):
                await store.slower[0].get_manifest(STORE_VERSION_PLACE, deadline=soon())
            await start_taken_over(server, folder)
            record = Prompt(ATTENTION, "a", 64).records()[0]
            with pytest.raises(KVStoreError, match="newer release"):
                await store.slower[0].put(record, deadline=soon())
            assert record.key.prefix.hex().encode() not in b" ".join(await all_keys(server))
