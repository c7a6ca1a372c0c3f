"""Records made in memory that a client shares with the service of its node, and whether they are copied or stored."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from kvstore.client import ClientOptions
from kvstore.format.record import Record, open_record
from kvstore.runtime.arena import Place
from kvstore.service import save_memory
from kvstore.service.save_memory import SaveMemory
from kvstore.testing.waiting import soon, until
from tests.unit.client.sharing_node import LARGE, Node

MIB = 1 << 20
MEMORY_BYTES = 16 * MIB
MAKES_RECORDS = ClientOptions(save_memory_bytes=MEMORY_BYTES)
RECORDS = LARGE.records()
ROOM_BYTES = 300_000


async def until_shared(node: Node) -> None:
    """Return when the client has memory that it shares with the service."""
    await node.client.wait_ready(deadline=soon())
    await node.client.open_namespace(LARGE.description, deadline=soon())
    await until(lambda: node.client.shared_buffer(ROOM_BYTES) is not None)


def made(node: Node, record: Record) -> Record:
    """The record, made in shared memory."""
    buffer = node.client.shared_buffer(ROOM_BYTES)
    assert buffer is not None
    buffer[: record.num_bytes] = record.data
    return Record(record.header, buffer[: record.num_bytes].toreadonly())


def stored(node: Node, record: Record) -> bool:
    """Whether the service has it; if so, with these bytes."""
    held = node.memory.peek(record.key)
    assert held is None or open_record(held.data, record.key).data == record.data
    return held is not None


def address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


async def until_idle(node: Node) -> None:
    """Return when the service works on no save."""
    await until(lambda: not node.server.describe()["receive_bytes_used"])


@contextmanager
def copies_wait(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Copies of the service wait, each in its thread: an event that is set when one waits, and one that lets them go
    on, as the end of the block does.
    """
    waits, go_on = threading.Event(), threading.Event()
    inner = SaveMemory.copy
    monkeypatch.setattr(save_memory, "INLINE_BYTES", 0)

    def copy(self: SaveMemory, place: Place, target: memoryview) -> Record:
        waits.set()
        go_on.wait(20)
        return inner(self, place, target)

    monkeypatch.setattr(SaveMemory, "copy", copy)
    try:
        yield waits, go_on
    finally:
        go_on.set()


def free_places(node: Node) -> set[int]:
    """Where buffers can be taken now."""
    taken = []
    while (buffer := node.client.shared_buffer(ROOM_BYTES)) is not None:
        taken.append(buffer)
    return {address(buffer) for buffer in taken}
