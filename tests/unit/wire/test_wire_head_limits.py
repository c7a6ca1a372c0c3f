"""What a head of a client may hold: a long one is refused before it costs much, and no request is refused."""

from __future__ import annotations

import time

import msgpack
import pytest

from kvstore.errors import InvalidRequest
from kvstore.wire import messages
from kvstore.wire.frames import LONG_HEAD_BYTES, MAX_HEAD_BYTES, FrameReader, Head, pack_head, unpack_head

START = b"\x81\xa1x"


class Sink:
    """Counts frames."""

    def __init__(self) -> None:
        self.num_frames = 0

    def on_head(self, head: Head, payload_bytes: int) -> None:
        """Drops payloads."""

    def on_frame(self, head: Head, payload: memoryview | None) -> None:
        self.num_frames += 1


def full(one: bytes) -> bytes:
    """As many of these as a head may have."""
    return START + one * ((MAX_HEAD_BYTES - 16) // len(one))


WORST = {
    "one list of maps": START + b"\xdd" + (MAX_HEAD_BYTES - 20).to_bytes(4, "big") + b"\x80" * (MAX_HEAD_BYTES - 20),
    "lists of lists": full(b"\xdc\x00\x40" + (b"\xdc\x00\x40" + b"\x80" * 64) * 64),
    "deep lists": full(b"\xdc\x00\x40" + b"\xca\x00\x01\x02\x03" * 63),
    "deep maps": full(b"\xde\x00\x40" + b"".join(b"\xa2" + bytes([number, 1, 1]) for number in range(63)) + b"\xa1b"),
    "a long list in each other": full(b"\xdd\x00\x40\x00\x00"),
    "a long text": msgpack.packb({"x": "a" * (1 << 20)}),
    "an extension": msgpack.packb({"x": msgpack.ExtType(5, b"a")}),
    "a date": msgpack.packb({"x": msgpack.Timestamp(1)}),
}


@pytest.mark.parametrize("name", WORST)
def test_heads_of_many_values(name: str) -> None:
    """Each is refused, and soon."""
    started_s = time.process_time()
    with pytest.raises(InvalidRequest, match="must be msgpack"):
        unpack_head(WORST[name], is_of_client=True)
    assert time.process_time() - started_s < 0.5


def test_requests_fit() -> None:
    """The longest lookup, the longest token, an outcome with details, and fields of a later release."""
    num_boundaries = MAX_HEAD_BYTES // 37
    lookup = messages.Lookup(1, 1, bytes(16), bytes(num_boundaries * 4), bytes(num_boundaries * 32), 0, 0, 0)
    outcome = messages.Outcome("r", bytes(16), 1, 1, 1, 1, "x" * 256, {str(number): number for number in range(40)})
    for message in (lookup, messages.Hello(1, token="x" * 4096), outcome):
        head = messages.encode(message) | {"later": [1, {"a": [2, 3]}]}
        packed = msgpack.packb(head)
        assert messages.decode(unpack_head(packed, is_of_client=True)) == message


def test_a_long_head_waits_for_room() -> None:
    """Nothing is allocated for it until then; short heads need no room."""
    sink, asked, arrived = Sink(), list[int](), list[int]()
    reader = FrameReader(sink, 0)
    reader.room_for_head = lambda num_bytes: bool(asked.append(num_bytes))
    reader.head_arrived = lambda: arrived.append(1)
    for payload in (b"", bytes(LONG_HEAD_BYTES)):
        stream = memoryview(pack_head({"x": payload}))
        while stream:
            if reader.waiting:
                assert asked and not arrived and not reader.is_in_head
                reader.provide(None)
            target = reader.buffer()
            count = min(len(target), len(stream))
            target[:count] = stream[:count]
            reader.received(count)
            stream = stream[count:]
    assert sink.num_frames == 2 and len(asked) == len(arrived) == 1
