"""What an operator orders of one service is followed by another one that shares its Redis."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis.asyncio import Redis

from kvstore.api import Ack
from kvstore.catalog.entry import Level
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.servers import RedisServer
from kvstore.testing.waiting import soon, until
from tests.unit.admin.service_harness import ServiceHarness, open_service


@pytest.mark.servers
async def test_what_one_service_was_told_another_one_does(tmp_path: Path, shared_redis: RedisServer) -> None:
    """A and B share a Redis. Weights retired at A are unreachable at B, whoever asks, until that is taken back; a quota
    that was set at A, which is gone then, is held by B, which had neither quota nor bound; and what Redis has lost is
    told to it again.
    """
    hot = f"redis://{shared_redis.host}:{shared_redis.port}"
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    async with Redis(host=shared_redis.host, port=shared_redis.port) as client:
        await client.flushdb()
        async with open_service(folders[1], hot=hot) as b:
            async with open_service(folders[0], hot=hot) as a:
                old = await a.save(Prompt(ATTENTION, "a", 256, tenant="red", weights_id="old"))
                await b.store.open_namespace(old.description, deadline=soon())
                assert await hit(b, old) == 256
                query = {"weights_id": "old", "confirm": "true"}
                async with a.client("operator") as operator:
                    assert (await operator.post("/v1/weights/retired", params=query)).is_success
                    assert await hit(a, old) == 0
                    await until(lambda: hit(b, old), holds=lambda tokens: tokens == 0)
                    assert (await b.store.stage(old.query(), deadline=soon())).cut == "weights_retired"
                    await client.delete("c1/orders")
                    await until(lambda: client.exists("c1/orders"))
                    assert (await operator.delete("/v1/weights/retired", params=query)).is_success
                    await until(lambda: hit(b, old), holds=lambda tokens: tokens == 256)
                    quota = {"maximum_bytes": 12_000}
                    assert (await operator.put("/v1/quotas/red", json=quota)).json()["is_ordered"]
            async with b.client("red") as red:
                await until(lambda: red.get("/v1/quotas"), holds=lambda answer: answer.json()["quotas"])
            prompt = Prompt(ATTENTION, "b", 64 * 20, tenant="red", weights_id="new")
            await b.store.open_namespace(prompt.description, deadline=soon())
            await b.store.lookup(prompt.query(), deadline=soon())
            for record in prompt.records():
                await b.store.save(record, ack=Ack.COLD, deadline=soon())
            await until(lambda: cold_bytes(b), holds=lambda num_bytes: num_bytes <= 12_000)
            assert await cold_bytes(b) > 6_000


async def hit(made: ServiceHarness, prompt: Prompt) -> int:
    return (await made.store.lookup(prompt.query(), deadline=soon())).resume_tokens


async def cold_bytes(made: ServiceHarness) -> int:
    totals = await made.catalog.totals(deadline=soon())
    return sum(held.levels[Level.COLD].num_bytes for held in totals.values())
