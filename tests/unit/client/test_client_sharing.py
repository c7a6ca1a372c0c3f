"""Records read from the service's shared memory: the same bytes, and nothing else where there is a doubt."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.api import Deadline
from kvstore.client import ClientOptions, RemoteStore, connect
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.format.header_v1 import HEADER_BYTES
from kvstore.format.record import open_record
from kvstore.runtime.arena import Arena, ArenaView
from kvstore.service.server import Server
from kvstore.store.limits import StoreLimits
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.tiers.memory import MemoryTier
from kvstore.wire.address import parse_address

LARGE = Prompt(ATTENTION, "shared", 256, payload_bytes=200_000)
SMALL = replace(LARGE, payload_bytes=1000)


def soon() -> Deadline:
    return Deadline.after(10)


class Node:
    """A service with shared memory and a client of it, which can be asked how records came."""

    def __init__(self, store: TieredStore, server: Server, client: RemoteStore) -> None:
        self.store, self.memory, self.server, self.client = store, store.memory, server, client

    @property
    def received_bytes(self) -> int:
        """Over all connections."""
        return sum(connection.frames.received_bytes for connection in self.client.pool.connections())

    async def saved(self, prompt: Prompt) -> None:
        await self.client.wait_ready(deadline=soon())
        await self.client.open_namespace(prompt.description, deadline=soon())
        for record in prompt.records():
            await self.client.save(record, deadline=soon())


@asynccontextmanager
async def node_at(
    url: str, *, options: ClientOptions | None = None, arena_bytes: int = 32 << 20
) -> AsyncIterator[Node]:
    memory = MemoryTier(16 << 20, arena=Arena.open(arena_bytes) if arena_bytes else None)
    store = TieredStore(memory, limits=StoreLimits(stage_bytes=8 << 20))
    server = Server(store, token="a token" if url.startswith("tcp") else "")
    await server.listen([parse_address(url)])
    client = connect(str(server.addresses[0]), token="a token" if url.startswith("tcp") else None, options=options)
    try:
        yield Node(store, server, client)
    finally:
        await client.aclose()
        await server.aclose()
        await store.aclose()
        await memory.aclose()


async def load_all(node: Node, prompt: Prompt) -> int:
    """Load and verify every record; returns the bytes that came through the connections for it."""
    staged = await node.client.stage(prompt.query(), deadline=soon())
    assert staged.lease is not None and len(staged.keys) == len(prompt.records())
    before = node.received_bytes
    expected = {record.key: record.data for record in prompt.records()}
    for key in staged.keys:
        buffer = memoryview(bytearray(300_000))
        record = await node.client.load(staged.lease, key, deadline=soon(), allocate=lambda size, b=buffer: b[:size])
        open_record(record.data, key)
        assert record.data == expected[key]
        assert buffer[:HEADER_BYTES] == expected[key][:HEADER_BYTES]
    await node.client.release(staged.lease)
    return node.received_bytes - before


async def test_large_records_are_read_where_they_stand(tmp_path: Path) -> None:
    """Over a Unix socket the bytes of large records do not travel, and arrive all the same, in the caller's buffer."""
    async with node_at(f"unix:{tmp_path / 's'}") as node:
        await node.saved(LARGE)
        assert await load_all(node, LARGE) < 20_000


@pytest.mark.parametrize("why", ["small", "tcp", "switched off", "no arena", "arena full"])
async def test_records_travel_where_they_cannot_be_shared(tmp_path: Path, why: str) -> None:
    """Small records, TCP, a client that does not want it, a service without or with a full arena: all are sent."""
    prompt = SMALL if why == "small" else LARGE
    options = ClientOptions(shared_memory=why != "switched off")
    url = "tcp://127.0.0.1:0" if why == "tcp" else f"unix:{tmp_path / 's'}"
    arena_bytes = {"no arena": 0, "arena full": 128 << 10}.get(why, 32 << 20)
    async with node_at(url, options=options, arena_bytes=arena_bytes) as node:
        await node.saved(prompt)
        assert await load_all(node, prompt) > sum(record.num_bytes for record in prompt.records())


async def test_a_buffer_that_is_too_small_is_refused(tmp_path: Path) -> None:
    """The caller's mistake gives the same error as for records that are sent."""
    async with node_at(f"unix:{tmp_path / 's'}") as node:
        await node.saved(LARGE)
        staged = await node.client.stage(LARGE.query(), deadline=soon())
        assert staged.lease is not None
        with pytest.raises(InvalidRequest, match="allocate"):
            await node.client.load(
                staged.lease, staged.keys[0], deadline=soon(), allocate=lambda size: memoryview(bytearray(size - 1))
            )


async def test_a_record_that_went_during_the_copy_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory serves another record before the copy has ended: the load fails, no byte of it is handed out."""
    async with node_at(f"unix:{tmp_path / 's'}") as node:
        await node.saved(LARGE)
        staged = await node.client.stage(LARGE.query(), deadline=soon())
        assert staged.lease is not None
        copy = ArenaView.copy

        def slow_copy(view: ArenaView, place: object, target: memoryview) -> bool:
            arena = node.memory.arena
            assert arena is not None
            for key in staged.keys:  # what a service does that thinks its peer is gone
                node.memory.remove(key)
            node.store.leases.release_all()
            overwritten = [arena.take(200_192) for _ in range(20)]
            for buffer in overwritten:
                if buffer is not None:
                    buffer[:] = b"\xff" * len(buffer)
            return copy(view, place, target)

        monkeypatch.setattr(ArenaView, "copy", slow_copy)
        with pytest.raises(Unavailable, match="no longer there"):
            await node.client.load(staged.lease, staged.keys[0], deadline=soon())


async def test_a_new_service_is_mapped_anew(tmp_path: Path) -> None:
    """After a restart the client reads from the new service's memory, never from the old one's."""
    url = f"unix:{tmp_path / 's'}"
    async with node_at(url) as first:
        await first.saved(LARGE)
        assert await load_all(first, LARGE) < 20_000
        old = first.client._shared.arena
        await first.server.aclose()
        async with node_at(url) as second:
            await first.client.wait_ready(deadline=soon())
            other = replace(LARGE, name="another prompt")
            await first.saved(other)
            assert first.client._shared.arena not in (b"", old)
            assert first.client._shared.arena == getattr(second.memory.arena, "id", None)
            assert await load_all(first, other) < 20_000


async def test_nothing_stays_open(tmp_path: Path) -> None:
    """Mapping costs no descriptor, and the service's is closed with it."""
    async with node_at(f"unix:{tmp_path / 'warm'}") as node:  # what the first connection of a process leaves open
        await node.client.wait_ready(deadline=soon())
    del node
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(3):
        async with node_at(f"unix:{tmp_path / str(number)}") as node:
            await node.client.wait_ready(deadline=soon())
            assert node.client._shared.arena
        del node
    gc.collect()  # mappings go with the last object that reads through them
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_a_service_that_promises_an_arena_and_gives_none_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the descriptor cannot be passed, records are sent."""

    def refuse(*_: object) -> int:
        raise OSError("not permitted")

    monkeypatch.setattr(socket, "send_fds", refuse)
    async with node_at(f"unix:{tmp_path / 's'}") as node:
        await node.saved(LARGE)
        assert node.client._shared.arena == b""
        assert await load_all(node, LARGE) > 200_000
