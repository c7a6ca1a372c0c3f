"""What the tests of the store share: slow tiers with faults, a store over them, and short calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from kvstore.api import Staged
from kvstore.store.limits import StoreLimits
from kvstore.store.tiered import TieredStore
from kvstore.testing.faults import FaultyTier
from kvstore.testing.prompts import Prompt
from kvstore.testing.waiting import soon
from kvstore.tiers.base import Tier
from kvstore.tiers.memory import MemoryTier

MIB = 1 << 20
LIMITS = replace(StoreLimits(), stage_bytes=12 * MIB, backoff_s_min=0.01, backoff_s_max=0.05, drain_timeout_s=0.2)


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
