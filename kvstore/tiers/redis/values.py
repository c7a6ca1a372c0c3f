"""The byte path: whole values and striped records, under one limit for bytes in flight."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import CorruptRecord, UnsupportedFormat
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.names import format_name
from kvstore.format.record import MAX_RECORD_BYTES, Record
from kvstore.model.keys import RecordKey
from kvstore.runtime.budget import ByteBudget
from kvstore.runtime.buffers import fresh_buffer
from kvstore.runtime.deadline import Deadline
from kvstore.tiers.base import PutOutcome
from kvstore.tiers.gather import gather_all
from kvstore.tiers.redis.connection import Sink
from kvstore.tiers.redis.replies import check_replies, check_reply
from kvstore.tiers.redis.resp import Command, ErrorReply, Reply
from kvstore.tiers.redis.stripes import (
    PART_BYTES,
    STRIPE_BYTES,
    Part,
    is_striped,
    parts_behind,
    parts_of,
    stripe_names,
    stripe_ranges,
)
from kvstore.tiers.redis.topology import Topology

__all__ = ["Values", "each_alone", "striped_header"]

_ORPHAN_MS = 10 * 60 * 1000  # stripes of a writer that died expire; a living one is done long before

_SCRATCHES_MAX = 8

_DROP_HEADER = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('UNLINK', KEYS[1]) end return 0"
"""Removes a striped record's header, unless somebody has stored the record anew since we read it."""


class Values:
    """Moves values between nodes and buffers.

    Args:
        topology: Where names live.
        in_flight: Bytes on their way; further calls wait for it within their deadline.
    """

    def __init__(self, topology: Topology, in_flight: ByteBudget) -> None:
        self._topology = topology
        self._in_flight = in_flight
        self._scratch: list[memoryview] = []

    async def fetch(self, name: str, *, bytes_max: int, sink: Sink, deadline: Deadline) -> memoryview | None:
        """GET a value of at most about `bytes_max` into what `sink` returns; `None`: no such name.

        Raises:
            CorruptRecord: Something that is no string stands there.
        """
        reply = await self._move(name, ("GET", name), bytes_max, deadline, sink)
        if isinstance(reply, ErrorReply) and reply.code == "WRONGTYPE":
            raise CorruptRecord("a foreign type of value stands under this name", name=name)
        check_reply(reply)
        return reply if isinstance(reply, memoryview) else None

    async def fetch_whole(self, name: str, *, sink: Sink, deadline: Deadline) -> memoryview | None:
        """`fetch` of a whole record or a striped one's header, in parts where it is larger than one.

        `sink` is asked once, for all of it.

        Raises:
            CorruptRecord: What stands there is no string, or has another size than its header says.
        """
        scratch = self._scratch.pop() if self._scratch else fresh_buffer(PART_BYTES)
        try:
            first = await self._part(
                name,
                0,
                PART_BYTES - 1,
                lambda index, size: scratch if size == PART_BYTES else sink(index, size),
                deadline,
            )
            if 0 < len(first) < PART_BYTES:
                return first
            num_bytes = _announced_bytes(first)
            if num_bytes is None:  # nothing, or nothing that can be trusted to say how much there is
                return await self.fetch(name, bytes_max=STRIPE_BYTES, sink=sink, deadline=deadline)
            buffer = sink(0, num_bytes)
            buffer[:PART_BYTES] = first
        finally:
            if len(self._scratch) < _SCRATCHES_MAX:
                self._scratch.append(scratch)
        return buffer if await self._fill(buffer, parts_behind(name, num_bytes), deadline) else None

    async def _fill(self, buffer: memoryview, parts: Sequence[Part], deadline: Deadline) -> bool:
        """Read parts into their places. False: one is not there.

        Raises:
            CorruptRecord: One has the wrong size.
        """

        async def fetch(part: Part) -> bool:
            expected = part.stop - part.start

            def sink(index: int, num_bytes: int) -> memoryview:
                if num_bytes not in (0, expected):  # nothing: there is no such name
                    raise CorruptRecord("a value has the wrong size", expected=expected, seen=num_bytes)
                return buffer[part.start : part.start + num_bytes]

            return len(await self._part(part.name, part.first, part.last, sink, deadline)) == expected

        return all(await gather_all([fetch(part) for part in parts]))

    async def _part(self, name: str, first: int, last: int, sink: Sink, deadline: Deadline) -> memoryview:
        """Some bytes of a value; none at all where there is no such name."""
        reply = await self._move(name, ("GETRANGE", name, first, last), PART_BYTES, deadline, sink)
        if isinstance(reply, ErrorReply) and reply.code == "WRONGTYPE":
            raise CorruptRecord("a foreign type of value stands under this name", name=name)
        check_reply(reply)
        return reply if isinstance(reply, memoryview) else memoryview(b"")

    async def store(self, name: str, value: memoryview, *options: str | int, deadline: Deadline) -> PutOutcome:
        """SET a value; `EXISTS` only with the option NX."""
        return _put_outcome(await self._move(name, ("SET", name, value, *options), len(value), deadline))

    async def keep(self, name: str, key: RecordKey, *, deadline: Deadline) -> bool:
        """Make a record that is there stay, all of it: it may have had leave to go. False: it is not there."""
        commands: list[tuple[str, Command]] = [
            (name, ("PERSIST", name)),
            (name, ("GETRANGE", name, 0, HEADER_BYTES - 1)),
        ]
        replies = await self._topology.ask(commands, deadline=deadline)
        if isinstance(replies[1], ErrorReply) and replies[1].code == "WRONGTYPE":
            return True  # no record, but there: the next get puts it aside
        check_replies(replies)
        head = replies[1]
        if not isinstance(head, memoryview) or not len(head):
            return False
        if len(head) == HEADER_BYTES and (header := striped_header(head, key)) is not None:
            check_replies(await self._topology.ask(each_alone("PERSIST", stripe_names(header)), deadline=deadline))
        return True

    async def get_striped(self, packed: bytes, header: HeaderV1, buffer: memoryview, *, deadline: Deadline) -> bool:
        """Fill `buffer` with the record of a striped `header`. False: a stripe is missing, and the header is removed.

        Raises:
            CorruptRecord: A stripe has the wrong size.
        """
        buffer[:HEADER_BYTES] = packed

        if await self._fill(buffer, parts_of(header), deadline):
            return True
        # Evicted or expired: the header alone would answer every later put with EXISTS, so it goes too.
        name = format_name(header.key)
        drop = ("EVAL", _DROP_HEADER, 1, name, packed)
        check_replies(await self._topology.ask([(name, drop)], deadline=deadline))
        return False

    async def put_striped(self, record: Record, *, expires_s: int | None = None, deadline: Deadline) -> PutOutcome:
        """Write the stripes, then the header with NX, then make the stripes stay as long as it does.

        Args:
            record: Which.
            expires_s: All of it may go from the start, and goes after so long; `None`: it stays.
            deadline: When to give up.

        If cancelled or interrupted, there is no header, or there are all stripes; a rest without header expires.
        The caller sees to it that a cancelled put is carried on after the header was written.
        """
        header, name = record.header, format_name(record.key)
        (exists,) = await self._topology.ask([(name, ("EXISTS", name))], deadline=deadline)
        check_reply(exists)
        if exists:
            return PutOutcome.EXISTS
        names = stripe_names(header)
        stores = [
            self.store(stripe, record.data[start:stop], "PX", _ORPHAN_MS, deadline=deadline)
            for stripe, (start, stop) in zip(names, stripe_ranges(header), strict=True)
        ]
        if PutOutcome.FULL in await gather_all(stores):
            await self._topology.ask(each_alone("UNLINK", names), deadline=deadline)
            return PutOutcome.FULL
        head = record.data[:HEADER_BYTES]
        options = ("NX",) if expires_s is None else ("NX", "EX", expires_s)
        replies = await self._topology.ask(
            [(name, ("SET", name, head, *options)), (name, ("GET", name))], deadline=deadline
        )
        outcome = _put_outcome(replies[0])
        if outcome is PutOutcome.STORED and expires_s is not None:
            expire = [(stripe, ("EXPIRE", stripe, expires_s)) for stripe in names]
            check_replies(await self._topology.ask(expire, deadline=deadline))
        elif outcome is PutOutcome.STORED or _same_payload(replies[1], header):
            # After a lost race against equal bytes the stripes are the winner's too.
            check_replies(await self._topology.ask(each_alone("PERSIST", names), deadline=deadline))
        else:
            await self._topology.ask(each_alone("UNLINK", names), deadline=deadline)
        return outcome

    async def _move(
        self, name: str, command: Command, num_bytes: int, deadline: Deadline, sink: Sink | None = None
    ) -> Reply:
        grant = self._in_flight.try_take(num_bytes)
        if grant is None:
            async with deadline.scope("waiting for bytes in flight to Redis (check its load)"):
                grant = await self._in_flight.take(num_bytes)
        try:
            return await self._topology.move(name, command, deadline=deadline, sink=sink)
        finally:
            self._in_flight.give_back(grant)


def each_alone(verb: str, names: Sequence[str]) -> list[tuple[str, Command]]:
    """A command per name, not one for all: while a cluster moves a slot it refuses what touches two names at once."""
    return [(name, (verb, name)) for name in names]


def striped_header(packed: memoryview, key: RecordKey) -> HeaderV1 | None:
    """The header of a striped record under `key`, or `None` when the bytes are not one."""
    try:
        header = HeaderV1.unpack(packed)
    except (CorruptRecord, UnsupportedFormat):
        return None
    plausible = header.payload_bytes <= MAX_RECORD_BYTES - HEADER_BYTES
    return header if header.key == key and plausible and is_striped(header) else None


def _announced_bytes(first: memoryview) -> int | None:
    """What a record that begins like this has in all, where that can be read and fits one value."""
    try:
        num_bytes = HEADER_BYTES + HeaderV1.unpack(first).payload_bytes
    except (CorruptRecord, UnsupportedFormat):
        return None
    return num_bytes if PART_BYTES <= num_bytes <= STRIPE_BYTES else None


def _same_payload(stored: Reply, header: HeaderV1) -> bool:
    if not isinstance(stored, memoryview) or len(stored) != HEADER_BYTES:
        return False
    other = striped_header(stored, header.key)
    return other is not None and other.payload_checksum == header.payload_checksum


def _put_outcome(reply: Reply) -> PutOutcome:
    if isinstance(reply, ErrorReply) and reply.code == "OOM":
        return PutOutcome.FULL
    check_reply(reply)
    return PutOutcome.EXISTS if reply is None else PutOutcome.STORED
