"""A Redis that is frozen, or refuses writes: no request waits long, and every answer names the cause."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from kvstore.api import Outcome
from kvstore.compose import open_store
from kvstore.runtime.deadline import Deadline
from kvstore.settings import load_settings
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.servers import RedisServer, redis_server
from kvstore.testing.store_node import save_all
from kvstore.testing.waiting import soon, until
from tests.unit.admin.service_harness import open_service, prompt_of

pytestmark = pytest.mark.servers


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """Of each test alone, since it is frozen or changed."""
    with redis_server() as server:
        yield server
        server.thaw()


def hot(server: RedisServer) -> str:
    return f"redis://{server.host}:{server.port}"


async def test_a_lookup_waits_no_longer_than_the_store_allows(redis: RedisServer, tmp_path: Path) -> None:
    """Clients with a minute's time ask while it is frozen, from the first moment on: all are answered within the
    store's own bound, of twice 0.4 s by default, and some room for a busy machine.
    """
    flags = {"hot": hot(redis), "cold": f"file://{tmp_path / 'cold'}", "memory_bytes": 64 << 20}
    async with open_store(load_settings({**flags, "listen": f"unix:{tmp_path / 'socket'}"})) as store:
        for name in "abcdef":
            prompt = Prompt(ATTENTION, name, 64)
            await store.open_namespace(prompt.description, deadline=soon())
            await store.lookup(prompt.query(), deadline=soon())
        redis.freeze()

        async def waited_s(name: str) -> float:
            started_s = time.monotonic()
            await store.lookup(Prompt(ATTENTION, name, 64).query(), deadline=Deadline.after(60.0))
            return time.monotonic() - started_s

        waits = [await waited_s("a")]
        waits += await asyncio.gather(*(waited_s(name) for name in "bcdef"))
        waits += [await waited_s(name) for name in "abcdef"]
        assert max(waits) < 4.0, waits
        redis.thaw()


async def test_lists_say_that_it_is_frozen(redis: RedisServer, tmp_path: Path) -> None:
    """Also before the service has noticed, and for several requests at a time: in a second or two, with the cause."""
    async with open_service(tmp_path, with_tokens=False, hot=hot(redis)) as made, made.client() as client:
        await made.save(prompt_of("a"))
        redis.freeze()
        for attempt in range(3):
            started_s = time.monotonic()
            paths = ["/v1/namespaces", "/v1/namespaces", "/v1/quotas", "/v1/namespaces"]
            answers = await asyncio.gather(*(client.get(path) for path in paths))
            waited_s = time.monotonic() - started_s
            assert answers[0].status_code == 503
            assert (
                "the catalog and does not answer" in answers[0].json()["detail"] or "not used until" in answers[0].text
            )
            assert waited_s < 5.0, attempt
            assert "does not answer" in answers[2].json()["unread"]
        command = [sys.executable, "-c", "import sys; from kvstore.cli.main import main; sys.exit(main())"]
        command += ["ls", "--admin-url", made.url]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        started_s = time.monotonic()
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, env=environment)
        _, said = await process.communicate()
        assert process.returncode != 0
        assert b"the catalog and does not answer" in said or b"not used until" in said, said
        assert time.monotonic() - started_s < 15.0  # most of it is the start of Python
        redis.thaw()


async def test_sizes_are_the_last_known_ones(redis: RedisServer, tmp_path: Path) -> None:
    """What it held, with the time of that, and not zero; the history has no value for the time."""
    async with open_service(tmp_path, with_tokens=False, hot=hot(redis)) as made, made.client() as client:
        await made.save(prompt_of("a"))
        (before,) = [one for one in (await client.get("/v1/tiers")).json()["tiers"] if one["name"] == "redis"]
        assert before["usage"]["used_bytes"] > 0 and before["last_known"] is None and before["own_at_s"] is None
        await made.port.watcher.step()
        redis.freeze()
        await asyncio.sleep(1.1)  # what the catalog told is believed for a second
        (after,) = [one for one in (await client.get("/v1/tiers")).json()["tiers"] if one["name"] == "redis"]
        assert not after["healthy"] and after["usage"] is None
        assert after["last_known"]["used_bytes"] > 0
        assert abs(after["last_known"]["at_s"] - time.time()) < 60
        assert after["own"] == before["own"] and after["own_at_s"] is not None
        assert 'kvstore_tier_used_bytes{tier="redis"} ' in (await client.get("/metrics")).text
        told: Any = await made.store.status(deadline=soon())
        assert told["tiers"]["redis"]["last_known"]["used_bytes"] > 0
        await made.port.watcher.step()
        samples = made.service.history.samples()
        assert samples[0].tier_bytes["redis"] > 0 and "redis" not in samples[-1].tier_bytes
        redis.thaw()


@pytest.mark.parametrize("is_seen", [True, False])
async def test_what_is_kept_is_not_zero_after_the_catalog_is_lost(
    is_seen: bool, redis: RedisServer, tmp_path: Path
) -> None:
    """Redis came back empty and the directory holds what it held: what was last known of it is shown, or nothing."""
    async with (
        open_service(tmp_path, with_tokens=False, hot=hot(redis)) as made,
        made.client() as client,
        Redis(host=redis.host, port=redis.port) as direct,
    ):

        async def cold() -> Any:
            return (await client.get("/v1/tiers")).json()["tiers"][2]

        await made.save(prompt_of("a"))
        before = await cold() if is_seen else None
        await direct.flushall()
        await asyncio.sleep(1.1)  # what the catalog told is believed for a second
        after = await cold()
        if before is None:
            assert after["own"] is None
        else:
            assert before["own"]["num_bytes"] > 0 and before["own_at_s"] is None
            assert after["own"] == before["own"] and after["own_at_s"] is not None


Refuse = Callable[[Redis], Awaitable[object]]

REFUSALS: dict[str, tuple[Refuse, Refuse]] = {
    "it is a replica": (
        lambda client: client.execute_command("REPLICAOF", "127.0.0.1", "1"),
        lambda client: client.execute_command("REPLICAOF", "NO", "ONE"),
    ),
    "it has no memory left": (
        lambda client: client.config_set("maxmemory", 1),
        lambda client: client.config_set("maxmemory", 0),
    ),
    "fewer replicas than it wants": (
        lambda client: client.config_set("min-replicas-to-write", 1),
        lambda client: client.config_set("min-replicas-to-write", 0),
    ),
}


@pytest.mark.parametrize("cause", REFUSALS)
async def test_it_is_not_ready_while_it_refuses_writes(cause: str, redis: RedisServer, tmp_path: Path) -> None:
    """Nothing need have been written until then. The cause is said; once it takes writes again, all is well."""
    refuse, allow = REFUSALS[cause]
    async with (
        open_service(tmp_path, with_tokens=False, hot=hot(redis)) as made,
        made.client() as client,
        Redis(host=redis.host, port=redis.port) as direct,
    ):
        assert (await client.get("/readyz")).status_code == 200
        await refuse(direct)
        answer = await client.get("/readyz")
        assert answer.status_code == 503
        (tier,) = [one for one in answer.json()["tiers"] if one["name"] == "redis"]
        assert cause in tier["reason"] and "it takes no writes" in tier["reason"]
        assert answer.json()["reason"] == f"redis: {tier['reason']}"
        (told,) = [one for one in (await client.get("/v1/tiers")).json()["tiers"] if one["name"] == "redis"]
        assert not told["healthy"] and told["problem"] == "takes no writes" and cause in told["reason"]
        status = await made.store.status(deadline=soon())
        assert cause in status["tiers"]["redis"]["refuses_writes"]  # type: ignore[index]
        await allow(direct)
        await until(lambda: client.get("/readyz"), 30, holds=lambda answer: answer.status_code == 200)


async def test_it_is_not_ready_while_records_find_no_room(redis: RedisServer, tmp_path: Path) -> None:
    """A small write would still find room; a record did not."""
    async with (
        open_service(tmp_path, with_tokens=False, hot=hot(redis)) as made,
        made.client() as client,
        Redis(host=redis.host, port=redis.port) as direct,
    ):
        used_bytes = (await direct.info("memory"))["used_memory"]
        await direct.config_set("maxmemory", used_bytes + (200 << 10))
        prompt = Prompt(ATTENTION, "large", 64 * 8, payload_bytes=512 << 10)
        await save_all(made.store, prompt)
        await made.store.drain(Deadline.after(5.0))
        answer = await client.get("/readyz")
        assert answer.status_code == 503 and "it has no memory left" in answer.text


async def test_what_a_full_redis_holds_is_shown_and_removed(redis: RedisServer, tmp_path: Path) -> None:
    """Also by a service that has not looked at the namespace before it was full: that is how an operator makes room."""
    async with (
        open_service(tmp_path, with_tokens=False, hot=hot(redis)) as made,
        made.client() as client,
        Redis(host=redis.host, port=redis.port) as direct,
    ):
        prompt = await made.save(prompt_of("a"))
        await direct.config_set("maxmemory", 1)
        where = f"/v1/namespaces/{prompt.namespace.hex()}"
        listed = await client.get("/v1/prefixes", params={"namespace": prompt.namespace.hex()})
        assert listed.status_code == 200, listed.text
        removed = await client.delete(where, params={"confirm": "true"})
        assert removed.status_code == 200 and removed.json()["is_complete"], removed.text
        assert (await client.get(where)).json()["num_boundaries"] == 0


async def test_a_full_redis_still_explains_another_namespace(redis: RedisServer, tmp_path: Path) -> None:
    """The reason is found by reading, so no write is needed for it."""
    async with (
        open_service(tmp_path, with_tokens=False, hot=hot(redis)) as made,
        Redis(host=redis.host, port=redis.port) as direct,
    ):
        stored = await made.save(prompt_of("a"))
        missed = replace(stored, weights_id="another")
        await made.store.open_namespace(missed.description, deadline=soon())
        await made.settle()
        await direct.config_set("maxmemory", 1)
        outcome = Outcome("r", missed.namespace, 336, 336, 0, 0, "nothing_stored", stop=stored.boundary(64))
        made.store.report(outcome)
        told = await made.store.explain("r", deadline=soon(), tenant=None)
        assert told["reason"] == "namespace_differs", told
