"""The Redis tier: records as values, large ones in stripes with their header last."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence

from kvstore.errors import Closed, CorruptRecord, InvalidRequest, Unavailable
from kvstore.format.header_v1 import HEADER_BYTES
from kvstore.format.names import ROOT, format_name, manifest_name, namespace_root, parse_name
from kvstore.format.record import MAX_RECORD_BYTES, Record
from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.runtime.background import Background
from kvstore.runtime.budget import ByteBudget
from kvstore.runtime.deadline import Deadline
from kvstore.tiers.base import Entry, PutOutcome, Tier, TierUsage
from kvstore.tiers.buffers import allocate_exactly
from kvstore.tiers.detached import see_through
from kvstore.tiers.redis.node import Node, check_replies, check_reply
from kvstore.tiers.redis.resp import ErrorReply, Reply
from kvstore.tiers.redis.stripes import STRIPE_BYTES, is_striped, stripe_names
from kvstore.tiers.redis.topology import Standalone, Topology
from kvstore.tiers.redis.url import RedisUrl
from kvstore.tiers.redis.values import Values, striped_header
from kvstore.tiers.verify import check_deadline, open_off_loop

__all__ = ["RedisTier"]

_log = logging.getLogger(__name__)

_QUARANTINE_S = 7 * 24 * 3600
_SCAN_COUNT = 512
_SCAN_STEP_S = 10.0


class RedisTier(Tier):
    """Stores records on the nodes of a topology; make one with `from_url`. Connects when first used.

    Args:
        topology: Which node a name lives on; owned by the tier.
        in_flight_bytes: Limit for bytes on their way to or from Redis; further calls wait within their deadline.
        name: Shown in metrics and answers.
    """

    def __init__(self, topology: Topology, *, in_flight_bytes: int = 256 << 20, name: str = "redis") -> None:
        if in_flight_bytes < STRIPE_BYTES:
            raise InvalidRequest("in_flight_bytes must hold one value", least=STRIPE_BYTES, seen=in_flight_bytes)
        self.name = name
        self._topology = topology
        self._values = Values(ByteBudget(in_flight_bytes))
        self._background = Background(f"{name} tier")
        self._num_quarantined = 0
        self._closed = False

    @classmethod
    def from_url(
        cls, url: str, *, num_connections: int = 4, in_flight_bytes: int = 256 << 20, name: str = "redis"
    ) -> RedisTier:
        """A tier on the server that `url` names; no I/O yet.

        Raises:
            InvalidRequest: The url is malformed.
        """
        if num_connections < 1:
            raise InvalidRequest("num_connections must be at least 1", seen=num_connections)
        topology = Standalone(RedisUrl.parse(url), num_connections)
        return cls(topology, in_flight_bytes=in_flight_bytes, name=name)

    @property
    def num_quarantined(self) -> int:
        return self._num_quarantined

    async def head(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> list[int | None]:
        """One round trip per node. A striped record's bytes are unknown here: 0."""
        self._check(deadline)
        if not keys:
            return []
        by_node: dict[Node, list[tuple[int, str]]] = {}
        for index, key in enumerate(keys):
            name = format_name(key)
            by_node.setdefault(self._topology.node_for(name), []).append((index, name))
        sizes: list[int | None] = [None] * len(keys)
        for node, names in by_node.items():
            replies = await node.control(*(("STRLEN", name) for _, name in names), deadline=deadline)
            for (index, _), reply in zip(names, replies, strict=True):
                sizes[index] = _size_of(reply, node)
        return sizes

    async def get(
        self, key: RecordKey, *, deadline: Deadline, allocate: Callable[[int], memoryview] | None = None
    ) -> Record | None:
        self._check(deadline)
        name = format_name(key)
        node = self._topology.node_for(name)

        def sink(index: int, num_bytes: int) -> memoryview:
            # Just a header: perhaps a striped record's, and then the caller's buffer has another size.
            return allocate_exactly(num_bytes, None if num_bytes <= HEADER_BYTES else allocate)

        opened: Record | str
        try:
            value = await self._values.fetch(node, name, bytes_max=STRIPE_BYTES, sink=sink, deadline=deadline)
            if value is None:
                return None
            if len(value) == HEADER_BYTES and (header := striped_header(value, key)) is not None:
                packed, value = bytes(value), allocate_exactly(HEADER_BYTES + header.payload_bytes, allocate)
                if not await self._values.get_striped(node, packed, header, value, deadline=deadline):
                    return None
            async with deadline.scope("verifying a record from Redis"):
                opened = await open_off_loop(value, key)
        except CorruptRecord as error:
            opened = str(error)
        if isinstance(opened, Record):
            return opened
        await self.quarantine(key, opened, deadline=deadline)
        return None

    async def put(self, record: Record, *, deadline: Deadline) -> PutOutcome:
        self._check(deadline)
        if record.num_bytes > MAX_RECORD_BYTES:
            raise InvalidRequest("the record is too large", limit_bytes=MAX_RECORD_BYTES, seen=record.num_bytes)
        name = format_name(record.key)
        node = self._topology.node_for(name)
        if is_striped(record.header):
            return await see_through(
                self._background,
                lambda: self._values.put_striped(node, record, deadline=deadline),
                f"write a striped record to Redis at {node.address}",
                deadline,
            )
        return await self._values.store(node, name, record.data, "NX", deadline=deadline)

    async def delete(self, key: RecordKey, *, deadline: Deadline) -> bool:
        self._check(deadline)
        name = format_name(key)
        node = self._topology.node_for(name)
        head, removed = await node.control(("GETRANGE", name, 0, HEADER_BYTES - 1), ("UNLINK", name), deadline=deadline)
        check_replies((head, removed), node.address)
        if isinstance(head, memoryview) and (header := striped_header(head, key)) is not None:
            check_replies(await node.control(("UNLINK", *stripe_names(header)), deadline=deadline), node.address)
        return removed == 1

    async def quarantine(self, key: RecordKey, reason: str, *, deadline: Deadline) -> None:
        """Rename the record to `quarantine:<name>` for a week; stripes get that expiry in place."""
        self._check(deadline)
        name = format_name(key)
        node = self._topology.node_for(name)
        aside = f"quarantine:{name}"
        head, renamed, _ = await node.control(
            ("GETRANGE", name, 0, HEADER_BYTES - 1), ("RENAME", name, aside), ("EXPIRE", aside, _QUARANTINE_S),
            deadline=deadline,
        )  # fmt: skip
        if isinstance(renamed, ErrorReply):
            if "no such key" in renamed.message:
                return
            check_reply(renamed, node.address)
        self._num_quarantined += 1
        _log.warning("record quarantined tier=%s key=%s reason=%s name=%s", self.name, key, reason, aside)
        if isinstance(head, memoryview) and (header := striped_header(head, key)) is not None:
            expiries = (("EXPIRE", stripe, _QUARANTINE_S) for stripe in stripe_names(header))
            await node.control(*expiries, deadline=deadline)

    async def scan(self, namespace: NamespaceId | None = None) -> AsyncIterator[Entry]:
        pattern = (namespace_root(namespace) if namespace is not None else f"{ROOT}/") + "*"
        for node in self._topology.nodes():
            seen: set[RecordKey] = set()  # SCAN may answer a name twice
            cursor: object = b"0"
            while cursor is not None:
                self._check_open()
                deadline = Deadline.after(_SCAN_STEP_S)
                scan = ("SCAN", cursor if isinstance(cursor, bytes) else b"0", "MATCH", pattern, "COUNT", _SCAN_COUNT)
                (reply,) = await node.control(scan, deadline=deadline)
                check_reply(reply, node.address)
                if not isinstance(reply, list) or len(reply) != 2 or not isinstance(reply[1], list):
                    raise Unavailable("Redis answered SCAN in an unknown form", address=node.address)
                cursor = None if reply[0] == b"0" else reply[0]
                keys = [key for key in map(_record_key, reply[1]) if key is not None and key not in seen]
                keys = list(dict.fromkeys(keys))
                seen.update(keys)
                for key, num_bytes in zip(keys, await self._sizes(node, keys, deadline), strict=True):
                    if num_bytes:
                        yield Entry(key, num_bytes)

    async def _sizes(self, node: Node, keys: Sequence[RecordKey], deadline: Deadline) -> list[int]:
        """Bytes of records on one node, striped ones included; 0 for what is gone."""
        if not keys:
            return []
        names = [format_name(key) for key in keys]
        replies = await node.control(*(("STRLEN", name) for name in names), deadline=deadline)
        sizes = [reply if isinstance(reply, int) else 0 for reply in replies]
        short = [index for index, num_bytes in enumerate(sizes) if num_bytes == HEADER_BYTES]
        if short:
            heads = await node.control(*(("GET", names[index]) for index in short), deadline=deadline)
            for index, head in zip(short, heads, strict=True):
                if isinstance(head, memoryview) and (header := striped_header(head, keys[index])) is not None:
                    sizes[index] = HEADER_BYTES + header.payload_bytes
        return sizes

    async def put_manifest(self, namespace: NamespaceId, manifest: bytes, *, deadline: Deadline) -> None:
        self._check(deadline)
        name = manifest_name(namespace)
        node = self._topology.node_for(name)
        check_replies(await node.control(("SET", name, manifest), deadline=deadline), node.address)

    async def get_manifest(self, namespace: NamespaceId, *, deadline: Deadline) -> bytes | None:
        self._check(deadline)
        name = manifest_name(namespace)
        node = self._topology.node_for(name)
        (reply,) = await node.control(("GET", name), deadline=deadline)
        check_reply(reply, node.address)
        return bytes(reply) if isinstance(reply, memoryview) else None

    async def usage(self, *, deadline: Deadline) -> TierUsage:
        """The servers' memory as they tell it, other users of theirs included."""
        self._check(deadline)
        used_bytes = limit_bytes = 0
        for node in self._topology.nodes():
            (reply,) = await node.control(("INFO", "memory"), deadline=deadline)
            check_reply(reply, node.address)
            lines = bytes(reply).decode().splitlines() if isinstance(reply, memoryview) else []
            facts = dict(line.split(":", 1) for line in lines if ":" in line)
            used_bytes += int(facts.get("used_memory", 0))
            limit_bytes += int(facts.get("maxmemory", 0))
        return TierUsage(None, used_bytes, limit_bytes or None, self._num_quarantined)

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            await self._background.aclose()
            await self._topology.aclose()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the tier is closed", tier=self.name)

    def _check(self, deadline: Deadline) -> None:
        self._check_open()
        check_deadline(deadline, self.name)


def _size_of(reply: Reply, node: Node) -> int | None:
    """What a STRLEN tells of a record: its bytes, 0 when it is there but they are unknown, `None` when it is not."""
    if isinstance(reply, ErrorReply) and reply.code == "WRONGTYPE":
        return 0  # there, and no record: the next get puts it aside
    check_reply(reply, node.address)
    if not isinstance(reply, int) or reply == 0:
        return None
    return 0 if reply == HEADER_BYTES else reply


def _record_key(name: Reply) -> RecordKey | None:
    """The key that a name spells; `None` for stripes, manifests and what is not ours."""
    try:
        return parse_name(name.decode()) if isinstance(name, bytes) else None
    except (InvalidRequest, UnicodeDecodeError):
        return None
