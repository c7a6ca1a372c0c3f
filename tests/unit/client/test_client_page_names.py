"""Names of pages on their way to a service: many in a message, or each in its own to an earlier service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import RemoteStore, connect
from kvstore.client.connection import Connection
from kvstore.model.keys import Boundary, NamespaceId, PrefixHash
from kvstore.model.page_blocks import BlockGroup, PageBlocks
from kvstore.service.server import Server
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.steered_store import SteeredStore
from kvstore.testing.waiting import soon, until
from kvstore.wire import messages
from kvstore.wire.address import parse_address
from kvstore.wire.page_names import blocks_message

PROMPT = Prompt(ATTENTION, "p", 64)
NUM = 150
"""More than are sent after one ping, and than one message may have."""


class NamedStore(SteeredStore):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.named: list[PageBlocks] = []

    @property
    def takes_blocks(self) -> bool:
        return True

    def name_blocks(self, blocks: PageBlocks) -> None:
        self.named.append(blocks)


def page(number: int, **change: Any) -> PageBlocks:
    blocks = PageBlocks(
        namespace=PROMPT.namespace,
        boundary=Boundary(64, PrefixHash(number.to_bytes(32, "big"))),
        group=0,
        model="org/model",
        hash_bytes=8,
        hashes=bytes(32),
        parent=b"",
        block_tokens=16,
        groups=(BlockGroup(0, "full_attention"),),
    )
    return blocks._replace(**change)


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[NamedStore, RemoteStore]]:
    store = NamedStore()
    server = Server(store)
    await server.listen([parse_address(f"unix:{folder}/s")])
    client = connect(f"unix:{folder}/s")
    try:
        await client.open_namespace(PROMPT.description, deadline=soon())
        yield store, client
    finally:
        await client.aclose()
        await server.aclose()
        await store.aclose()


async def until_named(store: NamedStore, num_pages: int) -> None:
    await until(lambda: len(store.named) >= num_pages)


def sent_names(monkeypatch: pytest.MonkeyPatch, *, is_old: bool) -> list[messages.Message]:
    """What clients send from now on without an answer: names of pages.

    Args:
        is_old: The service does not say that it takes `page_names`.
    """
    sent: list[messages.Message] = []
    encode, post = messages.encode, Connection.post

    def encode_as_old(message: messages.Message) -> dict[str, Any]:
        is_welcome = isinstance(message, messages.Welcome)
        return {name: value for name, value in encode(message).items() if not (is_welcome and name == "page_names")}

    def note_and_post(connection: Connection, message: messages.Message) -> None:
        sent.append(message)
        post(connection, message)

    if is_old:
        monkeypatch.setattr(messages, "encode", encode_as_old)
    monkeypatch.setattr(Connection, "post", note_and_post)
    return sent


@pytest.mark.parametrize("is_old", [False, True])
async def test_names_arrive_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_old: bool) -> None:
    sent = sent_names(monkeypatch, is_old=is_old)
    pages = [page(number) for number in range(NUM)]
    async with served(tmp_path) as (store, client):
        for blocks in pages:
            client.name_blocks(blocks)
        await until_named(store, NUM)
        assert store.named == pages
    assert len(sent) == (NUM if is_old else 3)
    assert all(isinstance(message, messages.Outcome if is_old else messages.PageNames) for message in sent)


@pytest.mark.parametrize("is_old", [False, True])
async def test_the_last_names_of_a_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_old: bool) -> None:
    """What waits when a client is closed is sent, of several groups, in messages that a service takes."""
    sent = sent_names(monkeypatch, is_old=is_old)
    pages = [page(number, group=number % 2) for number in range(NUM)]
    async with served(tmp_path) as (store, client):
        for blocks in pages:
            client.name_blocks(blocks)
        await client.aclose()
        await until_named(store, NUM)
        for group in (0, 1):
            assert [one for one in store.named if one.group == group] == pages[group::2]
    assert len(sent) == (NUM if is_old else 4)


async def test_an_earlier_client(tmp_path: Path) -> None:
    """It names each page with an outcome."""
    async with served(tmp_path) as (store, client):
        connection = client.pool.now()
        assert connection is not None
        for number in range(3):
            connection.post(blocks_message(page(number)))
        await until_named(store, 3)
        assert store.named == [page(number) for number in range(3)]


async def test_names_in_a_namespace_that_is_not_open_are_dropped(tmp_path: Path) -> None:
    """Others of the same client are taken."""
    async with served(tmp_path) as (store, client):
        client.name_blocks(page(1, namespace=NamespaceId(bytes(16))))
        client.name_blocks(page(2))
        await until_named(store, 1)
        assert store.named == [page(2)]
