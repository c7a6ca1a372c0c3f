"""Cache events: names of pages from tenants, and peers of the sockets, which show no token."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.model.keys import Boundary, PrefixHash
from kvstore.model.kinds import FullAttention
from kvstore.model.layout import GroupLayout, Layout
from kvstore.model.page_blocks import BlockGroup, PageBlocks
from kvstore.testing.attacked import AttackedService, beside
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.wire import messages
from kvstore.wire.page_names import blocks_message, names_messages
from tests.security.raw_peer import RawPeer, head_bytes

EVIL = "evil"
LARGE = Layout(16_384, (GroupLayout(FullAttention(), 2),))
"""Pages as long as a tenant wants."""

Names = Callable[[PageBlocks], messages.Message]


def in_names(blocks: PageBlocks) -> messages.Message:
    """A page as clients name several."""
    (message,) = names_messages([blocks])
    return message


BOTH: tuple[Names, ...] = (blocks_message, in_names)


def service_with_events(folder: Path, **scopes: tuple[str, ...]) -> AttackedService:
    settings = {
        "events_endpoint": f"ipc://{folder}/events",
        "events_replay_endpoint": f"ipc://{folder}/replay",
        "events_node": "node:here",
    }
    return AttackedService(folder, tokens={EVIL: EVIL}, scopes=scopes, settings=settings)


def largest(
    prompt: Prompt, boundary: Boundary, number: int, *, num_blocks: int = 512, block_tokens: int = 32
) -> PageBlocks:
    """The names of a page that take most, with hashes of their own."""
    start = number * num_blocks
    return PageBlocks(
        namespace=prompt.namespace,
        boundary=boundary,
        group=0,
        model="m",
        hash_bytes=8,
        hashes=b"".join((start + index).to_bytes(8, "big") for index in range(num_blocks)),
        parent=b"",
        block_tokens=block_tokens,
        groups=tuple(BlockGroup(index, "full_attention") for index in range(8)),
        tokens=b"\xff" * (4 * num_blocks * block_tokens),
    )


def opened(peer: RawPeer, prompt: Prompt) -> None:
    peer.send(head_bytes(messages.OpenNamespace(1, 60_000, prompt.description.canonical)))
    answer = peer.receive()
    assert answer is not None and answer["type"] == "namespace_opened", answer


def ping(peer: RawPeer) -> None:
    """Return when all before was taken."""
    peer.send(head_bytes(messages.Ping(9, 60_000)))
    answer = peer.receive()
    assert answer is not None and answer["type"] == "pong", answer


@pytest.mark.parametrize("are_stored", [True, False])
async def test_the_largest_names(folder: Path, full: bool, are_stored: bool, tell: Callable[[str], None]) -> None:
    """One tenant names large pages, as many as it wants: others are served, and the memory is bounded."""
    num_pages = 2_000 if full and not are_stored else 300 if not are_stored else 30

    def attack() -> None:
        with RawPeer(service.url, EVIL) as peer:
            for number in range(num_pages):
                prompt = Prompt(LARGE, f"p{number}", 16_384, step_tokens=16_384, payload_bytes=100, tenant=EVIL)
                if not number:
                    opened(peer, prompt)
                for record in prompt.records() if are_stored else ():
                    peer.send(head_bytes(messages.Save(2, 60_000, "memory"), record.num_bytes) + bytes(record.data))
                    answer = peer.receive()
                    assert answer is not None and answer["type"] == "saved", answer
                blocks = largest(prompt, prompt.boundary(16_384), number)
                peer.send(head_bytes(blocks_message(blocks)))
            ping(peer)

    with service_with_events(folder) as service:
        seen = await beside(service, lambda: asyncio.to_thread(attack), at_least_s=3)
    tell(f"names of {num_pages} pages, stored: {are_stored}: {seen}")
    seen.check(full=full)


async def test_as_many_small_names_as_a_message_may_have(folder: Path, full: bool, tell: Callable[[str], None]) -> None:
    """One tenant sends full messages without a pause: others are served, and the memory is bounded."""
    prompt = Prompt(LARGE, "p", 16_384, step_tokens=16_384, payload_bytes=100, tenant=EVIL)
    page = largest(prompt, prompt.boundary(16_384), 0, num_blocks=1, block_tokens=1)._replace(tokens=b"")
    num_messages = 3_000 if full else 300

    def attack() -> None:
        with RawPeer(service.url, EVIL) as peer:
            opened(peer, prompt)
            for number in range(num_messages):
                start = number * messages.PAGE_NAMES_MAX
                prefixes = (hash_of(start + index) for index in range(messages.PAGE_NAMES_MAX))
                pages = [page._replace(boundary=Boundary(16_384, prefix), hashes=prefix[:8]) for prefix in prefixes]
                (message,) = names_messages(pages)
                peer.send(head_bytes(message))
            ping(peer)

    with service_with_events(folder) as service:
        seen = await beside(service, lambda: asyncio.to_thread(attack), at_least_s=3)
    tell(f"{num_messages} full messages of names: {seen}")
    seen.check(full=full)


def hash_of(number: int) -> PrefixHash:
    return PrefixHash(hashlib.sha256(number.to_bytes(8, "big")).digest())


@pytest.mark.parametrize("message", BOTH, ids=lambda message: message.__name__)
async def test_names_of_more_than_a_page_end_the_connection(folder: Path, message: Names) -> None:
    """So do more groups, and more blocks for each group, than any engine has."""
    large, small = (Prompt(layout, "p", 16_384, tenant=EVIL) for layout in (LARGE, ATTENTION))
    with service_with_events(folder) as service:
        for prompt, num_blocks, block_tokens in ((large, 513, 32), (large, 4_000, 255), (small, 5, 16), (small, 1, 65)):
            with RawPeer(service.url, EVIL) as peer:
                opened(peer, prompt)
                blocks = largest(prompt, prompt.boundary(16_384), 0, num_blocks=num_blocks, block_tokens=block_tokens)
                peer.send(head_bytes(message(blocks)))
                answer = peer.receive()
                assert answer is not None and answer["type"] == "refused", answer


@pytest.mark.parametrize("message", BOTH, ids=lambda message: message.__name__)
async def test_who_may_not_save_names_no_page(folder: Path, message: Names) -> None:
    """The first names of a page count. A client with a token for reading is not asked for names; a peer that sends them
    all the same is refused."""
    prompt = Prompt(ATTENTION, "p", 64, tenant=EVIL)
    with service_with_events(folder, evil=("read",)) as service, RawPeer(service.url, greet=False) as peer:
        peer.send(head_bytes(messages.Hello(1, token=EVIL)))
        welcome = peer.receive()
        assert welcome is not None and welcome["type"] == "welcome" and not welcome["blocks"]
        assert not welcome["page_names"]
        opened(peer, prompt)
        blocks = largest(prompt, prompt.boundary(64), 0, num_blocks=4, block_tokens=16)
        peer.send(head_bytes(message(blocks)))
        answer = peer.receive()
        assert answer is not None and answer["type"] == "refused" and "scope save" in answer["message"], answer
