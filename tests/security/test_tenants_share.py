"""What one tenant takes, as much of it as it can get: another tenant's engine works all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.client import ClientOptions, RemoteStore, connect
from kvstore.errors import Unavailable
from kvstore.service.authentication import Grant
from kvstore.service.limits import ServiceLimits
from kvstore.service.server import Server
from kvstore.store.limits import StoreLimits
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import ATTENTION, Prompt, describe
from kvstore.testing.store_node import save_all
from kvstore.testing.tokens import credentials_of
from kvstore.testing.waiting import soon
from kvstore.tiers.memory import MemoryTier
from kvstore.wire import convert, messages
from kvstore.wire.address import UnixAddress, parse_address
from kvstore.wire.frames import pack_head
from kvstore.wire.messages import encode

GREEDY, MODEST = "greedy", "modest"
STAGE_BYTES = 3 << 20


def prompt_of(tenant: str, name: str, num_tokens: int = 256) -> Prompt:
    """Four pages of two slices of 20 KB."""
    return Prompt(ATTENTION, name, num_tokens, payload_bytes=20_000, tenant=tenant)


class Node:
    """A service with two tenants."""

    def __init__(self, server: Server, store: TieredStore) -> None:
        self.server, self.store = server, store
        self.clients: list[RemoteStore] = []

    def client(self, tenant: str) -> RemoteStore:
        made = connect(str(self.server.addresses[0]), options=ClientOptions(token=tenant))
        self.clients.append(made)
        return made

    async def works(self, tenant: str) -> bool:
        """Whether a tenant's engine can open one more namespace, save, get a hit, and load it."""
        model = f"model {len(self.clients)} of {tenant}"
        client, prompt = self.client(tenant), Prompt(ATTENTION, "a", 64, model=model, tenant=tenant)
        await save_all(client, prompt)
        staged = await client.stage(prompt.query(), deadline=soon())
        if staged.lease is None:
            return False
        await client.load(staged.lease, staged.keys[0], deadline=soon())
        await client.release(staged.lease)
        return staged.resume_tokens == 64


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    limits = StoreLimits(
        stage_bytes=STAGE_BYTES,
        leases_max=40,
        lease_records_max=400,
        namespaces_max=40,
        description_bytes=200_000,
        lease_s=60.0,
    )
    store = TieredStore(MemoryTier(8 << 20), limits=limits)
    server = Server(
        store,
        ServiceLimits(request_bytes=1 << 20),
        credentials=credentials_of({name: Grant(name) for name in (GREEDY, MODEST)}),
    )
    await server.listen([parse_address(f"unix:{tmp_path / 's'}")])
    made = Node(server, store)
    yield made
    for client in made.clients:
        await client.aclose()
    await server.aclose()
    await store.aclose()


async def open_until_refused(node: Node, what: str, padding: str = "") -> int:
    """How many namespaces, of models with such long names, were opened."""
    client = node.client(GREEDY)
    opened = 0
    with pytest.raises(Unavailable, match=what):
        while True:
            await client.open_namespace(describe(ATTENTION, f"model {opened}{padding}"), deadline=soon())
            opened += 1
    return opened


async def take_namespaces(node: Node) -> None:
    assert await open_until_refused(node, "namespaces") >= 25


async def take_descriptions(node: Node) -> None:
    assert await open_until_refused(node, "descriptions", "x" * 40_000) >= 2


async def stage_until_cut(node: Node, num_tokens: int) -> list[int]:
    """The numbers of records of the leases on a prompt that were given."""
    client, prompt = node.client(GREEDY), prompt_of(GREEDY, "leased", num_tokens)
    await save_all(client, prompt)
    leased: list[int] = []
    while (staged := await client.stage(prompt.query(), deadline=soon())).lease is not None:
        leased.append(len(staged.keys))
    assert staged.cut == "node_memory"
    return leased


async def take_leases(node: Node) -> None:
    assert len(await stage_until_cut(node, 64)) >= 25


async def take_leased_records(node: Node) -> None:
    assert 200 < sum(await stage_until_cut(node, 640)) <= 300


async def take_pinned_bytes(node: Node) -> None:
    client = node.client(GREEDY)
    for number in range(30):
        prompt = prompt_of(GREEDY, f"pinned {number}", 256)
        await save_all(client, prompt)
        await client.stage(prompt.query(), deadline=soon())
    assert STAGE_BYTES * 0.6 < node.store.memory.pinned_bytes <= STAGE_BYTES * 0.75


async def take_requests(node: Node) -> None:
    """Many connections, each with many long lookups at once."""
    address = parse_address(str(node.server.addresses[0]))
    assert isinstance(address, UnixAddress)
    prompt = Prompt(ATTENTION, "long", 100_000, tenant=GREEDY)
    client = node.client(GREEDY)
    await client.open_namespace(prompt.description, deadline=soon())
    fields = convert.query_fields(prompt.query())
    frame = pack_head(encode(messages.Hello(1, token=GREEDY)))
    frame += b"".join(pack_head(encode(messages.Lookup(number, 20_000, **fields))) for number in range(10))
    writers = []
    for _ in range(8):
        _, writer = await asyncio.open_unix_connection(address.path)
        writer.write(frame)
        writers.append(writer)
    most_bytes = 0
    for _ in range(200):
        most_bytes = max(most_bytes, node.server.describe()["request_bytes_used"])
        await asyncio.sleep(0.001)
    assert 400_000 < most_bytes <= 3 << 18
    assert await node.works(MODEST)
    for writer in writers:
        writer.transport.abort()


@pytest.mark.parametrize(
    "attack",
    [take_namespaces, take_descriptions, take_leases, take_leased_records, take_pinned_bytes, take_requests],
)
async def test_another_tenant_still_works(node: Node, attack: object) -> None:
    """A tenant takes as much of one thing as it can get, and keeps it."""
    assert await node.works(MODEST)
    await attack(node)  # type: ignore[operator]
    assert await node.works(MODEST)
