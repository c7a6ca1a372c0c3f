"""Requests that wait for their turn with megabytes in a field that is short in any other client's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.service.limits import bytes_of
from kvstore.service.server import Server
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.tiers.memory import MemoryTier
from kvstore.wire import convert, messages
from kvstore.wire.address import parse_address
from tests.security.raw_peer import RawPeer, head_bytes

MIB = 1 << 20
LONG = bytes(4 * MIB - 1024)
PROMPT = Prompt(ATTENTION, "waits", 64, payload_bytes=8 * MIB)
KEY = convert.key_fields(PROMPT.records()[0].key)
Long = Callable[[int, bytes], messages.Request]

LOADS: dict[str, Long] = {
    "lease": lambda number, _: messages.Load(number, 600_000, LONG, **KEY),
    "arena": lambda number, lease: messages.Load(number, 600_000, lease, **KEY, arena=LONG),
    "prefix": lambda number, lease: messages.Load(number, 600_000, lease, **{**KEY, "prefix": LONG}),
}


@pytest.mark.parametrize("field", LOADS)
async def test_loads_with_a_long_field(folder: Path, field: str) -> None:
    """Behind loads whose answers their peer does not read wait others: the service stops to read the connection when it
    holds 16 MiB of them."""
    store = TieredStore(MemoryTier(64 * MIB))
    server = Server(store)
    await server.listen([parse_address(f"unix:{folder / 's'}")])

    def attack() -> int:
        with RawPeer(str(server.addresses[0])) as peer:
            peer.send(head_bytes(messages.OpenNamespace(1, 60_000, PROMPT.description.canonical)))
            peer.receive()
            for record in PROMPT.records():
                peer.send(head_bytes(messages.Save(2, 60_000, "memory"), record.num_bytes) + bytes(record.data))
                peer.receive()
            peer.send(head_bytes(messages.Stage(3, 60_000, **convert.query_fields(PROMPT.query()))))
            while "lease" not in (staged := peer.receive() or {}):
                pass
            for number in range(16):
                peer.send(head_bytes(messages.Load(10 + number, 600_000, staged["lease"], **KEY)))
            peer.sock.settimeout(1.0)
            for number in range(32):
                try:
                    peer.send(head_bytes(LOADS[field](100 + number, staged["lease"])))
                except TimeoutError:
                    return number
            return 32

    num_taken = await asyncio.to_thread(attack)
    await server.aclose()
    await store.aclose()
    assert num_taken <= 6, f"it holds {num_taken * 4} MiB"


def test_texts_inside_of_a_field_count() -> None:
    """What an engine says of itself when it opens a namespace counts with all that is nested in it."""
    deep: object = "x" * 100
    for _ in range(500):
        deep = [deep]
    engine = {"name": "e" * MIB, "models": ["m" * MIB, {"n" * MIB: deep}]}
    request = messages.OpenNamespace(1, 60_000, bytes(MIB), engine)
    assert bytes_of(request) == 4 * MIB + 100 + len("namemodels")
