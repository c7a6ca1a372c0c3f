"""What the tests of the store share: slow tiers with faults, a store over them, and short calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import redis.asyncio

from kvstore.api import Staged
from kvstore.catalog.pending import PendingTotals
from kvstore.catalog.redis.pending import RedisPendingLog
from kvstore.store.limits import StoreLimits
from kvstore.store.tiered import TieredStore
from kvstore.testing.faults import FaultyTier
from kvstore.testing.prompts import Prompt
from kvstore.testing.waiting import soon, until
from kvstore.tiers.base import Tier
from kvstore.tiers.memory import MemoryTier

MIB = 1 << 20
LEASE_S = 0.3
LIMITS = replace(StoreLimits(), stage_bytes=12 * MIB, backoff_s_min=0.01, backoff_s_max=0.05, drain_timeout_s=0.2)
PATIENT = replace(LIMITS, write_back_attempts=1_000_000)


def slow_tier(name: str) -> FaultyTier:
    return FaultyTier(MemoryTier(64 * MIB), name=name)


@asynccontextmanager
async def opened(
    prompt: Prompt,
    *,
    hot: Tier | None = None,
    cold: FaultyTier | None = None,
    limits: StoreLimits = LIMITS,
    memory_bytes: int = 16 * MIB,
) -> AsyncIterator[TieredStore]:
    """A store with empty memory over these tiers, the prompt's namespace open."""
    store = TieredStore(MemoryTier(memory_bytes), hot, cold, limits=limits)
    await store.open_namespace(prompt.description, deadline=soon())
    try:
        yield store
    finally:
        await store.aclose()


async def fill(tier: FaultyTier, prompt: Prompt, *, tokens: list[int] | None = None) -> None:
    for record in prompt.records(tokens):
        await tier.inner.put(record, deadline=soon())


async def stage(store: TieredStore, prompt: Prompt, **query: int) -> Staged:
    return await store.stage(prompt.query(**query), deadline=soon())


class SharedTiers:
    """Two slower tiers and a log that any number of stores share."""

    def __init__(self, url: str, scope: str) -> None:
        self.hot, self.cold = slow_tier("redis"), slow_tier("s3")
        self.scope = scope
        self.client = redis.asyncio.Redis.from_url(url, socket_timeout=None)  # as `kvstore.tiers.redis.control`
        self.stores: list[TieredStore] = []

    def log(self, lease_s: float = LEASE_S) -> RedisPendingLog:
        return RedisPendingLog(self.client, self.scope, lease_s=lease_s)

    async def store(
        self,
        prompt: Prompt,
        *,
        limits: StoreLimits = PATIENT,
        memory: MemoryTier | None = None,
        hot: Tier | None = None,
        lease_s: float = LEASE_S,
    ) -> TieredStore:
        memory = MemoryTier(16 * MIB) if memory is None else memory  # an empty one is false
        store = TieredStore(memory, hot or self.hot, self.cold, pending=self.log(lease_s), limits=limits)
        await store.open_namespace(prompt.description, deadline=soon())
        self.stores.append(store)
        return store

    async def totals(self) -> PendingTotals:
        return await self.log().totals(deadline=soon())

    async def finished(self) -> None:
        await until(self.totals, holds=lambda totals: totals == PendingTotals(0, 0))

    async def die(self, store: TieredStore) -> None:
        """As a crash does: nothing is written any more, and nothing is given back."""
        self.stores.remove(store)
        await store._context.background.aclose()
