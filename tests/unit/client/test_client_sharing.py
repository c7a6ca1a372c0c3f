"""Records read where they are in the service's shared memory: the same bytes, or an error."""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import threading
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.api import LeaseId, LoadedRecord, Staged
from kvstore.client import ClientOptions
from kvstore.client.sharing import map_arena
from kvstore.errors import CorruptRecord, InvalidRequest, Unavailable
from kvstore.format.header_v1 import HEADER_BYTES
from kvstore.format.record import open_record, verify_payload
from kvstore.runtime.arena import Arena, Place
from kvstore.testing.prompts import Prompt
from kvstore.testing.waiting import soon
from kvstore.wire import convert, messages, places
from kvstore.wire.frames import pack_head
from tests.unit.client.sharing_node import LARGE, SMALL, Node, node_at


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with node_at(f"unix:{tmp_path / 's'}") as node:
        yield node


def test_a_service_that_answers_byte_by_byte(tmp_path: Path) -> None:
    """The thread that asks for the shared memory is free again when the time for it is over."""
    path, ended = tmp_path / "s", threading.Event()

    def drip(listening: socket.socket) -> None:
        welcome = messages.Welcome(messages.PROTOCOL_VERSION, "a service", 1 << 20, 1 << 20, 8)
        with listening.accept()[0] as peer, suppress(OSError):
            for byte in pack_head(messages.encode(welcome)):
                peer.sendall(bytes([byte]))
                if ended.wait(0.1):
                    return

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        dripping = threading.Thread(target=drip, args=(listening,))
        dripping.start()
        started_s = time.monotonic()
        with pytest.raises(TimeoutError):
            map_arena(str(path), ClientOptions(hello_timeout_s=0.5))
        assert time.monotonic() - started_s < 3
        ended.set()
        dripping.join()


def shared_arena(node: Node) -> bytes:
    """Id of the memory that the client has mapped."""
    return node.client._shared.arena


async def load_all(node: Node, prompt: Prompt) -> int:
    """Load and verify every record with one call; returns the bytes that came through the connections for it."""
    staged = await node.client.stage(prompt.query(), deadline=soon())
    assert staged.lease is not None and len(staged.keys) == len(prompt.records())
    before = node.received_bytes
    expected = {record.key: record.data for record in prompt.records()}
    records = await node.client.load_many(staged.lease, staged.keys, deadline=soon())
    for key, leased in zip(staged.keys, records, strict=True):
        loaded = await leased.load(deadline=soon())
        assert loaded.num_bytes == len(expected[key])
        with loaded.reading() as record:
            open_record(record.data, key)
            assert record.data == expected[key]
            assert record.data.readonly
    await node.client.release(staged.lease)
    return node.received_bytes - before


async def mapped(node: Node, prompt: Prompt) -> tuple[Staged, LoadedRecord]:
    """The first record of a prompt, which was saved, ready to be read."""
    staged = await node.client.stage(prompt.query(), deadline=soon())
    assert staged.lease is not None
    leased = (await node.client.load_many(staged.lease, staged.keys, deadline=soon()))[0]
    return staged, await leased.load(deadline=soon())


def overwrite(node: Node, staged: Staged) -> None:
    """What a service does that considers its peer dead: free the records and use their memory for others."""
    node.store.leases.release_all()
    for key in staged.keys:
        node.memory.remove(key)
    assert node.memory.arena is not None
    taken = [node.memory.arena.take(200_192) for _ in staged.keys]
    for buffer in taken:
        assert buffer is not None
        buffer[:] = b"\xff" * len(buffer)


async def test_large_records_are_read_where_they_stand(node: Node) -> None:
    """Over a Unix socket the bytes of large records do not travel, and one request serves all of them."""
    await node.saved(LARGE)
    assert await load_all(node, LARGE) < 2000


@pytest.mark.parametrize("why", ["small", "tcp", "switched off", "no arena", "arena full"])
async def test_records_travel_where_they_cannot_be_shared(tmp_path: Path, why: str) -> None:
    """Small records, TCP, a client that does not want it, a service without or with a full arena: all are sent."""
    prompt = SMALL if why == "small" else LARGE
    options = ClientOptions(shared_memory=why != "switched off")
    url = "tcp://127.0.0.1:0" if why == "tcp" else f"unix:{tmp_path / 's'}"
    arena_bytes = {"no arena": 0, "arena full": 128 << 10}.get(why, 32 << 20)
    async with node_at(url, options=options, arena_bytes=arena_bytes) as node:
        await node.saved(prompt)
        assert await load_all(node, prompt) > sum(record.num_bytes for record in prompt.records())


async def test_one_record_is_sent(node: Node) -> None:
    """`load` returns bytes that are the caller's own, also where memory is shared."""
    await node.saved(LARGE)
    staged = await node.client.stage(LARGE.query(), deadline=soon())
    assert staged.lease is not None
    buffer = memoryview(bytearray(300_000))
    record = await node.client.load(staged.lease, staged.keys[0], deadline=soon(), allocate=lambda size: buffer[:size])
    overwrite(node, staged)
    open_record(record.data, staged.keys[0])
    assert record.data == buffer[: record.num_bytes]


async def test_long_loads_are_asked_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More records than a request may name: each has its place all the same."""
    monkeypatch.setattr("kvstore.wire.messages.LOCATE_MAX", 3)
    async with node_at(f"unix:{tmp_path / 's'}") as node:
        await node.saved(LARGE)
        assert await load_all(node, LARGE) < 4000


@pytest.mark.parametrize("when", ["before", "while"])
async def test_a_record_whose_memory_was_reused_is_not_used(node: Node, when: str) -> None:
    """Its memory serves another record before or while it is read: the reader learns that it has read nothing."""
    await node.saved(LARGE)
    staged, loaded = await mapped(node, LARGE)
    if when == "before":
        overwrite(node, staged)
    with pytest.raises(Unavailable, match="no longer there"), loaded.reading() as record:
        open_record(record.data)
        if when == "while":
            overwrite(node, staged)
            open_record(record.data)  # its error would blame the record


async def test_a_corrupt_byte_is_the_records_fault(node: Node) -> None:
    """A byte that changed under a live record is found by the checksum, of header or payload, and is not excused."""
    await node.saved(LARGE)
    staged, loaded = await mapped(node, LARGE)
    held = node.memory.peek(staged.keys[0])
    assert held is not None
    flipped: Any = np.ndarray(
        held.num_bytes, np.uint8, (ctypes.c_char * held.num_bytes).from_address(address(held.data))
    )
    for at in (HEADER_BYTES + 1000, 30):
        flipped[at] ^= 1
        with pytest.raises(CorruptRecord), loaded.reading() as record:
            verify_payload(record)
        flipped[at] ^= 1
    with loaded.reading() as record:
        verify_payload(record)


def address(data: memoryview) -> int:
    array: Any = np.frombuffer(data, np.uint8)
    return int(array.__array_interface__["data"][0])


async def test_a_lease_that_ended_takes_nothing_away_yet(node: Node) -> None:
    """Bytes stay what they are until the memory is used again: a load whose lease has just expired is right."""
    await node.saved(LARGE)
    staged, loaded = await mapped(node, LARGE)
    node.store.leases.release_all()
    with loaded.reading() as record:
        open_record(record.data, staged.keys[0])
    with pytest.raises(Unavailable, match="lease"):
        await node.client.load_many(LeaseId(staged.lease or b""), staged.keys, deadline=soon())


async def test_a_record_that_was_replaced_is_still_the_leased_one(node: Node) -> None:
    """A record is discarded and saved again with other bytes: a reader with a lease sees the old bytes or an error."""
    await node.saved(LARGE)
    staged, loaded = await mapped(node, LARGE)
    key, old = staged.keys[0], {record.key: record for record in LARGE.records()}
    await node.client.discard(key, "a test", deadline=soon())
    for seed in range(1, 4):
        other = LARGE.record(old[key].header.span.stop, key.group, key.slice, seed=seed)
        await node.client.save(other, deadline=soon())
        await node.client.discard(key, "a test", deadline=soon())
    with suppress(Unavailable), loaded.reading() as record:
        open_record(record.data, key)
        assert record.data == old[key].data
    lost, *others = await node.client.load_many(LeaseId(staged.lease or b""), staged.keys, deadline=soon())
    with pytest.raises(Unavailable):
        await lost.load(deadline=soon())
    for one, other in zip(others, staged.keys[1:], strict=True):
        assert (await one.load(deadline=soon())).peek().data == old[other].data


async def test_a_service_that_ended_leaves_what_is_being_read(node: Node) -> None:
    """The service goes while a record is read: the memory stays until the reader is done, and so do the bytes."""
    await node.saved(LARGE)
    staged, loaded = await mapped(node, LARGE)
    with loaded.reading() as record:
        await node.server.aclose()
        await node.memory.aclose()
        open_record(record.data, staged.keys[0])
    with pytest.raises(Unavailable):
        await node.client.load_many(LeaseId(staged.lease or b""), staged.keys, deadline=soon())


async def test_nothing_is_read_after_its_block(node: Node) -> None:
    """The bytes of a mapped record cannot be read once it was checked that they are right."""
    await node.saved(LARGE)
    _, loaded = await mapped(node, LARGE)
    with loaded.reading() as record:
        assert record.payload[:10]
    with pytest.raises(ValueError, match="released"):
        bytes(record.data)


@pytest.mark.parametrize(
    "place",
    [Place(0, 200_192, 1), Place(63, 10, 1), Place(32 << 20, 1, 1), Place(64, 1 << 40, 1), Place(1 << 62, 1 << 62, 1)],
)
async def test_places_outside_the_memory_are_refused(node: Node, monkeypatch: pytest.MonkeyPatch, place: Place) -> None:
    """A service that answers with places that cannot be costs the load, and no memory outside is read."""
    await node.saved(LARGE)
    monkeypatch.setattr(Arena, "place", lambda *_: place)
    with pytest.raises(InvalidRequest, match="no such place"):
        await mapped(node, LARGE)


async def test_a_place_of_another_record_is_refused(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that confuses places, or their sizes, is found out by the headers."""
    await node.saved(LARGE)
    staged, _ = await mapped(node, LARGE)
    other, arena = node.memory.peek(staged.keys[1]), node.memory.arena
    assert other is not None and arena is not None
    confused = arena.place(other.data)
    assert confused is not None
    for place in (confused, replace(confused, num_bytes=confused.num_bytes - 1), replace(confused, num_bytes=7)):
        monkeypatch.setattr(Arena, "place", lambda *_, place=place: place)
        _, loaded = await mapped(node, LARGE)
        with pytest.raises(CorruptRecord), loaded.reading():
            pass


async def test_answers_of_the_wrong_length_are_refused(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that answers for fewer or more records than were named costs the load."""
    await node.saved(LARGE)
    for located in (b"", bytes(24), bytes(24 * 9), bytes(7)):
        answer = partial(messages.Located, places=located)
        monkeypatch.setattr(places, "located_reply", lambda request_id, _, answer=answer: answer(request_id))
        with pytest.raises(InvalidRequest, match="length"):
            await mapped(node, LARGE)


async def test_records_of_two_namespaces_are_not_loaded_together(node: Node) -> None:
    """The caller's mistake is named, and nothing is sent."""
    await node.saved(LARGE)
    keys = [LARGE.key(64), replace(LARGE, model="another").key(64)]
    with pytest.raises(InvalidRequest, match="one namespace"):
        await node.client.load_many(LeaseId(bytes(16)), keys, deadline=soon())


async def test_an_older_client_gets_places_one_by_one(node: Node) -> None:
    """A client of a release before `locate` names the arena in each load, and copies the record from its place."""
    await node.saved(LARGE)
    staged = await node.client.stage(LARGE.query(), deadline=soon())
    connection, arena = node.client.pool.now(), node.memory.arena
    assert staged.lease is not None and connection is not None and arena is not None
    fields = convert.key_fields(staged.keys[0])
    lease, held = staged.lease, node.memory.peek(staged.keys[0])
    assert held is not None
    for named, is_sent in ((arena.id, False), (bytes(16), True), (b"", True)):
        answer, payload = await connection.request(
            lambda i, ms, named=named: messages.Load(i, ms, lease, **fields, arena=named),
            messages.Loaded,
            deadline=soon(),
        )
        assert (payload is not None, answer.stamp == 0) == (is_sent, is_sent)
        if not is_sent:
            assert Place(answer.offset, answer.num_bytes, answer.stamp) == arena.place(held.data)


async def test_an_older_service_sends_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that has an arena and does not say where records are in it: it is not mapped, and not asked."""
    encode = messages.encode
    monkeypatch.setattr(messages, "encode", lambda message: {**encode(message), "locates": False})
    async with node_at(f"unix:{tmp_path / 's'}") as node:
        await node.saved(LARGE)
        connection = node.client.pool.now()
        assert connection is not None and connection.welcome.arena and not connection.welcome.locates
        assert await load_all(node, LARGE) > sum(record.num_bytes for record in LARGE.records())


async def test_a_new_service_is_mapped_anew(tmp_path: Path) -> None:
    """After a restart the client reads from the new service's memory, never from the old one's."""
    url = f"unix:{tmp_path / 's'}"
    async with node_at(url) as first:
        await first.saved(LARGE)
        assert await load_all(first, LARGE) < 20_000
        old = shared_arena(first)
        await first.server.aclose()
        async with node_at(url) as second:
            await first.client.wait_ready(deadline=soon())
            other = replace(LARGE, name="another prompt")
            await first.saved(other)
            assert shared_arena(first) not in (b"", old)
            assert shared_arena(first) == getattr(second.memory.arena, "id", None)
            assert await load_all(first, other) < 20_000


async def test_a_closed_client_maps_nothing(node: Node) -> None:
    """What it mapped is free at once, though Python has not collected the client yet."""
    await node.client.wait_ready(deadline=soon())
    view = weakref.ref(node.client.shared_memory())
    assert view() is not None
    await node.client.aclose()
    assert view() is None


async def test_nothing_stays_open(tmp_path: Path) -> None:
    """Mapping costs no descriptor, and the service's is closed with it."""
    async with node_at(f"unix:{tmp_path / 'warm'}") as node:  # what the first connection of a process leaves open
        await node.client.wait_ready(deadline=soon())
    del node
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(3):
        async with node_at(f"unix:{tmp_path / str(number)}") as node:
            await node.client.wait_ready(deadline=soon())
            assert shared_arena(node)
        del node
    gc.collect()  # mappings go with the last object that reads through them
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_a_service_that_promises_an_arena_and_gives_none_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the descriptor cannot be passed, records are sent."""

    def refuse(*_: object) -> int:
        raise OSError("not permitted")

    monkeypatch.setattr(socket, "send_fds", refuse)
    async with node_at(f"unix:{tmp_path / 's'}") as node:
        await node.saved(LARGE)
        assert shared_arena(node) == b""
        assert await load_all(node, LARGE) > 200_000
