"""Ranks whose loads read records where they are in a real service's memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu.kit import InlineStreams
from connector.device.gpu import StreamDevice
from connector.device.registered import RegisteredMemory
from connector.jobs import LoadJob, LoadPiece, StepJobs
from connector.worker import side
from kvstore.api import Deadline, LeasedRecord, LeaseId
from kvstore.client import ClientOptions, connect
from kvstore.model.keys import RecordKey
from kvstore.runtime.arena import Arena, ArenaView
from kvstore.service.server import Server
from kvstore.store.tiered import TieredStore
from kvstore.testing.steered_store import SteeredStore
from kvstore.testing.waiting import eventually, soon
from kvstore.tiers.memory import MemoryTier
from kvstore.wire.address import parse_address
from tests.unit.connector.rank_harness import Rank
from tests.unit.connector.support import MIB, LoopBridge

ARENA_BYTES = 2 * MIB


class SharingStore(SteeredStore):
    """The client of a service; a load of many records is one call of it."""

    def shared_memory(self) -> ArenaView | None:
        found: ArenaView | None = self.inner.shared_memory()
        return found

    async def load_many(
        self, lease: LeaseId, keys: Sequence[RecordKey], *, deadline: Deadline
    ) -> Sequence[LeasedRecord]:
        await self._pass("load_many", deadline)
        records: Sequence[LeasedRecord] = await self.inner.load_many(lease, keys, deadline=deadline)
        return records


class SharingBridge(LoopBridge):
    """A loop with a service that shares its memory, and a client of it, which `options` say and `steered` wraps."""

    options = ClientOptions()
    steered: type[SharingStore] = SharingStore
    memory: MemoryTier
    behind: TieredStore
    server: Server

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        super().__init__()

    async def _make(self) -> SteeredStore:
        self.memory = MemoryTier(ARENA_BYTES, arena=Arena.open(ARENA_BYTES))
        self.behind = TieredStore(self.memory)
        self.server = Server(self.behind)
        url = f"unix:{self.folder / 's'}"
        await self.server.listen([parse_address(url)])
        client = connect(url, options=self.options)
        await client.wait_ready(deadline=soon())
        return self.steered(client)

    def close(self) -> None:
        async def end_service(_: SteeredStore) -> None:
            await self.server.aclose()
            await self.behind.aclose()
            await self.memory.aclose()

        self.run(end_service)
        super().close()

    def overwrite(self) -> None:
        """What a service does that considers its peer dead: free all records, and use all memory for others."""

        async def use_all(_: SteeredStore) -> None:
            self.behind.leases.release_all()
            for key in [key async for key in _keys(self.memory)]:
                self.memory.remove(key)
            arena, taken = self.memory.arena, list[memoryview]()
            assert arena is not None
            while (buffer := arena.take(16_000)) is not None:
                buffer[:] = b"\xff" * len(buffer)
                taken.append(buffer)
            assert len(taken) * (16 << 10) == ARENA_BYTES

        self.run(use_all)

    def record_bytes(self, key: RecordKey) -> Any:
        """uint8 [bytes]: a record in the service's memory, for writing."""
        held = self.memory.peek(key)
        assert held is not None
        array: Any = np.frombuffer(held.data, np.uint8)
        address = array.__array_interface__["data"][0]
        return np.ndarray(array.size, np.uint8, (ctypes.c_char * array.size).from_address(address))


@contextmanager
def sharing_bridge(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SharingBridge]:
    """A bridge whose service shares records of any size: those of tests are small."""
    monkeypatch.setattr("kvstore.tiers.memory.ARENA_BYTES_MIN", 1)
    made = SharingBridge(folder)
    try:
        yield made
    finally:
        made.close()


async def _keys(memory: MemoryTier) -> Any:
    async for entry in memory.scan():
        yield entry.key


def pieces_of(rank: Rank) -> tuple[bytes, tuple[LoadPiece, ...]]:
    (job,) = rank.load_job(rank.stage()).loads
    assert job.pieces is not None
    return job.lease, job.pieces


def load(rank: Rank, lease: bytes, pieces: tuple[LoadPiece, ...]) -> bool:
    """Load these pieces; whether that succeeded."""
    rank.side.start_loads(StepJobs(loads=(LoadJob("r", lease, pieces),)))
    finished, failed = rank.result()
    assert finished == {"r"}
    return not failed


def use_streams(monkeypatch: pytest.MonkeyPatch, streams: InlineStreams | None = None, kernels: Any = None) -> None:
    """Have the ranks that are made next copy with streams, as on a GPU."""

    def open_device(_: object, **sizes: int) -> StreamDevice:
        device = StreamDevice(streams or InlineStreams(), unit_bytes_min=1, kernels=kernels, **sizes)
        device.registered = RegisteredMemory(InlineStreams(), least_bytes=1, most_bytes=100 << 10)
        return device

    monkeypatch.setattr(side, "open_device", open_device)


def load_prepared(rank: Rank, lease: bytes, pieces: tuple[LoadPiece, ...]) -> bool:
    """`load`, once the device can read the service's memory."""
    assert rank.side.loader is not None
    device = rank.side.loader.device
    assert isinstance(device, StreamDevice)
    rank.side.begin_step(StepJobs())
    eventually(lambda: device.registered.num_bytes and device.registered.wait(1))
    return load(rank, lease, pieces)
