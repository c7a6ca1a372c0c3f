"""Stores that decline what was seen once: on a real directory, and several services on a real Redis and S3."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from redis.asyncio import Redis

from kvstore.api import Ack, SaveOutcome
from kvstore.compose import open_store, open_tier
from kvstore.eviction.trace import read_trace
from kvstore.format.record import Record
from kvstore.model.keys import Boundary
from kvstore.model.kinds import FullAttention
from kvstore.model.layout import GroupLayout, Layout
from kvstore.settings import Settings, load_settings
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import HYBRID, Prompt
from kvstore.testing.servers import CephRgw, RedisServer
from kvstore.testing.waiting import soon, until
from tests.integration.bounded_store import directory_settings

TRACE = Path(__file__).parents[1] / "traces" / "conversation-cut.jsonl.gz"
LAYOUT = Layout(16, (GroupLayout(FullAttention(), 1),))
"""A record for each page, and a page for each block of the trace."""


@dataclass(frozen=True)
class Conversation(Prompt):
    """A prompt of the trace: its boundaries are named by the blocks that end there."""

    blocks: tuple[int, ...] = ()

    @classmethod
    def of(cls, blocks: Sequence[int]) -> Conversation:
        num_tokens = LAYOUT.page_tokens * len(blocks)
        return cls(LAYOUT, "conversation", num_tokens, payload_bytes=400, blocks=tuple(blocks))

    def boundary(self, tokens: int) -> Boundary:
        return Prompt(LAYOUT, f"block {self.blocks[tokens // LAYOUT.page_tokens - 1]}", tokens).boundary(tokens)


async def serve(store: TieredStore, prompt: Prompt) -> int:
    """As an engine does: look a prompt up, save what is not there, and wait for none of it. Returns the tokens hit."""
    lookup = await store.lookup(prompt.query(), deadline=soon())
    for record in prompt.records():
        if record.header.span.stop > lookup.resume_tokens:
            assert await store.save(record, deadline=soon()) in {SaveOutcome.STORED, SaveOutcome.EXISTS}
    return lookup.resume_tokens


async def stored(settings: Settings) -> dict[object, int]:
    """What the cold tier has: bytes by record."""
    async with open_tier(settings.cold, settings) as tier:
        return {entry.key: entry.num_bytes or 0 async for entry in tier.scan()}


async def replay(settings: Settings, prompts: Sequence[Prompt]) -> tuple[int, int]:
    """Serve prompts one after the other by a store that ends then. Returns the tokens hit, and the records written."""
    async with open_store(settings) as store:
        await store.open_namespace(prompts[0].description, deadline=soon())
        hit_tokens = sum([await serve(store, prompt) for prompt in prompts])
        assert await store.drain(soon()) == 0
    return hit_tokens, len(await stored(settings))


def conversations(num_long: int) -> list[Conversation]:
    """Some conversations of three turns or more, and twice as many that end after one, as they came."""
    traced = [prompt for prompt in read_trace(TRACE, block_tokens=512) if len(prompt.blocks) > 1]
    turns = Counter(prompt.blocks[1] for prompt in traced)
    long = [block for block, count in turns.items() if count > 2][:num_long]
    once = [block for block, count in turns.items() if count == 1][: 2 * num_long]
    return [Conversation.of(prompt.blocks) for prompt in traced if prompt.blocks[1] in {*long, *once}]


@pytest.mark.parametrize("num_long", [4, pytest.param(100, marks=pytest.mark.full)])
async def test_a_directory_gets_what_comes_again(tmp_path: Path, num_long: int) -> None:
    """Conversations of the trace: with memory enough, hits are the same by either rule, and second sight writes of all
    blocks those that came again.
    """
    prompts = conversations(num_long)
    every = directory_settings(tmp_path / "all", retention_admission="all")
    second = directory_settings(tmp_path / "second", retention_admission="second_sight")
    all_tokens, all_records = await replay(every, prompts)
    hit_tokens, num_records = await replay(second, prompts)
    print(
        f"{len(prompts)} prompts, {all_tokens} tokens hit: all writes {all_records} records, second sight {num_records}"
    )
    seen: set[int] = set()
    again: set[int] = set()
    for prompt in prompts:
        again |= seen.intersection(prompt.blocks)
        seen.update(prompt.blocks)
    assert hit_tokens == all_tokens > 0
    assert (all_records, num_records) == (len(seen), len(again))
    assert 0 < num_records < 0.5 * all_records


async def test_a_restart_forgets_sightings_and_no_bytes(tmp_path: Path) -> None:
    """What was kept is served by the next process, bit for bit; what was declined has to be seen twice again."""
    settings = directory_settings(tmp_path, retention_admission="second_sight")
    often, once = Prompt(HYBRID, "often", 320), Prompt(HYBRID, "once", 320)
    await replay(settings, [often, once, often])
    assert set(await stored(settings)) == {record.key for record in often.records()}
    async with open_store(settings) as store:
        await store.open_namespace(often.description, deadline=soon())
        assert await serve(store, once) == 0
        assert await serve(store, often) == 320
        await _check_bytes(store, often)
    assert set(await stored(settings)) == {record.key for record in often.records()}
    await replay(settings, [once, once])
    assert set(await stored(settings)) == {record.key for prompt in (often, once) for record in prompt.records()}


async def test_auto_declines_once_a_directory_is_nearly_full(tmp_path: Path) -> None:
    """A few prompts come again and again among many that come once, and not all of it fits: nothing is declined while
    there is room, then what comes once is, and the directory stays within its bound.
    """
    budget = 160 * 8704  # a record of 4,592 bytes takes two blocks and an inode
    settings = directory_settings(tmp_path, disk_bytes=budget, retention_policy="lru")
    async with open_store(settings) as store:
        meters = store.meters

        async def live(number: int) -> None:
            for name in (
                f"often {number % 20}",
                f"once {3 * number}",
                f"once {3 * number + 1}",
                f"once {3 * number + 2}",
            ):
                prompt = Prompt(LAYOUT, name, 64, payload_bytes=4400)
                await store.open_namespace(prompt.description, deadline=soon())
                await serve(store, prompt)
            assert await store.drain(soon()) == 0

        for number in range(9):  # 144 records
            await live(number)
        assert meters.get("declined_records", rule="second_sight") == 0
        async with asyncio.timeout(120):
            while meters.get("declined_records", rule="second_sight") < 100:
                number += 1
                await live(number)
        status = await store.status(deadline=soon())
        assert list(status["admission"].values()) == ["second_sight"]  # type: ignore[attr-defined]
        assert int(status["tiers"]["filesystem"]["used_bytes"]) <= budget  # type: ignore[index]


class TestTwoServices:
    """On one Redis and one S3."""

    pytestmark = pytest.mark.servers

    @pytest.fixture
    async def client(self, shared_redis: RedisServer) -> AsyncIterator[Redis]:
        async with Redis(host=shared_redis.host, port=shared_redis.port) as client:
            await client.flushall()
            yield client

    @pytest.fixture
    def settings(
        self, client: Redis, shared_redis: RedisServer, shared_rgw: CephRgw, monkeypatch: pytest.MonkeyPatch
    ) -> Settings:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", shared_rgw.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", shared_rgw.secret_key)
        bucket = f"admission-{secrets.token_hex(4)}"
        shared_rgw.create_bucket(bucket)
        cold = f"s3://{bucket}/records?endpoint_url={shared_rgw.endpoint_url}&region={shared_rgw.region}"
        return load_settings(
            {
                "memory_bytes": "64MiB",
                "hot": shared_redis.url,
                "cold": cold,
                "retention_admission": "second_sight",
                "stall_timeout_ms": 20_000,
            }
        )

    async def test_what_one_saw_the_other_brings(self, client: Redis, settings: Settings) -> None:
        """A prompt that one service served is in Redis alone, where it may go. Seen by the other, it is brought to S3
        with its start; what is promised at once is there at once; without Redis all of that is served from S3.
        """
        prompt, once = Prompt(HYBRID, "a", 320), Prompt(HYBRID, "b", 320)
        longer, promised = Prompt(HYBRID, "a", 640), Prompt(HYBRID, "c", 320)
        async with AsyncExitStack() as stack:
            one, two = [await stack.enter_async_context(open_store(settings)) for _ in range(2)]
            for store in (one, two):
                await store.open_namespace(prompt.description, deadline=soon())
            for each in (prompt, once):
                assert await serve(one, each) == 0
            assert await one.drain(soon()) == 0
            assert await stored(settings) == {}
            names = [name async for name in client.scan_iter("v1/*") if b".g" in name]
            assert len(names) == len(prompt.records()) + len(once.records())
            assert all([await client.ttl(name) > 0 for name in names])

            assert await serve(two, longer) == 320
            expected = {record.key for record in prompt.records()}
            await _until_stored(settings, expected)
            for ack, records in ((Ack.HOT, promised.records()[:15]), (Ack.COLD, promised.records()[15:])):
                for record in records:
                    assert await two.save(record, ack=ack, deadline=soon()) is SaveOutcome.STORED
            expected |= {record.key for record in promised.records()}
            await _until_stored(settings, expected)
        await client.flushall()
        async with open_store(settings) as store:
            await store.open_namespace(prompt.description, deadline=soon())
            for each in (prompt, promised):
                await _check_bytes(store, each)
            assert (await store.stage(once.query(), deadline=soon())).resume_tokens == 0

    async def test_services_follow_the_owner(self, settings: Settings) -> None:
        """A full cold tier has an owner, which was told to decline; the other service was not, and does as well."""
        prompts = [Prompt(HYBRID, f"prompt {number}", 320) for number in range(4)]
        bound = {"cold_bytes": sum(record.num_bytes for prompt in prompts for record in prompt.records())}
        strict = settings.model_copy(update=bound)
        async with AsyncExitStack() as stack:
            owner = await stack.enter_async_context(open_store(strict))
            await owner.open_namespace(prompts[0].description, deadline=soon())
            for prompt in prompts:
                for record in prompt.records():
                    await _save_cold(owner, record)
            await _until_followed(owner)
            lax = strict.model_copy(update={"retention_admission": "all"})
            other = await stack.enter_async_context(open_store(lax))
            await other.open_namespace(prompts[0].description, deadline=soon())
            await _until_followed(other)
            fresh = Prompt(HYBRID, "fresh", 320)
            assert await serve(other, fresh) == 0
            assert await other.drain(soon()) == 0
            assert other.meters.get("declined_records", rule="second_sight") == len(fresh.records())


async def _save_cold(store: TieredStore, record: Record) -> None:
    """What was stored last may have to leave first."""
    await until(
        lambda: store.save(record, ack=Ack.COLD, deadline=soon()),
        holds=lambda outcome: outcome is not SaveOutcome.FULL,
    )


async def _until_followed(store: TieredStore) -> None:
    await until(
        lambda: store.status(deadline=soon()), holds=lambda status: "second_sight" in status["admission"].values()
    )


async def _until_stored(settings: Settings, expected: set[object]) -> None:
    async with asyncio.timeout(60):
        while (now := set(await stored(settings))) != expected:
            assert now < expected
            await asyncio.sleep(0.1)


async def _check_bytes(store: TieredStore, prompt: Prompt) -> None:
    staged = await store.stage(prompt.query(), deadline=soon())
    assert staged.lease is not None
    assert staged.resume_tokens == prompt.num_tokens
    sealed = {record.key: record.data for record in prompt.records()}
    for key in staged.keys:
        assert (await store.load(staged.lease, key, deadline=soon())).data == sealed[key]
    await store.release(staged.lease)
