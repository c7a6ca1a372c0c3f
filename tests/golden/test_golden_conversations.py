"""Neighbouring releases: what one said is understood today, by the service and by the client."""

from __future__ import annotations

import asyncio
import base64
import json
import mmap
import os
import socket
import struct
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvstore.api import LeaseId, SaveOutcome
from kvstore.client import ClientOptions, connect, trace_parent
from kvstore.client.remote import RemoteStore
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.format.record import Record, read_record
from kvstore.model.namespace import NamespaceDescription
from kvstore.runtime.arena import Arena, ArenaView, memory_file
from kvstore.service.server import Server
from kvstore.store.tiered import TieredStore
from kvstore.testing.waiting import soon, until
from kvstore.tiers.memory import MemoryTier
from kvstore.wire import convert, messages
from kvstore.wire.address import TcpAddress, parse_address
from kvstore.wire.messages import raise_error
from kvstore.wire.places import parse_save_places
from tests.golden.record_conversation import SAVED, SHARED, shared_store
from tests.golden.record_conversation import exchange as raw_exchange

FILES = sorted(Path(__file__).parent.glob("wire-v1-*.jsonl"))
PLACES = sorted(Path(__file__).parent.glob("places-v1-*.jsonl"))
SAVES = sorted(Path(__file__).parent.glob("saves-v1-*.jsonl"))
SEVERAL = sorted(Path(__file__).parent.glob("several-v1-*.jsonl"))
EVERY_SEVERAL_FILE = pytest.mark.parametrize("file", SEVERAL, ids=lambda file: file.stem)
EVERY_SAVES_FILE = pytest.mark.parametrize("file", SAVES, ids=lambda file: file.stem)
EVERY_PLACES_FILE = pytest.mark.parametrize("file", PLACES, ids=lambda file: file.stem)
EVERY_FILE = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)

_PREFIX = struct.Struct("<4sIQ")
_NOT_ANSWERED = ("release", "outcome", "cancel")
_DIFFER = ("release", "lease", "arena", "memory", "lease_s", "values", "message", "deadline_ms")
"""Fields that are of the run or of the release, not of the question."""


@dataclass(frozen=True)
class Frame:
    """One frame, as it was sent.

    Attributes:
        connection: Which of the conversation.
        head: What it says.
        data: All its bytes.
        payload: Those behind the head.
    """

    connection: int
    head: Mapping[str, Any]
    data: bytes
    payload: bytes

    @classmethod
    def of(cls, connection: int, data: bytes) -> Frame:
        _, head_bytes, _ = _PREFIX.unpack_from(data)
        stop = _PREFIX.size + head_bytes
        return cls(connection, msgpack.unpackb(data[_PREFIX.size : stop]), data, data[stop:])

    @property
    def type(self) -> str:
        return str(self.head["type"])


@dataclass(frozen=True)
class Exchange:
    """What a client sent, and all that the service answered to it."""

    asked: Frame
    answers: tuple[Frame, ...]


def conversation(file: Path) -> list[Exchange]:
    """A file's exchanges, in the order in which they were begun."""
    frames = [
        (line["from"], Frame.of(line["connection"], base64.b64decode(line["frame"])))
        for line in map(json.loads, file.read_text().splitlines())
    ]
    asked = [frame for sender, frame in frames if sender == "client"]
    answers = defaultdict(list)
    for sender, frame in frames:
        if sender == "service":
            answers[frame.connection, frame.head.get("id")].append(frame)
    return [
        Exchange(
            frame,
            tuple(() if frame.type in _NOT_ANSWERED else answers[frame.connection, frame.head.get("id")]),
        )
        for frame in asked
    ]


async def read_frame(reader: asyncio.StreamReader, connection: int) -> Frame:
    prefix = await reader.readexactly(_PREFIX.size)
    _, head_bytes, payload_bytes = _PREFIX.unpack(prefix)
    return Frame.of(connection, prefix + await reader.readexactly(head_bytes + payload_bytes))


def same_shape(old: Any, new: Any, where: str) -> None:
    """Every key that a program of the old release may read is there, and of the old kind."""
    if isinstance(old, Mapping):
        assert isinstance(new, Mapping), where
        for name, value in old.items():
            if where.endswith(".counters"):
                continue  # each appears with its first count
            assert name in new, f"{where}.{name}"
            same_shape(value, new[name], f"{where}.{name}")
    elif old is not None:
        assert isinstance(new, type(old)) or isinstance(old, int | float) == isinstance(new, int | float), where


def compare(old: Frame, new: Frame) -> None:
    """An answer says what it said then; it may say more."""
    assert new.type == old.type, new.head
    same_shape(old.head, new.head, new.type)
    for name, value in old.head.items():
        if name not in _DIFFER:
            assert new.head[name] == value, (new.type, name)
    assert new.payload == old.payload


def test_there_is_a_conversation() -> None:
    """With every request that a client makes, with hits and misses, an error and a refusal."""
    assert FILES
    assert PLACES
    assert SAVES
    assert SEVERAL
    exchanges = conversation(FILES[0])
    requests = {exchange.asked.type for exchange in exchanges}
    assert requests >= {"hello", "open_namespace", "lookup", "stage", "save", "load", "renew", "release", "discard"}
    assert requests >= {"outcome", "explain", "status"}
    answers = {frame.type for exchange in exchanges for frame in exchange.answers}
    assert answers >= {"welcome", "refused", "error", "staged", "stage_progress", "loaded"}


@EVERY_FILE
async def test_a_client_of_that_release_at_todays_service(file: Path) -> None:
    """Its very frames, over real connections: each answer is what it was then, or more. Leases alone are today's."""
    store = TieredStore(MemoryTier(8 << 20))
    server = Server(store, token="golden token")
    try:
        await server.listen([parse_address("tcp://127.0.0.1:0")])
        (address,) = server.addresses
        assert isinstance(address, TcpAddress)
        leases = await replay(conversation(file), lambda: asyncio.open_connection("127.0.0.1", address.port))
        assert leases
    finally:
        await server.aclose()
        await store.aclose()


Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


async def replay(
    exchanges: Sequence[Exchange], connect: Connect, ids: Mapping[bytes, bytes] | None = None
) -> dict[bytes, bytes]:
    """Send a conversation's very frames and compare each answer; returns today's ids by those of then.

    Args:
        exchanges: What was said.
        connect: Opens a connection.
        ids: Those that are known before.
    """
    streams: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
    ids = dict(ids or {})
    try:
        for exchange in exchanges:
            asked = exchange.asked
            if asked.connection not in streams:
                streams[asked.connection] = await connect()
            reader, writer = streams[asked.connection]
            data = asked.data
            for old, new in ids.items():
                data = data.replace(old, new)
            writer.write(data)
            async with asyncio.timeout(60.0):
                for expected in exchange.answers:
                    seen = await read_frame(reader, asked.connection)
                    if seen.type == "stage_progress" != expected.type:  # how often it is told is a matter of time
                        seen = await read_frame(reader, asked.connection)
                    compare(expected, seen)
                    for name in ("lease", "arena"):
                        if expected.head.get(name):
                            ids[expected.head[name]] = seen.head[name]
    finally:
        for _, writer in streams.values():
            writer.close()
    return ids


@EVERY_PLACES_FILE
async def test_a_client_that_asks_for_places_at_todays_service(file: Path, tmp_path: Path) -> None:
    """The frames of a client of that release that has mapped the arena: each record has the place that it had then."""
    store, memory = await shared_store()
    server = Server(store)
    try:
        await server.listen([parse_address(f"unix:{tmp_path}/s")])
        ids = await replay(conversation(file), lambda: asyncio.open_unix_connection(f"{tmp_path}/s"))
        assert len(ids) == 2  # the lease and the arena
    finally:
        await server.aclose()
        await store.aclose()
        await memory.aclose()


@EVERY_PLACES_FILE
async def test_todays_client_reads_places_of_that_release(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks a service of that release as its own client did, and finds each record at the place in the answer."""
    exchanges = conversation(file)
    welcome = next(one.answers[0].head for one in exchanges if one.asked.type == "hello")
    store, memory = await shared_store()
    assert memory.arena is not None
    view = ArenaView(memory.arena.descriptor, memory.arena.capacity_bytes)
    monkeypatch.setattr("kvstore.client.sharing.map_arena", lambda *_: (welcome["arena"], view))
    service = PastService(exchanges)
    server = await asyncio.start_unix_server(service.serve, f"{tmp_path}/s")
    client = connect(f"unix:{tmp_path}/s", options=ClientOptions(num_data_connections=1, name="golden"))
    try:
        await client.open_namespace(SHARED.description, deadline=soon())
        staged = await client.stage(SHARED.query(), deadline=soon())
        assert staged.lease is not None
        records = await client.load_many(staged.lease, staged.keys, deadline=soon())
        expected = {record.key: record.data for record in SHARED.records()}
        for key, leased in zip(staged.keys, records, strict=True):
            with (await leased.load(deadline=soon())).reading() as record:
                assert record.data == expected[key]
        assert service.complaints == []
    finally:
        await client.aclose()
        server.close()
        await store.aclose()
        await memory.aclose()


@pytest.mark.parametrize("file", [*SAVES, *SEVERAL], ids=lambda file: file.stem)
async def test_a_client_that_saves_in_place_at_todays_service(file: Path, tmp_path: Path) -> None:
    """A client of that release asks for memory and makes its records there: each is stored as it was then."""
    exchanges = conversation(file)
    memory = MemoryTier(8 << 20, arena=Arena.open(8 << 20))
    store = TieredStore(memory)
    server = Server(store)
    with socket.socket(socket.AF_UNIX) as owner:
        try:
            await server.listen([parse_address(f"unix:{tmp_path}/s")])
            owner.connect(f"{tmp_path}/s")
            for asked in (one for one in exchanges if one.asked.connection == 0):
                answer, descriptors = await asyncio.to_thread(raw_exchange, owner, asked.asked.data)
                compare(asked.answers[0], seen := Frame.of(0, answer))
            ids = {asked.answers[0].head["memory"]: seen.head["memory"]}
            make_records(exchanges, descriptors[0], seen.head["capacity_bytes"])
            others = [one for one in exchanges if one.asked.connection != 0]
            await replay(others, lambda: asyncio.open_unix_connection(f"{tmp_path}/s"), ids)
            for record in SAVED.records():
                held = memory.peek(record.key)
                assert held is not None and held.data == record.data
        finally:
            await server.aclose()
            await store.aclose()
            await memory.aclose()


def make_records(exchanges: Sequence[Exchange], descriptor: int, capacity_bytes: int) -> None:
    """Make the records where a conversation's saves say that they are, in the order in which they name new places."""
    saves = [messages.decode(one.asked.head) for one in exchanges if one.asked.type == "save"]
    named = [place for save in saves if isinstance(save, messages.Save) for place in parse_save_places(save)]
    with mmap.mmap(descriptor, capacity_bytes) as memory:
        for record, place in zip(SAVED.records(), dict.fromkeys(named), strict=False):
            assert place.num_bytes == record.num_bytes
            struct.pack_into("<Q", memory, place.offset - 64, place.stamp)
            memory[place.offset : place.offset + record.num_bytes] = bytes(record.data)
    os.close(descriptor)


@EVERY_SAVES_FILE
async def test_todays_client_saves_in_place_at_a_service_of_that_release(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the places of its records as a client of that release did."""
    async with makes_records(file, tmp_path, monkeypatch) as (service, client):
        for record in SAVED.records():
            assert await client.save(in_memory_of(client, record), deadline=soon()) is SaveOutcome.STORED
        assert service.complaints == []


@EVERY_SEVERAL_FILE
async def test_todays_client_saves_several_at_a_service_of_that_release(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one request, as then; each record has the outcome in the answer."""
    async with makes_records(file, tmp_path, monkeypatch) as (service, client):
        records = [in_memory_of(client, record) for record in SAVED.records()]
        outcomes = await client.save_many(records[:-1], deadline=soon())
        assert outcomes == [SaveOutcome.STORED] * (len(records) - 1)
        outcomes = await client.save_many([records[0], records[-1]], deadline=soon())
        assert outcomes == [SaveOutcome.EXISTS, SaveOutcome.STORED]
        with pytest.raises(Unavailable):
            await client.save_many(records[:2], deadline=soon())
        with pytest.raises(InvalidRequest):
            await client.save_many(records[:2], deadline=soon())
        assert service.complaints == []


def in_memory_of(client: RemoteStore, record: Record) -> Record:
    """The record, made in memory that the service reads."""
    buffer = client.shared_buffer(record.num_bytes)
    assert buffer is not None
    buffer[:] = record.data
    return read_record(buffer)


@asynccontextmanager
async def makes_records(
    file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[PastService, RemoteStore]]:
    """A service of that release on a Unix socket, and today's client, which has memory that the service reads."""
    exchanges = conversation(file)
    shared = next(one.answers[0].head for one in exchanges if one.asked.type == "share_save_memory")

    def memory_of_then(connection: socket.socket, path: str, _: ClientOptions) -> tuple[bytes, Arena]:
        connection.connect(path)
        capacity_bytes = shared["capacity_bytes"]
        return shared["memory"], Arena.over(memory_file(capacity_bytes), capacity_bytes)

    monkeypatch.setattr("kvstore.client.sharing.map_save_memory", memory_of_then)
    monkeypatch.setattr("kvstore.client.sharing.map_arena", lambda *_: (b"", None))
    service = PastService(exchanges)
    server = await asyncio.start_unix_server(service.serve, f"{folder}/s")
    options = ClientOptions(num_data_connections=1, name="golden", save_memory_bytes=16 << 20)
    client = connect(f"unix:{folder}/s", options=options)
    try:
        await client.open_namespace(SAVED.description, deadline=soon())
        await until(lambda: client.shared_buffer(70_192) is not None)
        yield service, client
    finally:
        await client.aclose()
        server.close()


class PastService:
    """Answers as a service of that release did, question by question; complains of what that would not know."""

    def __init__(self, exchanges: list[Exchange]) -> None:
        self.complaints: list[str] = []
        self._welcomes = [one for one in exchanges if one.asked.type == "hello" and one.answers[0].type == "welcome"]
        self._fields = {one.asked.type: one.asked.head for one in exchanges}
        self._left: dict[str, Iterator[Exchange]] = {}
        for type_ in self._fields:
            self._left[type_] = iter([one for one in exchanges if one.asked.type == type_])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                asked = await read_frame(reader, 0)
                if asked.type == "ping":
                    self._say(writer, messages.encode(messages.Pong(asked.head["id"])), b"")
                    continue
                self._look_at(asked.head)
                exchange = self._welcomes[0] if asked.type == "hello" else next(self._left[asked.type])
                for frame in exchange.answers:
                    head = {**frame.head, "id": asked.head["id"]} if "id" in frame.head else frame.head
                    self._say(writer, head, frame.payload)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
        except (StopIteration, KeyError) as error:
            self.complaints.append(f"{type(error).__name__}: {error}")
            writer.close()

    def _look_at(self, head: Mapping[str, Any]) -> None:
        known = self._fields.get(str(head["type"]))
        if known is None:
            self.complaints.append(f"a message that it does not know: {head['type']}")
            return
        for name, value in known.items():
            if type(head.get(name)) is not type(value):
                self.complaints.append(f"{head['type']}.{name}: expected {value!r}, seen {head.get(name)!r}")

    @staticmethod
    def _say(writer: asyncio.StreamWriter, head: Mapping[str, Any], payload: bytes) -> None:
        packed = msgpack.packb(head)
        writer.write(_PREFIX.pack(b"KVW1", len(packed), len(payload)) + packed + payload)


@asynccontextmanager
async def past_service(file: Path) -> AsyncIterator[tuple[PastService, RemoteStore]]:
    """Such a service on a real port, and today's client of it."""
    service = PastService(conversation(file))
    server = await asyncio.start_server(service.serve, "127.0.0.1", 0)
    options = ClientOptions(num_data_connections=1, name="golden")
    client = connect(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", token="golden token", options=options)
    try:
        yield service, client
    finally:
        await client.aclose()
        server.close()


@EVERY_FILE
async def test_todays_client_at_a_service_of_that_release(file: Path) -> None:
    """It asks nothing that the service would not understand, in a trace too, and understands each answer."""
    exchanges = conversation(file)

    def first(type_: str) -> Mapping[str, Any]:
        return next(one.asked.head for one in exchanges if one.asked.type == type_)

    description = NamespaceDescription.from_canonical(first("open_namespace")["description"], "")
    query = convert.parse_query(messages.decode(first("lookup")))  # type: ignore[arg-type]
    records = [read_record(memoryview(one.asked.payload)) for one in exchanges if one.asked.type == "save"]
    outcome = convert.parse_outcome(messages.decode(first("outcome")))  # type: ignore[arg-type]
    token = trace_parent.set("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
    try:
        async with past_service(file) as (service, store):
            await store.open_namespace(description, deadline=soon())
            assert (await store.lookup(query, deadline=soon())).resume_tokens == 0
            assert (await store.stage(query, deadline=soon())).lease is None
            saved = [await store.save(record, deadline=soon()) for record in records]
            assert saved == [SaveOutcome.STORED] * 4 + [SaveOutcome.EXISTS]
            found = await store.lookup(query, deadline=soon())
            assert found.resume_tokens == 128 and found.offers
            staged = await store.stage(query, deadline=soon())
            assert staged.lease is not None and staged.resume_tokens == 128
            assert await store.renew(staged.lease, deadline=soon())
            by_key = {record.key: bytes(record.data) for record in records}
            for key in staged.keys:
                assert bytes((await store.load(staged.lease, key, deadline=soon())).data) == by_key[key]
            with pytest.raises(Unavailable, match="the lease has ended"):
                await store.load(LeaseId(bytes(16)), records[0].key, deadline=soon())
            store.report(outcome)
            assert (await store.explain("golden-1", deadline=soon()))["reason"] == "stage_timeout"
            assert (await store.explain("", deadline=soon()))["requests"]
            await store.release(staged.lease)
            await store.discard(records[-1].key, "golden", deadline=soon())
            assert (await store.lookup(query, deadline=soon())).resume_tokens == 64
            assert (await store.status(deadline=soon()))["namespaces"] == 1
        assert service.complaints == []
    finally:
        trace_parent.reset(token)


@EVERY_FILE
async def test_the_hello_of_a_later_release_is_served(file: Path) -> None:
    """A client that speaks more, and says so, gets what both know; one that speaks less is refused in words."""
    hello = next(one.asked for one in conversation(file) if one.asked.type == "hello")
    store = TieredStore(MemoryTier(8 << 20))
    server = Server(store, token="golden token")
    try:
        await server.listen([parse_address("tcp://127.0.0.1:0")])
        (address,) = server.addresses
        assert isinstance(address, TcpAddress)
        for version, answer in ((99, "welcome"), (0, "refused")):
            reader, writer = await asyncio.open_connection("127.0.0.1", address.port)
            PastService._say(writer, {**hello.head, "version": version, "a later field": [1]}, b"")
            async with asyncio.timeout(60.0):
                seen = await read_frame(reader, 0)
            assert seen.type == answer
            if answer == "welcome":
                assert seen.head["version"] == messages.PROTOCOL_VERSION
            writer.close()
    finally:
        await server.aclose()
        await store.aclose()


def test_a_refusal_of_that_release_is_raised() -> None:
    """By the class that it names."""
    refusal = next(
        one.answers[0]
        for file in FILES
        for one in conversation(file)
        if one.answers[:1] and one.answers[0].type == "refused"
    )
    with pytest.raises(InvalidRequest, match="the token is wrong"):
        raise_error(messages.decode(refusal.head))  # type: ignore[arg-type]
