"""The administration of services that share a Redis: what one shows and deletes is so for all."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis.asyncio import Redis

from kvstore.api import Ack, SaveOutcome
from kvstore.catalog.entry import Level
from kvstore.compose import open_store
from kvstore.service.admin.jobs import gc
from kvstore.settings import load_settings
from kvstore.testing.faulty_proxy import FaultyProxy
from kvstore.testing.prompts import ATTENTION, HYBRID, Prompt
from kvstore.testing.servers import CephRgw, RedisServer
from kvstore.testing.waiting import soon, until
from tests.unit.admin.service_harness import ended, open_service


@pytest.mark.servers
async def test_a_shared_redis_is_listed_pinned_and_deleted(tmp_path: Path, shared_redis: RedisServer) -> None:
    """Records at both levels: listed in every order, pinned, deleted by one service; the other one's lookups, Redis
    itself, the directory and the totals all agree. A namespace that nobody has open here is known by its manifest.
    """
    hot = f"redis://{shared_redis.host}:{shared_redis.port}"
    prompt = Prompt(HYBRID, "a", 64 * 6, tenant="red")
    async with Redis(host=shared_redis.host, port=shared_redis.port) as client:
        await client.flushdb()
        async with open_service(tmp_path, hot=hot) as saved:
            await saved.save(prompt)
        beside = load_settings({"memory_bytes": "16MiB", "hot": hot, "cold": "memory:"})
        async with open_service(tmp_path, hot=hot) as made, open_store(beside) as other, made.client("red") as red:
            namespace = prompt.namespace.hex()
            held = (await red.get(f"/v1/namespaces/{namespace}")).json()
            whole = {"num_boundaries": 6, "num_records": 30, "num_bytes": 35760}
            assert held["held"] == {"redis": whole, "filesystem": whole}
            assert held["description"] == prompt.description.fields
            for order in ("stored", "hits", "bytes", "age", "idle"):
                listed, cursor = [], ""
                while cursor is not None:
                    query = {"namespace": namespace, "order": order, "limit": 4, "cursor": cursor}
                    page = (await red.get("/v1/prefixes", params=query)).json()
                    listed += page["prefixes"]
                    cursor = page["next_cursor"]
                assert sorted(one["tokens"] for one in listed) == [64 * i for i in range(1, 7)]
                assert all(one["num_bytes"] == {"redis": 5960, "filesystem": 5960} for one in listed)
            pin = {"namespace": namespace, "prefix": prompt.boundary(128).prefix.hex(), "expires_in_s": 60}
            assert (await red.post("/v1/pins", json=pin)).status_code == 201
            assert len((await red.get("/v1/pins", params={"namespace": namespace})).json()["pins"]) == 1
            last = f"/v1/prefixes/{namespace}/{prompt.boundary(384).prefix.hex()}"
            deleted = (await red.delete(last, params={"confirm": "true"})).json()
            one = {"num_boundaries": 1, "num_records": 5, "num_bytes": 5960}
            assert deleted["by_tier"] == {"redis": one, "filesystem": one}
            await other.open_namespace(prompt.description, deadline=soon())
            assert (await other.lookup(prompt.query(), deadline=soon())).resume_tokens == 320
            deleted = (await red.delete(f"/v1/namespaces/{namespace}?confirm=true")).json()
            assert (deleted["num_pinned"], deleted["by_tier"]["redis"]["num_boundaries"]) == (2, 3)
            assert (await other.lookup(prompt.query(), deadline=soon())).resume_tokens == 128
            names = [name async for name in client.scan_iter(match=f"v1/{namespace}/*.g*", count=1000)]
            assert len(names) == 10
            left = (await red.get(f"/v1/namespaces/{namespace}")).json()["held"]
            assert {tier: amount["num_records"] for tier, amount in left.items()} == {"redis": 10, "filesystem": 10}


@pytest.mark.servers
async def test_a_reindex_of_both_tiers(tmp_path: Path, shared_redis: RedisServer) -> None:
    """One job lists both, and makes the catalog complete."""
    hot = f"redis://{shared_redis.host}:{shared_redis.port}"
    async with Redis(host=shared_redis.host, port=shared_redis.port) as client:
        await client.flushdb()
        async with open_service(tmp_path, hot=hot) as made, made.client("operator") as operator:
            await made.save(Prompt(HYBRID, "a", 64 * 6, tenant="red"))
            await made.catalog.mark_incomplete(deadline=soon())
            job = await ended(operator, await operator.post("/v1/reindex"))
            assert job["report"].keys() == {"hot", "cold"} and job["error"] is None
            assert await made.catalog.is_complete(deadline=soon())


@pytest.mark.servers
async def test_garbage_of_many_namespaces_is_found_in_few_listings(tmp_path: Path, shared_redis: RedisServer) -> None:
    """The names in Redis are listed for all namespaces together, of retired weights too, and not for each."""
    hot = f"redis://{shared_redis.host}:{shared_redis.port}"
    live = [Prompt(HYBRID, "a", 64 * 3, model=f"model {number}", payload_bytes=100) for number in range(12)]
    dead = [Prompt(HYBRID, "a", 64 * 3, model=f"model {number}", weights_id="old") for number in range(12)]
    async with Redis(host=shared_redis.host, port=shared_redis.port) as client:
        await client.flushdb()
        async with open_service(tmp_path, hot=hot) as made, made.client("operator") as operator:
            for prompt in (*live, *dead):
                await made.save(prompt)
            query = {"weights_id": "old", "confirm": "true"}
            assert not (await operator.post("/v1/weights/retired", params=query)).json()["is_dry_run"]
            pin = {"namespace": dead[0].namespace.hex(), "prefix": dead[0].boundary(128).prefix.hex()}
            assert (await operator.post("/v1/pins", json={**pin, "expires_in_s": 60})).status_code == 201
            before = (await client.info("commandstats"))["cmdstat_scan"]["calls"]
            job = await ended(operator, await operator.post("/v1/gc?confirm=true"))
            listings = (await client.info("commandstats"))["cmdstat_scan"]["calls"] - before
            assert (job["state"], job["report"]["num_pinned"], job["report"]["incomplete"]) == ("done", 2, {})
            assert job["report"]["retired"]["redis"]["num_boundaries"] == 12 * 3 - 2
            held = {one: total.num_boundaries for one, total in (await made.catalog.totals(deadline=soon())).items()}
            assert [held[prompt.namespace] for prompt in live] == [3] * 12
            assert [held[prompt.namespace] for prompt in dead] == [2] + [0] * 11
            assert listings < len(live)


@pytest.mark.servers
@pytest.mark.parametrize("are_old", [False, True])
async def test_what_a_service_wrote_without_redis_is_no_garbage(
    tmp_path: Path, shared_redis: RedisServer, shared_rgw: CephRgw, monkeypatch: pytest.MonkeyPatch, *, are_old: bool
) -> None:
    """One service is cut off from Redis, and saves to S3. Another one collects garbage: what is younger than a day
    stays, and the first one's entries make it a hit of both once it is back. What is older goes.
    """
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", shared_rgw.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", shared_rgw.secret_key)
    monkeypatch.setattr(gc, "UNUSED_S", 0)  # a minute has passed
    if are_old:
        monkeypatch.setattr(gc, "YOUNG_S", -60.0)  # the clock of S3 tells ages to the second
    bucket = f"garbage-{are_old}".lower()
    shared_rgw.create_bucket(bucket)
    cold = f"s3://{bucket}?endpoint_url={shared_rgw.endpoint_url}"
    known, cut_off = Prompt(ATTENTION, "known", 64 * 2), Prompt(ATTENTION, "cut off", 64 * 3)
    async with Redis(host=shared_redis.host, port=shared_redis.port) as client:
        await client.flushdb()
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    with FaultyProxy(shared_redis.port) as proxy:
        near = {"hot": f"redis://127.0.0.1:{proxy.port}", "cold": cold}
        far = {"hot": f"redis://127.0.0.1:{shared_redis.port}", "cold": cold}
        async with (
            open_service(tmp_path / "a", **near) as writer,
            open_service(tmp_path / "b", **far) as other,
            other.client("operator") as operator,
        ):
            await writer.save(known)
            proxy.refuse()
            await writer.store.open_namespace(cut_off.description, deadline=soon())
            for record in cut_off.records():
                assert await writer.store.save(record, ack=Ack.COLD, deadline=soon()) is SaveOutcome.STORED
            for confirm in (False, True):
                job = await ended(operator, await operator.post("/v1/gc", params={"confirm": confirm}))
                assert (job["state"], job["error"]) == ("done", None)
                found, notes = job["report"]["orphans"], job["report"]["notes"]
                if are_old:
                    assert found["s3"]["num_records"] == 6 and notes == ([] if confirm else [gc.MAY_BE_LIVE])
                else:
                    assert (found, notes) == ({}, [f"s3 keeps 6 more that are younger than a day: {gc.YOUNG}"])
            proxy.heal()
            stored = await other.store.operations.stored_sizes(cut_off.record_keys(), Level.COLD, deadline=soon())
            assert [size is None for size in stored] == [are_old] * 6
            if not are_old:
                await other.store.open_namespace(cut_off.description, deadline=soon())

                async def resumed() -> int:
                    return (await other.store.lookup(cut_off.query(), deadline=soon())).resume_tokens

                await until(resumed, holds=lambda tokens: tokens == 64 * 3)
