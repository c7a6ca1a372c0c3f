"""The Redis tier: records as values, large ones in stripes with their header last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import cast

from kvstore.errors import CorruptRecord, InvalidRequest, Unavailable, next_step
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.names import ROOT, format_name, manifest_name, namespace_root, record_key
from kvstore.format.record import MAX_RECORD_BYTES, Record
from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.runtime.background import Background, gather_all
from kvstore.runtime.budget import ByteBudget
from kvstore.runtime.buffers import fresh_buffer
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.io_loops import IoLoop
from kvstore.tiers.base import Concern, Entry, PutOutcome, Tier, TierUsage
from kvstore.tiers.locations import RedisLocation, parse_redis
from kvstore.tiers.redis.cluster import slot_of
from kvstore.tiers.redis.examine import ServerFacts, concerns_of, read_facts
from kvstore.tiers.redis.node import Node
from kvstore.tiers.redis.reading import STRIPE_BYTES, Reading, is_striped, stripe_names, striped_header
from kvstore.tiers.redis.replies import NO_ROOM, WRITE_PROBE, check_replies, check_reply, is_wrong_type, writes_refused
from kvstore.tiers.redis.resp import Reply
from kvstore.tiers.redis.striped_puts import StripedPuts
from kvstore.tiers.redis.topology import open_topology
from kvstore.tiers.redis.values import Values, each_alone
from kvstore.tiers.refusals import PartDown
from kvstore.tiers.verify import QuarantineBudget, allocate_exactly, is_same, open_or_reason

_QUARANTINE_S = 7 * 24 * 3600
_REMOVED_S = 1
"""Expiry of quarantined records beyond the budget: they are removed almost at once."""
_EVICTABLE_S = 7 * 24 * 3600
"""Expiry of a record that the cold tier has too. Until then Redis decides whether to evict it."""
_PUT_ATTEMPTS = 3
_SCAN_COUNT = 512
_SCAN_STEP_S = 10.0


class RedisTier(Tier):
    """Stores records in a Redis. Connects when first used.

    Args:
        location: One server, a cluster, or the primary that sentinels name; or its url.
        num_connections: Connections to each server that carry records; one more carries small commands.
        in_flight_bytes: Limit for bytes in flight to or from Redis. Further calls wait within their deadline.
        io_loops: Where the connections that carry records move their bytes, in turn, and `allocate` is called; none: on
            the caller's loop. They stay the caller's.

    Raises:
        InvalidRequest: The url is malformed, or a certificate cannot be used.
    """

    name = "redis"
    no_room = NO_ROOM

    def __init__(
        self,
        location: RedisLocation | str,
        *,
        num_connections: int = 4,
        in_flight_bytes: int = 256 << 20,
        io_loops: Sequence[IoLoop] = (),
    ) -> None:
        if in_flight_bytes < STRIPE_BYTES:
            raise InvalidRequest("in_flight_bytes must hold one value", least=STRIPE_BYTES, seen=in_flight_bytes)
        if num_connections < 1:
            raise InvalidRequest("num_connections must be at least 1", seen=num_connections)
        location = parse_redis(location) if isinstance(location, str) else location
        self._topology = open_topology(location, num_connections, io_loops)
        self._values = Values(self._topology, ByteBudget(in_flight_bytes))
        self._striped_puts = StripedPuts(self._topology, self._values)
        self._background = Background("redis tier")
        self._quarantine_budget = QuarantineBudget()

    async def head(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> list[int | None]:
        """One round trip per node. A striped record's bytes are unknown here: 0."""
        self._check(deadline)
        return list(map(_size_of, await self._each("STRLEN", keys, deadline)))

    async def _each(self, verb: str, keys: Sequence[RecordKey], deadline: Deadline) -> list[Reply]:
        """The reply to a command for each record."""
        if not keys:
            return []
        return await self._topology.query(each_alone(verb, list(map(format_name, keys))), deadline=deadline)

    async def get(
        self, key: RecordKey, *, deadline: Deadline, allocate: Callable[[int], memoryview] | None = None
    ) -> Record | None:
        self._check(deadline)
        reading = Reading(key, lambda num_bytes: allocate_exactly(num_bytes, allocate))
        opened = await self._read(reading, key, deadline)
        if isinstance(opened, str):
            # another engine may have replaced an evicted record between two parts: then neither is damaged
            reading.begin()
            opened = await self._read(reading, key, deadline)
        if isinstance(opened, str):
            await self._quarantine(key, opened, reading.striped or reading.data, deadline)
            return None
        return opened

    async def _read(self, reading: Reading, key: RecordKey, deadline: Deadline) -> Record | str | None:
        """The record, `None` if there is none, or why it is corrupt."""
        try:
            await self._values.read(reading, deadline=deadline)
        except CorruptRecord as error:
            return str(error)
        return None if reading.data is None else open_or_reason(reading.data, key, reading.checksum)

    async def put(self, record: Record, *, deadline: Deadline) -> PutOutcome:
        self._check(deadline)
        for _ in range(_PUT_ATTEMPTS):
            outcome = await self._put_once(record, deadline)
            # a caller relies on a record that exists, but this one may have been evictable: make it stay
            if outcome is not PutOutcome.EXISTS or await self._values.keep(record.key, deadline=deadline):
                return outcome
        raise Unavailable("the record of this name was removed again and again: put it later", key=record.key)

    async def put_evictable(self, record: Record, *, deadline: Deadline) -> PutOutcome:
        """As `Tier.put_evictable`: with an expiry, set by the command that writes the record."""
        self._check(deadline)
        return await self._put_once(record, deadline, expires_s=_EVICTABLE_S)

    async def _put_once(self, record: Record, deadline: Deadline, expires_s: int | None = None) -> PutOutcome:
        if record.num_bytes > MAX_RECORD_BYTES:
            raise InvalidRequest("the record is too large", limit_bytes=MAX_RECORD_BYTES, seen=record.num_bytes)
        if is_striped(record.header):
            return await self._background.run_to_end(
                lambda: self._striped_puts.put(record, expires_s=expires_s, deadline=deadline),
                "write a striped record to Redis",
                deadline,
            )
        options = ("NX",) if expires_s is None else ("NX", "EX", expires_s)
        return await self._values.store(format_name(record.key), record.data, *options, deadline=deadline)

    async def delete(self, key: RecordKey, *, deadline: Deadline) -> bool:
        self._check(deadline)
        return await self._values.remove(key, deadline=deadline)

    async def allow_eviction(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        """Give records an expiry, so that `volatile-*` policies may evict them. Up to three round trips."""
        self._check(deadline)
        if not keys:
            return
        names = [format_name(key) for key in keys]
        commands = [(name, command) for name in names for command in (("EXPIRE", name, _EVICTABLE_S), ("STRLEN", name))]
        replies = await self._topology.query(commands, deadline=deadline)
        check_replies(replies[::2])
        striped = await self._striped(keys, replies[1::2], deadline)
        stripes = [stripe for header in striped.values() for stripe in stripe_names(header)]
        if stripes:
            expire = [(stripe, ("EXPIRE", stripe, _EVICTABLE_S)) for stripe in stripes]
            check_replies(await self._topology.query(expire, deadline=deadline))

    async def quarantine(self, key: RecordKey, reason: str, *, seen: Record | None = None, deadline: Deadline) -> bool:
        """Rename the record to `quarantine:<name>` for a week; stripes get that expiry under their own names. Once this
        process has 256 MiB there, the record is removed.
        """
        self._check(deadline)
        if seen is None or not is_striped(seen.header):
            value = None if seen is None else seen.data
            return await self._quarantine(key, reason, value, deadline, is_forced=True)
        reading = Reading(key, fresh_buffer)
        await self._read(reading, key, deadline)
        if reading.data is None or not is_same(reading.data, seen.data):
            return False
        return await self._quarantine(key, reason, reading.striped, deadline)

    async def _quarantine(
        self,
        key: RecordKey,
        reason: str,
        seen: bytes | memoryview | None,
        deadline: Deadline,
        *,
        is_forced: bool = False,
    ) -> bool:
        """As `Values.quarantine`, counted and reported. False: nothing was quarantined."""
        num_bytes = len(seen) if seen is not None and len(seen) > HEADER_BYTES else STRIPE_BYTES
        expires_s = _QUARANTINE_S if self._quarantine_budget.keeps(num_bytes) else _REMOVED_S
        name = await self._values.quarantine(key, seen, is_forced=is_forced, expires_s=expires_s, deadline=deadline)
        return self._quarantined(key, reason, name)

    async def scan(self, namespace: NamespaceId | None = None) -> AsyncIterator[Entry]:
        pattern = (namespace_root(namespace) if namespace is not None else f"{ROOT}/") + "*"
        self._check_open()
        before = await self._topology.placement(Deadline.after(_SCAN_STEP_S))
        for node in await self._topology.nodes(Deadline.after(_SCAN_STEP_S)):
            async for entry in self._scan_node(node, pattern):
                yield entry
        # a slot may have moved from a node that was yet to be listed to one that had been
        while (now := await self._topology.placement(Deadline.after(_SCAN_STEP_S), is_fresh=True)) != before:
            moved = {slot for slot, address in enumerate(now) if address != before[slot]}
            places, before = {str(now[slot]) for slot in moved}, now
            for node in await self._topology.nodes(Deadline.after(_SCAN_STEP_S)):
                if node.address in places:
                    async for entry in self._scan_node(node, pattern):
                        if slot_of(format_name(entry.key)) in moved:
                            yield entry

    async def _scan_node(self, node: Node, pattern: str) -> AsyncIterator[Entry]:
        cursor = b""
        while cursor != b"0":
            self._check_open()
            deadline = Deadline.after(_SCAN_STEP_S)
            scan = ("SCAN", cursor or b"0", "MATCH", pattern, "COUNT", _SCAN_COUNT)
            (reply,) = await node.control(scan, deadline=deadline)
            check_reply(reply)
            cursor, names = cast("tuple[bytes, list[Reply]]", reply)  # a connection passes on no other form
            named = (record_key(name) for name in names if isinstance(name, bytes))
            keys = list(dict.fromkeys(key for key in named if key is not None))
            for key, num_bytes in zip(keys, await self._sizes(keys, deadline), strict=True):
                if num_bytes:
                    yield Entry(key, num_bytes)

    async def _sizes(self, keys: Sequence[RecordKey], deadline: Deadline) -> list[int]:
        """Bytes of records, striped ones included; 0 for records that are gone."""
        lengths = await self._each("STRLEN", keys, deadline)
        check_replies([length for length in lengths if not is_wrong_type(length)])  # else a record would be passed over
        striped = await self._striped(keys, lengths, deadline)
        sizes = {key: HEADER_BYTES + header.payload_bytes for key, header in striped.items()}
        return [
            sizes.get(key, length if isinstance(length, int) else 0) for key, length in zip(keys, lengths, strict=True)
        ]

    async def _striped(
        self, keys: Sequence[RecordKey], lengths: Sequence[Reply], deadline: Deadline
    ) -> dict[RecordKey, HeaderV1]:
        """The headers of striped records, which are found by the length of their values."""
        short = [key for key, length in zip(keys, lengths, strict=True) if length == HEADER_BYTES]
        heads = await self._each("GET", short, deadline)
        found = ((key, striped_header(head, key)) for key, head in zip(short, heads, strict=True))
        return {key: header for key, header in found if header is not None}

    async def put_manifest(self, namespace: NamespaceId, manifest: bytes, *, deadline: Deadline) -> None:
        self._check(deadline)
        name = manifest_name(namespace)
        check_replies(await self._topology.query([(name, ("SET", name, manifest))], deadline=deadline))

    async def get_manifest(self, namespace: NamespaceId, *, deadline: Deadline) -> bytes | None:
        self._check(deadline)
        name = manifest_name(namespace)
        (reply,) = await self._topology.query([(name, ("GET", name))], deadline=deadline)
        check_reply(reply)
        return bytes(reply) if isinstance(reply, memoryview) else None

    async def usage(self, *, deadline: Deadline) -> TierUsage:
        """The servers' memory as they report it, also that of other users."""
        facts = await self.facts(deadline=deadline)
        limits = [server.limit_bytes for server in facts]
        limit_bytes = None if None in limits else sum(limit for limit in limits if limit is not None)
        used_bytes, name = sum(server.used_bytes for server in facts), "maxmemory" if limit_bytes is not None else ""
        refused = await self._refuses_writes(deadline)
        return TierUsage(None, used_bytes, limit_bytes, self._num_quarantined, name, refused)

    async def _refuses_writes(self, deadline: Deadline) -> str:
        """Why one of the servers refuses writes; empty: all accept the probe. Large values may not fit all the same."""
        nodes = await self._topology.nodes(deadline)
        replies = await gather_all([node.control(WRITE_PROBE, deadline=deadline) for node in nodes])
        return next((why for (reply,) in replies if (why := writes_refused(reply))), "")

    async def facts(self, *, deadline: Deadline) -> list[ServerFacts]:
        """What the servers that hold records report."""
        self._check(deadline)
        nodes = await self._topology.nodes(deadline)
        answers = await asyncio.gather(*(read_facts(node, deadline) for node in nodes), return_exceptions=True)
        facts = [answer for answer in answers if not isinstance(answer, BaseException)]
        for error in answers:
            if isinstance(error, Unavailable) and facts:
                what, step = next_step(error.message)
                text = f"{what} at one node of the cluster, the others are used"
                raise PartDown(f"{text}: {step}" if step else text, **error.details) from error
            if isinstance(error, BaseException):
                raise error
        return facts

    async def concerns(self, *, deadline: Deadline) -> list[Concern]:
        return concerns_of(await self.facts(deadline=deadline))

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            await self._background.aclose()
            await self._topology.aclose()


def _size_of(reply: Reply) -> int | None:
    """A record's bytes by the reply to STRLEN; 0 if it exists and its size is unknown, `None` if it is absent."""
    if is_wrong_type(reply):
        return 0  # present, but not a record: the next get quarantines it
    check_reply(reply)
    if not isinstance(reply, int) or reply == 0:
        return None
    return 0 if reply == HEADER_BYTES else reply
