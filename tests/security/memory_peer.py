"""A client whose records are in memory that the service reads, with bytes and places as it likes; and a service."""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgpack

from kvstore.format.record import Record, open_record
from kvstore.runtime.arena import Arena
from kvstore.service.limits import ServiceLimits
from kvstore.service.server import Server
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.tiers.memory import MemoryTier
from kvstore.wire import messages
from kvstore.wire.address import parse_address
from tests.security.raw_peer import RawPeer, head_bytes

MIB = 1 << 20
PROMPT = Prompt(ATTENTION, "save memory", 64, payload_bytes=70_000)
_STAMP = struct.Struct("<Q")
HEAD_BYTES = 64
"""Before each record; its stamp is there."""


class MemoryPeer:
    """A client of the own user: its memory, as it may write to it, and a connection that names records there."""

    def __init__(self, url: str, num_bytes: int = 16 * MIB, prompt: Prompt = PROMPT) -> None:
        self.owner, self.peer = RawPeer(url), RawPeer(url)
        answer, self.descriptor = ask_for_memory(self.owner, num_bytes)
        assert answer["type"] == "save_memory_shared", answer
        self.id, self.capacity_bytes = answer["memory"], answer["capacity_bytes"]
        self.memory = mmap.mmap(self.descriptor, self.capacity_bytes)
        self.peer.send(head_bytes(messages.OpenNamespace(1, 20_000, prompt.description.canonical)))
        assert (self.peer.receive() or {})["type"] == "namespace_opened"

    def put(self, record: Record, offset: int, stamp: int = 1) -> None:
        """Make a record at a place, as a good client does."""
        _STAMP.pack_into(self.memory, offset - HEAD_BYTES, stamp)
        self.memory[offset : offset + record.num_bytes] = bytes(record.data)

    def save(self, request_id: int, **changes: Any) -> bytes:
        """A request that names a record of `PROMPT` at the first place; `changes` are fields of it."""
        fields = {"memory": self.id, "offset": HEAD_BYTES, "num_bytes": RECORD.num_bytes, "stamp": 1, **changes}
        return head_bytes(messages.Save(request_id, 20_000, "memory", **fields))

    def ask(self, request: bytes) -> dict[str, Any]:
        """The answer to a request."""
        self.peer.send(request)
        return self.peer.receive() or {"type": "ended"}

    def die(self) -> None:
        for peer in (self.owner, self.peer):
            peer.die()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


RECORD = PROMPT.records()[0]


def ask_for_memory(peer: RawPeer, num_bytes: int) -> tuple[dict[str, Any], int]:
    """The answer, and the descriptor that came with it; -1: none."""
    peer.send(head_bytes(messages.ShareSaveMemory(1, 20_000, num_bytes)))
    data, descriptors, _, _ = socket.recv_fds(peer.sock, 1 << 16, 1)
    answer: dict[str, Any] = msgpack.unpackb(data[16:])
    return answer, descriptors[0] if descriptors else -1


class Service:
    """A service in this process that shares its memory."""

    def __init__(self, store: TieredStore, server: Server) -> None:
        self.memory, self.server = store.memory, server

    @property
    def url(self) -> str:
        return str(self.server.addresses[0])

    def held(self, record: Record) -> bool:
        """Whether it has the record; if so, with these bytes."""
        held = self.memory.peek(record.key)
        assert held is None or open_record(held.data, record.key).data == record.data
        return held is not None


@asynccontextmanager
async def service_at(url: str, limits: ServiceLimits | None = None, **arguments: Any) -> AsyncIterator[Service]:
    memory = MemoryTier(32 * MIB, arena=Arena.open(48 * MIB))
    store = TieredStore(memory)
    server = Server(store, limits, **arguments)
    await server.listen([parse_address(url)])
    try:
        yield Service(store, server)
    finally:
        await server.aclose()
        await store.aclose()
        await memory.aclose()
