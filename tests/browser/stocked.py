"""A service with an hour of history: prompts of two tenants in a real Redis and a directory, lookups, stages, reports,
evicted and corrupt records. Only the clock of its history is not real.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from redis.asyncio import Redis

from kvstore.api import Outcome
from kvstore.catalog.base import Use
from kvstore.runtime.events import EventKind
from kvstore.service.watcher import Watcher
from kvstore.testing.prompts import ATTENTION, HYBRID, Prompt
from kvstore.testing.servers import RedisServer
from kvstore.testing.waiting import soon
from tests.unit.admin.service_harness import ServiceHarness, ended, open_service
from tests.virtual_time import ShiftedClock

STEPS = 40
"""Of a minute each."""

RED = Prompt(HYBRID, "a", 64 * 5 + 16, tenant="red", model="small", payload_bytes=60_000)
BLUE = Prompt(ATTENTION, "b", 64 * 3, tenant="blue", model="other", payload_bytes=90_000)
BRANCH = Prompt(HYBRID, "c", 64 * 3, tenant="red", model="small", payload_bytes=60_000)


@asynccontextmanager
async def stocked(folder: Path, redis: RedisServer) -> AsyncIterator[ServiceHarness]:
    """The service, without tokens."""
    async with Redis(host=redis.host, port=redis.port) as client:
        await client.flushdb()
    hot = f"redis://{redis.host}:{redis.port}"
    async with open_service(folder, with_tokens=False, hot=hot, cold_bytes="256MiB", quotas="red=1MiB:8MiB") as made:
        await made.port.watcher.aclose()
        clock = ShiftedClock(date_ahead_s=-60.0 * STEPS)
        watcher = Watcher(made.store, made.service.history, made.store.events, clock=clock)
        for prompt in (RED, BLUE, BRANCH):
            await made.save(prompt)
        for number in range(STEPS):
            await use(made, number)
            clock.date_ahead_s += 60
            await watcher.step()
        await made.settle()
        uses = [Use(RED.boundary(tokens).prefix, 400 // tokens) for tokens in range(64, 321, 64)]
        await made.catalog.use(RED.namespace, uses, deadline=soon())
        add_events(made)
        await run_jobs(made)
        yield made


async def run_jobs(made: ServiceHarness) -> None:
    """Jobs that have ended, and one that takes minutes."""
    async with made.client() as client:
        for path in ("/v1/gc", "/v1/reindex", "/v1/tiers/cold/drain"):
            await ended(client, await client.post(path))
        slow = {"bytes_per_s": 40_000}
        assert (await client.post("/v1/tiers/cold/verify", params=slow)).status_code == 202


async def use(made: ServiceHarness, number: int) -> None:
    """One minute of two engines: most prompts are found, some in part, some are new."""
    for index in range(3 + number % 5):
        prompt = (RED, BLUE, RED)[index % 3]
        is_new = (number + index) % 4 == 0
        asked = replace(prompt, name=f"new {number} {index}") if is_new else prompt
        staged = await made.store.stage(asked.query(), deadline=soon())
        await made.store.lookup(asked.query(), deadline=soon())
        if staged.lease is not None:
            await made.store.release(staged.lease)
        reason = ("nothing_stored", "too_short", "cheaper_to_compute", "deadline")[number % 4] if is_new else ""
        reached = 0 if is_new else prompt.num_tokens - (64 if index == 4 else 0)
        told = Outcome(
            f"chatcmpl-{number:02d}{index}",
            prompt.namespace,
            prompt.num_tokens,
            prompt.num_tokens,
            0,
            reached,
            reason or ("nothing_stored" if index == 4 else ""),
            stop=asked.boundary(64) if reason == "nothing_stored" else None,
            tenant=prompt.tenant,
        )
        made.store.report(told)


def add_events(made: ServiceHarness) -> None:
    """What tests of their own make happen for real; here it is there to be looked at."""
    tell, about = made.store.events.add, RED.namespace.hex()
    tell(EventKind.TIER_DOWN, "tier redis is off, requests go on without it", is_public=True, detail={"tier": "redis"})
    tell(EventKind.TIER_BACK, "tier redis is back after 4.2 s", is_public=True, detail={"tier": "redis"})
    told = {"tier": "filesystem", "reason": "payload checksum"}
    tell(EventKind.QUARANTINED, "a record in filesystem was quarantined, and not served", namespace=about, detail=told)
    tell(EventKind.EVICTED, "evicted 12 boundaries from filesystem", detail={"evicted": 12})
    tell(EventKind.SAVES_DROPPED, "7 records are not copied to filesystem", detail={"busy": 7})
