"""Saves that name many records each: bursts of small ones, and places that are used again while they are copied."""

from __future__ import annotations

import asyncio
import random
import struct
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import connect
from kvstore.service import save_memory
from kvstore.store.tiered import TieredStore
from kvstore.testing.waiting import soon, until
from kvstore.wire import messages
from tests.security.memory_peer import HEAD_BYTES, PROMPT, MemoryPeer, service_at
from tests.security.raw_peer import RawPeer, head_bytes

CONNECTIONS = 40
REQUESTS = 25
"""In one go, on each connection."""
BURSTS = 2
HELD = 1000
"""Copies at a time, beside what is stored. Of all requests of a burst there would be 32,000."""
TIMES = 400
"""Requests while places are used again."""
SMALL = replace(PROMPT, payload_bytes=500, num_tokens=64 * messages.SAVE_PLACES_MAX // 2)
_STEP_BYTES = 16 << 10


def burst_of(attacker: MemoryPeer, name: str, stamp: int) -> bytes:
    """Requests in one go, each with as many records as a save may name: the same ones."""
    places, num_bytes = [], 0
    for at, record in enumerate(replace(SMALL, name=name).records()):
        offset = HEAD_BYTES + at * _STEP_BYTES
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
        held = ("receive_bytes_used", "save_memory_bytes_used")
        await until(lambda: not any(service.server.describe()[name] for name in held))
    tell(f"{num_lookups} lookups beside {outcomes.total()} records, of which at most {most_held} were held at a time")
    num_new = BURSTS * messages.SAVE_PLACES_MAX
    assert outcomes == {"stored": num_new, "exists": num_new * CONNECTIONS * REQUESTS - num_new}
    assert most_held < num_new + HELD
    assert num_lookups > 10


@pytest.mark.parametrize("where", ["in threads", "on the loop"])
async def test_places_that_are_used_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tell: Callable[[str], None], where: str
) -> None:
    """A client makes other records at its places all the time, with a new stamp or without, while requests name all of
    them: a request is refused, or each of its records is stored, with the bytes of a record."""
    monkeypatch.setattr(save_memory, "INLINE_BYTES", 0 if where == "in threads" else 1 << 30)
    made = [replace(PROMPT, name=name, num_tokens=SMALL.num_tokens).records() for name in ("these", "others")]
    all_bytes = {record.key: bytes(record.data) for records in made for record in records}
    record_bytes, num_places = made[0][0].num_bytes, len(made[0])
    offsets = [HEAD_BYTES + at * 5 * _STEP_BYTES for at in range(num_places)]
    stamps, ended, outcomes = [1] * num_places, threading.Event(), Counter[str]()

    def change(owner: MemoryPeer) -> None:
        numbers = random.Random(1)
        while not ended.is_set():
            at = numbers.randrange(num_places)
            record = numbers.choice(made)[at]
            if numbers.random() < 0.7:  # as a good client does
                struct.pack_into("<Q", owner.memory, offsets[at] - HEAD_BYTES, 0)
                stamps[at] += 1
            owner.put(record, offsets[at], stamps[at])

    def save_some(owner: MemoryPeer, request_id: int) -> dict[str, Any]:
        chosen = random.sample(range(num_places), random.choice((2, 4, num_places)))
        places = b"".join(struct.pack("<3Q", offsets[at], record_bytes, stamps[at]) for at in chosen)
        fields = {"memory": owner.id, "num_bytes": record_bytes * len(chosen), "places": places}
        return owner.ask(head_bytes(messages.Save(request_id, 60_000, "memory", **fields)))

    async with service_at(f"unix:{folder / 's'}") as service:
        owner = await asyncio.to_thread(MemoryPeer, service.url)
        for record, offset in zip(made[0], offsets, strict=True):
            owner.put(record, offset)
        changing = threading.Thread(target=change, args=(owner,))
        changing.start()
        num_held = 0
        try:
            for request_id in range(2, 2 + TIMES):
                answer = await asyncio.to_thread(save_some, owner, request_id)
                assert answer["type"] == "saved" or answer["kind"] in ("Unavailable", "CorruptRecord"), answer
                outcomes.update(answer.get("outcomes", ["refused"]))
                for record in (one for records in made for one in records):
                    if (held := service.memory.peek(record.key)) is not None:
                        num_held += 1
                        assert bytes(held.data) == all_bytes[record.key]
                        service.memory.remove(record.key)
        finally:
            ended.set()
            changing.join()
            owner.die()
    tell(f"{where}: {outcomes['stored']} records were stored, {outcomes['refused']} of {TIMES} requests refused")
    assert num_held == outcomes["stored"] > 0
    assert outcomes["refused"] > 0
