"""How often the catalog is compared with a Redis that evicts all the time."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from kvstore.catalog.redis.catalog import RedisCatalog
from kvstore.catalog.redis.reconcile import Reconciler
from kvstore.runtime.meters import Meters


@pytest.mark.virtual_time
async def test_a_long_comparison_has_a_quarter_of_the_time() -> None:
    """Redis answers lookups too: a comparison that takes 40 s is begun every 160 s, a short one each period."""
    for took_s, num_begun in ((40.0, 10), (0.0, 107)):
        begun: list[float] = []

        class Comparing(Reconciler):
            async def check(self, begun: list[float] = begun, took_s: float = took_s) -> int:
                begun.append(took_s)
                await asyncio.sleep(took_s)
                return 0

        running = asyncio.ensure_future(Comparing(RedisCatalog(Redis()), Meters(), period_s=15.0).run())
        await asyncio.sleep(1599.0)
        running.cancel()
        assert len(begun) == num_begun
