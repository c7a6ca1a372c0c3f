"""Writes striped records: first the stripes, then the header, so that a record is whole or not there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum

from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.names import format_name
from kvstore.format.record import Record
from kvstore.model.keys import RecordKey
from kvstore.runtime.background import gather_all
from kvstore.runtime.deadline import Deadline
from kvstore.tiers.base import PutOutcome
from kvstore.tiers.redis.reading import STRIPE_BYTES, stripe_names, stripe_ranges, striped_header
from kvstore.tiers.redis.replies import SlotMoves, check_replies, check_reply, is_no_room
from kvstore.tiers.redis.resp import Command, Reply
from kvstore.tiers.redis.topology import Topology
from kvstore.tiers.redis.values import ORPHAN_S, Values, each_alone, put_outcome

_CHECKSUM_FIRST, _CHECKSUM_LAST = 24, 39
"""Where the payload's checksum is in a record's header."""

_SMALL_BYTES = 8 << 10
"""A payload up to this much longer than one stripe is written in one round trip."""

_ANY_AGE_MS = -1
_JUST_WRITTEN_MS = (ORPHAN_S - 5) * 1000
"""A stripe that has less left until it expires was not written a moment ago, and may be damaged."""


class _Committed(IntEnum):
    """What `_COMMIT` returns.

    Attributes:
        EXISTS: Not stored: another record has the name, or the put has failed.
        STORED: The record is stored.
        STRIPE_MISSING: Not stored: a stripe is not there.
        WRITTEN_BEFORE: Not stored: a stripe was written before this put, and may be damaged.
    """

    EXISTS = 0
    STORED = 1
    STRIPE_MISSING = 2
    WRITTEN_BEFORE = 3


_COMMIT = """
local function stripes(command, ...)
  for i = 2, #KEYS do redis.call(command, KEYS[i], ...) end
end
if redis.call('EXISTS', KEYS[1]) == 1 then
  if redis.pcall('GETRANGE', KEYS[1], ARGV[3], ARGV[4]) ~= ARGV[5] then stripes('UNLINK') end
  return 0
end
if ARGV[1] == '' then stripes('UNLINK') return 0 end
for i = 2, #KEYS do
  local left_ms = redis.call('PTTL', KEYS[i])
  if left_ms == -2 then return 2 end
  if left_ms < tonumber(ARGV[6]) then return 3 end
end
if ARGV[2] == '' then
  redis.call('SET', KEYS[1], ARGV[1])
  stripes('PERSIST')
else
  redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
  stripes('EXPIRE', ARGV[2])
end
return 1
"""
"""Ends a put in stripes: writes the header and makes the stripes stay as long as it, all or nothing. Removes the
stripes if another record has the name, unless its payload is the same: then they are that record's too. Arguments: the
header (empty: the put has failed, only remove the stripes), its expiry (empty: it stays), where in a header the
checksum is, this one's checksum, and how many milliseconds each stripe must have left until it expires. Returns one of
`_Committed`."""


class StripedPuts:
    """Puts records that are longer than a value may be."""

    def __init__(self, topology: Topology, values: Values) -> None:
        self._topology = topology
        self._values = values

    async def put(self, record: Record, *, expires_s: int | None, deadline: Deadline) -> PutOutcome:
        """Write the stripes with an expiry, then at once the header and that the stripes stay as long as it. Two round
        trips; one for a record that is hardly longer than a value may be, as pages often are.

        If interrupted, the record is there as a whole, or it is not there and what was written of it expires. Only
        while a slot of a cluster moves the header comes before its stripes stay: a writer that dies between the two
        leaves a record that becomes a miss.

        Args:
            expires_s: Expiry of the record, which makes it evictable from the start; `None`: it stays.
        """
        header = record.header
        stripes = [
            (name, record.data[start:stop])
            for name, (start, stop) in zip(stripe_names(header), stripe_ranges(header), strict=True)
        ]
        if sum(len(value) for _, value in stripes) <= STRIPE_BYTES + _SMALL_BYTES:
            return await self._put_at_once(record, stripes, expires_s, deadline)
        first, others = await gather_all(
            [self._store(stripes[:1], deadline), self._store_unless_there(record.key, stripes[1:], deadline)]
        )
        assert first is not None
        if others is None:
            if first == [PutOutcome.STORED]:
                await self._abandon(header, deadline)
            return PutOutcome.EXISTS
        return await self._finish(record, stripes, [*first, *others], expires_s, deadline)

    async def _finish(
        self,
        record: Record,
        stripes: Sequence[tuple[str, memoryview]],
        outcomes: Sequence[PutOutcome],
        expires_s: int | None,
        deadline: Deadline,
    ) -> PutOutcome:
        """Write the header of a record whose stripes were written with these outcomes."""
        # A stripe whose name is there has the same content, another writer's or what one left, unless it is damaged: it
        # is written again. It keeps its expiry: if it has none, it is part of a record.
        there = [stripe for stripe, outcome in zip(stripes, outcomes, strict=True) if outcome is PutOutcome.EXISTS]
        again = await gather_all(self._values.store(*stripe, "XX", "KEEPTTL", deadline=deadline) for stripe in there)
        if PutOutcome.FULL not in [*outcomes, *again]:
            head = record.data[:HEADER_BYTES]
            try:
                (reply,) = await self._topology.query([_commit(record.header, head, expires_s)], deadline=deadline)
            except SlotMoves:
                return await self._commit_in_steps(record.header, head, expires_s, deadline)
            if (outcome := _commit_outcome(reply)) is not PutOutcome.FULL:
                return outcome
        await self._abandon(record.header, deadline)
        return PutOutcome.FULL

    async def _store(self, stripes: Sequence[tuple[str, memoryview]], deadline: Deadline) -> list[PutOutcome]:
        """Write stripes that expire; `EXISTS` for one whose name is there."""
        return await gather_all(
            self._values.store(*stripe, "NX", "EX", ORPHAN_S, deadline=deadline) for stripe in stripes
        )

    async def _store_unless_there(
        self, key: RecordKey, stripes: Sequence[tuple[str, memoryview]], deadline: Deadline
    ) -> list[PutOutcome] | None:
        """As `_store`; `None`, and nothing is written, if there is a record of this name."""
        name = format_name(key)
        (exists,) = await self._topology.query([(name, ("EXISTS", name))], deadline=deadline)
        check_reply(exists)
        return None if exists else await self._store(stripes, deadline)

    async def _put_at_once(
        self, record: Record, stripes: Sequence[tuple[str, memoryview]], expires_s: int | None, deadline: Deadline
    ) -> PutOutcome:
        """`put` with all commands on one connection, one behind the other."""
        header, head = record.header, record.data[:HEADER_BYTES]
        commands: list[tuple[str, Command]] = [
            (name, ("SET", name, value, "NX", "EX", ORPHAN_S)) for name, value in stripes
        ]
        commands.append(_commit(header, head, expires_s, least_ms=_JUST_WRITTEN_MS))
        try:
            async with self._values.granted(STRIPE_BYTES, deadline):
                *replies, committed = await self._topology.query(commands, deadline=deadline, carries_bytes=True)
        except SlotMoves:
            return await self._commit_in_steps(header, head, expires_s, deadline)
        if committed == _Committed.WRITTEN_BEFORE:
            return await self._finish(record, stripes, list(map(put_outcome, replies)), expires_s, deadline)
        outcome = _commit_outcome(committed)
        if outcome is PutOutcome.FULL:
            await self._abandon(header, deadline)
        return outcome

    async def _abandon(self, header: HeaderV1, deadline: Deadline) -> None:
        """Remove the stripes of a put that has failed, now instead of when they expire, unless a record has them."""
        with suppress(SlotMoves):
            check_replies(await self._topology.query([_commit(header, "", None)], deadline=deadline))

    async def _commit_in_steps(
        self, header: HeaderV1, head: memoryview, expires_s: int | None, deadline: Deadline
    ) -> PutOutcome:
        """Commit with commands on one name each: others are refused while a slot moves."""
        name, stripes = format_name(header.key), stripe_names(header)
        options = ("NX",) if expires_s is None else ("NX", "EX", expires_s)
        replies = await self._topology.query(
            [(name, ("SET", name, head, *options)), (name, ("GET", name))], deadline=deadline
        )
        outcome = put_outcome(replies[0])
        if outcome is PutOutcome.STORED and expires_s is not None:
            expire = [(stripe, ("EXPIRE", stripe, expires_s)) for stripe in stripes]
            check_replies(await self._topology.query(expire, deadline=deadline))
        elif outcome is PutOutcome.STORED:
            if not await self._values.keep_stripes(header, head, deadline):
                outcome = PutOutcome.FULL
        elif not _same_payload(replies[1], header):  # of a record with the same payload the stripes are a part
            check_replies(await self._topology.query(each_alone("UNLINK", stripes), deadline=deadline))
        return outcome


def _commit(
    header: HeaderV1, head: memoryview | str, expires_s: int | None, *, least_ms: int = _ANY_AGE_MS
) -> tuple[str, Command]:
    """The command that ends a put in stripes, see `_COMMIT`."""
    name, stripes = format_name(header.key), stripe_names(header)
    arguments = (head, expires_s or "", _CHECKSUM_FIRST, _CHECKSUM_LAST, header.payload_checksum, least_ms)
    return name, ("EVAL", _COMMIT, 1 + len(stripes), name, *stripes, *arguments)


def _commit_outcome(reply: Reply) -> PutOutcome:
    """`FULL`: there is no room for the header, or a server without room has evicted a stripe."""
    if is_no_room(reply) or reply == _Committed.STRIPE_MISSING:
        return PutOutcome.FULL
    check_reply(reply)
    return PutOutcome.STORED if reply == _Committed.STORED else PutOutcome.EXISTS


def _same_payload(stored: Reply, header: HeaderV1) -> bool:
    other = striped_header(stored, header.key)
    return other is not None and other.payload_checksum == header.payload_checksum
