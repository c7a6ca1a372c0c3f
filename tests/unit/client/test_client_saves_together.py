"""Several records in one save: one request where they are in memory that the service reads, else one for each."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.api import PageStore, SaveOutcome
from kvstore.client import BlockingStore, ClientOptions, PageDoor, describe_pages
from kvstore.errors import CorruptRecord, KVStoreError, Unavailable
from kvstore.format.record import Record
from kvstore.runtime.deadline import Deadline
from kvstore.service.limits import ServiceLimits
from kvstore.testing.attacked import AttackedService
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.waiting import eventually, soon, until
from kvstore.wire import messages
from tests.unit.client.shared_records import (
    MAKES_RECORDS,
    MIB,
    RECORDS,
    copies_wait,
    free_places,
    made,
    stored,
    until_idle,
    until_shared,
)
from tests.unit.client.sharing_node import LARGE, Node, node_at

MANY = Prompt(ATTENTION, "many together", 64 * (messages.SAVE_PLACES_MAX + 6), payload_bytes=70_000)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with node_at(f"unix:{tmp_path / 's'}", options=MAKES_RECORDS) as node:
        await until_shared(node)
        yield node


def all_made(node: Node, records: list[Record]) -> list[Record]:
    return [made(node, record) for record in records]


def damaged(node: Node, record: Record) -> Record:
    """The record, made in shared memory with another last byte."""
    buffer = node.client.shared_buffer(record.num_bytes)
    assert buffer is not None
    buffer[:] = record.data
    buffer[-1] ^= 1
    return Record(record.header, buffer.toreadonly())


def count_saves(monkeypatch: pytest.MonkeyPatch) -> list[messages.Save]:
    """The saves that are sent from now on."""
    saves, encode = list[messages.Save](), messages.encode

    def counted(message: messages.Message) -> dict[str, object]:
        if isinstance(message, messages.Save):
            saves.append(message)
        return encode(message)

    monkeypatch.setattr(messages, "encode", counted)
    return saves


async def test_records_in_shared_memory_take_one_request(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its outcome, and the bytes that were made; one that is there already keeps its own."""
    await node.client.save(RECORDS[2], deadline=soon())
    saves, before = count_saves(monkeypatch), node.sent_bytes
    outcomes = await node.client.save_many(all_made(node, RECORDS), deadline=soon())
    assert [outcome is SaveOutcome.EXISTS for outcome in outcomes] == [at == 2 for at in range(len(RECORDS))]
    assert len(saves) == 1 and node.sent_bytes - before < 400
    assert all(stored(node, record) for record in RECORDS)


async def test_more_records_than_one_request_may_have(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are divided."""
    await node.client.open_namespace(MANY.description, deadline=soon())
    saves, records = count_saves(monkeypatch), []
    for record in MANY.records():
        buffer = node.client.shared_buffer(record.num_bytes)
        assert buffer is not None
        buffer[:] = record.data
        records.append(Record(record.header, buffer.toreadonly()))
    outcomes = await node.client.save_many(records, deadline=soon())
    assert outcomes == [SaveOutcome.STORED] * len(records)
    assert [len(save.places) // 24 for save in saves] == [messages.SAVE_PLACES_MAX] * 2 + [12]
    assert all(stored(node, record) for record in MANY.records())


@pytest.mark.parametrize("why", ["one is elsewhere", "older service", "too large together"])
async def test_each_by_itself_where_they_cannot_go_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """All are stored all the same."""
    if why == "older service":
        encode = messages.encode
        monkeypatch.setattr(messages, "encode", lambda message: {**encode(message), "save_places": False})
    limits = ServiceLimits(receive_bytes=2 * RECORDS[0].num_bytes) if why == "too large together" else None
    async with node_at(f"unix:{tmp_path / 's'}", options=MAKES_RECORDS, limits=limits) as node:
        await until_shared(node)
        records = all_made(node, RECORDS)
        if why == "one is elsewhere":
            records[1] = RECORDS[1]
        saves = count_saves(monkeypatch)
        assert await node.client.save_many(records, deadline=soon()) == [SaveOutcome.STORED] * len(records)
        assert len(saves) == len(records) and not any(save.places for save in saves)
        assert all(stored(node, record) for record in RECORDS)
        await until_idle(node)


async def test_a_damaged_record_among_others(node: Node) -> None:
    """It is refused and not stored; of the others none is stored with other bytes, and they can be saved again."""
    records = all_made(node, RECORDS)
    records[1] = damaged(node, RECORDS[1])
    with pytest.raises(CorruptRecord):
        await node.client.save_many(records, deadline=soon())
    assert not stored(node, RECORDS[1])
    outcomes = await node.client.save_many(all_made(node, RECORDS), deadline=soon())
    assert set(outcomes) <= {SaveOutcome.STORED, SaveOutcome.EXISTS}
    assert all(stored(node, record) for record in RECORDS)
    await until_idle(node)


async def test_a_service_whose_memory_is_full(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing there can be evicted: of one request the record that fits and those that are there have their outcomes,
    as the ones between them that do not fit."""
    limit_bytes = node.memory.limit_bytes
    filling = replace(LARGE, name="filling", payload_bytes=limit_bytes // len(RECORDS) - 160_000)
    for record in (RECORDS[4], *filling.records()):
        await node.client.save(record, deadline=soon())
        assert node.memory.pin(record.key) is not None
    free_bytes = limit_bytes - node.memory.pinned_bytes
    assert RECORDS[0].num_bytes < free_bytes < 2 * MIB
    too_large = replace(LARGE, name="too large", payload_bytes=2 * MIB).records()[:2]
    records = [too_large[0], RECORDS[4], RECORDS[0], too_large[1], RECORDS[4]]
    in_memory = []
    for record in records:
        buffer = node.client.shared_buffer(record.num_bytes)
        assert buffer is not None
        buffer[:] = record.data
        in_memory.append(Record(record.header, buffer.toreadonly()))
    saves = count_saves(monkeypatch)
    outcomes = await node.client.save_many(in_memory, deadline=soon())
    full, there = SaveOutcome.FULL, SaveOutcome.EXISTS
    assert outcomes == [full, there, SaveOutcome.STORED, full, there]
    assert len(saves) == 1 and [stored(node, record) for record in records] == [False, True, True, False, True]
    await until_idle(node)


@pytest.mark.parametrize("ends", ["answered", "connection lost"])
async def test_the_memory_of_cancelled_saves_is_kept_until_the_answer(
    node: Node, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """The service may still copy each of them. A lost connection fails the call, and gives all room back."""
    with copies_wait(monkeypatch) as (waits, go_on):
        taken, free = all_made(node, RECORDS), len(free_places(node))
        saving = asyncio.ensure_future(node.client.save_many(taken, deadline=soon()))
        del taken
        assert await asyncio.to_thread(waits.wait, 10)
        if ends == "answered":
            saving.cancel()
            with suppress(asyncio.CancelledError):
                await saving
            await node.client.status(deadline=soon())  # the service has had the cancel
        else:
            for connection in node.client.pool.connections()[1:]:
                connection.close()
            with pytest.raises(Unavailable):
                await saving
        del saving
        if ends == "answered":
            assert len(free_places(node)) == free
        go_on.set()
        await until(lambda: len(free_places(node)) >= free + len(RECORDS))
    await until_idle(node)
    assert len({stored(node, record) for record in RECORDS}) == 1


@pytest.mark.parametrize("why", ["late", "no credit", "too large", "damaged", "damaged and one elsewhere", "cancelled"])
async def test_failed_saves_leave_nothing_to_the_collector(tmp_path: Path, why: str) -> None:
    """Their memory is free once the service has answered: no cycle of an error keeps it."""
    limits = ServiceLimits(receive_bytes=RECORDS[0].num_bytes - 1) if why == "too large" else None
    async with node_at(f"unix:{tmp_path / 's'}", options=MAKES_RECORDS, limits=limits) as node:
        await until_shared(node)
        gc.collect()
        gc.disable()
        try:
            free = len(free_places(node))
            if why == "no credit":  # as beside many saves of which none is answered
                for connection in node.client.pool.connections():
                    assert connection.save_credit.try_take(connection.save_credit.limit_bytes) is not None
            for _ in range(6):
                records = all_made(node, RECORDS[:3])
                if why.startswith("damaged"):
                    records[1] = damaged(node, RECORDS[1])
                if why.endswith("elsewhere"):  # so each is saved by itself
                    records[0] = RECORDS[0]
                deadline = Deadline.after({"late": 0.0005, "no credit": 0.01}.get(why, 20))
                saving = asyncio.ensure_future(node.client.save_many(records, deadline=deadline))
                del records
                await asyncio.sleep(0)
                if why == "cancelled":
                    saving.cancel()
                with suppress(asyncio.CancelledError, KVStoreError):
                    await saving
                    assert why == "late", "it was saved"
                del saving
            await until(lambda: len(free_places(node)) >= free)
        finally:
            gc.enable()


def test_failed_calls_of_a_thread_leave_nothing_to_the_collector(tmp_path: Path) -> None:
    """Also where a plain thread waits for the call: the future that it waits for is in no cycle with its error."""

    async def free(store: PageStore) -> int:
        taken = []
        while (buffer := store.shared_buffer(MIB)) is not None:
            taken.append(buffer)
        return len(taken)

    async def with_another_byte(store: PageStore) -> list[Record]:
        records = []
        for record in RECORDS[:3]:
            buffer = store.shared_buffer(record.num_bytes)
            assert buffer is not None
            buffer[:] = record.data
            buffer[-1] ^= 1
            records.append(Record(record.header, buffer.toreadonly()))
        return records

    with AttackedService(tmp_path) as service, BlockingStore(service.url, options=MAKES_RECORDS) as store:
        store.wait_ready(deadline=Deadline.after(60))
        store.run(until_there, deadline=soon())
        store.open_namespace(LARGE.description, deadline=soon())
        gc.collect()
        gc.disable()
        try:
            before = store.run(free, deadline=soon())
            for _ in range(4):
                with pytest.raises(CorruptRecord):
                    store.save_many(store.run(with_another_byte, deadline=soon()), deadline=soon())
            eventually(lambda: store.run(free, deadline=soon()) >= before, 10, why="memory of a failed call is kept")
        finally:
            gc.enable()


async def until_there(store: PageStore) -> None:
    """Return when there is shared memory."""
    await until(lambda: store.shared_buffer(300_000) is not None)


def test_pages_of_many_sizes_come_back(tmp_path: Path) -> None:
    """Pages that are saved together, alone, and by socket; each has its own bytes."""
    options = ClientOptions(save_memory_bytes=16 * MIB)
    with AttackedService(tmp_path) as service, BlockingStore(service.url, options=options) as store:
        store.wait_ready(deadline=Deadline.after(60))
        store.run(until_there, deadline=soon())
        door = PageDoor(store, describe_pages({"pages of": "many sizes"}, page_tokens=16, chained=False))
        for num_bytes in (1, 1000, 70_000, 3 * MIB, 9 * MIB):
            pages = [bytes([at + 1]) * num_bytes for at in range(5)]
            keys = [f"{num_bytes} {at}" for at in range(5)]
            assert door.write_from(keys[1:3], [[page] for page in pages[1:3]]) == [True] * 2
            assert door.write_from(keys, [[page] for page in pages]) == [True] * 5
            targets = [bytearray(num_bytes) for _ in pages]
            assert door.read_into(keys, [[target] for target in targets]) == 5
            assert targets == pages
        door.close()
