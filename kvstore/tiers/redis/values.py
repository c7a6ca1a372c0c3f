"""The byte path: whole values and striped records, under one limit for bytes in flight."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import CorruptRecord
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.names import format_name
from kvstore.format.record import Record
from kvstore.model.keys import RecordKey
from kvstore.runtime.budget import ByteBudget, Grant
from kvstore.runtime.deadline import Deadline
from kvstore.tiers.base import PutOutcome
from kvstore.tiers.gather import gather_all
from kvstore.tiers.redis.reading import Reading, striped_header
from kvstore.tiers.redis.replies import check_replies, check_reply
from kvstore.tiers.redis.resp import Command, ErrorReply, Reply
from kvstore.tiers.redis.stripes import PART_BYTES, STRIPE_BYTES, stripe_names, stripe_ranges
from kvstore.tiers.redis.topology import Topology

__all__ = ["Values", "each_alone"]

_ORPHAN_MS = 10 * 60 * 1000  # stripes of a writer that died expire; a living one is done long before

_READING_BYTES = 2 * PART_BYTES
"""What one reading has on its way at most."""

_DROP = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('UNLINK', KEYS[1]) end return 0"
"""Removes a value, unless somebody has stored another one since we read it."""


class Values:
    """Moves values between nodes and buffers.

    Args:
        topology: Where names live.
        in_flight: Bytes on their way; further calls wait for it within their deadline.
    """

    def __init__(self, topology: Topology, in_flight: ByteBudget) -> None:
        self._topology = topology
        self._in_flight = in_flight

    async def read(self, reading: Reading, *, deadline: Deadline) -> None:
        """Read a record, also one that is written meanwhile.

        Raises:
            CorruptRecord: What stands there is no string, is empty, or has another size than its header says.
            InvalidRequest: From the reading.
        """
        await self._read_once(reading, deadline)
        while reading.is_empty and await self._is_there(reading.name, deadline):
            reading.begin()
            await self._read_once(reading, deadline)
        if reading.data is None and reading.striped is not None:
            # Evicted or expired: the header alone would answer every later put with EXISTS, so it goes too.
            await self._drop(reading.name, reading.striped, deadline)

    async def _read_once(self, reading: Reading, deadline: Deadline) -> None:
        grant = await self._granted(_READING_BYTES, deadline)
        try:
            await self._topology.read(reading, deadline=deadline)
        finally:
            self._in_flight.give_back(grant)
        _check_string(reading.error, reading.name)

    async def _is_there(self, name: str, deadline: Deadline) -> bool:
        """Whether a value stands where a reading found nothing; only `GET` tells an empty one from none."""
        grant = await self._granted(STRIPE_BYTES, deadline)
        try:
            value = await self._topology.move(name, ("GET", name), deadline=deadline)
        finally:
            self._in_flight.give_back(grant)
        _check_string(value, name)
        if isinstance(value, memoryview) and not len(value):
            raise CorruptRecord("an empty value stands under this name", name=name)
        return value is not None

    async def store(self, name: str, value: memoryview, *options: str | int, deadline: Deadline) -> PutOutcome:
        """SET a value; `EXISTS` only with the option NX."""
        grant = await self._granted(len(value), deadline)
        try:
            reply = await self._topology.move(name, ("SET", name, value, *options), deadline=deadline)
        finally:
            self._in_flight.give_back(grant)
        return _put_outcome(reply)

    async def keep(self, name: str, key: RecordKey, *, deadline: Deadline) -> bool:
        """Make a record that is there stay, all of it: it may have had leave to go. False: it is not there; nor is an
        empty value any more, which no put would get past.
        """
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
            await self._drop(name, b"", deadline)
            return False
        if len(head) == HEADER_BYTES and (header := striped_header(head, key)) is not None:
            check_replies(await self._topology.ask(each_alone("PERSIST", stripe_names(header)), deadline=deadline))
        return True

    async def _drop(self, name: str, seen: bytes | memoryview, deadline: Deadline) -> None:
        drop = ("EVAL", _DROP, 1, name, seen)
        check_replies(await self._topology.ask([(name, drop)], deadline=deadline))

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

    async def _granted(self, num_bytes: int, deadline: Deadline) -> Grant:
        grant = self._in_flight.try_take(num_bytes)
        if grant is None:
            async with deadline.scope("waiting for bytes in flight to Redis (check its load)"):
                grant = await self._in_flight.take(num_bytes)
        return grant


def each_alone(verb: str, names: Sequence[str]) -> list[tuple[str, Command]]:
    """A command per name, not one for all: while a cluster moves a slot it refuses what touches two names at once."""
    return [(name, (verb, name)) for name in names]


def _check_string(reply: Reply, name: str) -> None:
    if isinstance(reply, ErrorReply) and reply.code == "WRONGTYPE":
        raise CorruptRecord("a foreign type of value stands under this name", name=name)
    check_reply(reply)


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
