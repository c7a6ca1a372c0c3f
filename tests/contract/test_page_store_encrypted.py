"""The contract of `PageStore`, on an `EncryptedStore`: over a directory, and in the middle of a change of keys."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.errors import Unavailable
from kvstore.model.keys import RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.store.encryption.encrypted import EncryptedStore
from kvstore.store.encryption.key_ring import watch_keys
from kvstore.store.limits import StoreLimits
from kvstore.store.tiered import TieredStore
from kvstore.testing.keys import write_keys
from kvstore.testing.store_contract import PageStoreContract
from kvstore.testing.store_node import LEASE_S, StoreNode
from kvstore.tiers.filesystem import FilesystemTier
from kvstore.tiers.memory import MemoryTier

MEMORY_BYTES = 64 << 20


@pytest.fixture(params=[[("*", 1, 1)], [("*", 2, 2), ("*", 1, 1), ("*", 0, 0)]], ids=["one key", "three generations"])
async def node(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[StoreNode]:
    memory = MemoryTier(MEMORY_BYTES)
    cold = await FilesystemTier.open(tmp_path / "records", budget_bytes=1 << 30)
    limits = replace(StoreLimits(), stage_bytes=MEMORY_BYTES // 2, lease_s=LEASE_S)
    inner = TieredStore(memory, None, cold, limits=limits)
    store = EncryptedStore(inner, watch_keys(str(write_keys(tmp_path / "keys.toml", request.param))))

    async def lose(key: RecordKey) -> None:
        for generation in store.generations(""):
            named = key if generation is None else generation.named(key)
            for tier in (memory, cold):
                with suppress(Unavailable):
                    await tier.delete(named, deadline=Deadline.after(5))

    yield StoreNode(store, lose=lose, drain=store.drain, num_pinned_bytes=lambda: memory.pinned_bytes)
    await store.aclose()
    await cold.aclose()


class TestEncryptedStore(PageStoreContract):
    """Whoever asks need not know that what is stored is encrypted."""
