"""Frames: any cut of the stream gives the same frames, and nothing is allocated for a size that was not checked."""

from __future__ import annotations

import struct

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InternalError, InvalidRequest, UnsupportedFormat
from kvstore.wire.frames import LATER, MAX_HEAD_BYTES, PREFIX_BYTES, FrameReader, Head, Later, pack_head, unpack_head


class Sink:
    """Collects frames; `later` postpones buffers, `drop` refuses them."""

    def __init__(self, *, later: bool = False, drop: bool = False) -> None:
        self.frames: list[tuple[Head, bytes | None]] = []
        self.buffers: list[bytearray] = []
        self._later, self._drop = later, drop

    def on_head(self, head: Head, payload_bytes: int) -> memoryview | Later | None:
        if self._drop:
            return None
        self.buffers.append(bytearray(payload_bytes))
        return LATER if self._later else memoryview(self.buffers[-1])

    def on_frame(self, head: Head, payload: memoryview | None) -> None:
        self.frames.append((head, None if payload is None else bytes(payload)))


def feed(reader: FrameReader, data: bytes, sink: Sink | None = None, most: int = 1 << 30) -> None:
    """Write `data` as a transport would, at most `most` bytes at a time."""
    at = 0
    while at < len(data):
        if reader.waiting and sink is not None:
            reader.provide(memoryview(sink.buffers[-1]))
        target = reader.buffer()
        count = min(len(target), len(data) - at, most)
        assert count > 0
        target[:count] = data[at : at + count]
        at += count
        reader.received(count)


@given(
    st.lists(st.tuples(st.dictionaries(st.text(max_size=5), st.integers(0, 9), max_size=3), st.binary(max_size=50))),
    st.integers(1, 40),
    st.booleans(),
)
def test_any_cut_of_the_stream_gives_the_same_frames(
    frames: list[tuple[dict[str, int], bytes]], most: int, later: bool
) -> None:
    """Frames with and without payload, received in pieces of any size, at once or after a wait for the buffer."""
    stream = b"".join(pack_head(head, len(payload)) + payload for head, payload in frames)
    sink = Sink(later=later)
    feed(FrameReader(sink, 1 << 20), stream, sink, most)
    assert sink.frames == [(head, payload or None) for head, payload in frames]


@pytest.mark.parametrize(
    ("prefix", "error", "text"),
    [
        (struct.pack("<4sIQ", b"KVW2", 1, 0), UnsupportedFormat, "KVW2"),
        (struct.pack("<4sIQ", b"GET ", 1, 0), InvalidRequest, "GET"),
        (struct.pack("<4sIQ", b"KVW1", 0, 0), InvalidRequest, "head_bytes"),
        (struct.pack("<4sIQ", b"KVW1", MAX_HEAD_BYTES + 1, 0), InvalidRequest, "head_bytes"),
        (struct.pack("<4sIQ", b"KVW1", 1, 1001), InvalidRequest, "payload_bytes"),
        (struct.pack("<4sIQ", b"KVW1", 1, 2**64 - 1), InvalidRequest, "payload_bytes"),
    ],
)
def test_sizes_and_versions_are_checked_before_anything_is_allocated(
    prefix: bytes, error: type[Exception], text: str
) -> None:
    """A prefix that promises too much, nothing, or another protocol is refused when its 16 bytes are there."""
    with pytest.raises(error, match=text):
        feed(FrameReader(Sink(), 1000), prefix)


@pytest.mark.parametrize(
    "head",
    [b"\xc1", b"\x81\xa1a", msgpack.packb([1]), msgpack.packb({1: 2}), msgpack.packb({"a": 1}) + b"\0", b"\x91" * 5000],
)
def test_heads_that_are_no_map_are_refused(head: bytes) -> None:
    """Not msgpack, cut off, a list, keys that are no text, bytes behind the map, absurdly nested."""
    with pytest.raises(InvalidRequest):
        unpack_head(head)


def test_dropped_payloads_leave_the_buffer_alone() -> None:
    """A reader drops the rest of a payload: its buffer is not written any more, and the next frame is found."""
    sink = Sink()
    reader = FrameReader(sink, 1 << 22)
    payload = b"\xaa" * 1_000_000
    feed(reader, pack_head({"n": 1}, len(payload)) + payload[:1000])
    assert reader.head_of_payload == {"n": 1}
    reader.drop_payload()
    feed(reader, payload[1000:] + pack_head({"n": 2}))
    assert bytes(sink.buffers[0]) == payload[:1000] + bytes(999_000)
    assert sink.frames == [({"n": 1}, None), ({"n": 2}, None)]


def test_payloads_nobody_wants_are_received_and_dropped() -> None:
    """A sink without a buffer gets the frame without its payload."""
    sink = Sink(drop=True)
    feed(FrameReader(sink, 1 << 22), pack_head({"n": 1}, 700_000) + bytes(700_000) + pack_head({"n": 2}))
    assert sink.frames == [({"n": 1}, None), ({"n": 2}, None)]


def test_a_buffer_that_is_too_small_is_never_written_past() -> None:
    """A sink that returns too little is a bug, found before the first byte."""

    class Small(Sink):
        def on_head(self, head: Head, payload_bytes: int) -> memoryview:
            return memoryview(bytearray(payload_bytes - 1))

    with pytest.raises(InternalError):
        feed(FrameReader(Small(), 1000), pack_head({}, 10))


def test_our_own_heads_are_bounded_too() -> None:
    """A head over the limit is not sent: the other side would close the connection."""
    assert len(pack_head({"a": b""})) > PREFIX_BYTES
    with pytest.raises(InternalError):
        pack_head({"a": bytes(MAX_HEAD_BYTES)})
