"""Saves that a token may not make, and saves that stop in the middle: they take no room from others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvstore.service.limits import ServiceLimits
from kvstore.service.server import Server
from kvstore.testing.attacked import HEALTHY, AttackedService
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.steered_store import SteeredStore
from kvstore.testing.waiting import until
from kvstore.wire import messages
from kvstore.wire.address import parse_address
from tests.security.raw_peer import RawPeer, head_bytes, prefix

PROMPT = Prompt(ATTENTION, "room", 64, payload_bytes=1 << 20, tenant=HEALTHY)
ROOM_BYTES = ServiceLimits().receive_bytes


@pytest.fixture
async def service(folder: Path) -> AsyncIterator[AttackedService]:
    """With a reader, which may save nothing, beside the healthy client."""
    tokens = {"reader": "other", "saver": "other"}
    with AttackedService(folder, tokens=tokens, scopes={"reader": ("read",)}) as made:
        yield made


def save_s(service: AttackedService) -> float:
    """How long a save of the healthy tenant takes."""
    record = PROMPT.records()[0]
    with RawPeer(service.url, HEALTHY) as peer:
        peer.send(head_bytes(messages.OpenNamespace(1, 20_000, PROMPT.description.canonical)))
        peer.receive()
        started_s = time.monotonic()
        peer.send(head_bytes(messages.Save(2, 20_000, "memory"), record.num_bytes) + bytes(record.data))
        answer = peer.receive()
        assert answer is not None and answer["type"] == "saved", answer
        return time.monotonic() - started_s


@pytest.mark.parametrize("num_bytes", [1, ROOM_BYTES // 2, ROOM_BYTES])
def test_a_reader_announces_saves(service: AttackedService, num_bytes: int, tell: Callable[[str], None]) -> None:
    """It announces four of them and sends a byte of each: others save at once. A save that it sends in full is refused
    for its scope, and its connection stays."""
    readers = [RawPeer(service.url, "reader") for _ in range(4)]
    for peer in readers:
        peer.send(head_bytes(messages.Save(1, 20_000, "memory"), num_bytes) + b"\0")
    took_s = save_s(service)
    tell(f"{num_bytes} bytes announced four times: a save of another tenant takes {took_s * 1e3:.0f} ms")
    assert took_s < 8.0
    if num_bytes == ROOM_BYTES // 2:
        readers[0].send(bytes(num_bytes - 1))
    if num_bytes < ROOM_BYTES:
        answer = readers[0].receive()
        assert answer is not None and (answer["id"], answer["kind"]) == (1, "InvalidRequest"), answer
        assert "scope save" in answer["message"]
        readers[0].send(head_bytes(messages.Ping(1, 1000)))
        assert (readers[0].receive() or {})["type"] == "pong"
    for peer in readers:
        peer.die()


def test_a_tenant_leaves_room_for_others(service: AttackedService, tell: Callable[[str], None]) -> None:
    """A tenant that may save announces as much as there is room, and more, and sends a byte of each: another tenant
    saves at once."""
    greedy = [RawPeer(service.url, "saver") for _ in range(6)]
    for peer in greedy:
        peer.send(head_bytes(messages.Save(1, 20_000, "memory"), ROOM_BYTES // 4) + b"\0")
    took_s = save_s(service)
    tell(f"one tenant asks for one and a half times the room: a save of another takes {took_s * 1e3:.0f} ms")
    assert took_s < 8.0
    for peer in greedy:
        peer.die()
    time.sleep(0.2)
    with RawPeer(service.url, "saver") as peer:  # what they held is free: one record may have all the room, alone
        peer.send(head_bytes(messages.Save(1, 20_000, "memory"), ROOM_BYTES) + bytes(ROOM_BYTES))
        answer = peer.receive()
        assert answer is not None and answer["kind"] != "Unavailable", answer


@pytest.mark.parametrize("kind", ["head", "payload"])
async def test_what_stops_in_the_middle_is_given_up(folder: Path, kind: str) -> None:
    """Peers stop in the middle of a record or of a head, long before its deadline: after the silence that is allowed
    the room is others', and a connection that stands in a head is ended."""
    server = Server(SteeredStore(), ServiceLimits(silence_timeout_s=0.5))
    await server.listen([parse_address(f"unix:{folder / 's'}")])
    url = str(server.addresses[0])
    peers = await asyncio.to_thread(lambda: [RawPeer(url) for _ in range(4)])
    for peer in peers:
        if kind == "head":
            peer.send(prefix(4 << 20) + bytes(1000))
        else:
            peer.send(head_bytes(messages.Save(1, 60_000, "memory"), ROOM_BYTES // 4) + bytes(1000))
    async with asyncio.timeout(20):
        if kind == "head":
            await until(lambda: not server.describe()["sessions"])
        else:
            await until(lambda: server.describe()["receive_bytes_used"])
            await until(lambda: not server.describe()["receive_bytes_used"])
    for peer in peers:
        if kind == "head":
            assert "did not arrive in time" in (await asyncio.to_thread(peer.receive) or {})["message"]
        peer.die()
    await server.aclose()
