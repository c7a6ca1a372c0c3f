"""The byte path to S3: connections kept and replaced, errors of every shape, one buffer, a pace and a budget."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import KVStoreError, Unavailable
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters
from kvstore.testing.records import make_key, make_record
from kvstore.testing.waiting import soon
from kvstore.tiers.base import PutOutcome
from kvstore.tiers.locations import S3Location
from kvstore.tiers.s3 import S3Tier
from kvstore.tiers.s3.failures import Throttled
from kvstore.tiers.s3.http import Answer, HttpConnection, Lost
from kvstore.tiers.s3.pacing import Pace, RetryBudget

RECORD = make_record(1, 100_000)

Script = Callable[[int, asyncio.StreamReader, asyncio.StreamWriter], AsyncIterator[bytes]]


class Endpoint:
    """Answers request number n, over all connections, with `answers[n]`; an empty answer ends the connection."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = answers
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.num_connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(lengths[0].split(b":")[1])) if lengths else b""
                answer = self.answers[min(len(self.heads), len(self.answers) - 1)]
                self.heads.append(head)
                self.bodies.append(body)
                writer.write(answer)
                await writer.drain()
                if not answer or b"connection: close" in answer.lower():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


@asynccontextmanager
async def tier_on(endpoint: Endpoint, meters: Meters | None = None) -> AsyncIterator[S3Tier]:
    async with await asyncio.start_server(endpoint.serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        tier = await S3Tier.open(S3Location("pages", "", url), credentials=("A", "b"), meters=meters)
        try:
            yield tier
        finally:
            await tier.aclose()


def ok(body: bytes = b"") -> bytes:
    return b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: %d\r\n\r\n' % len(body) + body


def xml(code: bytes) -> bytes:
    return b"<?xml version='1.0'?><Error><Code>" + code + b"</Code></Error>"


def refused(status: bytes, code: bytes) -> bytes:
    return b"HTTP/1.1 " + status + b"\r\nContent-Length: %d\r\n\r\n" % len(xml(code)) + xml(code)


def chunked(status: bytes, *chunks: bytes) -> bytes:
    parts = b"".join(b"%x\r\n" % len(chunk) + chunk + b"\r\n" for chunk in chunks)
    return b"HTTP/1.1 " + status + b"\r\nTransfer-Encoding: chunked\r\n\r\n" + parts + b"0\r\n\r\n"


async def test_a_connection_is_used_again() -> None:
    """Gets and puts one after the other travel on one connection, also behind an error with a body in chunks."""
    missing = chunked(b"404 Not Found", xml(b"NoSuchKey")[:20], xml(b"NoSuchKey")[20:])
    endpoint = Endpoint(
        ok(bytes(RECORD.data)), missing, ok(), refused(b"412 Precondition Failed", b"PreconditionFailed")
    )
    async with tier_on(endpoint) as tier:
        stored = await tier.get(RECORD.key, deadline=soon())
        assert stored is not None and stored.data == RECORD.data
        assert await tier.get(make_key(2), deadline=soon()) is None
        assert await tier.put(RECORD, deadline=soon()) is PutOutcome.STORED
        assert await tier.put(RECORD, deadline=soon()) is PutOutcome.EXISTS
    assert endpoint.num_connections == 1
    assert endpoint.bodies[2] == RECORD.data


async def test_a_request_that_ends_after_the_tier_was_closed() -> None:
    """Its connection is not kept for others: nobody would end it."""
    began, go, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        began.set()
        await go.wait()
        writer.write(ok(bytes(RECORD.data)))
        await reader.read()
        writer.close()
        ended.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        tier = await S3Tier.open(S3Location("pages", "", url), credentials=("A", "b"))
        getting = asyncio.ensure_future(tier.get(RECORD.key, deadline=soon()))
        await began.wait()
        await tier.aclose()
        go.set()
        found = await getting
        assert found is not None and found.data == RECORD.data
        await asyncio.wait_for(ended.wait(), 5)


async def test_payloads_are_neither_signed_nor_hashed() -> None:
    """A put is signed without its payload, conditional, and carries no further checksum."""
    endpoint = Endpoint(ok())
    async with tier_on(endpoint) as tier:
        await tier.put(RECORD, deadline=soon())
    fields = dict(line.lower().split(b": ", 1) for line in endpoint.heads[0].split(b"\r\n")[1:] if b": " in line)
    assert endpoint.heads[0].startswith(b"PUT /pages/v1/")
    assert fields[b"x-amz-content-sha256"] == b"unsigned-payload"
    assert fields[b"if-none-match"] == b"*"
    assert b"authorization" in fields
    assert not [name for name in fields if name.startswith(b"x-amz-checksum") or name == b"content-md5"]


async def test_a_connection_that_was_ended_while_idle() -> None:
    """The peer ends a connection between two requests: the next one goes out again on a fresh one, uncounted."""
    endpoint = Endpoint(ok(), b"", ok(bytes(RECORD.data)))
    meters = Meters()
    async with tier_on(endpoint, meters) as tier:
        await tier.put(RECORD, deadline=soon())
        stored = await tier.get(RECORD.key, deadline=soon())
    assert stored is not None and stored.data == RECORD.data
    assert endpoint.num_connections == 2
    assert meters.get("s3_retries") == 0


async def test_a_body_that_breaks_off_is_asked_for_again() -> None:
    """Half a body, then all of it: the second attempt fills the same buffer, which was asked for once."""
    half = ok(bytes(RECORD.data))[: RECORD.num_bytes // 2]
    endpoint = Endpoint(b"Connection: close", ok(bytes(RECORD.data)))
    endpoint.answers = (half.replace(b"200 OK\r\n", b"200 OK\r\nConnection: close\r\n"), ok(bytes(RECORD.data)))
    buffers: list[memoryview] = []

    def allocate(num_bytes: int) -> memoryview:
        buffers.append(memoryview(bytearray(num_bytes)))
        return buffers[-1]

    async with tier_on(endpoint) as tier:
        stored = await tier.get(RECORD.key, deadline=soon(), allocate=allocate)
    assert stored is not None and stored.data == RECORD.data
    assert len(buffers) == 1 and buffers[0] == RECORD.data


@pytest.mark.parametrize(
    "answer",
    [
        b"+PONG\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1e3\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nmore than three",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 3\r\n\r\nmore than three",
        b"HTTP/1.1 500 X\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 500 X\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 40_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + bytes(RECORD.data),
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + bytes(RECORD.data)[:50_000],
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n186a0\r\n" + bytes(RECORD.data),
        chunked(b"200 OK", bytes(RECORD.data)[:1000]),
        b"HTTP/1.1 403 X\r\nContent-Length: 999999999999\r\n\r\n" + b"x" * 100_000,
        b"HTTP/1.1 403 X\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n" + b"x" * 100_000,
    ],
)
async def test_nonsense_is_unavailable_and_bounded(answer: bytes) -> None:
    """What is no answer of S3, or one without end, is unavailable: no crash, no hang, and nothing is quarantined."""
    endpoint = Endpoint(answer)
    async with tier_on(endpoint) as tier:
        with pytest.raises(Unavailable):
            await tier.get(RECORD.key, deadline=Deadline.after(20))
    assert {head.split()[0] for head in endpoint.heads} == {b"GET"}


async def test_a_cancelled_get_writes_nothing_more() -> None:
    """A get that is cancelled in the middle of its body drops the connection: its buffer is not touched again."""
    began, go_on = asyncio.Event(), asyncio.Event()
    buffer = bytearray(RECORD.num_bytes)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ok(bytes(RECORD.data))[:50_000])
        await writer.drain()
        began.set()
        await go_on.wait()
        writer.write(bytes(RECORD.data)[50_000:])
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        tier = await S3Tier.open(S3Location("pages", "", url), credentials=("A", "b"))
        get = asyncio.ensure_future(tier.get(RECORD.key, deadline=soon(), allocate=lambda _: memoryview(buffer)))
        await began.wait()
        await asyncio.sleep(0.05)
        get.cancel()
        with pytest.raises(asyncio.CancelledError):
            await get
        seen = bytes(buffer)
        go_on.set()
        await asyncio.sleep(0.1)
        assert bytes(buffer) == seen
        await tier.aclose()


async def test_slow_down_is_retried_and_counted() -> None:
    """After `SlowDown` the request is sent again; both attempts are counted."""
    endpoint = Endpoint(refused(b"503 Slow Down", b"SlowDown"), ok())
    meters = Meters()
    async with tier_on(endpoint, meters) as tier:
        assert await tier.put(RECORD, deadline=soon()) is PutOutcome.STORED
        assert meters.get("s3_throttled") == meters.get("s3_retries") == 1
        assert meters.get("s3_requests", verb="PUT") == 2


async def test_what_slows_down_meanwhile_counts_once() -> None:
    """Several requests in flight are answered with `SlowDown`: the window is halved once, not for each."""
    pace = Pace(16)

    async def one() -> None:
        async with pace.turn():
            await asyncio.sleep(0.01)
            raise Throttled("a test")

    outcomes = await asyncio.gather(*(one() for _ in range(8)), return_exceptions=True)
    assert all(isinstance(outcome, Throttled) for outcome in outcomes)
    assert pace.window == 8.0


def test_retries_have_a_budget() -> None:
    """32 retries in a row, then one for each ten successes."""
    budget = RetryBudget()
    assert sum(budget.take() for _ in range(100)) == 32
    for _ in range(21):
        budget.earn()
    assert [budget.take() for _ in range(3)] == [True, True, False]


async def test_the_window_shrinks_to_one_and_grows_to_its_limit() -> None:
    """Each success adds a share of one, and no number of them more than was lost."""
    pace = Pace(2)
    for _ in range(2):
        with pytest.raises(Throttled):
            async with pace.turn():
                raise Throttled("a test")
        assert pace.window == 1.0
    for _ in range(5):
        async with pace.turn():
            pass
    assert pace.window == 2.0


class _Pipe(asyncio.Transport):
    """A transport that only notes whether it was dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped = False

    def write(self, data: object) -> None:
        pass

    def is_closing(self) -> bool:
        return self.dropped

    def abort(self) -> None:
        self.dropped = True


_PIECES = st.one_of(
    st.sampled_from(
        [
            *(b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 404 X\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"),
            *(b"Content-Length: 40\r\n", b"Transfer-Encoding: chunked\r\n", b"\r\n", b"5\r\nhello\r\n"),
            *(b"0\r\n\r\n", b"x" * 40, xml(b"NoSuchKey")),
        ]
    ),
    st.binary(max_size=60),
)


@given(st.lists(_PIECES, max_size=12).map(b"".join), st.integers(1, 80))
async def test_any_bytes_in_any_cut_end_in_an_answer_or_an_error(data: bytes, most: int) -> None:
    """Any bytes in pieces of any size: an answer, an expected error, or a wait for more; never a crash."""
    connection, pipe = HttpConnection(), _Pipe()
    connection.connection_made(pipe)
    asked = asyncio.ensure_future(connection.request(b"", None, lambda num_bytes: memoryview(bytearray(num_bytes))))
    await asyncio.sleep(0)
    at = 0
    while at < len(data) and not asked.done() and connection.reusable is False and not pipe.dropped:
        target = connection.get_buffer(-1)
        assert len(target) > 0
        count = min(len(target), most, len(data) - at)
        target[:count] = data[at : at + count]
        connection.buffer_updated(count)
        at += count
    connection.connection_lost(None)
    try:
        answer = await asked
    except (Lost, KVStoreError):
        return
    assert isinstance(answer, Answer) and len(answer.body) < 70_000
