"""The catalog in Redis, standalone or cluster: shared by any number of services."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from redis.asyncio import Redis, RedisCluster

from kvstore.catalog.base import (
    Addition,
    BoundaryEntry,
    Catalog,
    Gate,
    LeaveReason,
    Leaving,
    NamespaceTotals,
    Removal,
    Step,
    Tombstone,
    Use,
)
from kvstore.catalog.changes import entry_of, packed_with
from kvstore.catalog.coordination import Ownership
from kvstore.catalog.entry import EntryShape, EntryTable, Level
from kvstore.catalog.redis.coordination import RedisOwnership
from kvstore.catalog.redis.nodes import NUM_SLOTS, RedisNodes, slot_of, tag_of
from kvstore.catalog.redis.replies import Argument, Command
from kvstore.catalog.redis.scripts import (
    ADD,
    FINISH,
    OBSERVE,
    PIN,
    REMOVE,
    START,
    STOP,
    USE,
    Script,
    add_item,
    hash_items,
    parse_tombstone,
    parse_totals,
    remove_item,
    sum_totals,
)
from kvstore.errors import Closed, CorruptRecord, InvalidRequest, UnsupportedFormat
from kvstore.format.manifest import parse_manifest
from kvstore.format.names import format_name, manifest_name, namespace_root
from kvstore.model.keys import NAMESPACE_BYTES, PREFIX_BYTES, NamespaceId, PrefixHash, RecordKey
from kvstore.model.layout import Layout
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.deadline import Deadline

__all__ = ["RedisCatalog", "parse_entry_name"]

_ROOT = "c1"
_NAMESPACES = f"{_ROOT}/namespaces"
_COMPLETE = f"{_ROOT}/complete"
_BATCH = 512
"""Entries that are changed or read in one round trip."""
_SCAN_S = 10.0
"""Time limit of each step of a scan."""
_TOMBSTONES = 16384


class RedisCatalog(Catalog):
    """One string per boundary, `c1/<namespace>/{<prefix>}`, in the slot of its records; per slot a hash of totals,
    `c1t/{tag}`, and a list of tombstones, `c1d/{tag}`. None of them has a TTL, so that no `volatile-*` policy evicts
    them.

    Args:
        client: Answers in `bytes`; the caller closes it.
        clock: For first and last use.
        gate: Asked before each call; `None`: calls are always allowed.
    """

    def __init__(self, client: Redis | RedisCluster, *, clock: Clock = SYSTEM_CLOCK, gate: Gate | None = None) -> None:
        self._nodes = RedisNodes(client, gate=gate)
        self._gate = gate
        self._clock = clock
        self._repairs_told = 0
        self._shapes: dict[NamespaceId, EntryShape] = {}
        self._tenants: dict[NamespaceId, str] = {}
        self._closed = False

    # reads

    async def is_complete(self, *, deadline: Deadline) -> bool:
        self._check_open()
        return bool(await self._nodes.one(("EXISTS", _COMPLETE), deadline=deadline))

    async def set_complete(self, complete: bool, *, deadline: Deadline) -> None:
        self._check_open()
        await self._nodes.one(("SET", _COMPLETE, self._now_s()) if complete else ("DEL", _COMPLETE), deadline=deadline)

    async def lookup(self, namespace: NamespaceId, prefixes: Sequence[PrefixHash], *, deadline: Deadline) -> EntryTable:
        shape = self._shape(namespace)
        return EntryTable.of(shape, await self._entries(namespace, prefixes, deadline))

    async def get(self, namespace: NamespaceId, prefix: PrefixHash, *, deadline: Deadline) -> BoundaryEntry | None:
        shape = self._shape(namespace)
        (data,) = await self._entries(namespace, [prefix], deadline)
        return None if data is None else entry_of(shape, namespace, prefix, data)

    async def iterate(self, namespace: NamespaceId) -> AsyncIterator[BoundaryEntry]:
        shape = self._shape(namespace)
        async for batch in self._nodes.scan(f"{_ROOT}/{namespace.hex()}/*", count=_BATCH, deadline_s=_SCAN_S):
            prefixes = [prefix for prefix in dict.fromkeys(map(_prefix_of, batch)) if prefix is not None]
            entries = await self._entries(namespace, prefixes, Deadline.after(_SCAN_S, self._clock))
            for prefix, data in zip(prefixes, entries, strict=True):
                if data is not None:
                    yield entry_of(shape, namespace, prefix, data)

    async def step(self, namespace: NamespaceId, cursor: str, *, count: int, deadline: Deadline) -> Step:
        shape = self._shape(namespace)
        names, after = await self._nodes.scan_step(f"{_ROOT}/{namespace.hex()}/*", cursor, count, deadline=deadline)
        prefixes = [prefix for prefix in dict.fromkeys(map(_prefix_of, names)) if prefix is not None]
        return Step(prefixes, EntryTable.of(shape, await self._entries(namespace, prefixes, deadline)), after)

    async def namespaces(self, *, deadline: Deadline) -> Mapping[NamespaceId, str]:
        self._check_open()
        found = hash_items(await self._nodes.one(("HGETALL", _NAMESPACES), deadline=deadline))
        return {
            NamespaceId(namespace): tenant.decode(errors="replace")
            for namespace, tenant in found
            if len(namespace) == NAMESPACE_BYTES  # anything else is damaged, and nobody's
        }

    async def totals(self, *, deadline: Deadline) -> Mapping[NamespaceId, NamespaceTotals]:
        tenants = await self.namespaces(deadline=deadline)
        replies = await self._everywhere(lambda tag: ("HGETALL", _totals(tag)), deadline)
        return sum_totals((parse_totals(reply) for reply in replies), tenants)

    async def tombstones(self, *, limit: int, deadline: Deadline) -> list[Tombstone]:
        self._check_open()
        kept = min(limit, self._tombstones_kept())
        replies = await self._everywhere(lambda tag: ("LRANGE", _tombstones(tag), 0, kept - 1), deadline)

        def parse() -> list[Tombstone]:
            read = [parse_tombstone(packed) for reply in replies for packed in reply]
            found = [tombstone for tombstone in read if tombstone is not None]
            return sorted(found, key=lambda tombstone: -tombstone.at_s)[:limit]

        return await asyncio.to_thread(parse)  # there may be thousands: the loop has others to answer

    # changes

    async def register(self, namespace: NamespaceId, layout: Layout, tenant: str, *, deadline: Deadline) -> None:
        self._check_open()
        self._shapes[namespace], self._tenants[namespace] = EntryShape.of(layout), tenant
        await self._nodes.one(("HSET", _NAMESPACES, namespace, tenant.encode()), deadline=deadline)

    async def add(self, additions: Sequence[Addition], *, deadline: Deadline) -> list[bool]:
        grouped: dict[tuple[NamespaceId, PrefixHash, Level], list[Addition]] = defaultdict(list)
        for addition in additions:
            grouped[addition.key.namespace, addition.key.prefix, addition.level].append(addition)
        now_s = self._now_s()
        calls = []
        for (namespace, prefix, level), of_boundary in grouped.items():
            shape, unique = self._shape(namespace), list({one.key: one for one in of_boundary}.values())
            items = b"".join(add_item(shape, one) for one in unique)
            new_entry = packed_with(shape, unique, now_s)
            num_bytes = sum(one.num_bytes for one in unique)
            calls.append(self._call(ADD, namespace, prefix, level, new_entry, num_bytes, items))
        accepted = dict(zip(grouped, await self._run(calls, deadline), strict=True))
        return [bool(accepted[one.key.namespace, one.key.prefix, one.level]) for one in additions]

    async def remove(self, removals: Sequence[Removal], *, deadline: Deadline) -> None:
        grouped: dict[tuple[NamespaceId, PrefixHash, Level], list[Removal]] = defaultdict(list)
        for removal in removals:
            grouped[removal.key.namespace, removal.key.prefix, removal.level].append(removal)
        calls = []
        for (namespace, prefix, level), of_boundary in grouped.items():
            items = b"".join(remove_item(self._shape(namespace), one) for one in of_boundary)
            calls.append(self._call(REMOVE, namespace, prefix, level, prefix, items))
        await self._run(calls, deadline)

    async def use(self, namespace: NamespaceId, uses: Sequence[Use], *, deadline: Deadline) -> None:
        blank = bytes(PREFIX_BYTES)
        calls = [
            self._call(USE, namespace, use.prefix, Level.HOT, use.hits, use.tokens, use.parent or blank) for use in uses
        ]
        await self._run(calls, deadline)

    async def start_leaving(
        self,
        namespace: NamespaceId,
        prefix: PrefixHash,
        level: Level,
        *,
        deadline: Deadline,
        unless_used_since_s: int | None = None,
        even_if_pinned: bool = False,
    ) -> BoundaryEntry | None:
        since_s = 0xFFFFFFFF if unless_used_since_s is None else unless_used_since_s
        call = self._call(START, namespace, prefix, level, since_s, int(even_if_pinned))
        (data,) = await self._run([call], deadline)
        return None if data is None else entry_of(self._shape(namespace), namespace, prefix, bytes(data))

    async def _start_wave(
        self, leaving: Sequence[Leaving], level: Level, deadline: Deadline
    ) -> list[BoundaryEntry | None]:
        calls = [self._call(START, one.namespace, one.prefix, level, one.unless_used_since_s, 0) for one in leaving]
        found = zip(leaving, await self._run(calls, deadline), strict=True)
        return [
            None if data is None else entry_of(self._shape(one.namespace), one.namespace, one.prefix, bytes(data))
            for one, data in found
        ]

    async def finish_leaving(
        self, namespace: NamespaceId, prefix: PrefixHash, level: Level, reason: LeaveReason, *, deadline: Deadline
    ) -> int:
        (num_bytes,) = await self._run([self._finish(namespace, prefix, level, reason)], deadline)
        return int(num_bytes)

    async def finish_leaving_all(
        self, gone: Sequence[tuple[BoundaryEntry, LeaveReason]], level: Level, *, deadline: Deadline
    ) -> int:
        calls = [self._finish(entry.namespace, entry.prefix, level, reason) for entry, reason in gone]
        return sum(map(int, await self._run(calls, deadline)))

    def _finish(
        self, namespace: NamespaceId, prefix: PrefixHash, level: Level, reason: LeaveReason
    ) -> tuple[int, Command]:
        shape = self._shape(namespace)
        arguments = (prefix, int(reason), shape.sum_at(level, 0), len(shape.num_slices))
        return self._call(FINISH, namespace, prefix, level, *arguments)

    async def stop_leaving(
        self, namespace: NamespaceId, prefix: PrefixHash, level: Level, *, deadline: Deadline
    ) -> None:
        await self._run([self._call(STOP, namespace, prefix, level)], deadline)

    async def pin(
        self, namespace: NamespaceId, prefixes: Sequence[PrefixHash], until_s: int, *, deadline: Deadline
    ) -> int:
        calls = [self._call(PIN, namespace, prefix, Level.HOT, until_s) for prefix in prefixes]
        return sum(await self._run(calls, deadline))

    async def observe_hot(self, namespace: NamespaceId, prefixes: Sequence[PrefixHash], *, deadline: Deadline) -> int:
        """Correct the hot bits and bytes of boundaries to what their server really holds, since it may have evicted
        records or been restarted. Returns how many records were lost. The hot records must be in this same Redis.
        """
        shape = self._shape(namespace)
        calls = []
        for prefix in prefixes:
            text = prefix.hex()
            names = f"{namespace_root(namespace)}{text[:2]}/{{{text}}}"
            first = shape.sum_at(Level.HOT, 0)
            arguments: list[Argument] = [prefix, int(LeaveReason.LOST), names, first, *shape.num_slices]
            calls.append(self._call(OBSERVE, namespace, prefix, Level.HOT, *arguments))
        return sum(await self._run(calls, deadline))

    async def know(self, namespace: NamespaceId, *, deadline: Deadline) -> bool:
        """Whether entries of a namespace can be read here: it was registered, or could be registered just now from the
        manifest beside its records in this Redis.
        """
        self._check_open()
        if namespace in self._shapes:
            return True
        manifest = await self._nodes.one(("GET", manifest_name(namespace)), deadline=deadline)
        try:
            description = parse_manifest(bytes(manifest), namespace) if manifest is not None else None
            layout = description.layout() if description is not None else None
        except (CorruptRecord, UnsupportedFormat, InvalidRequest):
            return False
        if description is None or layout is None:
            return False
        await self.register(namespace, layout, description.tenant, deadline=deadline)
        return True

    async def register_again(self, *, deadline: Deadline) -> None:
        """Register again those of this catalog's namespaces that Redis has lost."""
        found = await self.namespaces(deadline=deadline)
        for namespace, tenant in self._tenants.items():
            if namespace not in found:
                await self._nodes.one(("HSET", _NAMESPACES, namespace, tenant.encode()), deadline=deadline)

    async def next_names(self, count: int, *, deadline: Deadline) -> list[bytes]:
        """See `RedisNodes.next_names`: names of entries, and of records, which are on the same servers."""
        self._check_open()
        return await self._nodes.next_names(count, deadline=deadline)

    async def are_stored(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> list[bool]:
        """Whether these servers hold records. Per key, in order."""
        self._check_open()
        calls = [(slot_of(key.prefix.hex().encode()), ("EXISTS", format_name(key))) for key in keys]
        return [bool(reply) for reply in await self._run(calls, deadline)]

    def ownership(self, lease_s: float) -> Ownership:
        """Leases among the services that share this Redis."""
        return RedisOwnership(self._nodes.client, lease_s=lease_s, gate=self._gate)

    async def note(self, name: str, text: str, *, deadline: Deadline) -> None:
        """Store a text for other services."""
        self._check_open()
        await self._nodes.one(("SET", f"{_ROOT}/{name}", text), deadline=deadline)

    async def noted(self, name: str, *, deadline: Deadline) -> str | None:
        """The text that was stored last under a name."""
        self._check_open()
        text = await self._nodes.one(("GET", f"{_ROOT}/{name}"), deadline=deadline)
        return None if text is None else bytes(text).decode(errors="replace")

    async def clear(self, *, deadline: Deadline) -> None:
        await self.set_complete(False, deadline=deadline)
        async for batch in self._nodes.scan(f"{_ROOT}/*/{{*}}", count=_BATCH, deadline_s=_SCAN_S):
            commands: dict[int, list[Command]] = defaultdict(list)
            for name in batch:
                commands[slot_of(name.partition(b"{")[2][:-1])].append(("UNLINK", name))
            await self._nodes.run(commands, deadline=Deadline.after(_SCAN_S, self._clock))
        await self._everywhere(lambda tag: ("UNLINK", _totals(tag)), Deadline.after(_SCAN_S, self._clock))

    async def info(self, section: str, *, deadline: Deadline) -> list[dict[str, str]]:
        """Each node's `INFO <section>`."""
        self._check_open()
        return await self._nodes.info(section, deadline=deadline)

    async def aclose(self) -> None:
        self._closed = True

    # helpers

    async def _entries(
        self, namespace: NamespaceId, prefixes: Sequence[PrefixHash], deadline: Deadline
    ) -> list[bytes | None]:
        """The entries as they are stored, in one round trip per node."""
        if not prefixes:
            return []
        start = f"{_ROOT}/{namespace.hex()}/{{"
        if not self._nodes.is_cluster:
            names = [f"{start}{prefix.hex()}}}" for prefix in prefixes]
            found = await self._nodes.run({0: [("MGET", *names)]}, deadline=deadline)
            entries: list[bytes | None] = found[0][0]
            return entries
        slots: dict[int, list[Command]] = defaultdict(list)
        places = []
        for prefix in prefixes:
            tag = prefix.hex()
            listed = slots[slot_of(tag.encode())]
            places.append((slot_of(tag.encode()), len(listed)))
            listed.append(("GET", f"{start}{tag}}}"))
        replies = await self._nodes.run(slots, deadline=deadline)
        return [replies[slot][index] for slot, index in places]

    def _call(
        self, script: Script, namespace: NamespaceId, prefix: PrefixHash, level: Level, *arguments: Argument
    ) -> tuple[int, Command]:
        """A script call and its slot; see `redis_scripts` for the arguments."""
        shape, text = self._shape(namespace), prefix.hex()
        slot = slot_of(text.encode()) if self._nodes.is_cluster else 0
        tag = tag_of(slot) if self._nodes.is_cluster else b"0"
        row = shape.row_at(level)
        keys = (f"{_ROOT}/{namespace.hex()}/{{{text}}}", _totals(tag), _tombstones(tag))
        common = (namespace, shape.num_bytes, int(level), row, row + shape.row_bytes - 1, shape.rows_at)
        kept = max(1, self._tombstones_kept())
        return slot, ("EVALSHA", script.sha, 3, *keys, *common, self._now_s(), kept, *arguments)

    async def _run(self, calls: Sequence[tuple[int, Command]], deadline: Deadline) -> list[Any]:
        replies: list[Any] = []
        for start in range(0, len(calls), _BATCH):
            slots: dict[int, list[Command]] = defaultdict(list)
            places = []
            for slot, command in calls[start : start + _BATCH]:
                places.append((slot, len(slots[slot])))
                slots[slot].append(command)
            found = await self._nodes.run(slots, deadline=deadline)
            replies += [found[slot][index] for slot, index in places]
        await self._tell_repairs(deadline)
        return replies

    async def _tell_repairs(self, deadline: Deadline) -> None:
        """Mark the catalog as not complete once something damaged was removed: it lacks what stood there."""
        if (repaired := self._nodes.num_repaired) != self._repairs_told:
            await self.set_complete(False, deadline=deadline)
            self._repairs_told = repaired

    async def _everywhere(self, command: Any, deadline: Deadline) -> list[Any]:
        """Run a command on the totals or tombstones of every slot."""
        if not self._nodes.is_cluster:
            return (await self._nodes.run({0: [command(b"0")]}, deadline=deadline))[0]
        commands = {slot: [command(tag_of(slot))] for slot in range(NUM_SLOTS)}
        return [reply for replies in (await self._nodes.run(commands, deadline=deadline)).values() for reply in replies]

    def _tombstones_kept(self) -> int:
        """Tombstones that are kept per slot."""
        return max(4, _TOMBSTONES // NUM_SLOTS) if self._nodes.is_cluster else _TOMBSTONES

    def _now_s(self) -> int:
        return self._clock.wall_ms() // 1000

    def _shape(self, namespace: NamespaceId) -> EntryShape:
        self._check_open()
        shape = self._shapes.get(namespace)
        if shape is None:
            raise InvalidRequest("the namespace is not known to the catalog: register it", namespace=namespace.hex())
        return shape

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the catalog is closed")


def _totals(tag: bytes) -> bytes:
    return b"c1t/{%s}" % tag


def _tombstones(tag: bytes) -> bytes:
    return b"c1d/{%s}" % tag


def _prefix_of(name: bytes) -> PrefixHash | None:
    place = parse_entry_name(name)
    return None if place is None else place[1]


def parse_entry_name(name: bytes) -> tuple[NamespaceId, PrefixHash] | None:
    """The namespace and the boundary of an entry's name; `None`: not the name of an entry."""
    root, _, rest = name.partition(b"/")
    namespace, _, text = rest.partition(b"/")
    if root != _ROOT.encode() or text[:1] != b"{" or text[-1:] != b"}":
        return None
    try:
        place = NamespaceId(bytes.fromhex(namespace.decode())), PrefixHash(bytes.fromhex(text[1:-1].decode()))
    except ValueError:
        return None
    return place if len(place[1]) == PREFIX_BYTES else None
