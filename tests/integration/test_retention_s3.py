"""Services on one Redis and one S3 whose cold level is much too small for what they write at once."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack

import pytest

from kvstore.api import Ack, SaveOutcome
from kvstore.catalog.base import Catalog
from kvstore.catalog.entry import Level
from kvstore.compose import open_catalog, open_store, open_tier
from kvstore.errors import Unavailable
from kvstore.format.record import Record
from kvstore.model.keys import PrefixHash
from kvstore.model.kinds import FullAttention, Recurrent
from kvstore.model.layout import GroupLayout, Layout
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.settings import Settings, load_settings
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import Prompt
from kvstore.testing.servers import CephRgw, RedisServer
from kvstore.testing.waiting import soon
from tests.integration.bounded_store import check_whole, entries_of, write

pytestmark = pytest.mark.servers

LAYOUT = Layout(64, (GroupLayout(FullAttention(), 1), GroupLayout(Recurrent(), 1)))
"""A recurrent state beside full attention, in few records: S3 takes some hundred a second here."""
BOUNDARIES = 4
WRITERS = 4
"""Of each service."""


class FastDays:
    """Dates pass twenty times as quickly as deadlines: what is new is old soon. If they passed quicker, a busy machine
    would write a boundary's next record only when the boundary is old.
    """

    def __init__(self) -> None:
        self._start_ms = SYSTEM_CLOCK.wall_ms()

    def monotonic_s(self) -> float:
        return SYSTEM_CLOCK.monotonic_s()

    def wall_ms(self) -> int:
        return 20 * SYSTEM_CLOCK.wall_ms() - 19 * self._start_ms


CLOCK = FastDays()


def prompt_named(name: str, tenant: str = "") -> Prompt:
    return Prompt(LAYOUT, name, 208, tenant=tenant)


@pytest.fixture
def place(shared_redis: RedisServer, shared_rgw: CephRgw, monkeypatch: pytest.MonkeyPatch) -> dict[str, str | int]:
    """Settings of an empty Redis and an empty bucket."""
    shared_redis.flush()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", shared_rgw.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", shared_rgw.secret_key)
    bucket = f"retention-{secrets.token_hex(4)}"
    shared_rgw.create_bucket(bucket)
    cold = f"s3://{bucket}/records?endpoint_url={shared_rgw.endpoint_url}&region={shared_rgw.region}"
    return {"memory_bytes": "64MiB", "hot": shared_redis.url, "cold": cold}


async def save(store: TieredStore, record: Record) -> None:
    """To the cold tier; again where its boundary is just being deleted or there is no room now, as write-back does."""
    async with asyncio.timeout(60):
        while True:
            try:
                outcome = await store.save(record, ack=Ack.COLD, deadline=soon())
            except Unavailable:
                outcome = SaveOutcome.FULL
            if outcome in (SaveOutcome.STORED, SaveOutcome.EXISTS):
                return
            await asyncio.sleep(0.05)


def in_halves(prompts: Sequence[Prompt], num_between: int) -> Iterator[tuple[Prompt, list[Record]]]:
    """Starts and ends of prompts; an end comes as many prompts after its start, as from engines that compute slowly."""
    for number in range(len(prompts) + num_between):
        for at, is_end in ((number, False), (number - num_between, True)):
            if 0 <= at < len(prompts):
                records = prompts[at].records()
                yield prompts[at], records[len(records) // 2 :] if is_end else records[: len(records) // 2]


async def save_all(store: TieredStore, prompts: Sequence[Prompt], num_between: int) -> None:
    """Several halves at a time, each record by record."""
    halves = in_halves(prompts, num_between)

    async def engine() -> None:
        for prompt, records in halves:
            await store.lookup(prompt.query(), deadline=soon())
            for record in records:
                await save(store, record)

    await asyncio.gather(*(engine() for _ in range(WRITERS)))


@pytest.mark.parametrize(
    ("num_services", "num_held"),
    [(1, 8), pytest.param(1, 100, marks=pytest.mark.full), pytest.param(2, 100, marks=pytest.mark.full)],
)
async def test_ten_times_the_budget_is_written(place: dict[str, str | int], num_services: int, num_held: int) -> None:
    """Prompts lose their start before their end is saved. The level never holds more than its budget and a
    twentieth; when all is quiet, every boundary that is left has all its records and the boundary below it, a pinned
    prompt and what is guaranteed to a tenant among them, and a listing of the bucket shows the same.
    """
    free = [prompt_named(f"prompt {number}") for number in range(10 * num_held)]
    paid, kept, last = prompt_named("paid", "paying"), free[0], free[0].query().boundaries[-1].prefix
    prompt_bytes = sum(record.num_bytes for record in kept.records())
    budget = num_held * prompt_bytes
    settings = load_settings({**place, "cold_bytes": budget, "quotas": f"paying={prompt_bytes}:"})
    peak = 0

    async with AsyncExitStack() as stack:
        catalog = await stack.enter_async_context(open_catalog(settings, clock=CLOCK))
        stores = [
            await stack.enter_async_context(open_store(settings, Instruments(clock=CLOCK))) for _ in range(num_services)
        ]
        for store in stores:
            await store.open_namespace(kept.description, deadline=soon())
        await write(stores[0], [paid, kept], _nothing)
        await entries_of(catalog, kept)
        assert await catalog.pin(kept.namespace, [PrefixHash(last)], 1 << 31, deadline=soon()) == 1

        async def watch() -> None:
            nonlocal peak
            while True:
                peak = max(peak, await _told_bytes(catalog))
                await asyncio.sleep(0.02)

        watching = asyncio.ensure_future(watch())
        shares = [free[1:][number::num_services] for number in range(num_services)]
        await asyncio.gather(
            *(save_all(*each, 2 * num_held // num_services) for each in zip(stores, shares, strict=True))
        )
        watching.cancel()
        assert [await store.drain(soon()) for store in stores] == [0] * num_services
        assert budget * 0.8 < peak <= budget * 1.05
        await _until_whole(settings, [paid, kept])
        assert last in await entries_of(catalog, kept)
        assert len(await entries_of(catalog, paid)) == BOUNDARIES
        assert await _told_bytes(catalog) <= budget


async def _told_bytes(catalog: Catalog) -> int:
    totals = await catalog.totals(deadline=soon())
    return sum(total.levels[Level.COLD].num_bytes for total in totals.values())


async def _until_whole(settings: Settings, prompts: Sequence[Prompt]) -> None:
    """Return when every boundary that is left is whole; fail with what is not when that does not come."""
    async with open_tier(settings.cold, settings) as tier, open_catalog(settings, clock=CLOCK) as catalog:
        deadline = Deadline.after(60.0)
        while True:
            try:
                assert await check_whole(tier, catalog, prompts) >= 2 * BOUNDARIES
            except AssertionError:
                if deadline.expired:
                    raise
                await asyncio.sleep(0.2)
            else:
                return


async def _nothing() -> None:
    pass
