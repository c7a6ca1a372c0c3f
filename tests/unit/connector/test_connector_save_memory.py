"""Saves of a rank whose records are made in memory that a real service reads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from connector import settings as connector_settings
from connector.settings import ConnectorSettings
from connector.worker.memory import RecordMemory
from kvstore.client import ClientOptions, RemoteStore
from kvstore.errors import Unavailable
from kvstore.testing.steered_store import SteeredStore
from kvstore.testing.waiting import eventually
from tests.unit.connector.rank_harness import SOURCE, TARGET, Make, ranks_on
from tests.unit.connector.sharing_ranks import SharingBridge, SharingStore
from tests.unit.connector.support import MIB

RECORD_BYTES = 1000


class MakingStore(SharingStore):
    """A client that passes on where records are made."""

    inner: RemoteStore

    def shared_buffer(self, num_bytes: int) -> memoryview | None:
        return self.inner.shared_buffer(num_bytes)

    def shares(self, num_bytes: int) -> bool:
        return self.inner.shares(num_bytes)


class MakingBridge(SharingBridge):
    """A loop with a service and a client that shares memory for saves with it."""

    options = ClientOptions(save_memory_bytes=16 * MIB)
    steered = MakingStore

    def sent_bytes(self) -> int:
        """Over all connections of the client."""

        async def count(store: SteeredStore) -> int:
            return sum(connection.frames.written_bytes for connection in store.inner.pool.connections())

        return self.run(count)

    def has_memory(self) -> bool:
        async def ask(store: SteeredStore) -> bool:
            return store.inner.shared_buffer(RECORD_BYTES) is not None

        return self.run(ask)


@pytest.fixture
def bridge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakingBridge]:
    # the records of these tests are small
    monkeypatch.setattr("kvstore.tiers.memory.ARENA_BYTES_MIN", 1)
    monkeypatch.setattr("kvstore.client.sharing.SHARED_BYTES_MIN", 1)
    made = MakingBridge(tmp_path)
    try:
        eventually(made.has_memory)
        yield made
    finally:
        made.close()


@pytest.fixture
def rank(bridge: MakingBridge) -> Iterator[Make]:
    with ranks_on(bridge) as make:
        yield make


def raising(*_: Any) -> Any:
    raise ZeroDivisionError


def test_records_are_made_in_shared_memory(bridge: MakingBridge, rank: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank takes no memory of its own for what it saves and sends no record, and what it loads is what it saved."""
    monkeypatch.setattr(RecordMemory, "take", raising)
    engine = rank()
    expected = engine.blocks(SOURCE)
    before = bridge.sent_bytes()
    engine.save()
    num_saved = engine.meters.get("connector_saves", outcome="stored")
    assert bridge.sent_bytes() - before < 300 * num_saved < engine.meters.get("connector_saved_bytes")
    engine.side.start_loads(engine.load_job(engine.stage()))
    assert engine.result() == ({"r"}, set())
    assert (engine.blocks(TARGET) == expected).all()


def test_a_rank_whose_shared_memory_is_full(bridge: MakingBridge, rank: Make) -> None:
    """Its records are made in its own memory, and sent."""
    engine = rank()
    taken = []

    async def take_all(store: SteeredStore) -> None:
        while (buffer := store.inner.shared_buffer(RECORD_BYTES)) is not None:
            taken.append(buffer)

    bridge.run(take_all)
    expected, before = engine.blocks(SOURCE), bridge.sent_bytes()
    engine.save()
    assert bridge.sent_bytes() - before > engine.meters.get("connector_saved_bytes")
    engine.side.start_loads(engine.load_job(engine.stage()))
    assert engine.result() == ({"r"}, set())
    assert (engine.blocks(TARGET) == expected).all()


def test_records_wait_for_room_in_shared_memory(
    bridge: MakingBridge, rank: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one record has room, the others follow it, and none is sent."""
    monkeypatch.setattr(RecordMemory, "take", raising)
    engine = rank(mode="save")  # in which no page is made a second time, elsewhere, on busy processors
    delay_saves(bridge, monkeypatch, 0.05)  # until the thread that made the record no longer refers to it
    taken = leave_one(bridge)
    before = bridge.sent_bytes()
    engine.save()
    del taken
    num_saved = engine.meters.get("connector_saves", outcome="stored")
    assert num_saved > 2
    assert bridge.sent_bytes() - before < 300 * num_saved < engine.meters.get("connector_saved_bytes")


def test_a_record_that_has_waited_too_long_is_sent(
    bridge: MakingBridge, rank: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one record has room and its save takes long, no other is lost for it."""
    monkeypatch.setattr("connector.worker.saver.SHARED_WAIT_S", 0.05)
    engine = rank(mode="save")
    delay_saves(bridge, monkeypatch, 0.5)
    taken = leave_one(bridge)
    before = bridge.sent_bytes()
    engine.save()
    del taken
    num_saved = engine.meters.get("connector_saves", outcome="stored")
    saved_bytes = engine.meters.get("connector_saved_bytes")
    assert saved_bytes / num_saved < bridge.sent_bytes() - before < saved_bytes


def delay_saves(bridge: MakingBridge, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    save = bridge.store.inner.save

    async def save_late(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(seconds)
        return await save(*args, **kwargs)

    monkeypatch.setattr(bridge.store.inner, "save", save_late)


def leave_one(bridge: MakingBridge) -> list[memoryview]:
    """Take all shared memory but room for one record."""

    async def take(store: SteeredStore) -> list[memoryview]:
        taken = []
        while (buffer := store.inner.shared_buffer(RECORD_BYTES)) is not None:
            taken.append(buffer)
        return taken[:-1]

    return bridge.run(take)


def test_a_rank_whose_saves_fail(bridge: MakingBridge, rank: Make) -> None:
    """The shared memory of its records is free again: later saves have all of it."""
    engine = rank()
    bridge.store.errors["save"] = Unavailable("a test")
    for turn in range(3):
        engine.side.save(engine.jobs(first_id=10 * turn))
        assert engine.side.saver is not None and engine.side.saver.drain(10)
        report = engine.side.take_report()
        assert report is not None and len(report.saves_failed) == 3
    del bridge.store.errors["save"]

    async def free_bytes(store: SteeredStore) -> int:
        taken = []
        while (buffer := store.inner.shared_buffer(MIB - 64)) is not None:
            taken.append(buffer)
        return len(taken) * MIB

    eventually(lambda: bridge.run(free_bytes) == 16 * MIB)


def test_own_memory_is_taken_when_it_is_needed() -> None:
    """A rank that shares memory with its service has none of its own beside that."""
    descriptors = len(os.listdir("/proc/self/fd"))
    memory = RecordMemory()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    buffer = memory.take(100_000)
    assert len(os.listdir("/proc/self/fd")) > descriptors
    memory.close()
    buffer[:] = b"\x07" * 100_000  # stays valid
    assert len(memory.take(100_000)) == 100_000
    del buffer
    never_used = RecordMemory()
    never_used.close()
    before = len(os.listdir("/proc/self/fd"))
    assert len(never_used.take(1000)) == 1000
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("mode", "saves", "asks"),
    [("both", True, True), ("save", True, True), ("load", True, False), ("both", False, False)],
)
def test_which_clients_ask_for_memory(monkeypatch: pytest.MonkeyPatch, mode: str, saves: bool, asks: bool) -> None:
    """A client of a rank that saves; not one that loads only, nor the one that looks up for an engine."""
    seen: list[ClientOptions] = []
    monkeypatch.setattr(connector_settings, "BlockingStore", lambda *_, options, **__: seen.append(options))
    ConnectorSettings(mode=mode).connect("a test", None, saves=saves)
    assert [options.save_memory_bytes > 0 for options in seen] == [asks]
