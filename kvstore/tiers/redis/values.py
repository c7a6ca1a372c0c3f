"""The byte path: whole values and striped records, under one limit for bytes in flight."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import CorruptRecord, UnsupportedFormat
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.names import format_name
from kvstore.format.record import MAX_RECORD_BYTES, Record
from kvstore.model.keys import RecordKey
from kvstore.runtime.budget import ByteBudget
from kvstore.runtime.deadline import Deadline
from kvstore.tiers.base import PutOutcome
from kvstore.tiers.gather import gather_all
from kvstore.tiers.redis.connection import Sink
from kvstore.tiers.redis.node import Node, check_replies, check_reply
from kvstore.tiers.redis.resp import Argument, ErrorReply, Reply
from kvstore.tiers.redis.stripes import is_striped, stripe_names, stripe_ranges

__all__ = ["Values", "striped_header"]

_ORPHAN_MS = 10 * 60 * 1000  # stripes of a writer that died expire; a living one is done long before

_DROP_HEADER = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('UNLINK', KEYS[1]) end return 0"
"""Removes a striped record's header, unless somebody has stored the record anew since we read it."""


class Values:
    """Moves values between nodes and buffers.

    Args:
        in_flight: Bytes on their way; further calls wait for it within their deadline.
    """

    def __init__(self, in_flight: ByteBudget) -> None:
        self._in_flight = in_flight

    async def fetch(
        self, node: Node, name: str, *, bytes_max: int, sink: Sink, deadline: Deadline
    ) -> memoryview | None:
        """GET a value of at most about `bytes_max` into what `sink` returns; `None`: no such name.

        Raises:
            CorruptRecord: Something that is no string stands there.
        """
        (reply,) = await self._move(node, ("GET", name), bytes_max, deadline, sink)
        if isinstance(reply, ErrorReply) and reply.code == "WRONGTYPE":
            raise CorruptRecord("a foreign type of value stands under this name", name=name)
        check_reply(reply, node.address)
        return reply if isinstance(reply, memoryview) else None

    async def store(
        self, node: Node, name: str, value: memoryview, *options: str | int, deadline: Deadline
    ) -> PutOutcome:
        """SET a value; `EXISTS` only with the option NX."""
        (reply,) = await self._move(node, ("SET", name, value, *options), len(value), deadline)
        return _put_outcome(reply, node)

    async def get_striped(
        self, node: Node, packed: bytes, header: HeaderV1, buffer: memoryview, *, deadline: Deadline
    ) -> bool:
        """Fill `buffer` with the record of a striped `header`. False: a stripe is missing, and the header is removed.

        Raises:
            CorruptRecord: A stripe has the wrong size.
        """
        buffer[:HEADER_BYTES] = packed

        async def fetch(stripe: str, start: int, stop: int) -> bool:
            def sink(index: int, num_bytes: int) -> memoryview:
                if num_bytes != stop - start:
                    raise CorruptRecord("a stripe has the wrong size", expected=stop - start, seen=num_bytes)
                return buffer[start:stop]

            return await self.fetch(node, stripe, bytes_max=stop - start, sink=sink, deadline=deadline) is not None

        ranges = stripe_ranges(header)
        if all(await gather_all([fetch(name, *span) for name, span in zip(stripe_names(header), ranges, strict=True)])):
            return True
        # Evicted or expired: the header alone would answer every later put with EXISTS, so it goes too.
        drop = ("EVAL", _DROP_HEADER, 1, format_name(header.key), packed)
        check_replies(await node.control(drop, deadline=deadline), node.address)
        return False

    async def put_striped(self, node: Node, record: Record, *, deadline: Deadline) -> PutOutcome:
        """Write the stripes, then the header with NX, then make the stripes stay.

        If cancelled or interrupted, there is no header, or there are all stripes; a rest without header expires.
        The caller sees to it that a cancelled put is carried on after the header was written.
        """
        header, name = record.header, format_name(record.key)
        (exists,) = await node.control(("EXISTS", name), deadline=deadline)
        check_reply(exists, node.address)
        if exists:
            return PutOutcome.EXISTS
        names = stripe_names(header)
        stores = [
            self.store(node, stripe, record.data[start:stop], "PX", _ORPHAN_MS, deadline=deadline)
            for stripe, (start, stop) in zip(names, stripe_ranges(header), strict=True)
        ]
        if PutOutcome.FULL in await gather_all(stores):
            await node.control(("UNLINK", *names), deadline=deadline)
            return PutOutcome.FULL
        head = record.data[:HEADER_BYTES]
        replies = await node.control(("SET", name, head, "NX"), ("GET", name), deadline=deadline)
        outcome = _put_outcome(replies[0], node)
        if outcome is PutOutcome.STORED or _same_payload(replies[1], header):
            # After a lost race against equal bytes the stripes are the winner's too.
            persist = [("PERSIST", stripe) for stripe in names]
            check_replies(await node.control(*persist, deadline=deadline), node.address)
        else:
            await node.control(("UNLINK", *names), deadline=deadline)
        return outcome

    async def _move(
        self, node: Node, command: Sequence[Argument], num_bytes: int, deadline: Deadline, sink: Sink | None = None
    ) -> list[Reply]:
        async with deadline.scope(f"waiting for bytes in flight to Redis at {node.address} (check its load)"):
            grant = await self._in_flight.take(num_bytes)
        try:
            return await node.data(command, deadline=deadline, sink=sink)
        finally:
            self._in_flight.give_back(grant)


def striped_header(packed: memoryview, key: RecordKey) -> HeaderV1 | None:
    """The header of a striped record under `key`, or `None` when the bytes are not one."""
    try:
        header = HeaderV1.unpack(packed)
    except (CorruptRecord, UnsupportedFormat):
        return None
    plausible = header.payload_bytes <= MAX_RECORD_BYTES - HEADER_BYTES
    return header if header.key == key and plausible and is_striped(header) else None


def _same_payload(stored: Reply, header: HeaderV1) -> bool:
    if not isinstance(stored, memoryview) or len(stored) != HEADER_BYTES:
        return False
    other = striped_header(stored, header.key)
    return other is not None and other.payload_checksum == header.payload_checksum


def _put_outcome(reply: Reply, node: Node) -> PutOutcome:
    if isinstance(reply, ErrorReply) and reply.code == "OOM":
        return PutOutcome.FULL
    check_reply(reply, node.address)
    return PutOutcome.EXISTS if reply is None else PutOutcome.STORED
