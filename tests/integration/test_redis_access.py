"""Logging in to Redis: TLS, certificates on both sides, users and their rights; and what is wrong with a server."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from kvstore.api import Ack
from kvstore.catalog.redis.catalog import RedisCatalog
from kvstore.compose import open_catalog, open_store
from kvstore.errors import Unavailable
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.runtime.meters import Meters
from kvstore.settings import load_settings
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.records import make_key, make_record
from kvstore.testing.servers import RedisServer, TlsRedis, redis_server, valkey_server
from kvstore.testing.servers.redis_tls import TLS_PASSWORD
from kvstore.testing.waiting import until
from kvstore.tiers.base import PutOutcome, Severity
from kvstore.tiers.guarded import GuardedTier
from kvstore.tiers.locations import parse_redis
from kvstore.tiers.redis import RedisTier, open_control
from kvstore.tiers.redis.examine import examine_redis

pytestmark = pytest.mark.servers


async def refused(url: str) -> str:
    """What a tier on `url` says."""
    tier = RedisTier(url)
    with pytest.raises(Unavailable) as caught:
        await tier.get(make_key(1), deadline=Deadline.after(5))
    await tier.aclose()
    return str(caught.value)


@pytest.mark.parametrize(
    ("login", "options", "advice"),
    [
        ("kvstore:hunter2@", None, "check user and password in the url"),
        ("nobody:hunter2@", None, "check user and password in the url"),
        (":hunter2@", None, "check user and password in the url"),
        ("", None, "put user and password into the url"),
        ("kvstore:hunter2@", "", "certificate of Redis is not trusted: name its authority with ?ca_file=/path"),
    ],
)
async def test_wrong_logins(tls: TlsRedis, login: str, options: str | None, advice: str) -> None:
    """A wrong user, password or authority: the message is the next step, and no secret is in it."""
    message = await refused(tls.url(login=login, options=options))
    assert advice in message
    assert f"127.0.0.1:{tls.server.port}" in message
    assert "hunter2" not in message and TLS_PASSWORD not in message


async def test_no_certificate_of_ours(tls: TlsRedis) -> None:
    """A server that asks clients for a certificate drops us without one: unavailable, with where to name ours."""
    message = await refused(tls.url(options=f"?ca_file={tls.ca_file}"))
    assert "cert_file" in message


async def test_tls_where_none_is_spoken_and_the_other_way_round(tls: TlsRedis, shared_redis: RedisServer) -> None:
    """`rediss://` to a plain port, and `redis://` to one with TLS: each message names the other form."""
    assert "use redis://" in await refused(tls.url().replace(str(tls.server.port), str(shared_redis.port)))
    assert "rediss://" in await refused(f"redis://127.0.0.1:{tls.server.port}")


async def test_another_program_than_a_redis() -> None:
    """What it sends is no reply: the port is wrong, rather than TLS."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        message = await refused(f"redis://127.0.0.1:{port}")
    assert "does not speak the Redis protocol: check the port" in message


async def test_a_user_that_lacks_rights(tls: TlsRedis) -> None:
    """A command that the user may not use is named, with who can help; it is no miss."""
    from redis import Redis

    tier = RedisTier(tls.server.url)
    assert await tier.put(make_record(1), deadline=Deadline.after(5)) in (PutOutcome.STORED, PutOutcome.EXISTS)
    await tier.aclose()
    with redis_server() as server, Redis(port=server.port) as admin:
        admin.acl_setuser(
            "reader", enabled=True, passwords=["+hunter2"], commands=["+get", "+getrange", "+ping"], keys=["*"]
        )
        tier = RedisTier(f"redis://reader:hunter2@127.0.0.1:{server.port}")
        assert await tier.get(make_key(1), deadline=Deadline.after(5)) is None
        with pytest.raises(Unavailable, match=r"commands and keys that it lacks \(ACL SETUSER\).*'set'"):
            await tier.put(make_record(1), deadline=Deadline.after(5))
        await tier.aclose()


async def test_a_list_without_the_right_to_sizes() -> None:
    """It fails: whoever lists the records must not take them for none."""
    from redis import Redis

    with redis_server() as server, Redis(port=server.port) as admin:
        tier = RedisTier(server.url)
        await tier.put(make_record(1), deadline=Deadline.after(5))
        await tier.aclose()
        commands = ["+@all", "-strlen"]
        admin.acl_setuser("lister", enabled=True, passwords=["+hunter2"], commands=commands, keys=["*"])
        tier = RedisTier(f"redis://lister:hunter2@127.0.0.1:{server.port}")
        with pytest.raises(Unavailable, match="strlen"):
            assert [entry async for entry in tier.scan()] == []
        await tier.aclose()


async def test_a_user_that_may_only_read_is_served(caplog: pytest.LogCaptureFixture) -> None:
    """It may not write, nor ask the server for its memory. The log says each once, and the tier is not switched off."""
    from redis import Redis

    with redis_server() as server, Redis(port=server.port) as admin:
        reads = ["+get", "+getrange", "+strlen", "+ping"]
        admin.acl_setuser("reader", enabled=True, passwords=["+hunter2"], commands=reads, keys=["*"])
        tier = GuardedTier(RedisTier(f"redis://reader:hunter2@127.0.0.1:{server.port}"), Instruments())
        for number in range(5):
            with pytest.raises(Unavailable, match=r"it lacks.*'set'"):
                await tier.put(make_record(number), deadline=Deadline.after(5))
            with pytest.raises(Unavailable, match=r"it lacks.*'info'"):
                await tier.usage(deadline=Deadline.after(5))
            assert await tier.head([make_key(number)], deadline=Deadline.after(5)) == [None]
        await tier.aclose()
        refused = [line.getMessage().partition(",")[0] for line in caplog.records]
        assert refused == ["tier redis refuses put", "tier redis refuses usage"]


async def test_the_user_of_the_documentation_may_do_all_that_is_tried(tls: TlsRedis) -> None:
    """`kvstore doctor` has nothing to say against a user with just the rights of docs/redis.md."""
    seen = await examine_redis(parse_redis(tls.server.url), deadline=Deadline.after(20))
    assert seen.refused == {}
    assert [server.role for server in seen.servers] == ["master"]


async def test_the_general_client_speaks_tls(tls: TlsRedis) -> None:
    """The client for scripts of others takes user, password and files from the same url."""
    async with open_control(parse_redis(tls.server.url)) as control:
        assert await control.set("v1/control", b"1") is True
        assert await control.get("v1/control") == b"1"
        await control.unlink("v1/control")


async def test_a_store_over_it(tls: TlsRedis, tmp_path: Path) -> None:
    """Catalog, pending entries, retention and reconciliation need no more rights than the documentation names."""
    settings = load_settings(
        {
            **{"memory_bytes": "16MiB", "hot": tls.server.url, "cold": f"file://{tmp_path}", "disk_bytes": "64MiB"},
            **{"cold_bytes": "32MiB", "catalog_look_s": 0.05},
        }
    )
    prompt, meters = Prompt(ATTENTION, "behind TLS", 128), Meters()
    async with open_store(settings, Instruments(meters=meters)) as store, open_catalog(settings) as catalog:
        assert isinstance(catalog, RedisCatalog)
        await store.open_namespace(prompt.description, deadline=Deadline.after(10))
        for record in prompt.records():
            await store.save(record, ack=Ack.HOT, deadline=Deadline.after(10))
        assert await store.drain(Deadline.after(10)) == 0
        totals = (await catalog.totals(deadline=Deadline.after(10)))[prompt.namespace]
        assert [level.num_records for level in totals.levels] == [4, 4]
        await until(
            lambda: catalog.read_counters(deadline=Deadline.after(10)), holds=lambda counters: counters is not None
        )
    failures = {name: value for name, value in meters.snapshot().items() if "failures" in name and value}
    assert failures == {}


async def test_settings_of_a_server_that_need_a_change(caplog: pytest.LogCaptureFixture) -> None:
    """A Redis that may evict anything, and is small, is a warning at start with the command that helps."""
    with redis_server(maxmemory_bytes=64 << 20, arguments=("--maxmemory-policy", "allkeys-lru")) as server:
        settings = load_settings({"memory_bytes": "16MiB", "cold": "memory:", "hot": server.url})
        async with open_store(settings):
            pass
        tier = RedisTier(server.url)
        (facts,) = await tier.facts(deadline=Deadline.after(5))
        concerns = await tier.concerns(deadline=Deadline.after(5))
        await tier.aclose()
    warnings = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.WARNING]
    assert any("CONFIG SET maxmemory-policy volatile-lru" in text and "danger" in text for text in warnings)
    assert any("too little memory" in text for text in warnings)
    assert [concern.severity for concern in concerns][:2] == [Severity.DANGER, Severity.ADVICE]
    assert (facts.limit_bytes, facts.eviction_policy, facts.product) == (64 << 20, "allkeys-lru", "redis")
    assert facts.version.startswith("7.") and 0 < facts.latency_s < 1 and facts.used_bytes > 0


async def test_facts_of_a_valkey() -> None:
    """A Valkey says so, with its own version, and one that is set up well raises no concern."""
    with valkey_server(("--maxmemory", "1gb", "--maxmemory-policy", "volatile-lru")) as server:
        tier = RedisTier(server.url)
        (facts,) = await tier.facts(deadline=Deadline.after(5))
        concerns = [
            concern for concern in await tier.concerns(deadline=Deadline.after(5)) if "round trip" not in concern.text
        ]
        await tier.aclose()
    assert (facts.product, facts.version.partition(".")[0]) == ("valkey", "9")
    assert concerns == []
