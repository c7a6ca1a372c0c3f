"""The contract of `PageStore`, on a `RemoteStore` that talks to a real service over a Unix socket and TCP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.client import connect
from kvstore.model.keys import RecordKey
from kvstore.runtime.arena import Arena
from kvstore.runtime.deadline import Deadline
from kvstore.service.server import Server
from kvstore.store.limits import StoreLimits
from kvstore.store.tiered import TieredStore
from kvstore.testing.store_contract import PageStoreContract
from kvstore.testing.store_node import LEASE_S, StoreNode
from kvstore.tiers.memory import MemoryTier
from kvstore.wire.address import parse_address


@asynccontextmanager
async def remote_node(url: str, token: str = "", arena: Arena | None = None) -> AsyncIterator[StoreNode]:
    """A service on `url` and a client of it."""
    memory = MemoryTier(64 << 20, arena=arena)
    behind = TieredStore(memory, limits=replace(StoreLimits(), stage_bytes=32 << 20, lease_s=LEASE_S))
    server = Server(behind, token=token)
    await server.listen([parse_address(url)])
    client = connect(str(server.addresses[0]), token=token)

    async def lose(key: RecordKey) -> None:
        await memory.delete(key, deadline=Deadline.after(5))

    yield StoreNode(client, lose=lose, drain=behind.drain, num_pinned_bytes=lambda: memory.pinned_bytes)
    await client.aclose()
    await server.aclose()
    await behind.aclose()
    await memory.aclose()


class TestRemoteStoreOnUnixSocket(PageStoreContract):
    """As an engine talks to its node's service."""

    @pytest.fixture
    async def node(self, tmp_path: Path) -> AsyncIterator[StoreNode]:
        async with remote_node(f"unix:{tmp_path / 's'}") as node:
            yield node


class TestRemoteStoreOnSharedMemory(PageStoreContract):
    """The same, of a service that keeps its records in an arena, where its clients read them."""

    @pytest.fixture
    async def node(self, tmp_path: Path) -> AsyncIterator[StoreNode]:
        arena = Arena.open(96 << 20)
        assert arena is not None
        async with remote_node(f"unix:{tmp_path / 's'}", arena=arena) as node:
            yield node


class TestRemoteStoreOnTcp(PageStoreContract):
    """With a token."""

    @pytest.fixture
    async def node(self) -> AsyncIterator[StoreNode]:
        async with remote_node("tcp://127.0.0.1:0", token="a secret of the test") as node:
            yield node
