"""`/v1/query` with Redis and S3: what it says of an engine is the hit that the engine then gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from kvstore.client import ClientOptions, connect
from kvstore.model.instance import EngineInstance
from kvstore.testing.prompts import ATTENTION, HYBRID, WINDOWED, Prompt
from kvstore.testing.servers import CephRgw, RedisServer
from tests.unit.admin.service_harness import open_service, soon
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
    async with Redis(host=shared_redis.host, port=shared_redis.port) as client:
        await client.flushall()
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
