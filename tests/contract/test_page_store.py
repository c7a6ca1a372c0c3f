"""The contract of `PageStore`, on a `TieredStore` over each combination of tiers."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.errors import Unavailable
from kvstore.model.keys import RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.runtime.meters import Meters
from kvstore.store.limits import StoreLimits
from kvstore.store.tiered import TieredStore
from kvstore.testing.servers import CephRgw, RedisServer
from kvstore.testing.store_contract import PageStoreContract
from kvstore.testing.store_node import LEASE_S, StoreNode
from kvstore.tiers.base import Tier
from kvstore.tiers.filesystem import FilesystemTier
from kvstore.tiers.guarded import GuardedTier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.s3 import S3Tier

MEMORY_BYTES = 64 << 20


def tiered_node(memory: MemoryTier, *, hot: Tier | None = None, cold: Tier | None = None) -> StoreNode:
    """A `TieredStore` over these tiers as the suite wants it."""
    limits = replace(StoreLimits(), stage_bytes=memory.limit_bytes // 2, lease_s=LEASE_S)
    store = TieredStore(memory, hot, cold, limits=limits)

    async def lose(key: RecordKey) -> None:
        for tier in (memory, hot, cold):
            if tier is not None:
                with suppress(Unavailable):
                    await tier.delete(key, deadline=Deadline.after(5))

    return StoreNode(store, lose=lose, drain=store.drain, num_pinned_bytes=lambda: memory.pinned_bytes)


class TestTieredStoreOnMemory(PageStoreContract):
    """Memory alone."""

    @pytest.fixture
    async def node(self) -> AsyncIterator[StoreNode]:
        node = tiered_node(MemoryTier(MEMORY_BYTES))
        yield node
        await node.store.aclose()


class TestTieredStoreOnFilesystem(PageStoreContract):
    """Memory and a directory, as an embedded service has them."""

    @pytest.fixture
    async def node(self, tmp_path: Path) -> AsyncIterator[StoreNode]:
        cold = await FilesystemTier.open(tmp_path / "records", budget_bytes=1 << 30)
        node = tiered_node(MemoryTier(MEMORY_BYTES), cold=cold)
        yield node
        await node.store.aclose()
        await cold.aclose()


@pytest.mark.servers
class TestTieredStoreOnRedisAndS3(PageStoreContract):
    """Memory, a real Redis and a real Ceph gateway, as a fleet has them, each behind its guard."""

    @pytest.fixture
    async def node(self, shared_redis: RedisServer, shared_rgw: CephRgw) -> AsyncIterator[StoreNode]:
        shared_rgw.create_bucket("page-store")
        meters, prefix = Meters(), secrets.token_hex(4)  # apart from the records of an earlier test
        hot = GuardedTier(RedisTier(shared_redis.url), Instruments(meters=meters))
        cold = GuardedTier(
            await S3Tier.open(shared_rgw.location("page-store", prefix), credentials=shared_rgw.credentials),
            Instruments(meters=meters),
        )
        node = tiered_node(MemoryTier(MEMORY_BYTES), hot=hot, cold=cold)
        yield node
        await node.store.aclose()
        async for entry in hot.scan():
            await hot.delete(entry.key, deadline=Deadline.after(10))
        await hot.aclose()
        await cold.aclose()
