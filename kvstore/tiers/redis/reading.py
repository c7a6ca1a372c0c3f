"""How a record is cut into values and read in parts: commands, places of the replies, the checksum. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvstore.errors import CorruptRecord, UnsupportedFormat
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.names import format_name, stripe_name
from kvstore.format.record import MAX_RECORD_BYTES, RunningChecksum
from kvstore.model.keys import RecordKey
from kvstore.runtime.buffers import fresh_buffer
from kvstore.tiers.redis.replies import strange_reply
from kvstore.tiers.redis.resp import Command, ErrorReply, Reply

STRIPE_BYTES = 4 * 1024 * 1024 - 64
"""The largest value: 4 MiB less Redis's own header of a string, so that it fills one 4 MiB allocation."""

PART_BYTES = 1 << 20
"""Bytes of a value read at a time: Redis copies each reply, and copies of 1 MiB cost it least per byte (0.12 to 0.2
s/GB; of 4 MiB 0.13, or 0.4 when two are in flight and its allocator returns memory in between)."""


class _Part(NamedTuple):
    """The bytes `first` to `last` of a value, which are at `start` to `stop` in the record.

    `last` is -1 for the value's end, so that a value that is too long is noticed.
    """

    name: str
    first: int
    last: int
    start: int
    stop: int


def _parts(name: str, start: int, stop: int, at: int) -> Iterator[_Part]:
    """The parts from `at` on of a value that is at `start` to `stop` in its record."""
    while at < stop:
        end = min(at + PART_BYTES, stop)
        yield _Part(name, at - start, -1 if end == stop else end - start - 1, at, end)
        at = end


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


class Reading:
    """Reads one record part by part, in order, so that each piece is summed while it is in the cache.

    The first part contains the record's size. The stripes of a striped record follow its header.

    Args:
        allocate: Returns a buffer of the given size; called once, unless the record's size changes during the read.

    Attributes:
        data: The whole record, after the last reply. `None`: it is absent or incomplete.
        checksum: Checksum of the payload in `data`.
        striped: The header of a striped record, as received.
        is_empty: There is no such name, or an empty value, which the command does not distinguish.
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
        """Start again, when no reply is due; in the same buffer if the size is the same."""
        self.data: memoryview | None = None
        self.checksum = b""
        self.striped: bytes | None = None
        self.is_empty = False
        self.error: ErrorReply | None = None
        self._sum = RunningChecksum()
        self._skip = 0  # bytes not to sum: the header has a checksum of its own
        # the first reply, if its place depends on its content
        self._first: memoryview | None = None
        self._is_first = True
        self._is_incomplete = False
        self._parts = deque([_Part(self.name, 0, PART_BYTES - 1, 0, PART_BYTES)])
        self._due: deque[_Part] = deque()

    def next(self) -> Command | None:
        """The next command to send; `None`: none for now."""
        if not self._parts or self._is_incomplete or self.error is not None:
            return None
        part = self._parts.popleft()
        self._due.append(part)
        return ("GETRANGE", part.name, part.first, part.last)

    def place(self, num_bytes: int, head: memoryview) -> memoryview | None:
        """Where a reply belongs of which `head` has arrived; `None`: drop it.

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
        """Add a piece, which was received in its place, to the checksum; called for all pieces in order."""
        if self._first is not None:
            return
        if self._skip:
            skipped = min(self._skip, len(piece))
            self._skip -= skipped
            piece = piece[skipped:]
        self._sum.update(piece)

    def answered(self, reply: Reply) -> None:
        """Take a complete reply: the bytes in their place, `None` if it was dropped, or an error.

        Raises:
            CorruptRecord: Its header cannot be read.
            InvalidRequest: From `allocate`.
            Unavailable: It is not a reply to the command.
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
        """Take a reply that was received in another buffer; errors as `place`."""
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
        """The place of a value's first part, which begins with `head`; queues the following parts."""
        num_bytes = _announced_bytes(head)
        self._skip = HEADER_BYTES
        self._parts.extend(_parts(self.name, 0, num_bytes, PART_BYTES))
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
        """Take a value of a header's size: a striped record's header, a record without payload, or damage."""
        header = striped_header(packed, self._key)
        if header is None:
            self._take_buffer(HEADER_BYTES)[:] = packed
            return
        self.striped = bytes(packed)
        self._take_buffer(HEADER_BYTES + header.payload_bytes)[:HEADER_BYTES] = packed
        for name, (start, stop) in zip(stripe_names(header), stripe_ranges(header), strict=True):
            self._parts.extend(_parts(name, start, stop, start))

    def _take_buffer(self, num_bytes: int) -> memoryview:
        if self._buffer is None or len(self._buffer) != num_bytes:
            self._buffer = self._allocate(num_bytes)
        return self._buffer


def striped_header(packed: Reply, key: RecordKey) -> HeaderV1 | None:
    """The header of a striped record of this key, or `None` if the reply is something else."""
    if not isinstance(packed, bytes | memoryview):
        return None
    try:
        header = HeaderV1.unpack(packed)
    except (CorruptRecord, UnsupportedFormat):
        return None
    plausible = header.payload_bytes <= MAX_RECORD_BYTES - HEADER_BYTES
    return header if header.key == key and plausible and is_striped(header) else None


def _announced_bytes(first: memoryview) -> int:
    """The size of a record that is a single value and begins with this part.

    Raises:
        CorruptRecord: The size cannot be read, or is impossible.
    """
    try:
        num_bytes = HEADER_BYTES + HeaderV1.unpack(first[:HEADER_BYTES]).payload_bytes
    except UnsupportedFormat as error:
        raise CorruptRecord(error.message, **error.details) from error
    if not PART_BYTES <= num_bytes <= STRIPE_BYTES:
        raise CorruptRecord("a value is not as long as its header says", expected=num_bytes)
    return num_bytes
