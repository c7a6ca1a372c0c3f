"""Dynamo's own index, compiled from its Rust sources, on the events of a service and of an engine.

docs/routers.md says what these tests show.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from kvstore.compose import open_store
from kvstore.model.media import MEDIA, Medium, parse_media
from kvstore.model.page_blocks import BlockGroup
from kvstore.settings import Settings
from kvstore.store.cache_events.encoding import CLEARED, Event, removed, stored
from kvstore.store.cache_events.publisher import EventPublisher
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.servers import RedisServer
from kvstore.testing.servers.ports import free_ports
from tests.integration.dynamo_indexer import DynamoIndexer, find_dynamo
from tests.integration.publishing import BLOCK, NODE, named, publishing, save

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(find_dynamo() is None, reason="no Dynamo here: run tools/other_packages.py dynamo"),
]

SERVICE, ENGINE, WITNESS = 7, 1, 8
"""Workers, as the index knows them."""
TOKENS = range(256)
NOTHING = (0, 0, 0)
ATTENTION_BLOCKS = BlockGroup(0, "full_attention")
GPU = Medium("GPU", "LOCAL")
PROMPT = Prompt(ATTENTION, "a", 128)


@dataclass(frozen=True)
class Addresses:
    """Of one publisher's two sockets."""

    events: str
    replay: str

    @property
    def bound(self) -> tuple[str, str]:
        return self.events.replace("127.0.0.1", "*"), self.replay.replace("127.0.0.1", "*")


@pytest.fixture
def addresses() -> Addresses:
    return Addresses(*(f"tcp://127.0.0.1:{port}" for port in free_ports(2)))


@pytest.fixture
def indexer(tmp_path: Path) -> Iterator[DynamoIndexer]:
    with DynamoIndexer(tmp_path, BLOCK) as running:
        yield running


@pytest.fixture
def publisher(addresses: Addresses) -> Iterator[EventPublisher]:
    publisher = EventPublisher(*addresses.bound)
    yield publisher
    publisher.close()


def settings_of(folder: Path, addresses: Addresses, **settings: object) -> Settings:
    """A service that publishes for Dynamo, as docs/routers.md says."""
    events, replay = addresses.bound
    ours: dict[str, object] = {"events_endpoint": events, "events_replay_endpoint": replay, "events_numbers": "clock"}
    return publishing(folder, **{**ours, "hot": "memory:", **settings})


async def credited(indexer: DynamoIndexer, expected: tuple[int, int, int]) -> None:
    await asyncio.to_thread(indexer.await_credit, SERVICE, TOKENS, expected)


def drop_from_memory(store: TieredStore, prompt: Prompt) -> None:
    for key in prompt.record_keys():
        store.memory.remove(key)


def page(medium: Medium, *, end: int = 64, group: BlockGroup = ATTENTION_BLOCKS) -> list[Event]:
    """Four blocks in front of `end`."""
    blocks = named(PROMPT, PROMPT.boundary(end))
    return [stored(blocks, range(blocks.num_blocks), group, medium)]


async def test_pages_of_a_real_service(indexer: DynamoIndexer, tmp_path: Path, addresses: Addresses) -> None:
    """Memory counts as host memory, a directory as disk; what leaves memory counts for the directory alone. An index
    that subscribes when all was sent has the same within seconds, though nothing new comes."""
    settings = settings_of(tmp_path, addresses, cold=f"file://{tmp_path}/records")
    await asyncio.to_thread(indexer.register, SERVICE, addresses.events, addresses.replay)
    with DynamoIndexer(tmp_path, BLOCK) as late:
        async with open_store(settings) as store:
            await save(store, [PROMPT])
            await credited(indexer, (0, 128, 128))
            await asyncio.to_thread(late.register, SERVICE, addresses.events, addresses.replay)
            await credited(late, (0, 128, 128))
            drop_from_memory(store, PROMPT)
            await credited(indexer, (0, 0, 128))
            await credited(late, (0, 0, 128))


async def test_pages_in_redis_get_no_credit(
    indexer: DynamoIndexer, shared_redis: RedisServer, tmp_path: Path, addresses: Addresses
) -> None:
    """Memory counts, and nothing is left when the page is in Redis alone."""
    await asyncio.to_thread(indexer.register, SERVICE, addresses.events, addresses.replay)
    async with open_store(settings_of(tmp_path, addresses, hot=shared_redis.url, cold="memory:")) as store:
        await save(store, [PROMPT])
        await credited(indexer, (0, 128, 128))
        drop_from_memory(store, PROMPT)
        await credited(indexer, NOTHING)


async def test_a_service_that_starts_again(indexer: DynamoIndexer, tmp_path: Path, addresses: Addresses) -> None:
    """What an earlier run published is forgotten with the first page that is named again, and pages count anew."""
    settings = settings_of(tmp_path, addresses, cold="memory:")
    await asyncio.to_thread(indexer.register, SERVICE, addresses.events, addresses.replay)
    async with open_store(settings) as store:
        await save(store, [PROMPT])
        await credited(indexer, (0, 128, 128))
    async with open_store(settings) as store:
        await save(store, [Prompt(ATTENTION, "a", 64)])
        await credited(indexer, (0, 64, 64))


def test_numbers_that_begin_at_zero_again_are_dropped(indexer: DynamoIndexer, addresses: Addresses) -> None:
    """Why `events_numbers` must be `clock`: until it is registered again, the index takes nothing of the new run.
    Another worker at the same address, which knows no earlier run, takes it."""
    more = [*page(MEDIA["memory"]), *page(MEDIA["memory"], end=128)]
    indexer.register(SERVICE, addresses.events, addresses.replay)
    first = EventPublisher(*addresses.bound)
    indexer.await_subscription(SERVICE, TOKENS, lambda: first.publish(NODE, page(MEDIA["memory"])))
    for _ in range(1_000):
        first.publish(NODE, page(MEDIA["memory"]))
    first.close()
    second = EventPublisher(*addresses.bound)
    try:
        indexer.register(WITNESS, addresses.events, addresses.replay)
        indexer.await_subscription(WITNESS, TOKENS, lambda: second.publish(NODE, more))
        time.sleep(2.0)  # until the first worker has connected again too
        second.publish(NODE, [CLEARED])
        indexer.await_credit(WITNESS, TOKENS, NOTHING)
        assert indexer.credit(SERVICE, TOKENS) == (0, 64, 64)
        indexer.unregister(SERVICE)
        assert indexer.credit(SERVICE, TOKENS) == NOTHING
        indexer.register(SERVICE, addresses.events, addresses.replay)
        indexer.await_subscription(SERVICE, TOKENS, lambda: second.publish(NODE, more))
        assert indexer.credit(SERVICE, TOKENS) == (0, 128, 128)
    finally:
        second.close()


def told(
    indexer: DynamoIndexer, addresses: Addresses, publisher: EventPublisher
) -> Callable[..., tuple[int, int, int]]:
    """Registers the service; returns what publishes events in place of all earlier ones, and tells the credit."""
    indexer.register(SERVICE, addresses.events, addresses.replay)
    numbers = count(1_000)

    def tell(*events: Event, topic: str = NODE) -> tuple[int, int, int]:
        number = next(numbers)  # of a block after the events: once it is credited, they were read
        last = {**page(MEDIA["memory"])[0], "block_hashes": [number], "token_ids": [number] * BLOCK}
        publisher.publish(topic, [CLEARED, *events])
        indexer.await_subscription(SERVICE, [number] * BLOCK, lambda: publisher.publish(topic, [last]))
        return indexer.credit(SERVICE, TOKENS)

    return tell


def test_credit_of_each_medium(indexer: DynamoIndexer, addresses: Addresses, publisher: EventPublisher) -> None:
    """Shared tiers, names that it does not know, windows and pages without tokens count for nothing; a medium adds to
    what is on faster ones."""
    tell = told(indexer, addresses, publisher)
    seen = {name: tell(*page(medium)) for name, medium in MEDIA.items()}
    assert seen == {"memory": (0, 64, 64), "filesystem": (0, 0, 64), "redis": NOTHING, "s3": NOTHING}
    renamed = parse_media("memory=HOST,redis=SHARED")
    assert tell(*page(renamed["memory"])) == tell(*page(renamed["redis"])) == NOTHING
    assert tell(*page(MEDIA["memory"], group=BlockGroup(1, "sliding_window", 32))) == NOTHING
    assert tell({**page(MEDIA["memory"])[0], "token_ids": []}) == NOTHING
    assert tell(*page(MEDIA["memory"]), *page(MEDIA["filesystem"], end=128)) == (0, 64, 128)
    assert tell(*page(MEDIA["memory"], end=128), *page(MEDIA["memory"])) == (0, 128, 128)  # in any order
    hashes = [int.from_bytes(PROMPT.boundary(end).prefix[:8], "big") for end in range(BLOCK, 65, BLOCK)]
    pages = [*page(MEDIA["memory"]), *page(MEDIA["memory"], end=128)]
    assert tell(*pages, removed(hashes[2:], 0, MEDIA["memory"])) == (0, 32, 32)


def test_topics_are_not_read(indexer: DynamoIndexer, addresses: Addresses, publisher: EventPublisher) -> None:
    """Pages of another model count for the model that was registered."""
    tell = told(indexer, addresses, publisher)
    assert tell(*page(MEDIA["memory"]), topic="kv@node:here@another/model") == (0, 64, 64)


def test_a_service_in_an_engines_name_clears_its_gpu(
    indexer: DynamoIndexer, addresses: Addresses, publisher: EventPublisher
) -> None:
    """Why a service is registered as a worker of its own: as a rank of an engine it would drop the engine's blocks."""
    (port,) = free_ports(1)
    engine = EventPublisher(f"tcp://*:{port}")
    try:
        indexer.register(ENGINE, f"tcp://127.0.0.1:{port}")
        indexer.register(ENGINE, addresses.events, addresses.replay, rank=1)
        indexer.register(SERVICE, addresses.events, addresses.replay)
        indexer.await_subscription(ENGINE, TOKENS, lambda: engine.publish("kv-events", page(GPU)))
        indexer.await_credit(ENGINE, TOKENS, (64, 64, 64))
        memory = page(MEDIA["memory"], end=128)
        indexer.await_subscription(ENGINE, TOKENS, lambda: publisher.publish(NODE, memory))
        publisher.publish(NODE, [CLEARED])
        indexer.await_credit(ENGINE, TOKENS, NOTHING)
    finally:
        engine.close()


def test_events_of_an_engine(indexer: DynamoIndexer, addresses: Addresses) -> None:
    """What an engine says of its pages in the store, published by vLLM's own publisher beside vLLM's own events."""
    from vllm.distributed.kv_events import AllBlocksCleared, KVEventBatch, ZmqEventPublisher

    from connector.scheduler.cache_events import PageEvent  # here, as the other tests need no engine
    from tests.unit.connector.vllm_events import events_of

    publisher = ZmqEventPublisher(0, *addresses.bound, topic="kv-events")
    indexer.register(ENGINE, addresses.events, addresses.replay)
    seen = {}
    try:
        for number, tier in enumerate(MEDIA, 1_000):
            tokens, ends = tuple(range(2 * BLOCK)), (number,) * BLOCK
            asked = PageEvent(0, (b"one", b"two"), MEDIA[tier], tokens=tokens, block_tokens=BLOCK)
            last = PageEvent(0, (b"%d" % number,), MEDIA["memory"], tokens=ends, block_tokens=BLOCK)
            events = [AllBlocksCleared(), *events_of(asked)[1:], *events_of(last)[1:]]
            batch = KVEventBatch(ts=1.0, events=events, data_parallel_rank=0)
            indexer.await_subscription(ENGINE, [number] * BLOCK, partial(publisher.publish, batch))
            seen[tier] = indexer.credit(ENGINE, TOKENS)
    finally:
        publisher.shutdown()
    both = 2 * BLOCK
    assert seen == {"memory": (0, both, both), "filesystem": (0, 0, both), "redis": NOTHING, "s3": NOTHING}
