"""Records made in memory that the service reads: they are not sent, and a record that changes is not stored."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.api import SaveOutcome
from kvstore.client import BlockingStore, ClientOptions, PageDoor, RemoteStore, describe_pages, sharing
from kvstore.errors import CorruptRecord, KVStoreError, Unavailable
from kvstore.format.header_v1 import HEADER_BYTES
from kvstore.format.record import Record
from kvstore.runtime.arena import Arena, ArenaView, memory_file
from kvstore.runtime.deadline import Deadline
from kvstore.service import save_memory
from kvstore.service.limits import ServiceLimits
from kvstore.service.save_memory import SaveMemory
from kvstore.store import saving
from kvstore.testing.attacked import AttackedService
from kvstore.testing.waiting import soon, until
from kvstore.wire import messages
from tests.unit.client.shared_records import (
    MAKES_RECORDS,
    MEMORY_BYTES,
    MIB,
    RECORDS,
    ROOM_BYTES,
    address,
    copies_wait,
    free_places,
    made,
    stored,
    until_idle,
    until_shared,
)
from tests.unit.client.sharing_node import LARGE, SMALL, Node, node_at


async def until_refused(node: Node) -> None:
    """Return when the client has asked for memory, after it has mapped the service's, and has none."""
    await until(lambda: (node.server.describe()["sessions_total"], len(node.client.sockets())) == (5, 3))


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with node_at(f"unix:{tmp_path / 's'}", options=MAKES_RECORDS) as node:
        await until_shared(node)
        yield node


async def test_large_records_are_not_sent(node: Node) -> None:
    """Their bytes do not travel, and are stored as those of records that do."""
    before = node.sent_bytes
    for record in RECORDS:
        assert await node.client.save(made(node, record), deadline=soon()) is SaveOutcome.STORED
    assert node.sent_bytes - before < 200 * len(RECORDS)
    assert await node.client.save(made(node, RECORDS[0]), deadline=soon()) is SaveOutcome.EXISTS
    assert all(stored(node, record) for record in RECORDS)


async def test_each_record_is_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was copied was verified on the way, one that was sent is verified by the store."""
    verified, inner = list[Record](), saving.verify_record

    async def verify_record(record: Record) -> None:
        verified.append(record)
        await inner(record)

    monkeypatch.setattr(saving, "verify_record", verify_record)
    async with node_at(f"unix:{tmp_path / 's'}", options=MAKES_RECORDS) as node:
        await until_shared(node)
        await node.client.save(made(node, RECORDS[0]), deadline=soon())
        await node.client.save(RECORDS[1], deadline=soon())
        assert [record.key for record in verified] == [RECORDS[1].key]
        assert stored(node, RECORDS[0]) and stored(node, RECORDS[1])


def test_a_place_without_a_record() -> None:
    """A client may name bytes that are no record, as few as a header has."""
    descriptor = memory_file(MIB)
    arena = Arena.over(descriptor, MIB)
    memory = SaveMemory(ArenaView(descriptor, MIB), MIB, "")
    for num_bytes in (HEADER_BYTES, HEADER_BYTES + 1, 300_000):
        buffer = arena.take(num_bytes)
        assert buffer is not None
        place = arena.place(buffer)
        assert place is not None
        with pytest.raises(CorruptRecord):
            memory.copy(place, memoryview(bytearray(num_bytes)))
    memory.close()
    arena.close()


async def test_a_stored_record_is_a_copy(node: Node) -> None:
    """What its client does with the memory after the answer does not reach the stored record."""
    buffer = node.client.shared_buffer(ROOM_BYTES)
    assert buffer is not None
    record = RECORDS[0]
    buffer[: record.num_bytes] = record.data
    await node.client.save(Record(record.header, buffer[: record.num_bytes]), deadline=soon())
    buffer[:] = b"\xff" * len(buffer)
    assert stored(node, record)


@pytest.mark.parametrize("why", ["tcp", "switched off", "no arena", "older service", "no memory"])
async def test_records_are_sent_where_memory_cannot_be_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Over TCP, for a client that does not ask, at a service without an arena, of an earlier release, or that cannot
    make memory: there is no buffer, and saves are as they were."""

    def refuse(_: int) -> int:
        raise OSError(12, "no memory left")

    if why == "older service":
        encode = messages.encode
        monkeypatch.setattr(messages, "encode", lambda message: {**encode(message), "save_memory": False})
    if why == "no memory":
        monkeypatch.setattr(save_memory, "memory_file", refuse)
    options = ClientOptions() if why == "switched off" else MAKES_RECORDS
    url = "tcp://127.0.0.1:0" if why == "tcp" else f"unix:{tmp_path / 's'}"
    async with node_at(url, options=options, arena_bytes=0 if why == "no arena" else 32 * MIB) as node:
        await node.client.wait_ready(deadline=soon())
        if why == "no memory":
            await until_refused(node)
        assert len(node.client.sockets()) == 3
        before = node.sent_bytes
        await node.saved(LARGE)
        assert node.client.shared_buffer(ROOM_BYTES) is None
        assert node.sent_bytes - before > sum(record.num_bytes for record in RECORDS)
        assert all(stored(node, record) for record in RECORDS)


async def test_an_older_client_sends_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save of a release before shared memory for saves has none of its fields."""
    encode, added = messages.encode, ("memory", "offset", "num_bytes", "stamp")

    def as_before(message: messages.Message) -> dict[str, object]:
        is_save = isinstance(message, messages.Save)
        return {name: value for name, value in encode(message).items() if not (is_save and name in added)}

    monkeypatch.setattr(messages, "encode", as_before)
    async with node_at(f"unix:{tmp_path / 's'}") as node:
        await node.saved(LARGE)
        assert all(stored(node, record) for record in RECORDS)


async def test_other_records_are_sent(node: Node) -> None:
    """Small ones, those in memory of another kind, and those that do not begin where their buffer does."""
    assert node.client.shared_buffer(SMALL.records()[0].num_bytes) is None
    buffer = node.client.shared_buffer(ROOM_BYTES)
    assert buffer is not None
    second = RECORDS[1]
    buffer[64 : 64 + second.num_bytes] = second.data
    shifted = Record(second.header, buffer[64 : 64 + second.num_bytes])
    before = node.sent_bytes
    for record in (RECORDS[0], shifted):
        assert await node.client.save(record, deadline=soon()) is SaveOutcome.STORED
    assert node.sent_bytes - before > RECORDS[0].num_bytes + second.num_bytes
    assert stored(node, RECORDS[0]) and stored(node, second)


async def test_memory_that_is_full(node: Node) -> None:
    """There is no further buffer until one is dropped; nothing waits."""
    taken = []
    while (buffer := node.client.shared_buffer(ROOM_BYTES)) is not None:
        taken.append(buffer)
    assert len(taken) > 40
    taken.pop()
    assert node.client.shared_buffer(ROOM_BYTES) is not None


@pytest.mark.parametrize("ends", ["answered", "connection lost"])
async def test_memory_is_not_used_again_before_the_answer(
    node: Node, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """A cancelled save whose record the service still copies keeps its memory, though its caller has dropped it."""
    with copies_wait(monkeypatch) as (waits, go_on):
        record = made(node, RECORDS[0])
        place, connections = address(record.data), node.client.pool.connections()
        saving = asyncio.ensure_future(node.client.save(record, deadline=soon()))
        assert await asyncio.to_thread(waits.wait, 10)
        saving.cancel()
        with suppress(asyncio.CancelledError):
            await saving
        del record, saving
        await node.client.status(deadline=soon())  # the service has had the cancel
        assert place not in free_places(node)
        if ends == "answered":
            go_on.set()
        else:
            for connection in connections[1:]:
                connection.close()
        await until(lambda: place in free_places(node))
    await until_idle(node)
    assert not stored(node, RECORDS[0]) or ends == "answered"


@pytest.mark.parametrize("change", ["used again", "written to", "written to in its header"])
async def test_bytes_that_change_before_they_are_copied_are_not_stored(
    node: Node, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """A client whose connection was lost may use the memory again while the service copies it, for a record that is
    whole as well: its stamp is another one. One that writes to a record which it saves is found by the checksums."""
    with copies_wait(monkeypatch) as (waits, go_on):
        buffer = node.client.shared_buffer(ROOM_BYTES)
        assert buffer is not None
        first, second = RECORDS[0], RECORDS[1]
        buffer[: first.num_bytes] = first.data
        place = address(buffer)
        saving = asyncio.ensure_future(
            node.client.save(Record(first.header, buffer[: first.num_bytes]), deadline=soon())
        )
        assert await asyncio.to_thread(waits.wait, 10)
        if change == "used again":
            for connection in node.client.pool.connections()[1:]:
                connection.close()
            with pytest.raises(Unavailable):
                await saving
            del saving, buffer
            await asyncio.sleep(0)  # its task has ended
            again = []
            while not again or address(again[-1]) != place:
                taken = node.client.shared_buffer(ROOM_BYTES)
                assert taken is not None
                again.append(taken)
            again[-1][: second.num_bytes] = second.data
            go_on.set()
        else:
            buffer[HEADER_BYTES + 70_000 if change == "written to" else 30] ^= 1
            go_on.set()
            with pytest.raises(CorruptRecord):
                await saving
    await until_idle(node)
    assert not stored(node, first) and not stored(node, second)


async def test_a_late_save_is_answered_when_its_copy_has_ended(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save whose deadline passes while the service copies fails, and its memory is used again after the copy."""
    with copies_wait(monkeypatch) as (_, go_on):
        record = made(node, RECORDS[0])
        place = address(record.data)
        with pytest.raises(Unavailable):
            await node.client.save(record, deadline=Deadline.after(0.1))
        del record
        assert place not in free_places(node)
        go_on.set()
        await until(lambda: place in free_places(node))


async def test_a_service_that_is_restarted(tmp_path: Path) -> None:
    """The memory goes with the service. Records that were made in it are sent to the next one, whose memory is used
    from then on."""
    url = f"unix:{tmp_path / 's'}"
    async with node_at(url, options=MAKES_RECORDS) as first:
        await until_shared(first)
        old = made(first, RECORDS[0])
        await first.server.aclose()
        await until(lambda: first.client.shared_buffer(ROOM_BYTES) is None)
        async with node_at(url) as second:
            await until_shared(first)
            assert await first.client.save(old, deadline=soon()) is SaveOutcome.STORED
            assert await first.client.save(made(first, RECORDS[1]), deadline=soon()) is SaveOutcome.STORED
            assert stored(second, RECORDS[0]) and stored(second, RECORDS[1])
            assert second.server.describe()["save_memory_bytes_used"] == MEMORY_BYTES


async def test_a_new_control_connection(node: Node) -> None:
    """The client asks again, of a service that may be another one, and gives the memory that it had up."""
    old = made(node, RECORDS[0])
    control = node.client.pool.now()
    assert control is not None
    control.close()
    await until(lambda: node.client.pool.now() not in (None, control))
    await until_shared(node)
    await until(lambda: node.server.describe()["save_memory_bytes_used"] == MEMORY_BYTES)
    assert len(node.client.sockets()) == 4
    for record in (old, made(node, RECORDS[1])):
        assert await node.client.save(record, deadline=soon()) is SaveOutcome.STORED
    assert stored(node, RECORDS[0]) and stored(node, RECORDS[1])


async def test_two_new_control_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one's request for memory is answered late, when there is a second one: its memory is not used, and the
    second one's is."""
    first, go_on, num_asked = threading.Event(), threading.Event(), 0
    inner = sharing.map_save_memory

    def ask(*arguments: Any) -> Any:
        nonlocal num_asked
        num_asked += 1
        if num_asked > 1:
            return inner(*arguments)
        found = inner(*arguments)
        first.set()
        go_on.wait(20)
        return found

    monkeypatch.setattr(sharing, "map_save_memory", ask)
    async with node_at(f"unix:{tmp_path / 's'}", options=MAKES_RECORDS) as node:
        await node.client.wait_ready(deadline=soon())
        assert await asyncio.to_thread(first.wait, 10)
        control = node.client.pool.now()
        assert control is not None
        control.close()
        await until(lambda: node.client.pool.now() not in (None, control))
        await asyncio.sleep(0.05)  # a second request, if it did not wait for the first one, would be answered
        go_on.set()
        await until_shared(node)
        await until(lambda: node.server.describe()["save_memory_bytes_used"] == MEMORY_BYTES)
        assert len(node.client.sockets()) == 4
        assert await node.client.save(made(node, RECORDS[0]), deadline=soon()) is SaveOutcome.STORED


async def test_a_connection_that_does_not_know_places(node: Node) -> None:
    """A record in shared memory is sent on a connection whose welcome does not say that the service reads places."""
    for connection in node.client.pool.connections():
        connection.welcome = replace(connection.welcome, save_memory=False)
    before = node.sent_bytes
    assert await node.client.save(made(node, RECORDS[0]), deadline=soon()) is SaveOutcome.STORED
    assert node.sent_bytes - before > RECORDS[0].num_bytes
    assert stored(node, RECORDS[0])


async def test_a_failed_save_frees_its_memory(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, without the cyclic collector: an error has no cycle that keeps the record."""
    gc.collect()
    gc.disable()
    try:
        with copies_wait(monkeypatch) as (waits, go_on):
            record = made(node, RECORDS[0])
            place = address(record.data)
            saving = asyncio.ensure_future(node.client.save(record, deadline=soon()))
            assert await asyncio.to_thread(waits.wait, 10)
            for connection in node.client.pool.connections()[1:]:
                connection.close()
            with pytest.raises(Unavailable):
                await saving
            del record, saving
            await asyncio.sleep(0)  # its task has ended
            assert place in free_places(node)
            go_on.set()
    finally:
        gc.enable()


async def test_a_service_that_dies_while_it_copies(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save fails, as one whose record was being sent."""
    with copies_wait(monkeypatch) as (waits, go_on):
        saving = asyncio.ensure_future(node.client.save(made(node, RECORDS[0]), deadline=soon()))
        assert await asyncio.to_thread(waits.wait, 10)
        closing = asyncio.ensure_future(node.server.aclose())
        with pytest.raises(Unavailable):
            await saving
        go_on.set()
        await closing


async def test_a_client_that_leaves_frees_its_memory(node: Node) -> None:
    """At once; and another client cannot name it."""
    assert node.server.describe()["save_memory_bytes_used"] == MEMORY_BYTES
    await node.client.aclose()
    assert node.client.shared_buffer(ROOM_BYTES) is None
    await until(lambda: not node.server.describe()["save_memory_bytes_used"])


async def test_saves_wait_for_room_as_sent_records_do(tmp_path: Path) -> None:
    """A service with room for two records at a time takes all of many that are saved at once."""
    limits = ServiceLimits(receive_bytes=450_000)
    async with node_at(f"unix:{tmp_path / 's'}", options=MAKES_RECORDS, limits=limits) as node:
        await until_shared(node)
        outcomes = await asyncio.gather(*(node.client.save(made(node, record), deadline=soon()) for record in RECORDS))
        assert outcomes == [SaveOutcome.STORED] * len(RECORDS)
        assert node.server.describe()["receive_bytes_used"] == 0


def test_pages_of_a_door_are_made_there(tmp_path: Path) -> None:
    """`PageDoor` writes pages under a caller's own keys without sending them."""
    page = np.random.default_rng(1).integers(0, 256, 200_000, np.uint8).tobytes()

    async def sent_bytes(store: RemoteStore) -> int:
        await until(lambda: store.shared_buffer(ROOM_BYTES) is not None)
        return sum(connection.frames.written_bytes for connection in store.pool.connections())

    with AttackedService(tmp_path) as service, BlockingStore(service.url, options=MAKES_RECORDS) as store:
        store.wait_ready(deadline=Deadline.after(60))
        door = PageDoor(store, describe_pages({"weights_id": "w", "model": "m"}, page_tokens=64))
        assert door.present(["a key"]) == [False]
        before = store.run(sent_bytes, deadline=soon())
        assert door.write_from(["a key"], [[page]]) == [True]
        assert store.run(sent_bytes, deadline=soon()) - before < 2000
        target = bytearray(len(page))
        assert door.read_into(["a key"], [[target]]) == 1
        assert target == page
        door.close()


def test_a_service_that_answers_byte_by_byte(tmp_path: Path) -> None:
    """The thread that asks for memory is free again when the time for it is over."""
    path, ended = tmp_path / "s", threading.Event()

    def drip(listening: socket.socket) -> None:
        with listening.accept()[0] as peer, suppress(OSError):
            while not ended.wait(0.1):
                peer.sendall(b"K")

    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as connection:
        listening.bind(str(path))
        listening.listen()
        dripping = threading.Thread(target=drip, args=(listening,))
        dripping.start()
        with pytest.raises((KVStoreError, TimeoutError)):
            sharing.map_save_memory(connection, str(path), replace(MAKES_RECORDS, hello_timeout_s=0.5))
        ended.set()
        dripping.join()


async def test_memory_that_may_shrink_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that could make its client fault: the client goes on without the memory."""

    def unsealed(num_bytes: int) -> int:
        descriptor = os.memfd_create("a test")
        os.ftruncate(descriptor, num_bytes)
        return descriptor

    monkeypatch.setattr(save_memory, "memory_file", unsealed)
    monkeypatch.setattr(save_memory, "ArenaView", lambda *_: None)  # it would refuse that too
    async with node_at(f"unix:{tmp_path / 's'}", options=MAKES_RECORDS) as node:
        await node.client.wait_ready(deadline=soon())
        await until_refused(node)
        assert node.client.shared_buffer(ROOM_BYTES) is None


async def test_nothing_stays_open(tmp_path: Path) -> None:
    """A client that is closed leaves no descriptor, also when it is closed while it asks for memory."""
    async with node_at(f"unix:{tmp_path / 'warm'}", options=MAKES_RECORDS) as node:
        await until_shared(node)
    del node
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(6):
        async with node_at(f"unix:{tmp_path / str(number)}", options=MAKES_RECORDS) as node:
            if number % 2:
                await until_shared(node)
                assert len(node.client.sockets()) == 4  # a forked child closes them
            else:
                await node.client.wait_ready(deadline=soon())
        assert node.client.sockets() == []
        del node
    gc.collect()  # mappings go with the last object that has them
    assert len(os.listdir("/proc/self/fd")) <= before


def test_an_arena_over_memory_of_another_process() -> None:
    """Its buffers are at the places that a reader of the same memory finds."""
    descriptor = save_memory.memory_file(MIB)
    view = save_memory.ArenaView(descriptor, MIB)
    arena = Arena.over(descriptor, MIB)
    buffer = arena.take(1000)
    assert buffer is not None
    buffer[:] = b"\x07" * 1000
    place = arena.place(buffer)
    assert place is not None
    assert bytes(view.at(place)) == bytes(buffer)
    assert view.holds(place)
    del buffer
    assert arena.take(1000) is not None
    assert not view.holds(place)
    arena.close()
