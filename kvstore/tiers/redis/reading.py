"""How a record is read: which commands, where their replies go, and its checksum on the way. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvstore.errors import CorruptRecord, UnsupportedFormat
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.names import format_name, stripe_name
from kvstore.format.record import MAX_RECORD_BYTES, RunningChecksum
from kvstore.model.keys import RecordKey
from kvstore.runtime.buffers import fresh_buffer
from kvstore.tiers.redis.replies import strange_reply
from kvstore.tiers.redis.resp import Command, ErrorReply, Reply

__all__ = [
    "PART_BYTES",
    "STRIPE_BYTES",
    "Part",
    "Reading",
    "is_striped",
    "parts_behind",
    "parts_of",
    "stripe_names",
    "stripe_ranges",
    "striped_header",
]


class Reading:
    """One record, read part by part in order, so that each piece is summed while it is in the cache.

    The first part tells the record's size. A striped record's stripes follow its header.

    Args:
        key: The record's key.
        allocate: Returns a buffer of the given size; called once, unless the record changes its size meanwhile.

    Attributes:
        name: The record's name.
        data: The whole record, once nothing is due any more; `None`: it is absent or incomplete.
        checksum: Checksum of the payload in `data`.
        striped: The header of a striped record, as received.
        is_empty: There is no such name, or an empty value: the command does not tell them apart.
        error: The error with which the server refused a command.
    """

    def __init__(self, key: RecordKey, allocate: Callable[[int], memoryview]) -> None:
        self.name = format_name(key)
        self._key = key
        self._allocate = allocate
        self._buffer: memoryview | None = None
        self.begin()

    @property
    def num_bytes(self) -> int:
        """Size of the record; 0 while it is not known."""
        return len(self._buffer) if self._buffer is not None else 0

    def begin(self) -> None:
        """Start over, once nothing is due any more; in the same buffer if that fits."""
        self.data: memoryview | None = None
        self.checksum = b""
        self.striped: bytes | None = None
        self.is_empty = False
        self.error: ErrorReply | None = None
        self._sum = RunningChecksum()
        self._skip = 0  # bytes not to sum: the header has a checksum of its own
        # the first reply, if its content must be seen before there is a place for it
        self._first: memoryview | None = None
        self._is_first = True
        self._is_incomplete = False
        self._parts = deque([Part(self.name, 0, PART_BYTES - 1, 0, PART_BYTES)])
        self._due: deque[Part] = deque()

    def next(self) -> Command | None:
        """The next command to send; `None`: nothing more for now."""
        if not self._parts or self._is_incomplete or self.error is not None:
            return None
        part = self._parts.popleft()
        self._due.append(part)
        return ("GETRANGE", part.name, part.first, part.last)

    def place(self, num_bytes: int, head: memoryview) -> memoryview | None:
        """Where the reply that is arriving belongs; `None`: drop it.

        Args:
            num_bytes: Size of the reply.
            head: The part of it that has arrived.

        Raises:
            CorruptRecord: It has the wrong size, or its header cannot be read.
            InvalidRequest: From `allocate`.
        """
        if self._is_incomplete or self.error is not None:
            return None
        part = self._due[0]
        expected = part.stop - part.start
        if num_bytes not in (0, expected) and not (self._is_first and num_bytes < expected):
            raise CorruptRecord("a value has the wrong size", expected=expected, seen=num_bytes)
        if self._is_first:
            return self._place_first(num_bytes, head)
        assert self._buffer is not None
        return self._buffer[part.start : part.start + num_bytes]

    def received(self, piece: memoryview) -> None:
        """Note a piece that was received in its place; called for all of them, in order."""
        if self._first is not None:
            return
        if self._skip:
            skipped = min(self._skip, len(piece))
            self._skip -= skipped
            piece = piece[skipped:]
        self._sum.update(piece)

    def answered(self, reply: Reply) -> None:
        """Note a complete reply: what was received in its place, `None` if it was dropped, or an error.

        Raises:
            CorruptRecord: Its header cannot be read.
            InvalidRequest: From `allocate`.
            Unavailable: It is no reply to what was asked.
        """
        self._due.popleft()
        if isinstance(reply, ErrorReply):
            self.error = self.error or reply
        elif isinstance(reply, memoryview):
            if self._is_first:
                self._end_first(len(reply))
            elif not len(reply):
                self._is_incomplete = True
        elif reply is not None or not (self._is_incomplete or self.error is not None):
            raise strange_reply("GETRANGE", reply, "")
        is_open = self._due or self._parts or self._is_first
        if not (is_open or self._is_incomplete or self.is_empty or self.error is not None):
            self.data = self._buffer
            self.checksum = self._sum.digest()

    def take(self, reply: Reply) -> None:
        """Take a reply that was received elsewhere; errors as `place`."""
        if isinstance(reply, memoryview):
            place = self.place(len(reply), reply)
            if place is not None:
                place[:] = reply
                self.received(place)
            reply = place
        self.answered(reply)

    def _place_first(self, num_bytes: int, head: memoryview) -> memoryview | None:
        if num_bytes == HEADER_BYTES or (num_bytes == PART_BYTES and len(head) < HEADER_BYTES):
            self._first = fresh_buffer(num_bytes)
            return self._first
        if num_bytes == PART_BYTES:
            return self._place_beginning(head)
        if not num_bytes:
            return fresh_buffer(0)
        self._skip = HEADER_BYTES
        return self._take_buffer(num_bytes)

    def _place_beginning(self, head: memoryview) -> memoryview:
        """The place of a value's first part, which begins with `head`; queues the parts that follow it."""
        num_bytes = _announced_bytes(head)
        self._skip = HEADER_BYTES
        self._parts.extend(parts_behind(self.name, num_bytes))
        return self._take_buffer(num_bytes)[:PART_BYTES]

    def _end_first(self, num_bytes: int) -> None:
        self._is_first = False
        first, self._first = self._first, None
        if not num_bytes:
            self.is_empty = True
        elif first is not None and num_bytes == PART_BYTES:
            place = self._place_beginning(first)
            place[:] = first
            self.received(place)
        elif first is not None:
            self._end_header(first)

    def _end_header(self, packed: memoryview) -> None:
        """Take a value that is a header only: a striped record's, a record without payload, or damaged."""
        header = striped_header(packed, self._key)
        if header is None:
            self._take_buffer(HEADER_BYTES)[:] = packed
            return
        self.striped = bytes(packed)
        self._take_buffer(HEADER_BYTES + header.payload_bytes)[:HEADER_BYTES] = packed
        self._parts.extend(parts_of(header))

    def _take_buffer(self, num_bytes: int) -> memoryview:
        if self._buffer is None or len(self._buffer) != num_bytes:
            self._buffer = self._allocate(num_bytes)
        return self._buffer


def striped_header(packed: memoryview, key: RecordKey) -> HeaderV1 | None:
    """The header of a striped record under `key`, or `None` if the bytes are something else."""
    try:
        header = HeaderV1.unpack(packed)
    except (CorruptRecord, UnsupportedFormat):
        return None
    plausible = header.payload_bytes <= MAX_RECORD_BYTES - HEADER_BYTES
    return header if header.key == key and plausible and is_striped(header) else None


def _announced_bytes(first: memoryview) -> int:
    """The size of a record that is a single value and begins with this part.

    Raises:
        CorruptRecord: The size cannot be read, or is impossible for a value of ours.
    """
    try:
        num_bytes = HEADER_BYTES + HeaderV1.unpack(first[:HEADER_BYTES]).payload_bytes
    except UnsupportedFormat as error:
        raise CorruptRecord(error.message, **error.details) from error
    if not PART_BYTES <= num_bytes <= STRIPE_BYTES:
        raise CorruptRecord("a value is not as long as its header says", expected=num_bytes)
    return num_bytes


STRIPE_BYTES = 4 * 1024 * 1024 - 64
"""The largest value: 4 MiB less Redis's own header of a string, so that it fills one 4 MiB allocation."""


PART_BYTES = 1 << 20
"""Bytes of a value read at a time: Redis copies each reply, and copies of 1 MiB cost it least per byte (0.12 to 0.2
s/GB; of 4 MiB 0.13, or 0.4 when two are in flight and its allocator returns memory in between)."""


class Part(NamedTuple):
    """Some bytes of a value.

    Attributes:
        name: Name of the value.
        first: Index of its first byte in the value.
        last: Index of its last byte in the value; -1 for the value's end, so that a value that is too long is noticed.
        start: Where the bytes start in the record.
        stop: Where they stop in the record.
    """

    name: str
    first: int
    last: int
    start: int
    stop: int


def is_striped(header: HeaderV1) -> bool:
    """True when header and payload together do not fit one value."""
    return HEADER_BYTES + header.payload_bytes > STRIPE_BYTES


def stripe_ranges(header: HeaderV1) -> list[tuple[int, int]]:
    """Where each stripe's bytes start and stop in the record (header included)."""
    end = HEADER_BYTES + header.payload_bytes
    return [(start, min(start + STRIPE_BYTES, end)) for start in range(HEADER_BYTES, end, STRIPE_BYTES)]


def stripe_names(header: HeaderV1) -> list[str]:
    """Names of the stripes. They contain the payload's checksum, so that two writers collide only with equal bytes."""
    return [stripe_name(header.key, header.payload_checksum, index) for index in range(len(stripe_ranges(header)))]


def parts_of(header: HeaderV1) -> list[Part]:
    """The parts in which a striped record's stripes are read."""
    stripes = zip(stripe_names(header), stripe_ranges(header), strict=True)
    return [part for name, (start, stop) in stripes for part in _parts(name, start, start, stop)]


def parts_behind(name: str, num_bytes: int) -> list[Part]:
    """The parts in which the rest of a single value is read, after its first part."""
    return _parts(name, PART_BYTES, 0, num_bytes) if num_bytes > PART_BYTES else []


def _parts(name: str, at: int, start: int, stop: int) -> list[Part]:
    """The parts from `at` on of a value that is at `start` to `stop` in its record."""
    ends = [*range(at + PART_BYTES, stop, PART_BYTES), stop]
    starts = [at, *ends[:-1]]
    return [
        Part(name, first - start, -1 if end == stop else end - start - 1, first, end)
        for first, end in zip(starts, ends, strict=True)
    ]
