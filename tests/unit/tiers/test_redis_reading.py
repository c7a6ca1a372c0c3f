"""Reading a record part by part: whole values, stripes, missing, wrong and changed values; how a record is cut."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import CorruptRecord, Unavailable
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.names import format_name
from kvstore.format.record import Record
from kvstore.model.kinds import RecordKind
from kvstore.model.layout import Span
from kvstore.runtime.deadline import Deadline
from kvstore.testing.records import make_key, make_record
from kvstore.tiers.redis.connection import Connection
from kvstore.tiers.redis.reading import PART_BYTES, STRIPE_BYTES, Reading, is_striped, stripe_names, stripe_ranges
from kvstore.tiers.redis.resp import ErrorReply

KEY = make_key(1)
NAME = format_name(KEY)


def values_of(record: Record) -> dict[str, bytes]:
    """What a Redis holds of a record."""
    if not is_striped(record.header):
        return {NAME: bytes(record.data)}
    stripes = zip(stripe_names(record.header), stripe_ranges(record.header), strict=True)
    return {
        NAME: bytes(record.data[:HEADER_BYTES]),
        **{name: bytes(record.data[start:stop]) for name, (start, stop) in stripes},
    }


class Buffers:
    """Counts what is asked for."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def allocate(self, num_bytes: int) -> memoryview:
        self.sizes.append(num_bytes)
        return memoryview(bytearray(num_bytes))


def answer(values: dict[str, bytes], command: tuple[object, ...]) -> bytes:
    _, name, first, last = command
    assert isinstance(name, str) and isinstance(first, int) and isinstance(last, int)
    value = values.get(name, b"")
    return value[first : len(value) if last == -1 else last + 1]


def run(reading: Reading, values: dict[str, bytes], head_bytes: int = 16_000, piece_bytes: int = 1 << 18) -> None:
    """Let a server answer one command after the other."""
    while (command := reading.next()) is not None:
        body = answer(values, tuple(command))
        target = reading.place(len(body), memoryview(body)[:head_bytes])
        if target is not None:
            assert len(target) == len(body)
            at = min(head_bytes, len(body))
            target[:at] = body[:at]
            reading.received(target[:at])
            for start in range(at, len(body), piece_bytes):
                target[start : start + piece_bytes] = body[start : start + piece_bytes]
                reading.received(target[start : start + piece_bytes])
        reading.answered(target)


@settings(max_examples=40, deadline=None)
@given(
    st.one_of(
        st.integers(0, 3000),
        st.integers(PART_BYTES - HEADER_BYTES - 2, PART_BYTES - HEADER_BYTES + 2),
        st.integers(STRIPE_BYTES - HEADER_BYTES - 2, STRIPE_BYTES - HEADER_BYTES + 2),
        st.integers(PART_BYTES, 9 << 20),
    ),
    st.sampled_from([0, 1, 191, 192, 193, 16_000]),
    st.sampled_from([1 << 16, 1 << 18, 1 << 24]),
)
def test_any_record_comes_whole_and_summed(payload_bytes: int, head_bytes: int, piece_bytes: int) -> None:
    """Of any size, however the first answer is cut: its bytes in one buffer, its checksum without another look."""
    record = make_record(KEY, payload_bytes)
    buffers = Buffers()
    reading = Reading(KEY, buffers.allocate)
    run(reading, values_of(record), head_bytes, piece_bytes)
    assert reading.data == record.data
    assert reading.checksum == record.header.payload_checksum
    assert buffers.sizes == [record.num_bytes] and reading.num_bytes == record.num_bytes


@pytest.mark.parametrize("values", [{}, {NAME: b""}])
def test_nothing_has_to_be_looked_at(values: dict[str, bytes]) -> None:
    """A missing name and an empty value look the same to a read."""
    reading = Reading(KEY, Buffers().allocate)
    run(reading, values)
    assert reading.is_empty and reading.data is None and reading.next() is None


@pytest.mark.parametrize("header_bytes", [0, HEADER_BYTES])
@pytest.mark.parametrize("head_bytes", [0, 16_000])
def test_a_value_that_is_not_as_long_as_it_says(header_bytes: int, head_bytes: int) -> None:
    """Longer than a part, without a header or with that of a short record: damage, and nothing is allocated for it."""
    buffers = Buffers()
    value = bytes(make_record(KEY, 100).data[:header_bytes]) + b"x" * (PART_BYTES + 5)
    with pytest.raises(CorruptRecord):
        run(Reading(KEY, buffers.allocate), {NAME: value}, head_bytes)
    assert buffers.sizes == []


def test_an_answer_that_is_longer_than_asked_for() -> None:
    """A server that answers more than it was asked for is not given a buffer for it."""
    reading = Reading(KEY, Buffers().allocate)
    assert reading.next() is not None
    with pytest.raises(CorruptRecord, match="wrong size"):
        reading.place(PART_BYTES + 1, memoryview(b""))


def test_answers_that_were_received_elsewhere() -> None:
    """Parts that come one by one, each from another connection: the same record."""
    for payload_bytes in (0, 100, 3 << 20, 9 << 20):
        record = make_record(KEY, payload_bytes)
        reading = Reading(KEY, Buffers().allocate)
        while (command := reading.next()) is not None:
            reading.take(memoryview(answer(values_of(record), tuple(command))))
        assert reading.data == record.data and reading.checksum == record.header.payload_checksum


def test_a_missing_stripe() -> None:
    """No record is returned, and the useless header is."""
    record = make_record(KEY, 9 << 20)
    values = values_of(record)
    del values[stripe_names(record.header)[1]]
    reading = Reading(KEY, Buffers().allocate)
    run(reading, values)
    assert reading.data is None and reading.striped == record.data[:HEADER_BYTES]


@pytest.mark.parametrize("change", [lambda value: value[:-1], lambda value: value + b"x"])
def test_a_stripe_of_another_size(change: Callable[[bytes], bytes]) -> None:
    """Shorter or longer than the header says is damage."""
    record = make_record(KEY, 9 << 20)
    values = values_of(record)
    name = stripe_names(record.header)[0]
    values[name] = change(values[name])
    with pytest.raises(CorruptRecord, match="wrong size"):
        run(Reading(KEY, Buffers().allocate), values)


def test_begun_anew_on_another_server() -> None:
    """After a refusal in the middle all is read again, into the same buffer, and summed from the start."""
    record = make_record(KEY, 3 << 20)
    buffers = Buffers()
    reading = Reading(KEY, buffers.allocate)
    body = values_of(record)[NAME][:PART_BYTES]
    assert reading.next() is not None
    target = reading.place(len(body), memoryview(body)[:1000])
    assert target is not None
    reading.received(target)
    reading.answered(target)
    assert reading.next() is not None
    moved = ErrorReply("MOVED 1 10.0.0.1:6379")
    reading.answered(moved)
    assert reading.next() is None and reading.error == moved and reading.data is None
    reading.begin()
    run(reading, values_of(record))
    assert reading.data == record.data and reading.checksum == record.header.payload_checksum
    assert buffers.sizes == [record.num_bytes]


async def test_a_reading_that_was_left_writes_no_more() -> None:
    """A reader that is cancelled between two parts: no further part is asked for, its buffer stays as it is."""
    record = make_record(KEY, 3 << 20)
    value = values_of(record)[NAME]
    commands: list[bytes] = []
    go_on = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                for _ in range(data.count(b"GETRANGE")):
                    start = len(commands) * PART_BYTES
                    commands.append(data)
                    if start:
                        await go_on.wait()
                    writer.write(b"$%d\r\n" % PART_BYTES + value[start : start + PART_BYTES] + b"\r\n")
                if b"PING" in data:
                    writer.write(b"+PONG\r\n")
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: Connection("peer:1"), "127.0.0.1", port)
        buffer = memoryview(bytearray(record.num_bytes))
        reading = Reading(KEY, lambda num_bytes: buffer)
        task = asyncio.ensure_future(connection.read(reading, deadline=Deadline.after(10)))
        while buffer[PART_BYTES - 1 : PART_BYTES] != value[PART_BYTES - 1 : PART_BYTES] or len(commands) < 2:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        asked = len(commands)
        before = bytes(buffer)
        go_on.set()
        assert await connection.run([("PING",)], deadline=Deadline.after(10)) == ["PONG"]
        assert bytes(buffer) == before and asked <= len(commands) <= 3
        await connection.aclose()


async def test_a_connection_that_is_lost_within_an_answer() -> None:
    """A server that dies while it sends: the read fails, and has no record."""
    value = values_of(make_record(KEY, 3 << 20))[NAME]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(b"$%d\r\n" % PART_BYTES + value[: PART_BYTES // 2])
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: Connection("peer:1"), "127.0.0.1", port)
        reading = Reading(KEY, Buffers().allocate)
        with pytest.raises(Unavailable, match="was lost"):
            await connection.read(reading, deadline=Deadline.after(10))
        assert reading.data is None and not connection.alive
        with pytest.raises(Unavailable, match="is lost"):
            await connection.read(Reading(KEY, Buffers().allocate), deadline=Deadline.after(10))


def header(payload_bytes: int, checksum: bytes = bytes(range(16))) -> HeaderV1:
    return HeaderV1(make_key(1), RecordKind.PAGE, Span(0, 256), 0, payload_bytes, payload_bytes, checksum, 0)


@given(st.integers(STRIPE_BYTES - HEADER_BYTES + 1, 1 << 30))
def test_stripes_tile_the_payload(payload_bytes: int) -> None:
    """Stripes cover the payload once, in order, and none is larger than a value may be."""
    ranges = stripe_ranges(header(payload_bytes))
    assert is_striped(header(payload_bytes))
    assert ranges[0][0] == HEADER_BYTES
    assert ranges[-1][1] == HEADER_BYTES + payload_bytes
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    assert all(0 < stop - start <= STRIPE_BYTES for start, stop in ranges)
    assert len(stripe_names(header(payload_bytes))) == len(ranges)


def test_up_to_the_limit_one_value() -> None:
    """A record that fits one value is not cut."""
    assert not is_striped(header(STRIPE_BYTES - HEADER_BYTES))


def test_names() -> None:
    """A stripe's name holds the record's, with its hash tag, and the payload's checksum."""
    names = stripe_names(header(STRIPE_BYTES))
    stem = f"{format_name(make_key(1))}.000102030405060708090a0b0c0d0e0f"
    assert names == [f"{stem}.0"]
    assert set(names).isdisjoint(stripe_names(header(STRIPE_BYTES, bytes(16))))
