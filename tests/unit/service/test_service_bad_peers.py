"""Bad peers at a live service: their connection ends with a reason, and no other peer notices."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvstore.api import Deadline, Outcome
from kvstore.client import RemoteStore, connect
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.service.limits import ServiceLimits, UnauthenticatedConnections
from kvstore.service.listener import Listener
from kvstore.service.server import Server
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.steered_store import SteeredStore
from kvstore.testing.waiting import until
from kvstore.wire import messages
from kvstore.wire.address import UnixAddress, parse_address
from kvstore.wire.frames import pack_head
from kvstore.wire.messages import encode

HELLO = pack_head(encode(messages.Hello(1)))
PROMPT = Prompt(ATTENTION, "bad peers", 64)


class Peer:
    """A raw connection that sends given bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def receive(self) -> dict[str, Any] | None:
        """The next head, `None` at the end; payloads are skipped."""
        async with asyncio.timeout(5):
            try:
                _, head_bytes, payload_bytes = struct.unpack("<4sIQ", await self._reader.readexactly(16))
                head = msgpack.unpackb(await self._reader.readexactly(head_bytes))
                await self._reader.readexactly(payload_bytes)
            except (asyncio.IncompleteReadError, ConnectionResetError):
                return None
        assert isinstance(head, dict)
        return head

    async def end(self) -> None:
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


@asynccontextmanager
async def peer_of(server: Server, *, greeted: bool = True) -> AsyncIterator[Peer]:
    address = server.addresses[0]
    assert isinstance(address, UnixAddress)
    peer = Peer(*await asyncio.open_unix_connection(address.path))
    try:
        if greeted:
            peer.send(HELLO)
            welcome = await peer.receive()
            assert welcome is not None
            assert welcome["type"] == "welcome"
        yield peer
    finally:
        await peer.end()


@pytest.fixture
async def store() -> AsyncIterator[SteeredStore]:
    store = SteeredStore()
    yield store
    await store.aclose()


@pytest.fixture
async def server(store: SteeredStore, tmp_path: Path) -> AsyncIterator[Server]:
    limits = ServiceLimits(receive_bytes=1 << 20, save_credit_bytes=512 << 10, max_requests=4, hello_timeout_s=0.3)
    server = Server(store, limits)
    await server.listen([parse_address(f"unix:{tmp_path / 's'}")])
    yield server
    await server.aclose()


@pytest.fixture
async def bystander(server: Server) -> AsyncIterator[RemoteStore]:
    """A well-behaved client; its connections must outlive every test."""
    client = connect(str(server.addresses[0]))
    await client.wait_ready(deadline=Deadline.after(5))
    opened = client.pool.connections()
    yield client
    assert (await client.status(deadline=Deadline.after(5)))["tiers"]
    assert client.pool.connections() == opened
    await client.aclose()


def prefix(head_bytes: int, payload_bytes: int, magic: bytes = b"KVW1") -> bytes:
    return struct.pack("<4sIQ", magic, head_bytes, payload_bytes)


def frame(head: dict[str, Any], payload_bytes: int = 0) -> bytes:
    return pack_head(head, payload_bytes)


SAVE = {"type": "save", "id": 1, "deadline_ms": 1000, "ack": "memory"}
BAD_FRAMES = {
    "http": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "InvalidRequest", "magic"),
    "another version": (prefix(1, 0, b"KVW9"), "UnsupportedFormat", "KVW9"),
    "huge head": (prefix(1 << 31, 0), "InvalidRequest", "head_bytes"),
    "huge payload": (prefix(9, 1 << 62), "InvalidRequest", "payload_bytes"),
    "not msgpack": (prefix(4, 0) + b"\xc1\xc1\xc1\xc1", "InvalidRequest", "msgpack"),
    "a list": (prefix(1, 0) + b"\x90", "InvalidRequest", "map"),
    "unknown type": (frame({"type": "frobnicate", "id": 1}), "InvalidRequest", "frobnicate"),
    "no type": (frame({"id": 1}), "InvalidRequest", "type"),
    "missing field": (frame({"type": "renew", "id": 1, "deadline_ms": 5}), "InvalidRequest", "renew.lease"),
    "wrong type": (frame({"type": "ping", "id": "x", "deadline_ms": 5}), "InvalidRequest", "ping.id"),
    "payload on a ping": (frame({"type": "ping", "id": 1, "deadline_ms": 5}, 9), "InvalidRequest", "payload"),
    "a reply": (frame({"type": "pong", "id": 1}), "InvalidRequest", "pong"),
    "a second hello": (HELLO, "InvalidRequest", "hello"),
}


@pytest.mark.parametrize("case", BAD_FRAMES)
async def test_bad_frames_end_their_connection_with_a_reason(server: Server, bystander: RemoteStore, case: str) -> None:
    """One bad frame after a good hello: a `refused` frame says what was wrong, then the connection ends."""
    data, kind, text = BAD_FRAMES[case]
    async with peer_of(server) as peer:
        peer.send(data)
        refused = await peer.receive()
        assert refused is not None
        assert (refused["type"], refused["kind"]) == ("refused", kind)
        assert text in refused["message"]
        assert await peer.receive() is None


async def test_details_whose_names_are_no_text_are_left_out(
    server: Server, store: SteeredStore, bystander: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of a map inside a message may be bytes, which no message needs."""
    reported: list[Outcome] = []
    monkeypatch.setattr(store, "report", reported.append)
    outcome = encode(messages.Outcome("r", b"", 1, 1, 0, 0)) | {"detail": {b"bytes": 1, "text": 2}}
    async with peer_of(server) as peer:
        peer.send(frame(outcome))
        await until(lambda: bool(reported), 5)
    assert reported[0].detail == {"text": 2}


async def test_a_bug_ends_the_connection_whose_frame_met_it(
    store: SteeredStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of a frame which waits for its turn, as one of these two does: it would never be read again."""

    def fail(outcome: Outcome) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(store, "report", fail)
    server = Server(store, ServiceLimits(frames_at_once=1))
    await server.listen([parse_address(f"unix:{tmp_path / 's'}")])
    async with peer_of(server) as one, peer_of(server) as other:
        for peer in (one, other):
            peer.send(frame(encode(messages.Outcome("r", b"", 1, 1, 0, 0))))
        assert await one.receive() is None
        assert await other.receive() is None
    await server.aclose()


async def test_a_bad_frame_behind_good_ones_spoils_only_what_follows(server: Server, bystander: RemoteStore) -> None:
    """Frames are answered in spite of a bad one behind them in the same packet; what follows it is not read."""
    ping = frame({"type": "ping", "id": 1, "deadline_ms": 1000})
    async with peer_of(server) as peer:
        peer.send(ping + b"rubbish of sixteen bytes and more" + ping)
        answers = [await peer.receive() for _ in range(3)]
        assert [answer and answer["type"] for answer in answers] == ["pong", "refused", None]


async def test_a_refused_peer_is_logged_once_in_a_minute(
    server: Server, bystander: RemoteStore, caplog: pytest.LogCaptureFixture
) -> None:
    """What it sent instead of a hello is said; those that follow cannot fill the log."""
    for data, _, _ in (BAD_FRAMES["http"], BAD_FRAMES["another version"], BAD_FRAMES["http"]):
        async with peer_of(server, greeted=False) as peer:
            peer.send(data)
            assert (await peer.receive() or {})["type"] == "refused"
            assert await peer.receive() is None
    await until(lambda: server.describe()["sessions"] == 3)
    (line,) = [record.getMessage() for record in caplog.records if "refused at its hello" in record.message]
    assert "a process of this machine" in line and "b'GET '" in line


async def test_requests_before_the_hello_are_refused(server: Server, bystander: RemoteStore) -> None:
    """Reordered: a request comes first."""
    async with peer_of(server, greeted=False) as peer:
        peer.send(frame({"type": "status", "id": 1, "deadline_ms": 1000}) + HELLO)
        refused = await peer.receive()
        assert refused is not None
        assert "hello" in refused["message"]
        assert await peer.receive() is None


async def test_silent_peers_are_not_kept(server: Server, bystander: RemoteStore) -> None:
    """A peer that connects and sends nothing, or half a hello, gets the reason, and its connection ends."""
    for begin in (b"", HELLO[:20]):
        async with peer_of(server, greeted=False) as peer:
            peer.send(begin)
            refused = await peer.receive()
            assert refused is not None
            assert "hello" in refused["message"]
            assert await peer.receive() is None


async def test_truncated_frames_hold_nothing(server: Server, bystander: RemoteStore) -> None:
    """Peers die at every point of a save: nothing is stored, and no byte stays taken from the budget."""
    namespace = await bystander.open_namespace(PROMPT.description, deadline=Deadline.after(5))
    record = PROMPT.record(64)
    assert record.key.namespace == namespace
    whole = frame(SAVE, record.num_bytes) + bytes(record.data)
    for cut in (1, 15, 16, 20, len(whole) - record.num_bytes, len(whole) - 1):
        async with peer_of(server) as peer:
            peer.send(whole[:cut])
            await asyncio.sleep(0.01)
    await until(lambda: server.describe()["receive_bytes_used"] == 0 and server.describe()["sessions"] == 3)
    assert (await bystander.status(deadline=Deadline.after(5)))["tiers"]["memory"]["num_records"] == 0


async def test_saves_beyond_the_credit_are_refused(server: Server, store: SteeredStore, bystander: RemoteStore) -> None:
    """A peer that ignores its window is cut off before its bytes are received."""
    prompt = Prompt(ATTENTION, "large", 64, payload_bytes=300 << 10)
    await bystander.open_namespace(prompt.description, deadline=Deadline.after(5))
    store.held = {"save", "status"}
    async with peer_of(server) as peer:
        record = prompt.record(64)
        for number in range(2):
            peer.send(frame({**SAVE, "id": number}, record.num_bytes) + bytes(record.data))
        refused = await peer.receive()
        assert refused is not None
        assert (refused["type"], "credit" in refused["message"]) == ("refused", True)
    store.held.clear()
    await until(lambda: server.describe()["receive_bytes_used"] == 0)


async def test_request_ids_in_use_are_refused(server: Server, store: SteeredStore, bystander: RemoteStore) -> None:
    """Two running requests with one id could not be distinguished."""
    store.held = {"save", "status"}
    async with peer_of(server) as peer:
        peer.send(frame({"type": "status", "id": 1, "deadline_ms": 1000}) * 2)
        refused = await peer.receive()
        assert refused is not None
        assert (refused["type"], "in use" in refused["message"]) == ("refused", True)
    store.held.clear()


async def test_too_many_requests_are_answered_unavailable(
    server: Server, store: SteeredStore, bystander: RemoteStore
) -> None:
    """The fifth of at most four running requests is answered at once; the others are answered when they can be."""
    store.held = {"save", "status"}
    async with peer_of(server) as peer:
        for number in range(5):
            peer.send(frame({"type": "status", "id": number, "deadline_ms": 5000}))
        first = await peer.receive()
        assert first is not None
        assert (first["type"], first["id"], first["kind"]) == ("error", 4, "Unavailable")
        store.held.clear()
        assert sorted([(await peer.receive() or {})["id"] for _ in range(4)]) == [0, 1, 2, 3]


async def test_who_asks_and_takes_no_answer_is_let_go(
    server: Server, bystander: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer sends pings for ever and reads nothing: the answers that wait for it are bounded, its connection ends."""
    for name in ("_WRITE_HIGH_BYTES", "_POSTED_BYTES_MAX"):
        monkeypatch.setattr(f"kvstore.wire.protocol.{name}", 64 << 10)
    async with peer_of(server) as peer:
        peer._writer.transport.pause_reading()  # type: ignore[attr-defined]
        pings = frame({"type": "ping", "id": 1, "deadline_ms": 1000}) * 100
        with pytest.raises(ConnectionError):
            for _ in range(2000):
                peer.send(pings)
                await peer._writer.drain()
                waiting = [session.connection._transport for session in server._sessions]
                assert max(one.get_write_buffer_size() for one in waiting if one) < (256 << 10)
    await until(lambda: server.describe()["sessions"] == 3)


async def test_cancelled_requests_are_answered_once(
    server: Server, store: SteeredStore, bystander: RemoteStore
) -> None:
    """Cancelled in the same packet and later; unknown ids are ignored, and the connection stays."""
    store.held = {"save", "status"}
    async with peer_of(server) as peer:
        cancel = frame({"type": "cancel", "id": 1}) + frame({"type": "cancel", "id": 77})
        peer.send(frame({"type": "status", "id": 1, "deadline_ms": 5000}) + cancel)
        answer = await peer.receive()
        assert answer is not None
        assert (answer["type"], answer["id"], answer["kind"]) == ("error", 1, "Unavailable")
        peer.send(frame({"type": "status", "id": 1, "deadline_ms": 5000}))
        await asyncio.sleep(0.02)
        peer.send(cancel)
        assert (await peer.receive() or {})["id"] == 1
        assert set(store.cancelled) == {"status"}
        store.held.clear()
        peer.send(frame({"type": "ping", "id": 2, "deadline_ms": 5000}))
        assert (await peer.receive() or {})["type"] == "pong"


async def test_tcp_peers_need_the_token() -> None:
    """Without the token, or with a wrong one, a TCP peer is refused with what to do; with it, it is served."""
    server = Server(SteeredStore(), token="right")
    await server.listen([parse_address("tcp://127.0.0.1:0")])
    url = str(server.addresses[0])
    for token in ("", "wrong", "rightt"):
        client = connect(url, token=token)
        with pytest.raises(Unavailable, match=f"the token is {'wrong' if token else 'missing'}: .* token_file"):
            await client.status(deadline=Deadline.after(1))
        await client.aclose()
    client = connect(url, token="right")
    assert await client.status(deadline=Deadline.after(5))
    await client.aclose()
    await server.aclose()


async def test_unix_sockets_are_their_users_alone(tmp_path: Path) -> None:
    """The socket has mode 0600 in a folder of mode 0700; a stale file is replaced, a live one and a plain file not."""
    path = tmp_path / "new" / "s"
    stale = socket.socket(socket.AF_UNIX)
    path.parent.mkdir(mode=0o700)
    stale.bind(str(path))
    stale.close()
    unauthenticated = UnauthenticatedConnections(4, 4)
    listener = await Listener.open(UnixAddress(str(path)), lambda _: asyncio.Protocol(), unauthenticated)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(InvalidRequest, match="another program listens"):
        await Listener.open(UnixAddress(str(path)), lambda _: asyncio.Protocol(), unauthenticated)
    await listener.aclose()
    assert os.listdir(path.parent) == []
    path.write_text("precious")
    with pytest.raises(InvalidRequest, match="not a socket"):
        await Listener.open(UnixAddress(str(path)), lambda _: asyncio.Protocol(), unauthenticated)
    assert path.read_text() == "precious"
    deep = tmp_path / "made" / "s"
    listener = await Listener.open(UnixAddress(str(deep)), lambda _: asyncio.Protocol(), unauthenticated)
    assert deep.parent.stat().st_mode & 0o777 == 0o700
    await listener.aclose()
    with pytest.raises(InvalidRequest, match="folder for its folder"):  # as of a misspelt path
        await Listener.open(
            UnixAddress(str(tmp_path / "rum" / "new" / "s")), lambda _: asyncio.Protocol(), unauthenticated
        )
    assert not (tmp_path / "rum").exists()
