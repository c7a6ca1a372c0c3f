"""Cache events of a real service's store: a subscriber's index equals what the tiers hold."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path

import pytest
import zmq
from redis.asyncio import Redis

from kvstore.api import Deadline
from kvstore.catalog.base import Addition, LeaveReason, Leaving
from kvstore.catalog.entry import Level
from kvstore.client import connect
from kvstore.client.connection import Connection
from kvstore.compose import open_catalog, open_store
from kvstore.service.authentication import Grant
from kvstore.service.server import Server
from kvstore.settings import load_settings
from kvstore.store.tiered import TieredStore
from kvstore.testing.event_subscriber import EventSubscriber
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.servers import RedisServer
from kvstore.testing.servers.ports import free_address
from kvstore.testing.store_node import save_all
from kvstore.testing.tokens import credentials_of
from kvstore.testing.waiting import soon, until
from kvstore.wire.address import parse_address
from tests.integration.publishing import BLOCK, NODE, POOL, named, publishing, save

pytestmark = pytest.mark.servers

WAITS_S = 0.4
FULL = os.environ.get("KVSTORE_TEST_FULL") == "1"
WITHIN_S = 1.0 if FULL else 5.0
"""A page that is gone has left a subscriber's index: a second on a machine of its own; tests share theirs."""
AWAY_S = 60.0 if FULL else 5.0
"""A subscriber reads nothing for so long. Longer than 30 s, and the publisher cuts it off."""


def hashes(prompt: Prompt, stop: int, start: int = 0) -> set[int]:
    """Of the blocks of a part of a prompt."""
    ends = range(start + BLOCK, stop + 1, BLOCK)
    return {int.from_bytes(prompt.boundary(end).prefix[:8], "big") for end in ends}


def blocks_in(subscriber: EventSubscriber, topic: str, medium: str) -> set[object]:
    return {entry[3] for entry in subscriber.index if entry[:2] == (topic, medium)}


async def seen(subscriber: EventSubscriber, is_reached: Callable[[], bool], within_s: float = 60.0) -> float:
    """Read events until something is so; returns how long that takes, in seconds, on a machine that does nothing else:
    the time between two looks at the catalog, and the processor's time here and in the store."""
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    await asyncio.to_thread(subscriber.read_until, is_reached, within_s)
    wall_s, cpu_s = time.monotonic() - start_s, time.process_time() - start_cpu_s
    print(f"\nseen after {wall_s:.2f} s, of which {cpu_s:.2f} s of the processor")
    return min(wall_s, cpu_s + WAITS_S)


@pytest.fixture
def subscriber(tmp_path: Path) -> Iterator[EventSubscriber]:
    subscriber = EventSubscriber(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    yield subscriber
    subscriber.close()


@asynccontextmanager
async def on_redis(server: RedisServer, folder: Path, **settings: object) -> AsyncIterator[TieredStore]:
    async with open_store(publishing(folder, hot=server.url, cold="memory:", **settings)) as store:
        yield store


async def test_what_one_engine_saves_every_subscriber_knows(
    shared_redis: RedisServer, client: Redis, tmp_path: Path, subscriber: EventSubscriber
) -> None:
    """A page and its tail are in memory for the node, and in Redis for the pool; each block counts once. A tail that
    is gone takes no block along that the page has too."""
    short, long = Prompt(ATTENTION, "a", 96), Prompt(ATTENTION, "a", 128)  # the tail of one is half a page of the other
    async with on_redis(shared_redis, tmp_path) as store:
        await save(store, [short])
        await seen(subscriber, lambda: blocks_in(subscriber, POOL, "STORAGE") == hashes(short, 96))
        await save(store, [long])
        for topic, medium in ((NODE, "CPU"), (POOL, "STORAGE")):
            await seen(subscriber, lambda t=topic, m=medium: blocks_in(subscriber, t, m) == hashes(long, 128))
        for key in short.record_keys([96]):
            store.memory.remove(key)
        store.memory.remove(long.key(64))
        await seen(subscriber, lambda: blocks_in(subscriber, NODE, "CPU") == hashes(long, 128, 64))
        assert blocks_in(subscriber, POOL, "STORAGE") == hashes(long, 128)
        assert subscriber.topics == {NODE, POOL}


async def test_memory_that_is_full(tmp_path: Path, subscriber: EventSubscriber) -> None:
    """Pages that memory drops for others leave the index within a second, and those that stay are in it."""
    settings = publishing(tmp_path, memory_bytes="4MiB", cold="memory:", hot="memory:")
    prompts = [Prompt(ATTENTION, f"p{number}", 64) for number in range(2_000)]
    async with open_store(settings) as store:
        await save(store, prompts)
        assert store.memory.num_evicted > 1_000
        held = {key for prompt in prompts for key in prompt.record_keys() if key in store.memory}
        whole = [prompt for prompt in prompts if held.issuperset(prompt.record_keys())]
        expected = set[object]().union(*(hashes(prompt, 64) for prompt in whole))
        await seen(subscriber, lambda: blocks_in(subscriber, NODE, "CPU") == expected)
        for key in held:
            store.memory.remove(key)
        took_s = await seen(subscriber, lambda: not subscriber.index)
        print(f"\n{len(whole)} pages of memory left a subscriber's index after {took_s:.2f} s")
        assert took_s < WITHIN_S


async def test_a_subscriber_that_stops_reading(tmp_path: Path) -> None:
    """While it reads nothing, thousands of pages are saved and evicted, and more batches are sent than wait for it. It
    goes on reading, finds the gap, asks for a replay, and has what the memory has, for each name of the node.
    """
    urls = [f"tcp://{free_address()}" for _ in range(2)]
    names = [f"node:{number}" for number in range(32)]  # each gets its own copy of a batch
    settings = publishing(
        tmp_path,
        **{"memory_bytes": "4MiB", "cold": "memory:", "hot": "memory:", "events_node": ",".join(names)},
        **{"events_endpoint": urls[0].replace("127.0.0.1", "*"), "events_replay_endpoint": urls[1]},
    )
    prompts = [Prompt(ATTENTION, f"p{number}", 64) for number in range(3_000)]
    bursts = [prompts[start : start + 50] for start in range(0, len(prompts), 50)]
    topics = [f"kv@{name}@org/model" for name in names]
    subscriber = EventSubscriber(*urls, waiting_max=1)
    try:
        async with open_store(settings) as store:
            await save(store, bursts[0])
            num_first = 4 * len(bursts[0]) * len(topics)
            await seen(subscriber, lambda: len(subscriber.index) == num_first)
            before, num_replays = subscriber.next, subscriber.replays
            started_s = time.monotonic()
            for number, burst in enumerate(bursts[1:], 1):
                await save(store, burst)
                rest_s = started_s + AWAY_S * number / len(bursts) - time.monotonic()
                await asyncio.sleep(max(0.11, rest_s))
            away_s = time.monotonic() - started_s
            assert away_s >= AWAY_S * 0.9 and store.memory.num_evicted > 2_000
            held = {key for prompt in prompts for key in prompt.record_keys() if key in store.memory}
            whole = [prompt for prompt in prompts if held.issuperset(prompt.record_keys())]
            blocks = set[int]().union(*(hashes(prompt, 64) for prompt in whole))
            expected = {(topic, "CPU", 0, block) for topic in topics for block in blocks}
            await seen(subscriber, lambda: subscriber.index == expected)
            num_missed, replays = subscriber.next - before, subscriber.replays - num_replays
            print(f"\n{num_missed} batches in {away_s:.0f} s without reading, {replays} replays, {len(blocks)} blocks")
            assert num_missed > 1_000 and replays >= 1
    finally:
        subscriber.close()


@pytest.mark.parametrize("numbers", ["zero", "clock"])
async def test_a_subscriber_that_comes_when_messages_are_no_longer_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: str
) -> None:
    """It asks for the first ones, so all pages are published again: it has all of them, as one that was there before,
    and each block was stored once. A name of an engine is not cleared, so its pages are taken back."""
    monkeypatch.setattr("kvstore.store.cache_events.publisher.KEPT", 20)
    names, prompts = ["node:here", "10.0.0.7:8000"], [Prompt(ATTENTION, f"p{number}", 64) for number in range(25)]
    settings = publishing(tmp_path, cold="memory:", hot="memory:", events_node=",".join(names), events_numbers=numbers)
    blocks = set[int]().union(*(hashes(prompt, 64) for prompt in prompts))
    expected = {(f"kv@{name}@org/model", "CPU", 0, block) for name in names for block in blocks}
    urls = (f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    async with open_store(settings) as store:
        publisher = vars(vars(store)["_cache_events"])["_publisher"]
        with closing(EventSubscriber(*urls)) as before:
            before.next = vars(publisher)["_first"]
            for prompt in prompts:
                await save(store, [prompt])
                await asyncio.sleep(0.25)
            await seen(before, lambda: before.index == expected)
            first, kept = vars(publisher)["_first"], vars(publisher)["_kept"]
            oldest = kept[0][0]
            assert oldest > first
            with closing(EventSubscriber(*urls)) as late:
                late.next = first
                # for a moment nothing is kept: what was published before is gone, and what follows not yet there
                await seen(
                    late, lambda: any(number not in range(first + 1, oldest + 1) for number, _ in list(kept)[:1])
                )
                if first:  # numbers go on, so only who knows that has what follows
                    late.next = kept[0][0]
                await seen(late, lambda: late.index == expected)
                await seen(before, lambda: before.index == expected)
                for key in prompts[0].record_keys():
                    store.memory.remove(key)
                for subscriber in (before, late):
                    await seen(subscriber, lambda one=subscriber: len(one.index) == len(expected) - 8)


@pytest.mark.parametrize("pages", [10_000])
async def test_what_another_service_evicts(
    shared_redis: RedisServer, client: Redis, tmp_path: Path, subscriber: EventSubscriber, pages: int
) -> None:
    """Another service's retention hides, deletes and buries 10,000 pages in the catalog that both share: none of them
    is in a subscriber's index a second later."""
    prompt = Prompt(ATTENTION, "p", 64)
    prompts = [Prompt(ATTENTION, f"p{number}", 64) for number in range(pages)]
    settings = publishing(tmp_path, hot=shared_redis.url, cold="memory:")
    never = 3600  # entries without records: a comparison would drop them, as the one at the start may
    async with on_redis(shared_redis, tmp_path, catalog_look_s=never) as store, open_catalog(settings) as other:
        await store.open_namespace(prompt.description, deadline=soon())
        await other.register(prompt.namespace, prompt.layout, "", deadline=soon())
        for start in range(0, pages, 500):
            keys = [key for one in prompts[start : start + 500] for key in one.record_keys()]
            await other.add([Addition(key, Level.HOT, 1000, 64) for key in keys], deadline=soon())
            for one in prompts[start : start + 500]:
                store.name_blocks(named(one, one.boundary(64)))
            await asyncio.sleep(0.3)
        prefixes = [one.boundary(64).prefix for one in prompts]
        table = await other.lookup(prompt.namespace, prefixes, deadline=soon())
        num_kept = sum(
            table.has(index, Level.HOT, 0, 0) and table.has(index, Level.HOT, 0, 1) for index in range(pages)
        )
        assert num_kept > pages * 0.9
        await seen(subscriber, lambda: len(subscriber.index) == 4 * num_kept)
        assert not blocks_in(subscriber, NODE, "CPU")
        for start in range(0, pages, 500):
            part = prompts[start : start + 500]
            leaving = [Leaving(one.namespace, one.boundary(64).prefix) for one in part]
            hidden = await other.start_leaving(leaving, Level.HOT, deadline=soon())
            gone = [(entry, LeaveReason.EVICTED) for entry in hidden if entry is not None]
            num_kept -= len(gone)
            await other.finish_leaving(gone, Level.HOT, deadline=soon())
        assert num_kept == 0
        took_s = await seen(subscriber, lambda: not subscriber.index)
        print(f"\n{pages} evicted pages left a subscriber's index {took_s:.2f} s after the last")
        assert took_s < WITHIN_S


async def test_a_record_that_redis_lost(
    shared_redis: RedisServer, client: Redis, tmp_path: Path, subscriber: EventSubscriber
) -> None:
    """Redis drops a record by itself. When a stage of another service finds that, the page leaves the pool."""
    prompt = Prompt(ATTENTION, "lost", 128)
    other_folder = tmp_path / "other"
    other_folder.mkdir()
    async with on_redis(shared_redis, tmp_path) as store, on_redis(shared_redis, other_folder) as other:
        await save(store, [prompt])
        await seen(subscriber, lambda: blocks_in(subscriber, POOL, "STORAGE") == hashes(prompt, 128))
        await store.drain(soon())
        await client.delete(*[key async for key in client.scan_iter(match="v1/*")])
        await other.open_namespace(prompt.description, deadline=soon())
        staged = await other.stage(prompt.query(), deadline=soon())
        assert staged.resume_tokens < 128
        took_s = await seen(subscriber, lambda: blocks_in(subscriber, POOL, "STORAGE") != hashes(prompt, 128))
        assert took_s < WITHIN_S
        assert blocks_in(subscriber, NODE, "CPU") == hashes(prompt, 128)


async def test_weights_that_are_retired(
    shared_redis: RedisServer, client: Redis, tmp_path: Path, subscriber: EventSubscriber
) -> None:
    """Nothing of them is served, from no medium, so nothing stays in the index. It comes back when they are served."""
    prompt = Prompt(ATTENTION, "retired", 128, weights_id="old")
    async with on_redis(shared_redis, tmp_path) as store:
        await save(store, [prompt])
        await seen(subscriber, lambda: len(subscriber.index) == 2 * 8)  # in memory and in Redis
        rules = store.operations.operator_rules
        assert rules is not None
        await rules.retire(None, "old", is_retired=True, deadline=soon())
        assert await seen(subscriber, lambda: not subscriber.index) < WITHIN_S
        await rules.retire(None, "old", is_retired=False, deadline=soon())
        await seen(subscriber, lambda: len(subscriber.index) == 2 * 8)


async def test_retention_of_a_directory(tmp_path: Path, subscriber: EventSubscriber) -> None:
    """A directory that is kept within a bound: the index is what the catalog has."""
    settings = publishing(tmp_path, cold=f"file://{tmp_path}/records", hot="memory:", disk_bytes="2MiB")
    prompts = [Prompt(ATTENTION, f"d{number}", 64, payload_bytes=20_000) for number in range(120)]
    async with open_store(settings) as store:
        for start in range(0, len(prompts), 10):
            await save(store, prompts[start : start + 10])
            await store.drain(soon())
        assert store.recorder is not None
        await store.recorder.drain(soon())
        await asyncio.sleep(1.0)
        prefixes = [one.boundary(64).prefix for one in prompts]
        table = await store.recorder.catalog.lookup(prompts[0].namespace, prefixes, deadline=soon())
        kept = [
            one
            for index, one in enumerate(prompts)
            if table.has(index, Level.COLD, 0, 0) and table.has(index, Level.COLD, 0, 1)
        ]
        assert 0 < len(kept) < len(prompts)
        expected = set[object]().union(*(hashes(one, 64) for one in kept))
        await seen(subscriber, lambda: blocks_in(subscriber, NODE, "STORAGE") == expected)


async def test_engines_name_pages_over_the_wire(tmp_path: Path, subscriber: EventSubscriber) -> None:
    """What one engine saved and named is published; a tenant's names of another tenant's pages, and of pages that are
    not stored, are not."""
    tokens = {"red": "red's", "blue": "blue's"}
    credentials = credentials_of({token: Grant(name) for name, token in tokens.items()})
    url = f"unix:{tmp_path}/s"
    prompt, absent = Prompt(ATTENTION, "p", 64, tenant="red"), Prompt(ATTENTION, "absent", 64, tenant="red")
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(publishing(tmp_path, cold="memory:", hot="memory:")))
        server = Server(store, credentials=credentials)
        stack.push_async_callback(server.aclose)
        await server.listen([parse_address(url)])
        red, blue = (connect(url, token=token) for token in tokens.values())
        for engine in (red, blue):
            stack.push_async_callback(engine.aclose)
            await engine.wait_ready(deadline=soon())
        await save_all(red, prompt)
        blue.name_blocks(named(prompt, prompt.boundary(64))._replace(model="blue's words"))
        await blue.status(deadline=soon())
        await asyncio.sleep(1.5)  # a client gathers names for a second
        for one in (absent, prompt):
            red.name_blocks(named(one, one.boundary(64)))
        await seen(subscriber, lambda: blocks_in(subscriber, NODE, "CPU") == hashes(prompt, 64))
        await asyncio.sleep(0.5)
        await seen(subscriber, lambda: len(subscriber.index) == 4)
        assert subscriber.topics == {NODE}


async def test_a_service_that_publishes_nothing_gets_no_names(tmp_path: Path) -> None:
    """Its welcome says so, and the client drops them."""
    url = f"unix:{tmp_path}/s"
    async with AsyncExitStack() as stack:
        settings = load_settings({"memory_bytes": "16MiB", "cold": "memory:", "hot": "memory:"})
        server = Server(await stack.enter_async_context(open_store(settings)))
        stack.push_async_callback(server.aclose)
        await server.listen([parse_address(url)])
        engine = connect(url)
        stack.push_async_callback(engine.aclose)
        await engine.wait_ready(deadline=soon())
        connection = engine.pool.now()
        assert connection is not None and not (connection.welcome.blocks or connection.welcome.page_names)
        engine.name_blocks(named(Prompt(ATTENTION, "p", 64), Prompt(ATTENTION, "p", 64).boundary(64)))
        await asyncio.sleep(1.5)
        assert await engine.status(deadline=soon())  # the connection lives


async def test_names_that_come_together_share_a_ping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ping costs more than a name: 60 names, each 2 ms after the one before, are sent after a few."""
    pings, ping = [], Connection.ping

    async def counted(connection: Connection, deadline: Deadline) -> None:
        pings.append(connection)
        await ping(connection, deadline)

    monkeypatch.setattr(Connection, "ping", counted)
    prompts = [Prompt(ATTENTION, f"p{number}", 64) for number in range(60)]
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(publishing(tmp_path, hot="memory:", cold="memory:")))
        server = Server(store)
        stack.push_async_callback(server.aclose)
        await server.listen([parse_address(f"unix:{tmp_path}/s")])
        engine = connect(f"unix:{tmp_path}/s")
        stack.push_async_callback(engine.aclose)
        namespace = await engine.open_namespace(prompts[0].description, deadline=soon())
        for prompt in prompts:
            engine.name_blocks(named(prompt, prompt.boundary(64)))
            await asyncio.sleep(0.002)
        await until(lambda: store.knows_blocks(namespace))
        assert 0 < len(pings) < len(prompts) / 2


async def test_numbers_that_grow_over_restarts(tmp_path: Path) -> None:
    """With `events_numbers` `clock` each run of the service begins behind the numbers of the one before."""
    prompt = Prompt(ATTENTION, "p", 64)
    numbers: list[int] = []
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.subscribe(b"")
        subscriber.setsockopt(zmq.RCVTIMEO, 20_000)
        subscriber.connect(f"ipc://{tmp_path}/events")
        for _ in range(2):
            async with open_store(publishing(tmp_path, cold="memory:", events_numbers="clock")) as store:
                await save(store, [prompt])
                _, number, _ = await asyncio.to_thread(subscriber.recv_multipart)
                numbers.append(int.from_bytes(number, "big"))
            while subscriber.poll(200):
                subscriber.recv_multipart()
    assert numbers[1] > numbers[0] > 10**15
