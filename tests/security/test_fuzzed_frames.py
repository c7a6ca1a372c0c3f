"""A million frames of every kind, good and hostile, sent to a real service beside a healthy client."""

from __future__ import annotations

import asyncio
import random
import secrets
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack

from kvstore.api import Ack
from kvstore.runtime.deadline import Deadline
from kvstore.testing.attacked import AttackedService, beside
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.wire.address import UnixAddress, parse_address
from tests.fuzz.frames import counted_conversation

_PEERS = 6
_ANSWERED_S = 20.0
_IDLE_S = 0.05
"""A peer ends its connection when nothing has come for this long."""


async def test_frames_of_every_kind(folder: Path, full: bool, tell: Callable[[str], None]) -> None:
    """The service answers or refuses each conversation, none with an internal error; it serves others during that, and
    everything still works afterwards."""
    num_frames, seed = 1_000_000 if full else 15_000, secrets.randbits(32)
    print(f"seed={seed}")
    with AttackedService(folder) as service:
        address = parse_address(service.url)
        assert isinstance(address, UnixAddress)
        peers = [Peer(address.path, random.Random(seed + number)) for number in range(_PEERS)]

        async def attack() -> None:
            await asyncio.gather(*(peer.converse(num_frames // _PEERS + 1) for peer in peers))

        seen = await beside(service, attack)
        await it_still_works(service)
        internal = [head for peer in peers for head in peer.internal]
        frames, answers = sum(peer.num_frames for peer in peers), sum(peer.num_answers for peer in peers)
        tell(f"{frames:,} frames in {sum(p.num_connections for p in peers):,} connections, {answers:,} answers; {seen}")
        assert frames >= num_frames and internal == []
        log = (folder / "service.log").read_text(errors="replace")
        assert "Traceback" not in log, log[log.index("Traceback") :][:20_000]
        seen.check(full=full)


class Peer:
    """Has one conversation after the other, each on a connection of its own.

    Attributes:
        num_frames, num_connections: What it has sent.
        num_answers: Heads that it has received.
        internal: Those of them that are errors of the kind `InternalError`.
    """

    def __init__(self, path: str, choose: random.Random) -> None:
        self._path, self._choose = path, choose
        self.num_frames = self.num_connections = self.num_answers = 0
        self.internal: list[dict[str, Any]] = []

    async def converse(self, num_frames: int) -> None:
        while self.num_frames < num_frames:
            stream, count = counted_conversation(self._choose)
            reader, writer = await asyncio.open_unix_connection(self._path)
            self.num_frames += count
            self.num_connections += 1
            writer.write(stream)
            received = bytearray()
            with suppress(TimeoutError, ConnectionError):
                await asyncio.wait_for(writer.drain(), _ANSWERED_S)
                while part := await asyncio.wait_for(reader.read(1 << 20), _IDLE_S):
                    received += part
            writer.transport.abort()
            self._count(received)

    def _count(self, received: bytearray) -> None:
        at = 0
        while at + 16 <= len(received):
            magic, head_bytes, payload_bytes = struct.unpack_from("<4sIQ", received, at)
            assert magic == b"KVW1"
            if at + 16 + head_bytes > len(received):
                break
            head = msgpack.unpackb(received[at + 16 : at + 16 + head_bytes])
            self.num_answers += 1
            if head.get("kind") == "InternalError":
                self.internal.append(head)
            at += 16 + head_bytes + payload_bytes


async def it_still_works(service: AttackedService) -> None:
    """A new client saves a prompt and reads it back."""
    prompt, client = Prompt(ATTENTION, "afterwards", 256), service.client()
    deadline = Deadline.after(60)
    await client.open_namespace(prompt.description, deadline=deadline)
    for record in prompt.records():
        await client.save(record, ack=Ack.MEMORY, deadline=deadline)
    staged = await client.stage(prompt.query(), deadline=deadline)
    assert staged.resume_tokens == 256 and staged.lease is not None
    expected = {record.key: bytes(record.data) for record in prompt.records()}
    for key in staged.keys:
        record = await client.load(staged.lease, key, deadline=deadline)
        assert record is not None and bytes(record.data) == expected[key]
    await client.aclose()
