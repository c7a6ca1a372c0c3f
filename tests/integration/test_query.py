"""`/v1/query` and `/v1/query_by_hash` with Redis and S3: what they say of an engine is the hit that it then gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvstore.client import ClientOptions, connect
from kvstore.model.instance import EngineInstance
from kvstore.testing.prompts import ATTENTION, HYBRID, WINDOWED, Prompt
from kvstore.testing.servers import CephRgw, RedisServer
from kvstore.testing.waiting import soon, until
from tests.integration.publishing import named
from tests.unit.admin.service_harness import open_service
from tests.unit.admin.stored_prompts import ask_as_engine, stored_prompts

QUESTIONS = 1000
LAYOUTS = {"attention": ATTENTION, "windowed": WINDOWED, "hybrid": HYBRID}


@pytest.mark.full
@pytest.mark.servers
async def test_a_thousand_prompts_are_hit_as_their_answers_say(
    tmp_path: Path,
    shared_redis: RedisServer,
    shared_rgw: CephRgw,
    monkeypatch: pytest.MonkeyPatch,
    tell: Callable[[str], None],
) -> None:
    """Records with holes in memory, Redis and S3, of three models: for each random prompt the answer has the tokens and
    the media of the hit that the engine then gets.
    """
    shared_redis.flush()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", shared_rgw.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", shared_rgw.secret_key)
    bucket = "query"
    shared_rgw.create_bucket(bucket)
    cold = f"s3://{bucket}/records?endpoint_url={shared_rgw.endpoint_url}&region={shared_rgw.region}"
    seen: Counter[str] = Counter()
    async with (
        open_service(tmp_path, with_tokens=False, hot=shared_redis.url, cold=cold) as made,
        made.client() as client,
    ):
        for seed, (name, layout) in enumerate(LAYOUTS.items()):
            instance = EngineInstance(name, ("m",), step_tokens=16)
            engine = connect(str(made.server.addresses[0]), options=ClientOptions(instance=instance))
            prompt = Prompt(layout, name, 64, model=name)
            await engine.open_namespace(prompt.description, deadline=soon())
            stored = await stored_prompts(made, prompt, seed=seed)
            for tokens, salt in stored.questions(-(-QUESTIONS // len(LAYOUTS))):
                body = {"model": "m", "token_ids": tokens, "cache_salt": salt, "instance_id": name}
                match = (await client.post("/v1/query", json=body)).json()["default"][name]
                hit = await ask_as_engine(stored, engine, instance, tokens, salt)
                assert (match["longest_matched"], match["CPU"]) == (hit.tokens, hit.memory_tokens)
                assert match["STORAGE"] == hit.tokens
                if not hit.tokens:
                    seen["no hit"] += 1
                elif hit.is_from_memory:
                    assert match["CPU"] == hit.tokens
                    seen["memory"] += 1
                else:
                    assert match["CPU"] < hit.tokens
                    seen["storage, after memory" if match["CPU"] else "storage"] += 1
            await engine.aclose()
    tell(f"{seen.total()} prompts: {dict(seen)}")
    assert seen.total() >= QUESTIONS and len(seen) == 4


@pytest.mark.servers
async def test_a_router_asks_by_the_hashes_of_events(tmp_path: Path, shared_redis: RedisServer) -> None:
    """An engine saves a prompt and names its pages. By their hashes a router learns that memory has them, then Redis
    alone, then nothing; a service that shares the Redis and was told no name finds nothing."""
    shared_redis.flush()
    prompt, instance = Prompt(ATTENTION, "asked", 192), EngineInstance("e", ("m",), step_tokens=16, names_blocks=True)
    told = [int.from_bytes(prompt.boundary(end).prefix[:8], "big") for end in range(16, 193, 16)]
    options = ClientOptions(instance=instance)
    async with AsyncExitStack() as stack:
        asked, engines = [], []
        for name in ("a", "b"):
            folder = tmp_path / name
            folder.mkdir()
            settings = {"hot": shared_redis.url, "cold": "memory:", "events_endpoint": f"ipc://{folder}/events"}
            made = await stack.enter_async_context(open_service(folder, with_tokens=False, **settings))
            client_of_admin = await stack.enter_async_context(made.client())
            engine = connect(str(made.server.addresses[0]), options=options)
            stack.push_async_callback(engine.aclose)
            await engine.open_namespace(prompt.description, deadline=soon())
            asked.append(client_of_admin)
            engines.append((made, engine))

        async def tokens(number: int) -> tuple[int, int]:
            body = {"model": "m", "block_hashes": told}
            match = (await asked[number].post("/v1/query_by_hash", json=body)).json()["default"]["e"]
            return match["CPU"], match["STORAGE"]

        made, engine = engines[0]
        for record in prompt.records():
            await engine.save(record, deadline=soon())
        for end in (64, 128, 192):
            engine.name_blocks(named(prompt, prompt.boundary(end)))
        await until(lambda: tokens(0), holds=lambda found: found == (192, 192))
        await made.settle()
        for key in prompt.record_keys():
            made.store.memory.remove(key)  # type: ignore[union-attr]
        assert await tokens(0) == (0, 192)
        assert (await engine.lookup(prompt.query(), deadline=soon())).resume_tokens == 192
        assert await tokens(1) == (0, 0)
        assert (await engines[1][1].lookup(prompt.query(), deadline=soon())).resume_tokens == 192
        shared_redis.flush()
        assert await tokens(0) == (0, 0)
