"""Why a request was a miss, each reason brought about on a real Redis or directory behind a real scheduler side."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from connector.identity import describe_namespace
from kvstore.api import Ack, Deadline, Outcome
from kvstore.catalog.redis.catalog import RedisCatalog
from kvstore.catalog.redis.reconcile import Reconciler
from kvstore.client import connect
from kvstore.client.remote import RemoteStore
from kvstore.compose import open_catalog, open_store
from kvstore.errors import InvalidRequest
from kvstore.model.keys import Boundary, PrefixHash
from kvstore.runtime.meters import Meters
from kvstore.service.authentication import Grant
from kvstore.service.server import Server
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import ATTENTION, HYBRID, Prompt
from kvstore.testing.servers import RedisServer
from kvstore.testing.tokens import credentials_of
from kvstore.testing.waiting import eventually, soon, until
from kvstore.tiers.memory import MemoryTier
from kvstore.wire.address import parse_address
from tests.integration.explained_engine import TOKENS, directory, engine, on_redis
from tests.unit.connector.support import WEIGHTS, make_facts, make_shape, records_of, tokens_of

pytestmark = pytest.mark.servers


@pytest.fixture
def redis(shared_redis: RedisServer) -> RedisServer:
    shared_redis.flush()
    return shared_redis


def test_never_stored_and_stored_since(tmp_path: Path) -> None:
    """Nobody ever had it; a moment later this very request's pages are there, which does not change why it missed."""
    with engine(directory(tmp_path), tmp_path) as at:
        assert at.ask("a", "prompt") == 0
        told = at.explain("a")
        assert (told["reason"], told["result"], told["stopped_at_tokens"]) == ("never_stored", "miss", 64)
        at.keep("prompt")
        told = at.explain("a")
        assert told["reason"] == "never_stored"
        assert 0 <= told["detail"]["stored_after_s"] <= 30
        assert at.ask("b", "prompt") == 192
        assert at.explain("b")["result"] == "hit"


def test_evicted(tmp_path: Path) -> None:
    """It was stored, and left for the sake of others: when is said, and from where."""
    settings = directory(tmp_path, disk_bytes=3 * 8 * 4096, retention_policy="lru")  # three prompts, a block a record
    with engine(settings, tmp_path) as at:
        at.keep("first")
        for number in range(6):
            at.keep(f"other {number}")
        eventually(at.num_tombstones)
    with engine(settings, tmp_path) as at:  # with an empty memory
        reached = at.ask("a", "first")
        assert reached < 192
        told = at.explain("a")
        assert told["reason"] == "evicted"
        assert (told["detail"]["left"], told["detail"]["left_from"]) == ("evicted", "cold")
        assert 0 <= told["detail"]["left_before_s"] <= 60
        assert "budget" in told["why"]
        assert "pin" in told["advice"]


def test_a_slice_is_missing(tmp_path: Path) -> None:
    """One record of a page was quarantined by an engine that found it corrupt: the group is named."""
    with engine(directory(tmp_path), tmp_path) as at:
        records = at.keep("prompt")
        second = next(record for record in records if record.header.span.stop == 128)
        at.bridge.run(lambda store: store.discard(second.key, "checksum", deadline=soon()))
        at.bridge.run(lambda store: store.recorder.drain(soon()))
        assert at.ask("a", "prompt") == 64
        told = at.explain("a")
        assert (told["result"], told["resume_tokens"], told["stopped_at_tokens"]) == ("part", 64, 128)
        assert told["reason"] == "corrupt"
        assert told["detail"]["left"] == "corrupt"


def test_another_dtype(tmp_path: Path) -> None:
    """The fleet's other engine has it in another namespace: the fields that differ are named, with both values."""
    settings = directory(tmp_path)
    with engine(settings, tmp_path, dtype="bfloat16", element_bytes=2, compute_dtype="bfloat16") as at:
        at.keep("prompt")
    with engine(settings, tmp_path) as at:
        assert at.ask("a", "prompt") == 0
        told = at.explain("a")
        assert told["reason"] == "namespace_differs"
        assert "'float32' here, 'bfloat16' there" in told["detail"].values()
        assert "dtype" in told["detail"]["fields"]


def test_another_salt(tmp_path: Path) -> None:
    """Stored for somebody else's salt: apart on purpose."""
    with engine(directory(tmp_path), tmp_path) as at:
        at.keep("prompt")
        assert at.ask("a", "prompt") == 192
        assert at.ask("b", "prompt", cache_salt="blue") == 0
        told = at.explain("b")
        assert (told["reason"], told["detail"]["other_request"]) == ("other_salt", "a")


def test_lists_and_counts_have_the_reasons_of_explain(tmp_path: Path) -> None:
    """Of misses for four causes, which the engine cannot tell apart: the list, the counts of the last minutes, and the
    meter have for each what `explain` says of it, though nobody has asked for an explanation."""
    settings = directory(tmp_path, disk_bytes=3 * 8 * 4096, retention_policy="lru")
    with engine(settings, tmp_path, dtype="bfloat16", element_bytes=2, compute_dtype="bfloat16") as at:
        at.keep("typed", ends=[64])
    with engine(settings, tmp_path) as at:
        at.keep("first")
        for number in range(6):
            at.keep(f"other {number}")
        eventually(lambda: at.num_tombstones() > 0)
    with engine(settings, tmp_path) as at:
        # what it compares at its start is not told of as never stored
        eventually(lambda: at.bridge.run(lambda store: store.recorder.catalog.is_complete(deadline=soon())))
        at.keep("salted", ends=[64])
        assert at.ask("a warm one", "salted") == 64
        asked = {"salt": "salted", "dtype": "typed", "evicted": "first", "never": "new"}
        for cause, prompt in asked.items():
            at.ask(cause, prompt, **({"cache_salt": "blue"} if cause == "salt" else {}))
        eventually(lambda: set(asked) <= set(at.listed()) and "nothing_stored" not in at.listed().values())
        listed = {cause: reason for cause, reason in at.listed().items() if cause in asked}
        status = at.bridge.run(lambda store: store.status(deadline=soon()))
        assert listed == {cause: at.explain(cause)["reason"] for cause in asked}
        assert listed["salt"] == "other_salt" and listed["never"] == "never_stored"
        for reason in set(listed.values()):
            num = sum(one == reason for one in at.listed().values())
            assert status["recent"]["reasons"][reason] == num
            requests = {name: num for name, num in status["counters"].items() if name.startswith("requests{")}
            counted = [value for name, value in requests.items() if f'reason="{reason}"' in name]
            assert sum(counted) == num
        assert "nothing_stored" not in status["recent"]["reasons"]


def test_lost_by_redis(redis: RedisServer, tmp_path: Path) -> None:
    """Redis let records go by itself; the catalog has found out."""
    settings = on_redis(redis)
    with engine(settings, tmp_path) as at:
        at.keep("prompt")

    async def lose() -> int:
        async with Redis(host=redis.host, port=redis.port) as client, open_catalog(settings) as catalog:
            assert isinstance(catalog, RedisCatalog)
            reconciler = Reconciler(catalog, Meters())
            await reconciler.check()
            await client.unlink(*[name async for name in client.scan_iter(match="v1/*{*")])
            return await reconciler.check()

    with engine(settings, tmp_path) as at:
        assert asyncio.run(lose()) > 0
        assert at.ask("a", "prompt") == 0
        assert at.explain("a")["reason"] == "lost"
        redis.freeze()
        try:
            frozen = at.bridge.run(lambda store: store.explain("a", deadline=Deadline.after(0.2), tenant=None))
        finally:
            redis.thaw()
        assert frozen["reason"] == at.listed()["a"] == "lost"
        assert "redis" in frozen["detail"]["no_answer"].lower()


def test_corrupt_in_redis(redis: RedisServer, tmp_path: Path) -> None:
    """Bytes changed in Redis: nothing of them is used, and that is the reason."""
    settings = on_redis(redis, stall_timeout_ms=5000)
    with engine(settings, tmp_path) as at:
        at.keep("prompt")

    async def damage() -> None:
        async with Redis(host=redis.host, port=redis.port) as client:
            for name in [name async for name in client.scan_iter(match="v1/*{*")]:
                await client.setrange(name, 200, b"damaged")

    asyncio.run(damage())
    with engine(settings, tmp_path) as at:
        assert at.ask("a", "prompt") == 0
        eventually(lambda: at.explain("a")["reason"] == "corrupt")


def test_a_frozen_tier(redis: RedisServer, tmp_path: Path) -> None:
    """Redis stands still while it is asked: nobody knows what it has, and it is named."""
    with engine(on_redis(redis), tmp_path) as at:
        at.keep("prompt")
    with engine(on_redis(redis), tmp_path) as at:
        redis.freeze()
        try:
            assert at.ask("a", "prompt") == 0
            told = at.explain("a")
        finally:
            redis.thaw()
        assert told["reason"] in ("tier_failed", "lookup_timeout")
        if told["reason"] == "tier_failed":
            assert told["detail"]["silent"] == "redis"


def test_no_room_in_this_node(tmp_path: Path) -> None:
    """A hit that is larger than what this node can hold is cut, and the setting is named."""
    with engine(directory(tmp_path), tmp_path) as at:
        num_bytes = sum(record.num_bytes for record in at.keep("prompt"))
    with engine(directory(tmp_path, memory_bytes=num_bytes * 2 // 3), tmp_path) as at:
        assert at.ask("a", "prompt") < 192
        told = at.explain("a")
        assert told["reason"] == "node_memory"
        assert "memory_bytes" in told["advice"]


async def test_tenants_see_their_own(tmp_path: Path) -> None:
    """Over the wire: a tenant gets its requests and no other's, and is not told that another one has the same; a
    process of the service's own user sees all, and that it is another tenant's.
    """
    tokens = {"red": "a" * 32, "blue": "b" * 32}
    credentials = credentials_of({token: Grant(name) for name, token in tokens.items()})
    facts = make_facts()
    shape = make_shape(facts)
    description = describe_namespace(facts, shape, WEIGHTS)
    async with AsyncExitStack() as stack:
        store = TieredStore(MemoryTier(8 << 20))
        stack.push_async_callback(store.aclose)
        server = Server(store, credentials=credentials)
        stack.push_async_callback(server.aclose)
        await server.listen([parse_address(f"unix:{tmp_path / 's'}")])

        def client(token: str | None) -> RemoteStore:
            made = connect(str(server.addresses[0]), token=token)
            stack.push_async_callback(made.aclose)
            return made

        content = {"first": PrefixHash(bytes(32)), "content": bytes(16), "prompt_tokens": 200, "cap_tokens": 192}
        for name in ("red", "blue"):
            tenant = client(tokens[name])
            namespace = await tenant.open_namespace(description, deadline=soon())
            stop = records_of(tokens_of("a", TOKENS), facts, shape)[0]
            tenant.report(
                Outcome(
                    f"of {name}", namespace, local_tokens=0, resume_tokens=0, reason="nothing_stored",
                    stop=Boundary(64, stop.key.prefix), **content,  # type: ignore[arg-type]
                )
            )  # fmt: skip
            await tenant.status(deadline=soon())  # behind it on the same connection: it has arrived
        blue: Any = await client(tokens["blue"]).explain("", deadline=soon())
        assert [one["request"] for one in blue["requests"]] == ["of blue"]
        with pytest.raises(InvalidRequest, match="unknown request"):
            await client(tokens["blue"]).explain("of red", deadline=soon())
        assert (await client(tokens["blue"]).explain("of blue", deadline=soon()))["reason"] == "nothing_stored"
        everything: Any = await client(None).explain("", deadline=soon())
        assert [one["request"] for one in everything["requests"]] == ["of blue", "of red"]
        told: Any = await client(None).explain("of blue", deadline=soon())
        assert (told["reason"], told["detail"]["other_tenant"]) == ("other_tenant", "red")


async def test_a_group_that_was_not_stored(tmp_path: Path) -> None:
    """Pages of attention alone, as an engine leaves them that died before it saved the state: the group is named."""
    prompt = Prompt(HYBRID, "a", 128)
    async with open_store(directory(tmp_path)) as store:
        await store.open_namespace(prompt.description, deadline=soon())
        for record in prompt.records():
            if record.key.group == 0:
                await store.save(record, ack=Ack.COLD, deadline=soon())
        found = await store.lookup(prompt.query(), deadline=soon())
        at_page = [boundary.tokens for boundary in prompt.query().boundaries].index(64)
        assert (found.resume_tokens, found.groups_present[at_page]) == (0, 0b01)
        store.report(
            Outcome("a", prompt.namespace, 128, 112, 0, 0, "nothing_stored", stop=prompt.boundary(64), groups=0b01)
        )
        told: Any = await store.explain("a", deadline=soon())
    assert (told["reason"], told["detail"]["groups_missing"]) == ("group_incomplete", "1 (recurrent)")


async def test_a_slice_that_was_not_stored(tmp_path: Path) -> None:
    """Of a model with one group, one of two slices: both are named, until it is stored too."""
    prompt = Prompt(ATTENTION, "a", 64)
    first, second = prompt.records()
    miss = Outcome("a", prompt.namespace, 80, 64, 0, 0, "nothing_stored", stop=prompt.boundary(64))
    async with open_store(directory(tmp_path)) as store:
        await store.open_namespace(prompt.description, deadline=soon())
        await store.save(first, ack=Ack.COLD, deadline=soon())
        await asyncio.sleep(1.1)  # times of the catalog are whole seconds
        store.report(miss)
        told: Any = await store.explain("a", deadline=soon())
        assert told["reason"] == "group_incomplete" and "on their way" not in told["advice"]
        assert told["detail"]["groups_missing"].startswith("0 (")
        assert told["detail"]["slices_missing"].startswith("1 of 2 of group 0 (")
        await store.save(second, ack=Ack.COLD, deadline=soon())
        told = await store.explain("a", deadline=soon())
        assert told["reason"] == "stored_since" and "groups_missing" not in told["detail"]


async def test_one_tenants_requests_do_not_push_out_anothers() -> None:
    """However many a tenant has: each has so many kept, and an operator sees both, newest first."""
    store = TieredStore(MemoryTier(8 << 20))
    try:
        for number in range(5000):
            store.report(Outcome(f"red {number}", None, 100, 0, 0, 0, "mode", tenant="red"))
            if number == 100:
                store.report(Outcome("blue", None, 100, 0, 0, 0, "mode", tenant="blue"))
        assert (await store.explain("blue", deadline=soon(), tenant="blue"))["request"] == "blue"
        with pytest.raises(InvalidRequest, match="unknown request"):
            await store.explain("red 100", deadline=soon(), tenant="red")
        everything: Any = await store.explain("", deadline=soon(), tenant=None)
        assert [one["request"] for one in everything["requests"][:2]] == ["red 4999", "red 4998"]
    finally:
        await store.aclose()


@pytest.mark.parametrize("num_explained", [128, pytest.param(256, marks=pytest.mark.full)])
async def test_more_misses_than_are_looked_into(num_explained: int, tmp_path: Path) -> None:
    """A flood of misses: each has a reason at once or soon, those that were not looked into say so, the counts add up,
    and who asks for one of them is told its own. At most 256 wait to be looked into, which is done slowly on purpose.
    """
    prompt = Prompt(HYBRID, "a", 128)
    async with open_store(directory(tmp_path)) as store:
        await store.open_namespace(prompt.description, deadline=soon())
        for number in range(1000):
            miss = Outcome(f"r{number}", prompt.namespace, 128, 112, 0, 0, "nothing_stored", stop=prompt.boundary(64))
            store.report(miss)

        async def reasons() -> dict[str, int]:
            status: Any = await store.status(deadline=soon())
            return dict(status["recent"]["reasons"])

        found = await until(reasons, holds=lambda found: found.get("never_stored", 0) >= num_explained)
        assert set(found) == {"never_stored", "not_looked_into"}
        assert 1000 - 256 + num_explained <= sum(found.values()) <= 1000
        told: Any = await store.explain("r999", deadline=soon())
        assert told["reason"] == "never_stored"
        listed: Any = await store.explain("", deadline=soon())
        assert listed["requests"][0]["reason"] == "never_stored", "the list says what was explained"
