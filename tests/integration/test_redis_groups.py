"""The Redis tier behind sentinels and in a cluster, where servers are killed and frozen, and slots move."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, suppress

import pytest
from redis.exceptions import AskError, RedisError

from kvstore.catalog.entry import Level
from kvstore.catalog.redis.catalog import RedisCatalog
from kvstore.compose import open_catalog, open_store
from kvstore.errors import Unavailable
from kvstore.format.names import format_name
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.runtime.meters import Meters
from kvstore.settings import load_settings
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.records import make_key, make_record
from kvstore.testing.servers import RedisCluster, RedisSentinel, RedisServer, redis_sentinel
from kvstore.testing.servers.redis_group import RedisGroup
from kvstore.testing.waiting import until
from kvstore.tiers.base import PutOutcome
from kvstore.tiers.locations import parse_redis
from kvstore.tiers.redis import RedisTier, open_control
from kvstore.tiers.redis.cluster import slot_of
from kvstore.tiers.redis.connection import Connection
from kvstore.tiers.redis.reading import stripe_names
from tests.integration.redis_traffic import CALL_S, LARGE_BYTES, Traffic, number_on, served_everywhere

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def sentinel_tls() -> Iterator[RedisSentinel]:
    with redis_sentinel(tls=True) as group:
        yield group


@pytest.fixture
async def tier(request: pytest.FixtureRequest) -> AsyncIterator[RedisTier]:
    """On the group that the test names; servers that were killed before run again, and nothing is stored."""
    group: RedisGroup = request.getfixturevalue(request.param)
    await asyncio.to_thread(group.settle)
    group.flush()
    tier = RedisTier(group.url)
    yield tier
    await tier.aclose()


on_sentinel = pytest.mark.parametrize("tier", ["sentinel"], indirect=True)
on_cluster = pytest.mark.parametrize("tier", ["cluster"], indirect=True)


async def kill_under_traffic(tier: RedisTier, group: RedisGroup, victim: RedisServer, stack: AsyncExitStack) -> None:
    """Kill a primary while four loops put and get: nothing wrong is served, no call is late, all is served again.

    The general client for scripts of others follows too.
    """
    before = [make_record(number, 3000) for number in range(2_000_000, 2_000_040)] + [make_record(3, LARGE_BYTES)]
    for record in before:
        assert await tier.put(record, deadline=Deadline.after(5)) is PutOutcome.STORED
    scripts = await stack.enter_async_context(open_control(parse_redis(group.url)))
    names = [f"{{{number}}}:count" for number in range(10)]
    count = scripts.register_script("return redis.call('INCR', KEYS[1])")
    assert [await count(keys=[name]) for name in names] == [1] * 10
    for server in group.primaries():
        server.ask("WAIT", 1, 2000)  # they are on a replica too
    traffic = Traffic(tier)
    loops = [asyncio.ensure_future(traffic.run(first)) for first in range(3_000_000, 7_000_000, 1_000_000)]
    await until(lambda: len(traffic.stored) >= 20, 20)
    await asyncio.to_thread(victim.kill9)
    killed_s = time.monotonic()
    await asyncio.sleep(0.2)
    await served_everywhere(tier)
    back_s = time.monotonic() - killed_s
    num_back = len(traffic.stored)
    await asyncio.sleep(0.5)
    traffic.ended = True
    await asyncio.gather(*loops)
    print(f"served again after {back_s:.1f} s, {len(traffic.stored)} stored, {traffic.num_refused} refused")
    assert len(traffic.stored) > num_back
    assert traffic.num_refused > 0
    assert traffic.longest_s < CALL_S + 0.5
    for record in before:
        stored = await tier.get(record.key, deadline=Deadline.after(5))
        assert stored is not None and stored.data == record.data
    for key in traffic.stored:
        stored = await tier.get(key, deadline=Deadline.after(5))
        assert stored is None or stored.data == make_record(key, stored.header.payload_bytes).data
    assert tier.num_quarantined == 0
    assert [await count(keys=[name]) for name in names] == [2] * 10


@on_sentinel
async def test_a_sentinel_that_is_frozen_or_gone(tier: RedisTier, sentinel: RedisSentinel) -> None:
    """With two of three sentinels out of order the primary is still found; of a wrong service all know nothing."""
    first, second, _ = sentinel.sentinels
    first.freeze()
    second.kill9()
    try:
        for _ in range(3):  # a different one is queried first
            fresh = RedisTier(sentinel.url)
            assert await fresh.get(make_key(1), deadline=Deadline.after(3)) is None
            await fresh.aclose()
    finally:
        first.thaw()
        second.start()
    wrong = RedisTier(sentinel.url.replace("/main/", "/other/"))
    with pytest.raises(Unavailable, match=r"no sentinel names the primary: check .*service=other"):
        await wrong.get(make_key(1), deadline=Deadline.after(3))
    await wrong.aclose()


@pytest.mark.full  # afterwards sentinels take ten seconds to come to rest
@on_sentinel
async def test_sentinels_primary_is_changed_by_hand(tier: RedisTier, sentinel: RedisSentinel) -> None:
    """A planned failover, in which the old primary lives on as a replica: writes go to the new one."""
    await tier.put(make_record(1), deadline=Deadline.after(5))
    old = sentinel.primary()
    async with open_control(parse_redis(sentinel.url)) as scripts:
        await scripts.set("before", 1)
        await change_primary(tier, sentinel, old)
        await scripts.set("after", 1)
        assert sentinel.primary().ask("EXISTS", "after") == 1


async def change_primary(tier: RedisTier, sentinel: RedisSentinel, old: RedisServer) -> None:
    sentinel.sentinels[0].ask("SENTINEL", "FAILOVER", "main")
    await until(lambda: sentinel.primary() is not old, 20)
    assert old.ask("ROLE")[0] == b"master"  # it does not know yet, and takes writes that it will throw away
    await asyncio.sleep(2)
    new = sentinel.primary()
    for number in range(10, 20):
        assert await tier.put(make_record(number), deadline=Deadline.after(2)) is PutOutcome.STORED
        assert new.ask("EXISTS", format_name(make_key(number))) == 1
    assert await tier.get(make_key(1), deadline=Deadline.after(2)) is not None


@pytest.mark.parametrize(
    ("tier", "form"),
    [("sentinel", "sentinel"), pytest.param("sentinel_tls", "sentinel_tls", marks=pytest.mark.full)],
    indirect=["tier"],
)
async def test_sentinels_primary_is_killed(tier: RedisTier, form: str, request: pytest.FixtureRequest) -> None:
    """The tier finds the primary that sentinels chose, on its own; also where all of them speak TLS alone."""
    group: RedisSentinel = request.getfixturevalue(form)
    async with AsyncExitStack() as stack:
        await kill_under_traffic(tier, group, group.primary(), stack)


@on_cluster
async def test_a_lookup_is_one_round_trip_per_node(
    tier: RedisTier, cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of 4,096 names on three nodes is three pipelines, all sent before the first is answered."""
    await tier.put(make_record(7), deadline=Deadline.after(5))
    run = Connection.run
    sent: list[tuple[str, int]] = []
    in_flight: list[int] = [0]

    async def counted(self: Connection, commands, **rest):  # type: ignore[no-untyped-def]
        sent.append((self.address, len(commands)))
        in_flight[0] += 1
        most = in_flight[0]
        try:
            return await run(self, commands, **rest)
        finally:
            widest.append(most)
            in_flight[0] -= 1

    widest: list[int] = []
    await tier.head([make_key(number) for number in range(100)], deadline=Deadline.after(5))  # connects
    monkeypatch.setattr(Connection, "run", counted)
    sizes = await tier.head([make_key(number) for number in range(4096)], deadline=Deadline.after(5))
    assert [index for index, size in enumerate(sizes) if size is not None] == [7]
    assert len(sent) == len({address for address, _ in sent}) == 3
    assert sum(count for _, count in sent) == 4096
    assert max(widest) == 3


@on_cluster
async def test_facts_of_every_primary(tier: RedisTier, cluster: RedisCluster) -> None:
    """Each node that holds records reports its facts."""
    facts = await tier.facts(deadline=Deadline.after(5))
    assert {server.address for server in facts} == {f"127.0.0.1:{server.port}" for server in cluster.primaries()}
    assert all(server.role == "master" and server.num_replicas == 1 for server in facts)


@on_cluster
async def test_a_slot_moves(tier: RedisTier, cluster: RedisCluster) -> None:
    """While a slot moves, records on both sides are found and new ones stored; afterwards the tier knows the way.

    Also striped records of which one side has the header or some stripes, and the other one the rest.
    """
    slot = slot_of(format_name(make_key(1)))
    source = cluster.primary_of(slot)
    target = next(server for server in cluster.primaries() if server is not source)
    source_id, target_id = (server.ask("CLUSTER", "MYID").decode() for server in (source, target))
    moved, stays, new, large = (
        make_record(make_key(1, group=group), 2000 if group < 3 else LARGE_BYTES) for group in range(4)
    )
    halved = [make_record(make_key(1, group=group), LARGE_BYTES) for group in (4, 5)]
    for record in (moved, stays, *halved):
        assert await tier.put(record, deadline=Deadline.after(5)) is PutOutcome.STORED
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
    values = [[format_name(record.key), *stripe_names(record.header)] for record in halved]
    first, rest = [values[0][0], values[0][2], *values[1][1:]], [*values[0][1::2], values[1][0]]
    for name in (format_name(moved.key), *first):
        source.ask("MIGRATE", "127.0.0.1", target.port, name, 0, 5000)
    for record in (new, large):
        assert await tier.put(record, deadline=Deadline.after(5)) is PutOutcome.STORED
        with pytest.raises(AskError):  # the source does not have it
            source.ask("EXISTS", format_name(record.key))
    records = (moved, stays, new, large, *halved)
    for has_moved in (False, True):
        sizes = await tier.head([record.key for record in records], deadline=Deadline.after(5))
        assert sizes == [moved.num_bytes, stays.num_bytes, new.num_bytes, 0, 0, 0]
        for record in records:
            stored = await tier.get(record.key, deadline=Deadline.after(5))
            assert stored is not None and stored.data == record.data
        if not has_moved:
            for name in (format_name(stays.key), *rest):
                source.ask("MIGRATE", "127.0.0.1", target.port, name, 0, 5000)
            for server in (target, source, *cluster.primaries()):  # from now on: MOVED
                server.ask("CLUSTER", "SETSLOT", slot, "NODE", target_id)
    for record in records:
        assert await tier.delete(record.key, deadline=Deadline.after(5))


@on_cluster
async def test_a_slot_moves_while_records_are_listed(tier: RedisTier, cluster: RedisCluster) -> None:
    """From a node that is listed later to one that was listed before: its records are listed all the same, once."""
    target, source = cluster.primary_of(0), cluster.primary_of(16_383)
    first, moved = (make_record(make_key(number_on(cluster, server))) for server in (target, source))
    stays = make_record(make_key(next(n for n in range(1000) if make_key(n) not in (first.key, moved.key))))
    for record in (first, moved, stays):
        assert await tier.put(record, deadline=Deadline.after(5)) is PutOutcome.STORED
    slot = slot_of(format_name(moved.key))
    target_id, source_id = (server.ask("CLUSTER", "MYID").decode() for server in (target, source))
    listed = []
    async for entry in tier.scan():
        listed.append(entry.key)
        if len(listed) == 1:
            target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
            source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
            source.ask("MIGRATE", "127.0.0.1", target.port, format_name(moved.key), 0, 5000)
            for server in (target, source, *cluster.primaries()):
                server.ask("CLUSTER", "SETSLOT", slot, "NODE", target_id)
    assert sorted(listed) == sorted(record.key for record in (first, moved, stays))


async def test_forms_that_are_mixed_up(sentinel: RedisSentinel, cluster: RedisCluster) -> None:
    """A cluster as if it were one server, and one server as if it were a cluster: the message names the right form."""
    await asyncio.to_thread(cluster.settle)
    lone = cluster.primaries()[0]
    number = next(n for n in range(1000) if cluster.primary_of(slot_of(format_name(make_key(n)))) is not lone)
    for url, advice in (
        (f"redis://127.0.0.1:{lone.port}", r"use redis\+cluster://"),
        (f"redis+cluster://127.0.0.1:{sentinel.primary().port}", r"no cluster: use redis://"),
        (f"redis+sentinel://127.0.0.1:{sentinel.primary().port}/main", "no sentinel names the primary"),
    ):
        tier = RedisTier(url)
        with pytest.raises(Unavailable, match=advice):
            await tier.get(make_key(number), deadline=Deadline.after(3))
        await tier.aclose()


@pytest.mark.parametrize("form", ["sentinel", "sentinel_tls", "cluster"])
async def test_a_store_over_it(form: str, request: pytest.FixtureRequest) -> None:
    """What one store saved with nothing but this Redis behind it another resumes; with catalog and pending queue."""
    group: RedisGroup = request.getfixturevalue(form)
    await asyncio.to_thread(group.settle)
    group.flush()
    soon = Deadline.after(60)  # for all of it
    patient = {"catalog_look_s": 0.05, "stall_timeout_ms": 20_000}
    settings = load_settings({"memory_bytes": "16MiB", "cold": "memory:", "hot": group.url, **patient})
    prompt, meters = Prompt(ATTENTION, f"behind {form}", 128), Meters()
    async with open_store(settings, Instruments(meters=meters)) as store, open_catalog(settings) as catalog:
        await store.open_namespace(prompt.description, deadline=soon)
        for record in prompt.records():
            await store.save(record, deadline=soon)
        await store.drain(soon)
        totals = (await catalog.totals(deadline=soon))[prompt.namespace]
        assert totals.levels[Level.HOT].num_records == len(prompt.records())
        assert isinstance(catalog, RedisCatalog)
        assert await catalog.are_stored([prompt.key(64), prompt.key(16)], deadline=soon) == [True, False]
        await until(lambda: meters.get("catalog_complete"))
        await until(lambda: catalog.read_counters(deadline=soon), holds=lambda counters: counters is not None)
    assert meters.get("catalog_failures", call="reconcile") == 0
    async with open_store(settings) as store:
        await store.open_namespace(prompt.description, deadline=soon)
        staged = await store.stage(prompt.query(), deadline=soon)
        assert staged.resume_tokens == 128


@on_cluster
async def test_a_frozen_node_costs_one_deadline(tier: RedisTier, cluster: RedisCluster) -> None:
    """A node that hangs costs one call its deadline; then its keys are refused at once, and others go on all along."""
    frozen = cluster.primary_of(0)
    alive = next(server for server in cluster.primaries() if server is not frozen)
    here, there = make_record(number_on(cluster, frozen)), make_record(number_on(cluster, alive))
    for record in (here, there):
        assert await tier.put(record, deadline=Deadline.after(5)) is PutOutcome.STORED
    frozen.freeze()
    try:
        started_s = time.monotonic()
        with pytest.raises(Unavailable, match="did not answer before the deadline"):
            await tier.get(here.key, deadline=Deadline.after(0.6))
        assert time.monotonic() - started_s < 5
        started_s = time.monotonic()
        for _ in range(20):
            with pytest.raises(Unavailable, match=f"not used until.*127.0.0.1:{frozen.port}"):
                await tier.get(here.key, deadline=Deadline.after(60))
            stored = await tier.get(there.key, deadline=Deadline.after(5))
            assert stored is not None and stored.data == there.data
        assert time.monotonic() - started_s < 10
        await served_everywhere(tier)  # by its replica
    finally:
        frozen.thaw()
    stored = await tier.get(here.key, deadline=Deadline.after(5))
    assert stored is not None and stored.data == here.data


@on_cluster
async def test_a_primary_of_a_cluster_is_killed(tier: RedisTier, cluster: RedisCluster) -> None:
    """Its replica takes its slots over, and the tier follows."""
    async with AsyncExitStack() as stack:
        await kill_under_traffic(tier, cluster, cluster.primary_of(0), stack)


@pytest.mark.full  # three servers and three sentinels more
async def test_servers_and_sentinels_that_ask_for_a_login() -> None:
    """One user and password for both with `sentinel_login=same`; without it sentinels say what is missing."""
    with redis_sentinel() as group:
        for server in group.servers:
            server.ask("CONFIG", "SET", "masterauth", "hunter2")
            server.ask("CONFIG", "SET", "requirepass", "hunter2")
        for sentinel in group.sentinels:
            sentinel.ask("SENTINEL", "SET", "main", "auth-pass", "hunter2")
            sentinel.ask("ACL", "SETUSER", "default", ">hunter2", "on", "resetpass", ">hunter2")
        url = group.url.replace("://", "://:hunter2@")
        without = RedisTier(url)
        with pytest.raises(Unavailable, match=r"sentinel_login=same"):
            await without.get(make_key(1), deadline=Deadline.after(3))
        await without.aclose()
        tier = RedisTier(f"{url}?sentinel_login=same")
        assert await tier.put(make_record(1), deadline=Deadline.after(3)) is PutOutcome.STORED
        assert await tier.get(make_key(1), deadline=Deadline.after(3)) is not None
        await tier.aclose()
        async with open_control(parse_redis(f"{url}?sentinel_login=same")) as scripts:
            assert await scripts.exists(format_name(make_key(1))) == 1


@on_cluster
async def test_a_tier_that_nobody_uses_learns_of_a_failover(tier: RedisTier, cluster: RedisCluster) -> None:
    """Nothing but its use of memory is asked for, as by a service without engines: it is told again once a replica has
    taken over, while the killed primary is still down."""
    await tier.usage(deadline=Deadline.after(5))
    victim = cluster.primaries()[0]
    await asyncio.to_thread(victim.kill9)
    await _until_it_works(lambda: tier.usage(deadline=Deadline.after(1)))
    assert not victim.process.running


@on_cluster
async def test_the_catalogs_client_leaves_a_primary_that_is_frozen(tier: RedisTier, cluster: RedisCluster) -> None:
    """A frozen primary keeps its connections open. Once a replica has its slots, the client asks the replica."""
    async with open_control(parse_redis(cluster.url)) as client:
        victim = cluster.primaries()[0]
        name = format_name(make_key(number_on(cluster, victim)))
        await client.set(name, b"1")
        victim.ask("WAIT", 1, 2000)
        await asyncio.sleep(1.5)  # the watch has seen who the primaries are
        victim.freeze()
        try:

            async def ask() -> None:
                async with Deadline.after(1).scope("asking for a value"):
                    assert await client.get(name) == b"1"

            await _until_it_works(ask)
        finally:
            victim.thaw()


async def _until_it_works(ask: Callable[[], Awaitable[object]]) -> None:
    ends_s = time.monotonic() + 30
    while True:
        with suppress(Unavailable, RedisError):
            await ask()
            return
        assert time.monotonic() < ends_s, "nobody has taken over"
        await asyncio.sleep(0.2)
