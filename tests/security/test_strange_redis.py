"""What answers on the port of Redis is no Redis, is damaged, or holds damaged keys: tiers and catalog are unavailable
or repaired. No internal error, no end with a traceback, and no refusal that outlasts a restart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgpack
import pytest
from redis.asyncio import Redis

from kvstore.catalog.base import Addition, Use
from kvstore.catalog.entry import Level
from kvstore.catalog.redis.pending import RedisPendingLog
from kvstore.compose import open_catalog, open_store
from kvstore.errors import CorruptRecord, Unavailable
from kvstore.runtime.deadline import Deadline
from kvstore.settings import Settings, load_settings
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.records import make_key, make_record
from kvstore.testing.servers import RedisServer, redis_server
from kvstore.testing.store_node import save_all
from kvstore.testing.waiting import soon, until
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis.examine import parse_info
from tests.contract.pending_entries import entries
from tests.security.strange_redis import strange_redis

pytestmark = pytest.mark.servers

HUGE = b"9" * 40
ENDLESS = b"9" * 5000
STRANGE = {
    "OK": b"+OK\r\n",
    "a word": b"+sure\r\n",
    "nil": b"$-1\r\n",
    "one": b":1\r\n",
    "minus one": b":-1\r\n",
    "more than 64 bits": b":" + HUGE + b"\r\n",
    "more digits than Python converts": b":" + ENDLESS + b"\r\n",
    "an empty text": b"$0\r\n\r\n",
    "a text": b"$3\r\nabc\r\n",
    "a number as text": b"$40\r\n" + HUGE + b"\r\n",
    "no text at all": b"$3\r\n\xff\xfe\x00\r\n",
    "an empty list": b"*0\r\n",
    "no list": b"*-1\r\n",
    "a short list": b"*1\r\n:1\r\n",
    "a list of nils": b"*3\r\n$-1\r\n$-1\r\n$-1\r\n",
    "a list of lists": b"*2\r\n*1\r\n:1\r\n*0\r\n",
    "an error": b"-ERR no\r\n",
    "an empty error": b"-\r\n",
    "a place that is none": b"-MOVED 99999999 host:999999999\r\n",
    "a place without a number": b"-MOVED a b\r\n",
    "another place": b"-ASK 1 127.0.0.1:1\r\n",
    "no protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "another protocol": b"%1\r\n+a\r\n+b\r\n",
}


@pytest.fixture
def no_bug(caplog: pytest.LogCaptureFixture) -> Callable[[], None]:
    """Fails if anything was logged with a traceback, as the tops of tasks do with an unexpected error."""

    def check() -> None:
        found = [record.getMessage() for record in caplog.records if record.exc_info or record.levelno > logging.ERROR]
        assert not found, found

    return check


def settings_of(port: int, folder: Path, **more: object) -> Settings:
    flags = {"hot": f"redis://127.0.0.1:{port}/0", "cold": f"file://{folder}", "memory_bytes": 64 << 20}
    return load_settings({**flags, "listen": f"unix:{folder}.sock", "catalog_look_s": 0.2, **more})


async def check_serves(store: TieredStore, name: str) -> None:
    """Engines are served from memory and the directory, for every fault of the hot tier; operators see the fault."""
    prompt = Prompt(ATTENTION, name, 64)
    await save_all(store, prompt)
    found = await store.lookup(prompt.query(), deadline=soon())
    assert found.resume_tokens == 64
    msgpack.packb(await store.status(deadline=Deadline.after(2.0)), default=str)
    for state in await store.operations.tiers(deadline=Deadline.after(2.0)):
        msgpack.packb([state.usage and state.usage.used_bytes, state.reason])


@pytest.mark.parametrize(
    ("name", "polite"),
    [*((name, True) for name in STRANGE), ("OK", False), ("nil", False), ("one", False), ("a short list", False)],
)
async def test_every_answer_is_strange(name: str, polite: bool, tmp_path: Path, no_bug: Callable[[], None]) -> None:
    """A store starts, serves and stops over it."""
    polite_to = frozenset({b"PING", b"CLIENT", b"SELECT", b"HELLO"} if polite else set())
    async with (
        asyncio.timeout(60),
        strange_redis(STRANGE[name], polite_to=polite_to) as port,
        open_store(settings_of(port, tmp_path / "cold", drain_timeout_s=0.1)) as store,
    ):
        await check_serves(store, "a")
        await asyncio.sleep(0.3)  # the reconciler, the finisher and the orders check during that
    no_bug()


@pytest.mark.parametrize("name", STRANGE)
async def test_every_call_of_the_tier(name: str) -> None:
    """Each is refused, or answered as if the record were absent or damaged; a put is never taken for done."""
    polite_to = frozenset({b"PING", b"SELECT"})
    async with strange_redis(STRANGE[name], polite_to=polite_to) as port:
        tier = RedisTier(f"redis://127.0.0.1:{port}/0")
        calls = {
            "head": lambda: tier.head([make_key(1), make_key(2)], deadline=soon()),
            "get": lambda: tier.get(make_key(1), deadline=soon()),
            "put": lambda: tier.put(make_record(1), deadline=soon()),
            "put, striped": lambda: tier.put(make_record(2, payload_bytes=5 << 20), deadline=soon()),
            "delete": lambda: tier.delete(make_key(1), deadline=soon()),
            "delete_all": lambda: tier.delete_all([make_key(1)], deadline=soon()),
            "allow_eviction": lambda: tier.allow_eviction([make_key(1)], deadline=soon()),
            "quarantine": lambda: tier.quarantine(make_key(1), "a test", deadline=soon()),
            "get_manifest": lambda: tier.get_manifest(make_key(1).namespace, deadline=soon()),
            "put_manifest": lambda: tier.put_manifest(make_key(1).namespace, b"{}", deadline=soon()),
            "usage": lambda: tier.usage(deadline=soon()),
        }
        for verb, call in calls.items():
            try:
                told = await call()
            except (Unavailable, CorruptRecord):
                continue
            msgpack.packb(told if isinstance(told, list) else 0)
            assert not verb.startswith("put, "), told
            assert verb != "put" or name in ("nil", "no list", "OK"), told
        await tier.aclose()


def test_facts_of_any_form() -> None:
    """Numbers of a server's report fit into the status."""
    for number in (b"", b"-1", b"abc", HUGE, ENDLESS, "٣".encode(), b"1e9"):
        report = b"".join(b"%b:%b\r\n" % (name, number) for name in (b"used_memory", b"maxmemory"))
        facts = parse_info(report, "here", 0.1)
        msgpack.packb([facts.used_bytes, facts.limit_bytes])


# Damaged keys

DAMAGE = {
    "another type": lambda client, name: client.lpush(name, b"x"),
    "a set": lambda client, name: client.sadd(name, b"x"),
    "garbage": lambda client, name: client.set(name, b"\xff garbage"),
    "an empty text": lambda client, name: client.set(name, b""),
    "a number over 64 bits": lambda client, name: client.set(name, HUGE),
    "a negative number": lambda client, name: client.set(name, b"-5"),
    "gone": lambda client, name: client.delete(name),
}


async def damage_all(client: Redis, damage: str) -> int:
    """Damage every key of the catalog, of pending writes, orders and leases; how many."""
    names = [name async for name in client.scan_iter(count=1000) if not name.startswith((b"v1/", b"quarantine"))]
    for name in names:
        await client.delete(name)
        await DAMAGE[damage](client, name)
    return len(names)


async def damage_values(client: Redis) -> None:
    """Damage what stands inside keys of the right type."""
    for name in [name async for name in client.scan_iter(count=1000) if not name.startswith((b"v1/", b"quarantine"))]:
        match await client.type(name):
            case b"string":
                await client.setrange(name, 0, b"\xff\xff\xff")
            case b"hash":
                for field in await client.hkeys(name):
                    await client.hset(name, field, b"\xff")
                await client.hset(name, b"a field", b"\xffvalue")
            case b"list":
                await client.lset(name, 0, b"\xff")
            case b"zset":
                await client.zadd(name, {b"a member": 0})


async def check_works(settings: Settings, store: TieredStore, name: str) -> None:
    """All of it works: records reach both tiers, the catalog learns of them, and nothing is pending."""
    prompt = Prompt(ATTENTION, name, 64)
    await check_serves(store, name)
    async with asyncio.timeout(30):
        while await store.drain(Deadline.after(5.0)):
            pass
    async with open_catalog(settings) as catalog, asyncio.timeout(30):
        await catalog.register(prompt.namespace, prompt.description.layout(), "", deadline=soon())
        prefixes = [boundary.prefix for boundary in prompt.query().boundaries]
        while True:
            table = await catalog.lookup(prompt.namespace, prefixes, deadline=soon())
            if all(table.rows(level).any() for level in (Level.HOT, Level.COLD)):
                break
            await asyncio.sleep(0.05)
        totals = await catalog.totals(deadline=soon())
        msgpack.packb([[held.num_bytes for held in one.levels] for one in totals.values()])
        await catalog.tombstones(limit=100, deadline=soon())
        # what was stored before the damage can be found, and used, again
        old = Prompt(ATTENTION, "before", 64)
        told = [Addition(record.key, Level.HOT, record.num_bytes, record.header.span.stop) for record in old.records()]
        assert all(await catalog.add(told, deadline=soon()))
        await catalog.use(old.namespace, [Use(told[0].key.prefix, 1, 64, None)], deadline=soon())
        assert await catalog.get(old.namespace, told[0].key.prefix, deadline=soon()) is not None


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.mark.parametrize("damage", [*DAMAGE, "inside"])
async def test_keys_are_damaged_under_a_running_service(
    damage: str, own_redis: RedisServer, tmp_path: Path, no_bug: Callable[[], None]
) -> None:
    """It continues, and so does the next one: every damaged key is repaired by the service that needs it."""
    server = own_redis
    settings = settings_of(server.port, tmp_path / "cold")
    async with Redis(host=server.host, port=server.port) as client:
        async with open_store(settings) as store:
            await check_works(settings, store, "before")
            if damage == "inside":
                await damage_values(client)
            else:
                assert await damage_all(client, damage) > 5
            await check_works(settings, store, "after")
        if damage == "inside":
            await damage_values(client)
        else:
            await damage_all(client, damage)
        async with open_store(settings) as store:
            await check_works(settings, store, "restarted")
    no_bug()


@pytest.mark.parametrize("text", [b"\xff", b"", HUGE, b"-7", b"1.5", b"nan"])
async def test_a_damaged_counter_of_pending_bytes_is_counted_again(
    text: bytes, shared_redis: RedisServer, tmp_path: Path
) -> None:
    """After any call the sum is right again."""
    async with Redis.from_url(shared_redis.url) as client:
        log = RedisPendingLog(client, str(tmp_path), lease_s=30)
        written = entries(*range(20))
        await log.add(written, deadline=soon())
        right = await log.totals(deadline=soon())
        counters = [name async for name in client.scan_iter(match=f"{log._root}:*:bytes")]
        for calls in (
            lambda: log.totals(deadline=soon()),
            lambda: log.add(written, deadline=soon()),
        ):
            for name in counters:
                await client.set(name, text)
            await calls()
            assert await log.totals(deadline=soon()) == right
        for name in counters:
            await client.set(name, text)
        await log.finish([entry.key for entry in written], deadline=soon())
        assert (await log.totals(deadline=soon())).num_bytes == 0


async def test_a_lease_that_never_ends_gets_an_end(shared_redis: RedisServer, tmp_path: Path) -> None:
    """Garbage without an expiry under a lease's name does not block the work for ever."""
    from kvstore.catalog.redis.coordination import RedisOwnership

    async with Redis.from_url(shared_redis.url) as client:
        for damage in (lambda name: client.set(name, b"garbage"), lambda name: client.lpush(name, b"x")):
            name = f"test {tmp_path.name} {damage.__code__.co_firstlineno}{damage.__code__.co_consts}"
            await client.delete(f"c1o/{name}")
            await damage(f"c1o/{name}")
            owner = RedisOwnership(client, lease_s=0.3)
            await until(partial(owner.hold, name, deadline=soon()))
