"""The protocol against peers of every kind: each ends in answers or a refusal, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgpack
import pytest

from kvstore.errors import KVStoreError
from kvstore.model.page_blocks import HASHES_MAX, TOKENS_MAX
from kvstore.runtime.budget import ByteBudget, Shares
from kvstore.runtime.turns import Turns
from kvstore.service.answers import Answers
from kvstore.service.authentication import Authenticator, Grant
from kvstore.service.limits import ServiceLimits, UnauthenticatedConnections
from kvstore.service.save_memory import SaveMemories
from kvstore.service.session import Session, SessionContext
from kvstore.testing.steered_store import SteeredStore
from kvstore.tiers.redis.resp import ProtocolError, ReplyParser
from kvstore.wire import convert, messages
from kvstore.wire.frames import LATER, FrameReader, Head, Later, unpack_head
from kvstore.wire.messages import decode, encode, raise_error
from kvstore.wire.page_names import blocks_message, names_messages, parse_blocks, parse_names
from kvstore.wire.places import parse_located, parse_save_places
from kvstore.wire.protocol import FrameConnection
from tests.fuzz.frames import HOSTILE, PAGES, conversation, hostile_frame
from tests.fuzz.inputs import bounded_memory, fuzz, mutated, pieces

LIMITS = ServiceLimits(receive_bytes=64 << 10, save_credit_bytes=16 << 10, max_requests=4, hello_timeout_s=60)


class Sink:
    """Gives buffers at once, later or never, and notes how much it was asked for at a time."""

    def __init__(self, choose: random.Random) -> None:
        self.choose = choose
        self.largest = 0

    def on_head(self, head: Head, payload_bytes: int) -> memoryview | Later | None:
        self.largest = max(self.largest, payload_bytes)
        return self.choose.choice((memoryview(bytearray(payload_bytes)), LATER, None))

    def on_frame(self, head: Head, payload: memoryview | None) -> None:
        assert isinstance(head, dict)


@fuzz(35_000)
def test_streams_of_frames(choose: random.Random) -> None:
    """Any bytes in any cut are frames or an expected error, and no buffer is asked for beyond the limit."""
    sink = Sink(choose)
    reader = FrameReader(sink, 1 << 16)
    with suppress(KVStoreError):
        for piece in pieces(conversation(choose), choose):
            rest = piece
            while rest:
                if reader.waiting:
                    reader.provide(choose.choice((memoryview(bytearray(1 << 16)), None)))
                if choose.random() < 0.01:
                    reader.drop_payload()
                target = reader.buffer()
                assert 0 < len(target) <= 4 << 20
                count = min(len(target), len(rest))
                target[:count] = rest[:count]
                rest = rest[count:]
                reader.received(count)
    assert sink.largest <= 1 << 16


@fuzz(20_000)
def test_heads_of_messages(choose: random.Random) -> None:
    """A head is a message or an expected error, and so is what a message says of prompts, keys and leases."""
    raw = hostile_frame(choose)
    size = struct.unpack_from("<4sIQ", raw)[1]
    head = msgpack.unpackb(raw[16 : 16 + size], strict_map_key=False)
    if not isinstance(head, dict):
        return
    with suppress(KVStoreError):
        message = decode({name: value for name, value in head.items() if isinstance(name, str)})
        match message:
            case messages.Lookup():
                convert.parse_query(message)
            case messages.LookedUp():
                convert.parse_lookup(message, choose.randrange(5))
            case messages.Staged():
                convert.parse_staged(message)
            case messages.Load() | messages.Discard():
                convert.parse_key(message)
            case messages.Locate():
                convert.parse_locate(message)
            case messages.Save():
                parse_save_places(message)
            case messages.Outcome():
                convert.parse_outcome(message)
                parse_blocks(message)
            case messages.PageNames():
                parse_names(message)
            case messages.Located():
                parse_located(message, choose.randrange(5))
            case messages.Error() | messages.Refused():
                raise_error(message)


def damaged(value: Any, choose: random.Random) -> Any:
    """A value with something strange at some depth."""
    if isinstance(value, list | tuple) and value and choose.random() < 0.8:
        at = choose.randrange(len(value))
        return [*value[:at], damaged(value[at], choose), *value[at + 1 :]]
    if isinstance(value, dict) and value and choose.random() < 0.9:
        name = choose.choice(list(value))
        return {**value, name: damaged(value[name], choose)}
    if isinstance(value, bytes) and choose.random() < 0.5:
        return value * choose.choice((0, 2, 200)) + bytes(choose.randrange(3))
    if isinstance(value, list) and choose.random() < 0.5:
        return value * choose.choice((0, 2, 40))
    return choose.choice(HOSTILE)


@fuzz(20_000)
def test_names_of_pages(choose: random.Random) -> None:
    """Names with something strange in them are an expected error, or pages that a service has room for."""
    head = damaged(encode(choose.choice((*names_messages(PAGES), blocks_message(PAGES[0])))), choose)
    with suppress(KVStoreError):
        message = decode(unpack_head(msgpack.packb(head), is_of_client=True))
        match message:
            case messages.PageNames():
                pages = parse_names(message)
            case messages.Outcome():
                pages = [parse_blocks(message)]
            case _:
                return
        assert 1 <= len(pages) <= messages.PAGE_NAMES_MAX
        for page in pages:
            assert not page.is_too_large and page.boundary.tokens >= 0
            assert len(page.boundary.prefix) == 32 and len(page.namespace) == 16
            assert page.hashes and len(page.hashes) == page.num_blocks * page.hash_bytes
            assert len(page.parent) in (0, page.hash_bytes)
            assert len(page.tokens) in (0, 4 * page.num_blocks * page.block_tokens)
        num_hashes = sum(page.num_blocks * len(page.groups) for page in pages)
        assert num_hashes <= HASHES_MAX and num_hashes * pages[0].block_tokens <= TOKENS_MAX


class Pipe(asyncio.Transport):
    """What a session writes, and whether it reads; it never refuses."""

    def __init__(self, connection: FrameConnection) -> None:
        super().__init__()
        self.connection = connection
        self.sent = bytearray()
        self.reading = True
        self.closed = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: Any) -> None:
        if not self.closed:
            self.sent += data

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self.connection.connection_lost, None)

    abort = close


class AnyPeer(Authenticator):
    def check(self, connection: FrameConnection, token: str) -> Grant:
        return Grant("")


def heads_in(sent: bytes) -> Iterator[dict[str, Any]]:
    """What the service said: whole frames only."""
    at = 0
    while at < len(sent):
        magic, head_bytes, payload_bytes = struct.unpack_from("<4sIQ", sent, at)
        assert magic == b"KVW1"
        yield msgpack.unpackb(sent[at + 16 : at + 16 + head_bytes])
        at += 16 + head_bytes + payload_bytes
    assert at == len(sent)


async def talk(choose: random.Random) -> None:
    budget, ended = ByteBudget(LIMITS.receive_bytes), list[Session]()
    store = SteeredStore()
    heads, connections = ByteBudget(LIMITS.head_bytes), Shares(LIMITS.connections)
    requests = Shares(LIMITS.request_bytes)
    frames = Turns(LIMITS.frames_at_once)
    memories = SaveMemories(LIMITS)
    context = SessionContext(
        Answers(store, dict), AnyPeer(), LIMITS, budget, requests, heads, connections, frames, memories
    )
    entry = UnauthenticatedConnections(64, 256).enter("")
    session = Session(context, entry, on_made=lambda _: None, on_ended=ended.append)
    pipe = Pipe(session.connection)
    session.connection.connection_made(pipe)
    for piece in pieces(conversation(choose), choose):
        rest = piece
        while rest and not pipe.closed:
            for _ in range(100):
                if pipe.reading or pipe.closed:
                    break
                await asyncio.sleep(0.001)
            if pipe.closed or not pipe.reading:
                break
            target = session.connection.get_buffer(-1)
            count = min(len(target), len(rest))
            target[:count] = rest[:count]
            rest = rest[count:]
            session.connection.buffer_updated(count)
        if choose.random() < 0.2:
            await asyncio.sleep(0)
        assert budget.used_bytes <= budget.limit_bytes
    for _ in range(choose.randrange(4)):
        await asyncio.sleep(0)
    pipe.close()
    await asyncio.sleep(0)
    assert ended == [session]
    async with asyncio.timeout(20):
        await session.aclose()
        await store.aclose()
    assert (budget.used_bytes, session.num_running, session.leases) == (0, 0, set())
    said = list(heads_in(bytes(pipe.sent)))
    assert [head for head in said if head.get("kind") == "InternalError"] == []
    assert len(said) <= 40


LOOP = asyncio.new_event_loop()


@pytest.fixture(scope="module", autouse=True)
def _end_loop() -> Iterator[None]:
    yield
    LOOP.close()


@fuzz(20_000)
def test_sessions(choose: random.Random) -> None:
    """A live session takes any conversation: no bug is answered, and nothing of its peer's is held after it is gone."""
    LOOP.run_until_complete(talk(choose))


@fuzz(15_000)
def test_replies_of_a_redis(choose: random.Random) -> None:
    """Bytes from a server that is no Redis, or a broken one: replies or a protocol error."""
    parts = [
        b"+OK\r\n",
        b"-ERR no\r\n",
        b":12\r\n",
        b"$5\r\nhello\r\n",
        b"$-1\r\n",
        b"*2\r\n",
        b"*-1\r\n",
        b"$0\r\n\r\n",
    ]
    parts += [b"*1\r\n" * 9, b"$99999999999\r\n", b":x\r\n", b"%2\r\n", b"\r\n", b"$3\r\nhello\r\n", b"*1000000\r\n"]
    stream = b"".join(choose.choice(parts) for _ in range(choose.randint(1, 12)))
    stream = stream if choose.random() < 0.5 else mutated(stream, choose)
    replies: list[object] = []
    parser = ReplyParser(
        lambda num_bytes: (
            choose.choice((memoryview(bytearray(min(num_bytes, 1 << 20))), None)) if num_bytes <= 1 << 20 else None
        ),
        replies.append,
    )
    with suppress(ProtocolError):
        for piece in pieces(stream, choose):
            rest = piece
            while rest:
                target = parser.buffer()
                assert len(target) > 0
                count = min(len(target), len(rest))
                target[:count] = rest[:count]
                rest = rest[count:]
                parser.received(count)
    assert len(replies) <= len(stream)


def test_memory_is_bounded_by_what_arrived() -> None:
    """Two hundred conversations, each on a reader of its own, hold a few MiB at most."""
    with bounded_memory(16 << 20):
        for seed in range(200):
            test = random.Random(seed)
            reader = FrameReader(Sink(test), 1 << 16)
            with suppress(KVStoreError):
                for piece in pieces(conversation(test), test):
                    rest = piece
                    while rest and not reader.waiting:
                        target = reader.buffer()
                        count = min(len(target), len(rest))
                        target[:count] = rest[:count]
                        rest = rest[count:]
                        reader.received(count)
