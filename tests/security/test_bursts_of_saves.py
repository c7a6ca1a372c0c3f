"""Bursts of small saves that name many records each: what the service holds stays bounded, beside another client."""

from __future__ import annotations

import asyncio
import struct
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.client import connect
from kvstore.store.tiered import TieredStore
from kvstore.testing.waiting import soon
from kvstore.wire import messages
from tests.security.raw_peer import RawPeer, head_bytes
from tests.security.test_save_memory import PROMPT, MemoryPeer, service_at

MIB = 1 << 20
CONNECTIONS = 40
REQUESTS = 25
"""In one go, on each connection."""
BURSTS = 2
HELD = 1000
"""Copies at a time, beside what is stored. Of all requests of a burst there would be 32,000."""
SMALL = replace(PROMPT, payload_bytes=500, num_tokens=64 * messages.SAVE_PLACES_MAX // 2)
_HEAD_BYTES = 64
_STEP_BYTES = 16 << 10


def burst_of(attacker: MemoryPeer, name: str, stamp: int) -> bytes:
    """Requests in one go, each with as many records as a save may name: the same ones."""
    places, num_bytes = [], 0
    for at, record in enumerate(replace(SMALL, name=name).records()):
        offset = _HEAD_BYTES + at * _STEP_BYTES
        attacker.put(record, offset, stamp)
        places.append(struct.pack("<3Q", offset, record.num_bytes, stamp))
        num_bytes += record.num_bytes
    fields = {"memory": attacker.id, "num_bytes": num_bytes, "places": b"".join(places)}
    return b"".join(
        head_bytes(messages.Save(request_id, 120_000, "memory", **fields)) for request_id in range(2, REQUESTS + 2)
    )


async def test_bursts_of_small_saves(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tell: Callable[[str], None]
) -> None:
    """A request has memory for its copies only once it is its turn. Each is answered, and so are another client's
    lookups."""
    num_held, most_held, inner = 0, 0, TieredStore.buffer
    outcomes, num_lookups = Counter[str](), 0

    def buffer(self: TieredStore, num_bytes: int) -> memoryview:
        nonlocal num_held, most_held
        data = inner(self, num_bytes)
        num_held += 1
        most_held = max(most_held, num_held)
        weakref.finalize(data.obj, dropped)
        return data

    def dropped() -> None:
        nonlocal num_held
        num_held -= 1

    async with service_at(f"unix:{folder / 's'}") as service:
        monkeypatch.setattr(TieredStore, "buffer", buffer)

        def attack() -> None:
            owner, peers = MemoryPeer(service.url), [RawPeer(service.url) for _ in range(CONNECTIONS)]
            for number in range(BURSTS):
                burst = burst_of(owner, f"burst {number}", number + 1)
                for peer in peers:
                    peer.send(burst)
                for peer in peers:
                    for _ in range(REQUESTS):
                        answer = peer.receive() or {}
                        assert answer["type"] == "saved", answer
                        outcomes.update(answer["outcomes"])
            for one in (owner, *peers):
                one.die()

        client = connect(service.url)
        await client.open_namespace(SMALL.description, deadline=soon())
        attacking = asyncio.ensure_future(asyncio.to_thread(attack))
        while not attacking.done():
            await client.lookup(SMALL.query(), deadline=soon())
            num_lookups += 1
        await attacking
        await client.aclose()
        async with asyncio.timeout(20):
            while (
                service.server.describe()["receive_bytes_used"] or service.server.describe()["save_memory_bytes_used"]
            ):
                await asyncio.sleep(0.01)
    tell(f"{num_lookups} lookups beside {outcomes.total()} records, of which at most {most_held} were held at a time")
    num_new = BURSTS * messages.SAVE_PLACES_MAX
    assert outcomes == {"stored": num_new, "exists": num_new * CONNECTIONS * REQUESTS - num_new}
    assert most_held < num_new + HELD
    assert num_lookups > 10
