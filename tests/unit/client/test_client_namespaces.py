"""Many namespaces, as of an engine whose weights change often: unused ones do not keep out new ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.api import Ack, Deadline, SaveOutcome
from kvstore.client import BlockingStore, PageDoor, RemoteStore, connect, describe_pages
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.model.keys import NamespaceId
from kvstore.model.namespace import NamespaceDescription
from kvstore.runtime.instruments import Instruments
from kvstore.service.server import Server
from kvstore.store.limits import StoreLimits
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.waiting import soon
from kvstore.tiers.memory import MemoryTier
from kvstore.wire.address import parse_address
from kvstore.wire.messages import error_of
from tests.virtual_time import ShiftedClock

OPEN_MAX = 3


class Store(TieredStore):
    """Notes what is opened."""

    def __init__(self, clock: ShiftedClock) -> None:
        limits = replace(StoreLimits(), stage_bytes=1 << 20, namespaces_max=OPEN_MAX)
        super().__init__(MemoryTier(2 << 20), limits=limits, instruments=Instruments(clock=clock))
        self.num_opened = 0

    async def open_namespace(self, description: NamespaceDescription, *, deadline: Deadline) -> NamespaceId:
        self.num_opened += 1
        return await super().open_namespace(description, deadline=deadline)


class Node:
    def __init__(self) -> None:
        self.clock = ShiftedClock()
        self.store = Store(self.clock)
        self.server = Server(self.store)

    def close_namespaces(self) -> None:
        self.server.answers._opened.clear()


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    node = Node()
    await node.server.listen([parse_address(f"unix:{tmp_path / 's'}")])
    yield node
    await node.server.aclose()
    await node.store.aclose()


@pytest.fixture
async def client(node: Node) -> AsyncIterator[RemoteStore]:
    client = connect(str(node.server.addresses[0]))
    await client.wait_ready(deadline=soon())
    yield client
    await client.aclose()


def remember_at_most(num_namespaces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound the namespaces that clients open again after a reconnection."""
    monkeypatch.setattr("kvstore.client.remote._NAMESPACES_MAX", num_namespaces)


def prompt_of(weights: int) -> Prompt:
    return Prompt(ATTENTION, "weights that change", 64, weights_id=str(weights))


async def test_a_new_namespace_closes_one_that_nobody_uses(node: Node, client: RemoteStore) -> None:
    """All are open that may be: one more is refused while they are in use, later it takes the place of the one that was
    not used for longest. A client that uses that one again opens it by doing so."""
    prompts = [prompt_of(weights) for weights in range(OPEN_MAX + 1)]
    for prompt in prompts[:-1]:
        await client.open_namespace(prompt.description, deadline=soon())
    with pytest.raises(Unavailable, match="in use"):
        await client.open_namespace(prompts[-1].description, deadline=soon())
    node.clock.ahead_s = 1000.0
    await client.lookup(prompts[0].query(), deadline=soon())
    await client.open_namespace(prompts[-1].description, deadline=soon())
    assert set(node.store._namespaces) == {prompts[index].namespace for index in (0, 2, 3)}
    node.clock.ahead_s = 2000.0
    assert await client.save(prompts[1].records()[0], deadline=soon()) is SaveOutcome.STORED
    node.clock.ahead_s = 3000.0
    await client.lookup(prompts[2].query(), deadline=soon())
    await client.stage(prompts[2].query(), deadline=soon())
    unknown = prompt_of(77)
    with pytest.raises(InvalidRequest, match="not opened"):
        await client.lookup(unknown.query(), deadline=soon())


async def test_an_invalid_request_opens_nothing(node: Node, client: RemoteStore) -> None:
    """A save asks for what this service does not have: no namespace is at fault, and none is opened again."""
    prompt = prompt_of(1)
    await client.open_namespace(prompt.description, deadline=soon())
    with pytest.raises(InvalidRequest, match="needs a cold tier"):
        await client.save(prompt.records()[0], ack=Ack.COLD, deadline=soon())
    assert node.store.num_opened == 1


@pytest.mark.parametrize("name", ["lookup", "stage", "save", "discard"])
async def test_each_call_opens_a_closed_namespace_again(node: Node, client: RemoteStore, name: str) -> None:
    """The service closed the namespace since the call before, as between an engine's lookup and its fetch."""
    prompt = prompt_of(1)
    await client.open_namespace(prompt.description, deadline=soon())
    record = prompt.records()[0]
    calls = {
        "lookup": lambda: client.lookup(prompt.query(), deadline=soon()),
        "stage": lambda: client.stage(prompt.query(), deadline=soon()),
        "save": lambda: client.save(record, deadline=soon()),
        "discard": lambda: client.discard(record.key, "damaged", deadline=soon()),
    }
    node.close_namespaces()
    await calls[name]()
    assert node.store.num_opened == 2


async def test_a_service_of_the_release_before(
    node: Node, client: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has closed a namespace, and has no word for that: the client opens it after any invalid request."""
    monkeypatch.setattr("kvstore.service.session.error_of", lambda *about: replace(error_of(*about), code=""))
    for connection in client.pool.connections():
        connection.welcome = replace(connection.welcome, codes=False)
    prompt = prompt_of(1)
    await client.open_namespace(prompt.description, deadline=soon())
    node.close_namespaces()
    await client.lookup(prompt.query(), deadline=soon())
    assert node.store.num_opened == 2


async def test_an_engine_that_had_many_namespaces_connects_again(node: Node, client: RemoteStore) -> None:
    """An engine has used more namespaces than a service has open, and its connection ends: it opens again the last ones
    that it used; refused ones do not stop it."""
    vars(client)["_namespaces"].most = 5
    for weights in range(20):
        node.clock.ahead_s += 1000.0
        await client.open_namespace(prompt_of(weights).description, deadline=soon())
    assert node.store.num_opened == 20
    for connection in client.pool.connections():
        connection.close()
        await connection.closed.wait()
    await client.wait_ready(deadline=soon())
    assert node.store.num_opened == 25
    node.clock.ahead_s += 1000.0
    await client.lookup(prompt_of(19).query(), deadline=soon())


async def test_a_door_on_a_namespace_that_its_client_has_forgotten(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client used another namespace since, and opens that one alone again: a door opens its own with its next call,
    whichever that is."""
    remember_at_most(1, monkeypatch)
    with BlockingStore(str(node.server.addresses[0])) as store:
        one, other = (PageDoor(store, describe_pages({"weights_id": name}, page_tokens=64)) for name in "ab")
        page = [memoryview(bytearray(4096))]
        calls: list[Callable[[], object]] = [
            lambda: one.present(["k"]),
            lambda: one.exists(["k"]),
            lambda: one.read_into(["k"], [page]),
            lambda: one.write_from(["k"], [page]),
        ]

        def use() -> None:
            for call in calls:
                one.open()
                other.present(["k"])
                node.close_namespaces()
                call()
            assert one.read_into(["k"], [page]) == 1

        await asyncio.to_thread(use)
        one.close()
        other.close()
