"""Parses frames from a stream of bytes. Sans-I/O; the format is specified in docs/formats/wire-v1.md.

A frame is a 16-byte prefix (magic with version, head bytes, payload bytes), a msgpack map as head, and a raw payload.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any, Final, Protocol

import msgpack

from kvstore.errors import InternalError, InvalidRequest, UnsupportedFormat

MAGIC = b"KVW1"
MAX_HEAD_BYTES = 4 << 20
HELLO_HEAD_BYTES_MAX = 8 << 10
"""What a service accepts before it knows its peer: a token of 4 KiB and a name."""
LONG_HEAD_BYTES = 16 << 10
"""A service receives a longer head only when it has room for it: a lookup of more than 450 boundaries."""
_ITEMS_MAX = 64
_ITEMS_TOTAL_MAX = 4096
_LIMITS_OF_CLIENT = {
    "max_array_len": _ITEMS_MAX,
    "max_map_len": _ITEMS_MAX,
    "max_str_len": 64 << 10,
    "max_ext_len": 0,
}
_PREFIX = struct.Struct("<4sIQ")
PREFIX_BYTES = _PREFIX.size
_SCRAP = memoryview(bytearray(256 << 10))
"""All readers write into it what they drop, and none reads it."""

Head = Mapping[str, Any]


class Later(Enum):
    """The type of `LATER`."""

    LATER = auto()


LATER: Final = Later.LATER
"""A sink's answer while it has no buffer yet: nothing is read until `FrameReader.provide`."""


class FrameSink(Protocol):
    """Receives the frames that a `FrameReader` parses."""

    def on_head(self, head: Head, payload_bytes: int) -> memoryview | Later | None:
        """Called before a payload of at least one byte is received.

        Returns:
            A writable buffer of at least `payload_bytes` for the payload, `None` to receive and drop it, or `LATER`.
        """
        ...

    def on_frame(self, head: Head, payload: memoryview | None) -> None:
        """Called with a complete frame; `payload` is the filled part of the buffer, `None`: no payload, or dropped."""
        ...


def pack_head(head: Head, payload_bytes: int = 0) -> bytes:
    """Prefix and head of a frame; the payload follows on the stream. A lone surrogate in a text, which users may have
    sent in JSON, becomes `?`.

    Raises:
        InternalError: The head is over 4 MiB, or holds a value that msgpack cannot represent, such as an integer of
            more than 64 bits.
    """
    try:
        packed: bytes = msgpack.packb(head, use_bin_type=True, unicode_errors="replace")
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InternalError("a frame's head cannot be packed", type=head.get("type"), error=error) from error
    if len(packed) > MAX_HEAD_BYTES:
        raise InternalError("a frame's head is too large", limit_bytes=MAX_HEAD_BYTES, seen=len(packed))
    return _PREFIX.pack(MAGIC, len(packed), payload_bytes) + packed


class _Items:
    """Counts the values of a head as its lists and maps are complete, so that a head is small once it is unpacked.

    Lists and maps that are not complete are few: msgpack allows 1,024 in each other, of 64 values each.
    """

    def __init__(self) -> None:
        self._left = _ITEMS_TOTAL_MAX

    def of_list(self, values: list[Any]) -> list[Any]:
        self._count(len(values))
        return values

    def of_map(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        self._count(len(pairs))
        return dict(pairs)

    def _count(self, num_items: int) -> None:
        self._left -= num_items + 1
        if self._left < 0:
            raise ValueError("too many values")


def unpack_head(data: bytes | bytearray, *, is_of_client: bool = False) -> Head:
    """The inverse of `pack_head`, without the prefix.

    Args:
        is_of_client: Whether it may hold no more than a request needs: lists and maps of 64 values, 4,096 values in
            all, and texts of 64 KiB. Bytes are as long as the head allows.

    Raises:
        InvalidRequest: Not one complete msgpack map with text keys, or it holds more than a client may send.
    """
    limits: Mapping[str, Any] = _LIMITS_OF_CLIENT if is_of_client else {}
    if is_of_client and len(data) > _ITEMS_TOTAL_MAX:  # a shorter head holds fewer values than it has bytes
        items = _Items()
        limits = {**limits, "list_hook": items.of_list, "object_pairs_hook": items.of_map}
    try:
        head = msgpack.unpackb(data, raw=False, strict_map_key=True, **limits)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidRequest("a frame's head must be msgpack", seen=type(error).__name__) from error
    if not isinstance(head, dict) or not all(isinstance(key, str) for key in head):
        raise InvalidRequest("a frame's head must be a msgpack map with text keys", seen=type(head).__name__)
    return head


class _Phase(Enum):
    PREFIX = auto()
    WAITING_FOR_HEAD = auto()
    HEAD = auto()
    WAITING = auto()
    PAYLOAD = auto()
    ENDED = auto()


class FrameReader:
    """Parses frames: the caller writes received bytes into `buffer()`, then passes their number to `received`.

    Every size is checked before memory is allocated for it. After an error the stream cannot be parsed any further.

    Larger payloads and heads than the limits are refused. The limits may be changed at any time; they apply to the next
    frame.

    Attributes:
        is_of_client: Whether it reads what a client sends; see `unpack_head`.
        room_for_head: Called with the size of a head over 16 KiB before anything is allocated for it. False: nothing is
            read until `provide`.
        head_arrived: Called when such a head has arrived in full.
    """

    def __init__(self, sink: FrameSink, max_payload_bytes: int, max_head_bytes: int = MAX_HEAD_BYTES) -> None:
        self.max_payload_bytes = max_payload_bytes
        self.max_head_bytes = max_head_bytes
        self.is_of_client = False
        self.room_for_head: Callable[[int], bool] | None = None
        self.head_arrived: Callable[[], None] | None = None
        self._sink: FrameSink | None = sink
        self._phase = _Phase.PREFIX
        self._target: memoryview | None = memoryview(bytearray(PREFIX_BYTES))
        self._filled = 0
        self._needed = PREFIX_BYTES
        self._head: Head = {}
        self._payload_bytes = 0
        self._head_bytes = 0

    @property
    def waiting(self) -> bool:
        """Whether the sink must provide a buffer, or room for a head, before anything more is read."""
        return self._phase in (_Phase.WAITING, _Phase.WAITING_FOR_HEAD)

    @property
    def is_in_head(self) -> bool:
        """Whether a frame has begun and its head is not complete."""
        return self._phase is _Phase.HEAD or (self._phase is _Phase.PREFIX and self._filled > 0)

    @property
    def head_of_payload(self) -> Head | None:
        """The head of the frame whose payload is being received, or waits for a buffer; `None`: there is none."""
        return self._head if self._phase in (_Phase.WAITING, _Phase.PAYLOAD) else None

    def buffer(self) -> memoryview:
        """Where the next received bytes belong; never empty."""
        if self.waiting:
            raise InternalError("read from a stream whose sink has no buffer yet")
        if self._target is not None:
            return self._target[self._filled : self._needed]
        return _SCRAP[: self._needed - self._filled]

    def received(self, num_bytes: int) -> None:
        """Process `num_bytes` that were written into the last `buffer()`; calls the sink for what is complete.

        Raises:
            InvalidRequest: Malformed or over a limit.
            UnsupportedFormat: Another version of the protocol.
        """
        self._filled += num_bytes
        if self._filled < self._needed:
            return
        if self._phase is _Phase.PREFIX:
            self._prefix_complete()
        elif self._phase is _Phase.HEAD:
            self._head_complete()
        else:
            target = self._target[: self._needed] if self._target is not None else None
            self._deliver(target)

    def provide(self, target: memoryview | None) -> None:
        """Provide the buffer after `LATER`, or `None` to drop the payload. A head that waits for room has it now."""
        if self._phase is _Phase.WAITING_FOR_HEAD:
            self._begin_head()
            return
        if self._phase is not _Phase.WAITING:
            raise InternalError("a buffer was provided, but no payload waits for one")
        self._expect(_Phase.PAYLOAD, target, self._payload_bytes)

    def drop_payload(self) -> None:
        """Drop the rest of the current payload; its buffer is not written to any more."""
        if self._phase is _Phase.PAYLOAD:
            self._target = None

    def end(self) -> None:
        """Drop the buffers and the sink: nothing is received any more.

        Sink and reader refer to each other, so without this a buffer would live until the cyclic collector runs.
        """
        self._phase, self._target, self._sink, self._head = _Phase.ENDED, None, None, {}
        self.room_for_head = self.head_arrived = None

    def _prefix_complete(self) -> None:
        assert self._target is not None
        magic, head_bytes, payload_bytes = _PREFIX.unpack(self._target)
        if magic != MAGIC:
            kind = UnsupportedFormat if magic[:3] == MAGIC[:3] else InvalidRequest
            raise kind("a frame must start with the magic of its version", expected=MAGIC, seen=magic)
        if not 1 <= head_bytes <= self.max_head_bytes:
            limit = self.max_head_bytes
            raise InvalidRequest("head size is out of range", field="head_bytes", limit=limit, seen=head_bytes)
        if payload_bytes > self.max_payload_bytes:
            limit = self.max_payload_bytes
            raise InvalidRequest("payload is too large", field="payload_bytes", limit=limit, seen=payload_bytes)
        self._payload_bytes, self._head_bytes = payload_bytes, head_bytes
        if head_bytes > LONG_HEAD_BYTES and self.room_for_head is not None and not self.room_for_head(head_bytes):
            self._phase = _Phase.WAITING_FOR_HEAD
        else:
            self._begin_head()

    def _begin_head(self) -> None:
        self._expect(_Phase.HEAD, memoryview(bytearray(self._head_bytes)), self._head_bytes)

    def _head_complete(self) -> None:
        assert self._target is not None
        if self._head_bytes > LONG_HEAD_BYTES and self.head_arrived is not None:
            self.head_arrived()
        self._head = unpack_head(self._target.obj, is_of_client=self.is_of_client)  # type: ignore[arg-type]
        if self._payload_bytes == 0:
            self._deliver(None)
            return
        assert self._sink is not None
        target = self._sink.on_head(self._head, self._payload_bytes)
        if target is LATER:
            self._phase = _Phase.WAITING
        else:
            self._expect(_Phase.PAYLOAD, target, self._payload_bytes)

    def _deliver(self, payload: memoryview | None) -> None:
        head, self._head = self._head, {}
        self._expect(_Phase.PREFIX, memoryview(bytearray(PREFIX_BYTES)), PREFIX_BYTES)
        assert self._sink is not None
        self._sink.on_frame(head, payload)

    def _expect(self, phase: _Phase, target: memoryview | None, needed: int) -> None:
        if target is not None and len(target) < needed:
            raise InternalError("a buffer for a payload is too small", expected=needed, seen=len(target))
        self._phase, self._target, self._needed, self._filled = phase, target, needed, 0
