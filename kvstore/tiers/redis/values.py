"""Reads, writes and quarantines values and striped records, under one limit for bytes in flight."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kvstore.errors import CorruptRecord, UnsupportedFormat
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.names import format_name
from kvstore.model.keys import RecordKey
from kvstore.runtime.budget import ByteBudget
from kvstore.runtime.deadline import Deadline
from kvstore.tiers.base import PutOutcome
from kvstore.tiers.redis.reading import (
    PART_BYTES,
    STRIPE_BYTES,
    Reading,
    is_striped,
    stripe_names,
    striped_header,
)
from kvstore.tiers.redis.replies import SlotMoves, check_replies, check_reply, is_no_room, is_wrong_type
from kvstore.tiers.redis.resp import Command, Reply
from kvstore.tiers.redis.topology import Topology

ORPHAN_S = 10 * 60  # expiry of stripes until their header is written, in case the writer dies
_READING_BYTES = 2 * PART_BYTES
"""The most bytes that one read has in flight."""

_DROP = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local missing = false
for i = 2, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then missing = true end
end
if #KEYS > 1 and not missing then return 0 end
for i = 2, #KEYS do redis.call('EXPIRE', KEYS[i], ARGV[2]) end
return redis.call('UNLINK', KEYS[1])
"""
"""Removes an empty value, or the header of a striped record that lacks a stripe, whose other stripes expire; unless
another value has replaced it since we read it, or no stripe is missing any more."""

_REMOVE = """
local length = redis.pcall('STRLEN', KEYS[1])
if #KEYS == 1 and ARGV[1] == '' and length == tonumber(ARGV[2]) then return 2 end
if ARGV[1] ~= '' and redis.pcall('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local removed = redis.call('UNLINK', KEYS[1])
for i = 2, #KEYS do redis.call('UNLINK', KEYS[i]) end
return removed
"""
"""Removes a value with its stripes, if it is the one that was seen. Arguments: that value, and the length of a header.
If the first one is empty, any value is removed but one as long as a header, which may have stripes: then 2 is returned.
Otherwise returns how many records were removed."""

_QUARANTINE = """
local kind = redis.call('TYPE', KEYS[1]).ok
if kind == 'none' or (kind == 'string') ~= (ARGV[1] ~= '') then return 0 end
if kind == 'string' then
  if redis.call('STRLEN', KEYS[1]) ~= tonumber(ARGV[1]) then return 0 end
  if redis.call('GETRANGE', KEYS[1], 0, #ARGV[2] - 1) ~= ARGV[2] then return 0 end
  if ARGV[3] ~= '' and redis.sha1hex(redis.call('GET', KEYS[1])) ~= ARGV[3] then return 0 end
end
redis.call('RENAME', KEYS[1], KEYS[2])
for i = 2, #KEYS do redis.call('EXPIRE', KEYS[i], ARGV[4]) end
return 1
"""
"""Renames a value and lets it and its stripes expire, unless another value has replaced it. Arguments: its length
(empty: it is not a string), its first bytes, its SHA-1 or nothing, and the expiry."""


class Values:
    """Moves values between nodes and buffers.

    Args:
        in_flight: Budget for bytes in flight; further calls wait for it within their deadline.
    """

    def __init__(self, topology: Topology, in_flight: ByteBudget) -> None:
        self._topology = topology
        self._in_flight = in_flight

    async def read(self, reading: Reading, *, deadline: Deadline) -> None:
        """Read a record, also one that is written at the same time.

        Raises:
            CorruptRecord: The value is not a string, is empty, or has another size than its header says.
            InvalidRequest: From the reading.
        """
        await self._read_once(reading, deadline)
        while reading.is_empty and await self._is_there(reading.name, deadline):
            reading.begin()
            await self._read_once(reading, deadline)
        if reading.data is None and reading.striped is not None:
            # stripes were evicted or expired: remove the header too, or every later put would be answered with EXISTS
            stripes = stripe_names(HeaderV1.unpack(reading.striped))
            await self._drop(reading.name, reading.striped, stripes, deadline)

    async def _read_once(self, reading: Reading, deadline: Deadline) -> None:
        async with self.granted(_READING_BYTES, deadline):
            await self._topology.read(reading, deadline=deadline)
        _check_string(reading.error, reading.name)

    async def _is_there(self, name: str, deadline: Deadline) -> bool:
        """Whether there is a value although a read found nothing; only `GET` tells an empty value from no value."""
        async with self.granted(STRIPE_BYTES, deadline):
            (value,) = await self._topology.query([(name, ("GET", name))], deadline=deadline, carries_bytes=True)
        _check_string(value, name)
        if isinstance(value, memoryview) and not len(value):
            raise CorruptRecord("this name has an empty value", name=name)
        return value is not None

    async def store(self, name: str, value: memoryview, *options: str | int, deadline: Deadline) -> PutOutcome:
        """SET a value; `EXISTS` is possible only with the option NX."""
        async with self.granted(len(value), deadline):
            command = ("SET", name, value, *options)
            (reply,) = await self._topology.query([(name, command)], deadline=deadline, carries_bytes=True)
        return put_outcome(reply)

    async def keep(self, key: RecordKey, *, deadline: Deadline) -> bool:
        """Make an existing record stay, stripes included, in case it was evictable. False: it is not there.

        A value that would block every put is removed: an empty one, or a header that has lost a stripe.
        """
        name = format_name(key)
        commands: list[tuple[str, Command]] = [
            (name, ("PERSIST", name)),
            (name, ("GETRANGE", name, 0, HEADER_BYTES - 1)),
        ]
        replies = await self._topology.query(commands, deadline=deadline)
        if is_wrong_type(replies[1]):
            return True  # present, but not a record: the next get quarantines it
        check_replies(replies)
        head = replies[1]
        if not isinstance(head, memoryview) or not len(head):
            await self._drop(name, b"", (), deadline)
            return False
        if (header := striped_header(head, key)) is not None:
            return await self.keep_stripes(header, head, deadline)
        return True

    async def keep_stripes(self, header: HeaderV1, head: memoryview, deadline: Deadline) -> bool:
        """Make all stripes of a record stay. False: one was evicted before; then the header is removed too.

        Args:
            header: The record's.
            head: The same as it is stored.
        """
        stripes = stripe_names(header)
        commands: list[tuple[str, Command]] = []
        for stripe in stripes:
            commands += [(stripe, ("PERSIST", stripe)), (stripe, ("EXISTS", stripe))]
        replies = await self._topology.query(commands, deadline=deadline)
        check_replies(replies)
        if 0 not in replies[1::2]:
            return True
        await self._drop(format_name(header.key), head, stripes, deadline)
        return False

    async def _drop(self, name: str, seen: bytes | memoryview, stripes: Sequence[str], deadline: Deadline) -> None:
        drop = ("EVAL", _DROP, 1 + len(stripes), name, *stripes, seen, ORPHAN_S)
        check_replies(await self._topology.query([(name, drop)], deadline=deadline))

    async def remove(self, key: RecordKey, *, deadline: Deadline) -> bool:
        """Remove a record, or another value of its name, with its stripes. False: it was not there.

        One round trip, two for a striped record. If interrupted, nothing is left that neither expires nor is read.
        """
        name = format_name(key)
        remove: Command = ("EVAL", _REMOVE, 1, name, "", HEADER_BYTES)
        commands: list[tuple[str, Command]] = [(name, ("GETRANGE", name, 0, HEADER_BYTES - 1)), (name, remove)]
        head, removed = await self._topology.query(commands, deadline=deadline)
        check_reply(removed)
        if removed != 2 or not isinstance(head, memoryview):
            return removed == 1
        header = striped_header(head, key)
        stripes = stripe_names(header) if header is not None else []
        remove = ("EVAL", _REMOVE, 1 + len(stripes), name, *stripes, head, HEADER_BYTES)
        try:
            (removed,) = await self._topology.query([(name, remove)], deadline=deadline)
        except SlotMoves:  # it refuses commands on several names
            commands = [(stripe, ("EXPIRE", stripe, ORPHAN_S)) for stripe in stripes]
            commands += each_alone("UNLINK", [name, *stripes])
            check_replies(replies := await self._topology.query(commands, deadline=deadline))
            removed = replies[len(stripes)]
        check_reply(removed)
        return removed == 1

    async def quarantine(
        self, key: RecordKey, seen: bytes | memoryview | None, *, is_forced: bool, expires_s: int, deadline: Deadline
    ) -> str | None:
        """Rename the value of a record, with an expiry, which its stripes get under their own names.

        Of a striped record only the header is compared. If another writer has replaced a damaged stripe by a good one
        since it was read, the good one expires too. Readers read twice just before, so this race is one round trip.

        Args:
            seen: The corrupt value: any other stays. `None`: it could not be a record by its type or size, and stays if
                it can be one by now.
            is_forced: With `seen` of `None`, quarantine any value.
            expires_s: The expiry.

        Returns:
            The new name; `None`: nothing was renamed.
        """
        name = format_name(key)
        commands: list[tuple[str, Command]] = [
            (name, ("STRLEN", name)),
            (name, ("GETRANGE", name, 0, HEADER_BYTES - 1)),
        ]
        length, head = await self._topology.query(commands, deadline=deadline)
        if is_wrong_type(length):
            length, head = "", b""
        else:
            check_replies([length, head])
        assert isinstance(length, int | str) and isinstance(head, bytes | memoryview)
        if seen is None and not is_forced and _may_be_whole(length, head, key):
            return None
        if seen is not None and (length != len(seen) or head != seen[:HEADER_BYTES]):
            return None
        digest = hashlib.sha1(seen, usedforsecurity=False).hexdigest() if seen is not None else ""
        header = striped_header(head, key) if length == HEADER_BYTES else None
        stripes = stripe_names(header) if header is not None else []
        target = f"quarantine:{name}"
        names = (name, target, *stripes)
        rename = ("EVAL", _QUARANTINE, len(names), *names, length, head, digest, expires_s)
        (renamed,) = await self._topology.query([(name, rename)], deadline=deadline)
        check_reply(renamed)
        return target if renamed else None

    @asynccontextmanager
    async def granted(self, num_bytes: int, deadline: Deadline) -> AsyncIterator[None]:
        """Run a block while it has some bytes in flight."""
        what = "waiting for bytes in flight to Redis (check its load)"
        grant = await self._in_flight.take_until(deadline, what, num_bytes)
        try:
            yield
        finally:
            self._in_flight.give_back(grant)


def each_alone(verb: str, names: Sequence[str]) -> list[tuple[str, Command]]:
    """One command per name: while a cluster moves a slot, it refuses commands on several names."""
    return [(name, (verb, name)) for name in names]


def _may_be_whole(length: int | str, head: bytes | memoryview, key: RecordKey) -> bool:
    """Whether a value of this size that begins like this may be a whole record's, or a striped one's header."""
    try:
        header = HeaderV1.unpack(head)
    except (CorruptRecord, UnsupportedFormat):
        return False
    expected = HEADER_BYTES if is_striped(header) else HEADER_BYTES + header.payload_bytes
    return header.key == key and length == expected


def _check_string(reply: Reply, name: str) -> None:
    if is_wrong_type(reply):
        raise CorruptRecord("this name has a value that is not a string", name=name)
    check_reply(reply)


def put_outcome(reply: Reply) -> PutOutcome:
    """What a reply to `SET` means."""
    if is_no_room(reply):
        return PutOutcome.FULL
    check_reply(reply)
    return PutOutcome.EXISTS if reply is None else PutOutcome.STORED
