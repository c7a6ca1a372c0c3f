"""Many engines at one service: none starves, none leaves bytes behind, and one that does not read holds little."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.api import Ack, Retention, SaveOutcome
from kvstore.client import ClientOptions, RemoteStore, connect
from kvstore.errors import Unavailable
from kvstore.format.record import Record
from kvstore.runtime.deadline import Deadline
from kvstore.service.limits import ServiceLimits, Stall
from kvstore.service.server import Server
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.steered_store import SteeredStore
from kvstore.testing.store_node import save_all
from kvstore.testing.waiting import soon, until
from kvstore.wire import convert, messages
from kvstore.wire.address import UnixAddress, parse_address
from kvstore.wire.frames import pack_head
from kvstore.wire.messages import encode

PAYLOAD_BYTES = 200_000
RECEIVE_BYTES = 1 << 20


class SlowStore(SteeredStore):
    """Takes its time with each save, forgets the record then, and knows which buffers it gave are still held."""

    def __init__(self) -> None:
        super().__init__()
        self.save_s = 0.0
        self.living: set[int] = set()

    def buffer(self, num_bytes: int) -> memoryview:
        array: Any = np.empty(num_bytes, np.uint8)
        self.living.add(id(array))
        weakref.finalize(array, self.living.discard, id(array))
        return memoryview(array)

    async def save(
        self,
        record: Record,
        *,
        ack: Ack = Ack.MEMORY,
        retention: Retention = Retention.NORMAL,
        deadline: Deadline,
    ) -> SaveOutcome:
        await asyncio.sleep(self.save_s)
        outcome = await super().save(record, ack=ack, retention=retention, deadline=deadline)
        self.inner.memory.remove(record.key)
        return outcome


class Node:
    def __init__(self, server: Server, store: SlowStore, url: str) -> None:
        self.server, self.store, self.url = server, store, url
        self.clients: list[RemoteStore] = []

    async def client(self, prompt: Prompt, **options: Any) -> RemoteStore:
        client = connect(self.url, options=ClientOptions(**options))
        self.clients.append(client)
        await client.wait_ready(deadline=soon())
        await client.open_namespace(prompt.description, deadline=soon())
        return client

    @property
    def used_bytes(self) -> int:
        return int(str(self.server.describe()["receive_bytes_used"]))


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    store = SlowStore()
    server = Server(store, ServiceLimits(receive_bytes=RECEIVE_BYTES, save_credit_bytes=RECEIVE_BYTES))
    await server.listen([parse_address(f"unix:{tmp_path / 's'}")])
    node = Node(server, store, str(server.addresses[0]))
    yield node
    for client in node.clients:
        await client.aclose()
    await server.aclose()
    await store.aclose()


def prompt_of(name: str, num_tokens: int = 64) -> Prompt:
    return Prompt(ATTENTION, name, num_tokens, payload_bytes=PAYLOAD_BYTES)


async def save_on(client: RemoteStore, record: Record, saved: list[float], end: asyncio.Event) -> None:
    """Save one record again and again; notes how long each took."""
    while not end.is_set():
        started_s = time.monotonic()
        assert await client.save(record, deadline=soon()) is SaveOutcome.STORED
        saved.append(time.monotonic() - started_s)


async def test_a_greedy_engine_leaves_room_for_the_others(node: Node) -> None:
    """One engine with 24 saves at a time, seven with one each, room for five records: all get on, lookups are quick.

    The greedy one has two connections, each other engine has two and uses one at a time: none gets under a third of an
    equal share, and no lookup waits behind records.
    """
    node.store.save_s = 0.004
    greedy, others = prompt_of("greedy"), [prompt_of(f"modest {number}") for number in range(7)]
    end = asyncio.Event()
    counts: list[list[float]] = [[] for _ in range(8)]
    clients = [await node.client(prompt) for prompt in (greedy, *others)]
    records = [prompt.records()[0] for prompt in (greedy, *others)]
    tasks = [asyncio.ensure_future(save_on(clients[0], records[0], counts[0], end)) for _ in range(24)]
    tasks += [
        asyncio.ensure_future(save_on(client, record, times, end))
        for client, record, times in zip(clients[1:], records[1:], counts[1:], strict=True)
    ]
    lookups = []
    for _ in range(30):
        started_s = time.monotonic()
        await clients[1].lookup(others[0].query(), deadline=soon())
        lookups.append(time.monotonic() - started_s)
        await asyncio.sleep(0.05)
    end.set()
    await asyncio.gather(*tasks)
    numbers = [len(times) for times in counts]
    equal_share = sum(numbers) / 9  # by connections that are used: two and seven
    assert min(numbers[1:]) > equal_share / 3, numbers
    assert sorted(lookups)[len(lookups) // 2] < 0.1, lookups
    assert node.used_bytes == 0


async def test_cancelled_saves_are_let_go_at_once(node: Node) -> None:
    """Saves that wait in the store are cancelled by their engine: their room is free and their memory gone."""
    prompt = prompt_of("cancelled", 128)
    client = await node.client(prompt)
    node.store.held.add("save")
    saves = [asyncio.ensure_future(client.save(record, deadline=soon())) for record in prompt.records()]
    await until(lambda: node.used_bytes >= 4 * PAYLOAD_BYTES)
    assert len(node.store.living) == 4
    started_s = time.monotonic()
    for save in saves:
        save.cancel()
    await asyncio.gather(*saves, return_exceptions=True)
    await until(lambda: not (node.used_bytes or node.store.living))
    assert time.monotonic() - started_s < 5  # and not at their deadline
    node.store.held.clear()
    assert await client.save(prompt.records()[0], deadline=soon()) is SaveOutcome.STORED


async def test_a_dead_engine_in_the_middle_of_a_record(node: Node) -> None:
    """An engine dies with half a record sent, others wait for the room: it is theirs at once."""
    prompt = prompt_of("dying")
    client = await node.client(prompt)
    address = parse_address(node.url)
    assert isinstance(address, UnixAddress)
    dying = []
    for number in range(5):  # they take all the room
        _, writer = await asyncio.open_unix_connection(address.path)
        writer.write(pack_head(encode(messages.Hello(1, role="data"))))
        writer.write(pack_head(encode(messages.Save(number, 9000, "memory")), 200_000) + bytes(100_000))
        dying.append(writer)
    await until(lambda: node.used_bytes >= 1_000_000)
    save = asyncio.ensure_future(client.save(prompt.records()[0], deadline=soon()))
    await asyncio.sleep(0.1)
    assert not save.done()
    for writer in dying:
        writer.transport.abort()
    async with asyncio.timeout(5):
        assert await save is SaveOutcome.STORED
    await until(lambda: not (node.used_bytes or node.store.living))


async def test_engines_that_stop_in_the_middle_of_a_record(node: Node) -> None:
    """Engines freeze with half a record sent, and their connections stay: at the deadline of their saves
    the room is others'. The rest of the record is dropped when it comes, and the connection stays."""
    prompt = prompt_of("stopping")
    client = await node.client(prompt)
    address = parse_address(node.url)
    assert isinstance(address, UnixAddress)
    stopped = []
    for number in range(5):  # they take all the room
        reader, writer = await asyncio.open_unix_connection(address.path)
        writer.write(pack_head(encode(messages.Hello(1, role="data"))))
        writer.write(pack_head(encode(messages.Save(number, 500, "memory")), PAYLOAD_BYTES) + bytes(PAYLOAD_BYTES // 2))
        stopped.append((reader, writer))
    assert await client.save(prompt.records()[0], deadline=Deadline.after(60)) is SaveOutcome.STORED
    await until(lambda: not (node.used_bytes or node.store.living))
    for reader, writer in stopped:
        writer.write(bytes(PAYLOAD_BYTES // 2) + pack_head(encode(messages.Ping(77, 5000))))
        async with asyncio.timeout(60):
            assert b"no room to receive" in await reader.readuntil(b"pong")
        writer.close()
    assert node.used_bytes == 0


async def test_leases_of_an_engine_that_dies_before_it_reads_of_them(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of several stages wait for an engine that reads nothing, and it dies: all of its leases end with it."""
    monkeypatch.setattr("kvstore.wire.protocol._WRITE_HIGH_BYTES", 64 << 10)
    prompt = Prompt(ATTENTION, "dying", 64)
    await save_all(node.store.inner, prompt)
    address = parse_address(node.url)
    assert isinstance(address, UnixAddress)
    _, writer = await asyncio.open_unix_connection(address.path)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(pack_head(encode(messages.Hello(1))))
    writer.write(pack_head(encode(messages.OpenNamespace(1000, 60_000, prompt.description.canonical))))
    fields = convert.query_fields(prompt.query())
    for number in range(100):  # enough: from Python 3.12 on a loop counts all that waits at each write
        writer.write(pack_head(encode(messages.Ping(number, 60_000))) * 100)
    for number in range(5):
        writer.write(pack_head(encode(messages.Stage(2000 + number, 60_000, **fields))))
    await until(lambda: node.store.num_leases >= 5)
    writer.transport.abort()
    await until(lambda: not node.store.num_leases)


async def test_an_engine_that_does_not_read_holds_little(node: Node) -> None:
    """It asks for 100 records of 2 MB and reads none: what waits for it is bounded, and others load as before."""
    prompt = Prompt(ATTENTION, "unread", 64, payload_bytes=2 << 20)
    await save_all(node.store.inner, prompt)
    client = await node.client(prompt, shared_memory=False)
    staged = await client.stage(prompt.query(), deadline=soon())
    assert staged.lease is not None
    address = parse_address(node.url)
    assert isinstance(address, UnixAddress)
    _, writer = await asyncio.open_unix_connection(address.path)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(pack_head(encode(messages.Hello(1, role="data"))))
    opened = messages.OpenNamespace(1000, 9000, prompt.description.canonical)
    writer.write(pack_head(encode(opened)))
    fields = convert.key_fields(staged.keys[0])
    for number in range(100):
        writer.write(pack_head(encode(messages.Load(number, 9000, staged.lease, **fields))))
    await asyncio.sleep(0.3)
    waiting = [session.connection._transport.get_write_buffer_size() for session in node.server._sessions]  # type: ignore[union-attr]
    assert 2 << 20 <= max(waiting) <= (8 << 20) + (3 << 20), waiting
    started_s = time.monotonic()
    for key in staged.keys:
        await client.load(staged.lease, key, deadline=soon())
    assert time.monotonic() - started_s < 10
    writer.transport.abort()
    with pytest.raises(Unavailable):
        await client.load(staged.lease.__class__(bytes(16)), staged.keys[0], deadline=soon())


class StepsStore(SteeredStore):
    """Answers `status` in several rounds of the event loop, and counts how many it answers at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.num_running = self.most_running = 0

    async def status(self, *, deadline: Deadline, tenant: str = "") -> Mapping[str, object]:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        for _ in range(10):
            await asyncio.sleep(0)
        self.num_running -= 1
        return {}


async def test_requests_sent_in_one_go_are_begun_a_few_at_a_time(tmp_path: Path) -> None:
    """Forty connections with fifty requests each: the rounds of the event loop stay short, and a lookup that comes last
    is answered long before they are.
    """
    store = StepsStore()
    server = Server(store)
    await server.listen([parse_address(f"unix:{tmp_path / 's'}")])
    address, prompt = server.addresses[0], prompt_of("late")
    assert isinstance(address, UnixAddress)
    asks = b"".join(pack_head(encode(messages.Status(number, 20_000))) for number in range(50))
    peers = [await asyncio.open_unix_connection(address.path) for _ in range(40)]
    for reader, writer in peers:
        writer.write(pack_head(encode(messages.Hello(1))))
        await reader.readuntil(b"losses")
    client = connect(str(address))
    await client.open_namespace(prompt.description, deadline=soon())
    for _, writer in peers:
        writer.write(asks)
    await client.lookup(prompt.query(), deadline=soon())
    assert store.num_running > 0
    assert store.most_running <= 50
    for _, writer in peers:
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()
    await client.aclose()
    await server.aclose()
    await store.aclose()


def test_a_count_of_bytes_that_begins_below_zero() -> None:
    """The kernel counts more for small frames than their bytes: a peer has its whole time to read them all the same."""
    stall = Stall()
    assert stall.seconds(-100_000, now_s=5000.0) == 0
    assert stall.seconds(-90_000, now_s=5004.0) == 4
    assert stall.seconds(-20_000, now_s=5005.0) == 0
