"""Records what a client and a service of one release say to each other, frame by frame, over real connections.

Run it from a checkout of the release, once; later releases must be able to take either part:

    git worktree add ../release COMMIT
    PYTHONPATH=../release python tests/golden/record_conversation.py \
        tests/golden/wire-v1-COMMIT.jsonl tests/golden/places-v1-COMMIT.jsonl tests/golden/saves-v1-COMMIT.jsonl \
        tests/golden/several-v1-COMMIT.jsonl

The first file has every request over TCP; the second one those for places in shared memory, over a Unix socket; the
third one saves of records that were made in shared memory; the fourth one such saves of several records each. Each line
of a file is a frame: the number of its connection, who sent it, and its bytes. Frames are cut by
docs/formats/wire-v1.md, not by the release's code.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
import struct
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgpack

from kvstore.api import LeaseId, Outcome
from kvstore.client import ClientOptions, connect
from kvstore.client.connection import Connection
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.format.record import read_record
from kvstore.runtime.arena import Arena, Place
from kvstore.service.server import Server
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.waiting import soon
from kvstore.tiers.memory import MemoryTier
from kvstore.wire import convert, messages
from kvstore.wire.address import TcpAddress, UnixAddress, parse_address
from kvstore.wire.frames import pack_head
from kvstore.wire.places import save_fields

TOKEN = "golden token"
PROMPT = Prompt(ATTENTION, "golden", 128, payload_bytes=200)
_PREFIX = struct.Struct("<4sIQ")


class Recorder:
    """Passes bytes on in both directions and keeps the frames.

    Attributes:
        lines: What was said, in order.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]],
        *,
        num_before: int = 0,
    ) -> None:
        self.lines: list[dict[str, object]] = []
        self._connect = connect
        self._num = num_before

    def write(self, path: Path) -> None:
        """Write the frames to a file."""
        path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        print(f"{path}: {len(self.lines)} frames of {self._num} connections")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self._num = self._num, self._num + 1
        up_reader, up_writer = await self._connect()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pass_on(number, "client", reader, up_writer))
            group.create_task(self._pass_on(number, "service", up_reader, writer))

    async def _pass_on(
        self, number: int, sender: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            while True:
                prefix = await reader.readexactly(_PREFIX.size)
                _, head_bytes, payload_bytes = _PREFIX.unpack(prefix)
                frame = prefix + await reader.readexactly(head_bytes + payload_bytes)
                self.lines.append(line_of(number, sender, frame))
                writer.write(frame)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


def line_of(connection: int, sender: str, frame: bytes) -> dict[str, object]:
    """A line of a conversation's file."""
    return {"connection": connection, "from": sender, "frame": base64.b64encode(frame).decode("ascii")}


async def talk(url: str) -> None:
    """Every kind of request that a client makes, with an answer of each kind."""
    store = connect(url, token=TOKEN, options=ClientOptions(num_data_connections=1, name="golden"))
    await store.wait_ready(deadline=soon())
    await store.open_namespace(PROMPT.description, deadline=soon())
    records = PROMPT.records()
    await store.lookup(PROMPT.query(), deadline=soon())  # nothing is there
    await store.stage(PROMPT.query(), deadline=soon())
    for record in records:
        await store.save(record, deadline=soon())
    await store.save(records[0], deadline=soon())  # it is there already
    await store.lookup(PROMPT.query(), deadline=soon())
    staged = await store.stage(PROMPT.query(), deadline=soon())
    assert staged.lease is not None
    assert await store.renew(staged.lease, deadline=soon())
    for key in staged.keys:
        await store.load(staged.lease, key, deadline=soon())
    with contextlib.suppress(Unavailable):
        await store.load(LeaseId(bytes(16)), records[0].key, deadline=soon())
    detail = {"tier": "redis", "seconds": 1.5}
    store.report(Outcome("golden-1", PROMPT.namespace, 130, 128, 0, 64, "stage_timeout", detail, tenant=""))
    await store.explain("golden-1", deadline=soon())
    await store.explain("", deadline=soon())
    await store.release(staged.lease)
    await store.discard(records[-1].key, "golden", deadline=soon())
    await store.lookup(PROMPT.query(), deadline=soon())  # a page less
    await store.status(deadline=soon())
    await store.aclose()


async def refused(address: TcpAddress) -> None:
    """A wrong token."""
    try:
        await Connection.connect(address, ClientOptions(token="wrong"), "control")
    except InvalidRequest:
        return
    raise AssertionError("a wrong token was taken")


async def record_all(path: Path) -> None:
    """Every request, over TCP."""
    store = TieredStore(MemoryTier(8 << 20))
    server = Server(store, token=TOKEN)
    await server.listen([parse_address("tcp://127.0.0.1:0")])
    (address,) = server.addresses
    assert isinstance(address, TcpAddress)
    recorder = Recorder(lambda: asyncio.open_connection("127.0.0.1", address.port))
    between = await asyncio.start_server(recorder.serve, "127.0.0.1", 0)
    port = between.sockets[0].getsockname()[1]
    await talk(f"tcp://127.0.0.1:{port}")
    await refused(TcpAddress("127.0.0.1", port))
    await asyncio.sleep(0.2)  # what was said last
    between.close()
    await server.aclose()
    await store.aclose()
    recorder.write(path)


SHARED = Prompt(ATTENTION, "golden places", 128, payload_bytes=70_000)
"""Its records are large enough for the arena."""


async def shared_store() -> tuple[TieredStore, MemoryTier]:
    """A store whose arena holds the records of `SHARED`, in an order that gives each the same place every time."""
    memory = MemoryTier(8 << 20, arena=Arena.open(8 << 20))
    store = TieredStore(memory)
    await store.open_namespace(SHARED.description, deadline=soon())
    for record in SHARED.records():
        buffer = store.buffer(record.num_bytes)
        buffer[:] = record.data
        await store.save(read_record(buffer), deadline=soon())
    return store, memory


async def ask_for_places(path: str) -> None:
    """Of all records, of a memory that the service does not have, and under a lease that is not one."""
    connection = await Connection.connect(UnixAddress(path), ClientOptions(name="golden"), "control")
    arena, deadline = connection.welcome.arena, soon()
    await connection.request(
        lambda i, ms: messages.OpenNamespace(i, ms, SHARED.description.canonical),
        messages.NamespaceOpened,
        deadline=deadline,
    )
    query = SHARED.query()
    fields = convert.query_fields(query)
    answer, _ = await connection.request(
        lambda i, ms: messages.Stage(i, ms, **fields, packed=True), messages.Staged, deadline=deadline
    )
    staged = convert.parse_staged(answer, query, SHARED.description.layout())
    assert staged.lease is not None
    keys = convert.locate_fields(staged.keys)
    for lease, memory in ((staged.lease, arena), (staged.lease, bytes(16)), (LeaseId(bytes(16)), arena)):
        with contextlib.suppress(Unavailable):
            await connection.request(
                lambda i, ms, lease=lease, memory=memory: messages.Locate(i, ms, lease, **keys, arena=memory),
                messages.Located,
                deadline=deadline,
            )
    connection.post(messages.Release(staged.lease))
    await asyncio.sleep(0.2)
    connection.close()


async def record_places(path: Path) -> None:
    """The requests for places in shared memory, over a Unix socket."""
    store, memory = await shared_store()
    server = Server(store)
    with tempfile.TemporaryDirectory() as folder:
        await server.listen([parse_address(f"unix:{folder}/s")])
        recorder = Recorder(lambda: asyncio.open_unix_connection(f"{folder}/s"))
        between = await asyncio.start_unix_server(recorder.serve, f"{folder}/between")
        await ask_for_places(f"{folder}/between")
        between.close()
        await server.aclose()
    await store.aclose()
    await memory.aclose()
    recorder.write(path)


SAVED = Prompt(ATTENTION, "golden saves", 128, payload_bytes=70_000)
"""Its records are made in memory that the service reads."""


def exchange(connection: socket.socket, frame: bytes) -> tuple[bytes, list[int]]:
    """Send a frame; returns the frame that answers it, and the descriptors that came with it."""
    connection.sendall(frame)
    data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 1)
    _, head_bytes, payload_bytes = _PREFIX.unpack_from(data)
    while len(data) < _PREFIX.size + head_bytes + payload_bytes:
        data += connection.recv(1 << 16)
    return data, list(descriptors)


async def connection_that_saves(path: str) -> Connection:
    connection = await Connection.connect(UnixAddress(path), ClientOptions(name="golden"), "data")
    await connection.request(
        lambda i, ms: messages.OpenNamespace(i, ms, SAVED.description.canonical),
        messages.NamespaceOpened,
        deadline=soon(),
    )
    return connection


async def save_in_place(path: str, memory: bytes, places: list[Place]) -> None:
    """Every record, the first one once more, one of memory that no connection has, and one outside of it."""
    connection = await connection_that_saves(path)
    outside = Place(1 << 40, places[0].num_bytes, 1)
    for named, place in (
        *((memory, place) for place in (*places, places[0])),
        (bytes(16), places[0]),
        (memory, outside),
    ):
        where = {"offset": place.offset, "num_bytes": place.num_bytes, "stamp": place.stamp}
        with contextlib.suppress(Unavailable, InvalidRequest):
            await connection.request(
                lambda i, ms, named=named, where=where: messages.Save(i, ms, "memory", memory=named, **where),
                messages.Saved,
                deadline=soon(),
            )
    await asyncio.sleep(0.2)
    connection.close()


async def save_several(path: str, memory: bytes, places: list[Place]) -> None:
    """All records but one at once, then that one after the first one, two of memory that no connection has, and two of
    which one is outside of it."""
    connection = await connection_that_saves(path)
    outside = Place(1 << 40, places[0].num_bytes, 1)
    for named, together in (
        (memory, places[:-1]),
        (memory, [places[0], places[-1]]),
        (bytes(16), places[:2]),
        (memory, [places[0], outside]),
    ):
        where = save_fields(named, together)
        with contextlib.suppress(Unavailable, InvalidRequest):
            await connection.request(
                lambda i, ms, where=where: messages.Save(i, ms, "memory", **where), messages.Saved, deadline=soon()
            )
    await asyncio.sleep(0.2)
    connection.close()


async def record_saves(path: Path, talk_about: Callable[[str, bytes, list[Place]], Awaitable[None]]) -> None:
    """Saves of records that were made in shared memory, over a Unix socket. Connection 0 is the memory's."""
    memory = MemoryTier(8 << 20, arena=Arena.open(8 << 20))
    store = TieredStore(memory)
    server = Server(store)
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as owner:
        await server.listen([parse_address(f"unix:{folder}/s")])
        owner.connect(f"{folder}/s")
        lines = []
        hello = messages.Hello(messages.PROTOCOL_VERSION, role="memory", client="golden")
        for message in (hello, messages.ShareSaveMemory(1, 30_000, 16 << 20)):
            frame = pack_head(messages.encode(message))
            answer, descriptors = await asyncio.to_thread(exchange, owner, frame)
            lines += [line_of(0, "client", frame), line_of(0, "service", answer)]
        _, head_bytes, _ = _PREFIX.unpack_from(answer)
        head = msgpack.unpackb(answer[_PREFIX.size : _PREFIX.size + head_bytes])
        arena = Arena.over(descriptors[0], head["capacity_bytes"])
        buffers, places = [], []
        for record in SAVED.records():
            buffers.append(buffer := arena.take(record.num_bytes))
            assert buffer is not None
            buffer[:] = record.data
            places.append(place := arena.place(buffer))
            assert place is not None
        recorder = Recorder(lambda: asyncio.open_unix_connection(f"{folder}/s"), num_before=1)
        recorder.lines += lines
        between = await asyncio.start_unix_server(recorder.serve, f"{folder}/between")
        await talk_about(f"{folder}/between", head["memory"], places)
        between.close()
        arena.close()
        await server.aclose()
    await store.aclose()
    await memory.aclose()
    recorder.write(path)


async def main(everything: Path, places: Path, saves: Path, several: Path) -> None:
    await record_all(everything)
    await record_places(places)
    await record_saves(saves, save_in_place)
    await record_saves(several, save_several)


if __name__ == "__main__":
    asyncio.run(main(*map(Path, sys.argv[1:])))
