"""A service with shared memory and a client of it, in one process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from kvstore.client import ClientOptions, RemoteStore, connect
from kvstore.runtime.arena import Arena
from kvstore.service.limits import ServiceLimits
from kvstore.service.server import Server
from kvstore.store.limits import StoreLimits
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.waiting import soon
from kvstore.tiers.memory import MemoryTier
from kvstore.wire.address import parse_address

LARGE = Prompt(ATTENTION, "shared", 256, payload_bytes=200_000)
SMALL = replace(LARGE, payload_bytes=1000)


class Node:
    """A service with shared memory and a client of it, which can be asked how records came."""

    def __init__(self, store: TieredStore, server: Server, client: RemoteStore) -> None:
        self.store, self.memory, self.server, self.client = store, store.memory, server, client

    @property
    def received_bytes(self) -> int:
        """Over all connections."""
        return sum(connection.frames.received_bytes for connection in self.client.pool.connections())

    @property
    def sent_bytes(self) -> int:
        """Over all connections."""
        return sum(connection.frames.written_bytes for connection in self.client.pool.connections())

    async def saved(self, prompt: Prompt) -> None:
        await self.client.wait_ready(deadline=soon())
        await self.client.open_namespace(prompt.description, deadline=soon())
        for record in prompt.records():
            await self.client.save(record, deadline=soon())


@asynccontextmanager
async def node_at(
    url: str,
    *,
    options: ClientOptions | None = None,
    arena_bytes: int = 32 << 20,
    limits: ServiceLimits | None = None,
) -> AsyncIterator[Node]:
    memory = MemoryTier(16 << 20, arena=Arena.open(arena_bytes) if arena_bytes else None)
    store = TieredStore(memory, limits=StoreLimits(stage_bytes=8 << 20))
    server = Server(store, limits, token="a token" if url.startswith("tcp") else "")
    await server.listen([parse_address(url)])
    client = connect(str(server.addresses[0]), token="a token" if url.startswith("tcp") else None, options=options)
    try:
        yield Node(store, server, client)
    finally:
        await client.aclose()
        await server.aclose()
        await store.aclose()
        await memory.aclose()
