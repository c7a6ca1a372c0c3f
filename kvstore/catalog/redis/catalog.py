"""The catalog in Redis, standalone or cluster: shared by any number of services."""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any

from redis.asyncio import Redis, RedisCluster

from kvstore.catalog.base import (
    STEP_ENTRIES,
    TOMBSTONES_MAX,
    Addition,
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
from kvstore.catalog.changes import packed_with
from kvstore.catalog.coordination import MarkBook, Ownership, TextStore, TextStoreKind
from kvstore.catalog.entry import MARK_AT, BoundaryEntry, EntryTable, Level, entry_of
from kvstore.catalog.pending import PendingLog
from kvstore.catalog.redis.coordination import RedisMarkBook, RedisOwnership, RedisTextStore
from kvstore.catalog.redis.counters import ServerCounters, counters_of, format_counters, parse_counters, run_ids
from kvstore.catalog.redis.entry_names import ROOT, GetEntries, entry_name, parse_entry_name
from kvstore.catalog.redis.nodes import NUM_SLOTS, Call, RedisNodes
from kvstore.catalog.redis.pending import RedisPendingLog
from kvstore.catalog.redis.replies import Argument, Command, strange_reply
from kvstore.catalog.redis.scripts import (
    ADD,
    BEGIN_RECOUNT,
    COUNT,
    END_RECOUNT,
    EPOCH,
    FINISH,
    MARK_COMPLETE,
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
from kvstore.format.names import format_name, manifest_name, namespace_root
from kvstore.model.keys import NAMESPACE_BYTES, PREFIX_BYTES, NamespaceId, PrefixHash, RecordKey
from kvstore.model.layout import Layout
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.deadline import Deadline

_NAMESPACES = f"{ROOT}/namespaces"
_COMPLETE = f"{ROOT}/complete"
_EPOCH = f"{ROOT}/rebuild{{{_COMPLETE}}}"
"""In the same slot, so that both change at once. It is there since a service first asked for it."""
_EPOCH_BYTES = 16
_COUNTERS = f"{ROOT}/reconciled"
_CALL_S = 10.0
_BATCH = 512
"""Entries that are changed or read in one round trip."""
_TOGETHER = 128
"""Entries of a namespace that are read in one round trip in a walk over several namespaces, whose names come mixed."""
_OBSERVED_AT_ONCE = 2048
"""Records that scripts look for in one round trip: Redis needs some 10 ms for them."""


class RedisCatalog(Catalog):
    """A catalog in Redis: one string per boundary, `c1/<namespace>/{<prefix>}`, in the slot of its records; per slot a
    hash of totals, `c1t/{tag}`, and a list of tombstones, `c1d/{tag}`. None of them has a TTL, so that no `volatile-*`
    policy evicts them.

    Args:
        client: Replies in `bytes`; the caller closes it.
        gate: As for `RedisNodes`.
    """

    def __init__(self, client: Redis | RedisCluster, *, clock: Clock = SYSTEM_CLOCK, gate: Gate | None = None) -> None:
        super().__init__(clock)
        self._nodes = RedisNodes(client, gate=gate)
        self._gate = gate
        self._repairs_reported = 0
        self._names_cursor: str | None = None

    # reads

    async def is_complete(self, *, deadline: Deadline) -> bool:
        self._check_open()
        return bool(await self._nodes.one(("EXISTS", _COMPLETE), deadline=deadline))

    async def epoch(self, *, deadline: Deadline) -> bytes:
        self._check_open()
        fresh = secrets.token_bytes(_EPOCH_BYTES)
        epoch = await self._nodes.one(("EVAL", EPOCH, 1, _EPOCH, fresh), deadline=deadline)
        if not isinstance(epoch, bytes):
            raise strange_reply("EVAL", epoch)
        return epoch

    async def complete_epoch(self, *, deadline: Deadline) -> bytes | None:
        epoch = await super().complete_epoch(deadline=deadline)
        return None if epoch is None or await self._is_doubtful(deadline) else epoch

    async def _is_doubtful(self, deadline: Deadline) -> bool:
        """Whether a server was restarted or replaced since entries were last compared with records: it may have an
        older state of both entries and marks, as from a snapshot. A service then marks the catalog as incomplete.
        """
        seen = await self.read_counters(deadline=deadline)
        servers = await self.info("server", deadline=deadline)
        return seen is None or run_ids(seen) != run_ids(counters_of(server, {}) for server in servers)

    async def mark_incomplete(self, *, deadline: Deadline) -> None:
        self._check_open()
        await self._nodes.one(("DEL", _COMPLETE, _EPOCH), deadline=deadline)

    async def mark_complete(self, epoch: bytes, *, deadline: Deadline) -> bool:
        self._check_open()
        command: Command = ("EVAL", MARK_COMPLETE, 2, _EPOCH, _COMPLETE, epoch, self._now_s())
        return bool(await self._nodes.one(command, deadline=deadline) == 1)

    async def lookup(self, namespace: NamespaceId, prefixes: Sequence[PrefixHash], *, deadline: Deadline) -> EntryTable:
        shape = self._shape(namespace)
        return EntryTable.of(shape, await self._entries(namespace, prefixes, deadline))

    async def step(self, namespace: NamespaceId, cursor: str, *, count: int, deadline: Deadline) -> Step:
        shape = self._shape(namespace)
        names, after = await self._nodes.scan(f"{ROOT}/{namespace.hex()}/*", cursor, count, deadline=deadline)
        places = [place for place in map(parse_entry_name, names) if place is not None]
        prefixes = list(dict.fromkeys(prefix for _, prefix in places))
        return Step(prefixes, EntryTable.of(shape, await self._entries(namespace, prefixes, deadline)), after)

    async def walk(self, namespaces: Collection[NamespaceId]) -> AsyncIterator[tuple[NamespaceId, Step]]:
        """One walk over all names in Redis: each namespace's own would list every name again."""
        if len(namespaces) <= 1:
            async for one in super().walk(namespaces):
                yield one
            return

        async def read(cursor: str, deadline: Deadline) -> tuple[list[bytes], str | None]:
            return await self._nodes.scan(f"{ROOT}/*", cursor, STEP_ENTRIES, deadline=deadline)

        found: dict[NamespaceId, dict[PrefixHash, None]] = {namespace: {} for namespace in namespaces}
        async for names in self._walk(read):
            for namespace, prefix in filter(None, map(parse_entry_name, names)):
                if (prefixes := found.get(namespace)) is not None:
                    prefixes[prefix] = None
                    if len(prefixes) == _TOGETHER:
                        yield namespace, await self._step_of(namespace, prefixes)
        for namespace, prefixes in found.items():
            if prefixes:
                yield namespace, await self._step_of(namespace, prefixes)

    async def _step_of(self, namespace: NamespaceId, prefixes: dict[PrefixHash, None]) -> Step:
        """The entries of boundaries; afterwards these are forgotten."""
        listed = list(prefixes)
        prefixes.clear()
        return Step(listed, await self.lookup(namespace, listed, deadline=self._deadline()), None)

    async def namespaces(self, *, deadline: Deadline) -> Mapping[NamespaceId, str]:
        self._check_open()
        found = hash_items(await self._nodes.one(("HGETALL", _NAMESPACES), deadline=deadline))
        return {
            NamespaceId(namespace): tenant.decode(errors="replace")
            for namespace, tenant in found
            if len(namespace) == NAMESPACE_BYTES  # anything else is damaged
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

        return await asyncio.to_thread(parse)  # there may be thousands, which would hold up the loop

    # changes

    async def register(self, namespace: NamespaceId, layout: Layout, tenant: str, *, deadline: Deadline) -> None:
        self._check_open()
        self.know(namespace, layout, tenant)
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
        self, leaving: Sequence[Leaving], level: Level, *, deadline: Deadline
    ) -> list[BoundaryEntry | None]:
        """Works in waves: a boundary's wave comes after those of all longer ones that name it as `below`."""
        hidden: list[BoundaryEntry | None] = [None] * len(leaving)
        waves: list[list[int]] = []
        wave_of: dict[int, int] = {}
        for index, one in enumerate(leaving):  # longer prefixes come first, so this one's wave is final
            wave = wave_of.get(index, 0)
            if wave == len(waves):
                waves.append([])
            waves[wave].append(index)
            if one.below is not None:
                wave_of[one.below] = max(wave_of.get(one.below, 0), wave + 1)
        stay: set[int | None] = set()
        for indexes in waves:
            going = [(index, leaving[index]) for index in indexes if index not in stay]
            calls = [self._call(START, one.namespace, one.prefix, level, one.unless_used_since_s) for _, one in going]
            for (index, one), data in zip(going, await self._run(calls, deadline), strict=True):
                if data is not None:
                    hidden[index] = entry_of(self._shape(one.namespace), one.namespace, one.prefix, bytes(data))
            stay.update(leaving[index].below for index in indexes if hidden[index] is None)
        return hidden

    async def finish_leaving(
        self, gone: Sequence[tuple[BoundaryEntry, LeaveReason]], level: Level, *, deadline: Deadline
    ) -> int:
        calls = []
        for one, reason in gone:
            shape = self._shape(one.namespace)
            arguments = (one.prefix, int(reason), shape.sum_at(level, 0), len(shape.num_slices))
            calls.append(self._call(FINISH, one.namespace, one.prefix, level, *arguments))
        return sum(map(int, await self._run(calls, deadline)))

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
        """Correct the hot bits and bytes of boundaries to the records that are stored. The hot records must be in this
        same Redis. Returns how many records were lost: Redis evicted them, or was restarted.

        Few boundaries are looked at in one round trip: a script looks for each of their records, and Redis serves other
        clients only after all scripts that it has received in one piece.
        """
        shape = self._shape(namespace)
        calls = []
        for prefix in prefixes:
            text = prefix.hex()
            names = f"{namespace_root(namespace)}{text[:2]}/{{{text}}}"
            first = shape.sum_at(Level.HOT, 0)
            arguments: list[Argument] = [prefix, int(LeaveReason.LOST), names, first, *shape.num_slices]
            calls.append(self._call(OBSERVE, namespace, prefix, Level.HOT, *arguments))
        at_once = max(1, _OBSERVED_AT_ONCE // sum(shape.num_slices))
        return sum([sum(await self._run(calls[i : i + at_once], deadline)) for i in range(0, len(calls), at_once)])

    async def recount(self) -> int:
        namespaces = list(self._shapes)
        mark = await self._unused_mark(namespaces)
        await self._in_each_slot(BEGIN_RECOUNT, mark, namespaces)
        async for namespace, step in self.walk(namespaces):
            shape = self._shape(namespace)
            await self._count(namespace, step.prefixes, (mark, len(shape.num_slices), shape.sum_at(Level.HOT, 0)))
        return sum(await self._in_each_slot(END_RECOUNT, mark, namespaces))

    async def _unused_mark(self, namespaces: Sequence[NamespaceId]) -> bytes:
        """Two bytes, not zero, which differ from the mark of the last recount."""
        used = {bytes(2)}
        for namespace in namespaces:
            step = await self.step(namespace, "", count=_BATCH, deadline=self._deadline())
            used |= {bytes(row) for row in step.table.data[:, MARK_AT : MARK_AT + 2]}
        while (mark := secrets.token_bytes(2)) in used:
            pass
        return mark

    async def _count(
        self, namespace: NamespaceId, prefixes: Sequence[PrefixHash], arguments: Sequence[Argument]
    ) -> None:
        """Count entries, each once, in the recount whose mark is in `arguments`, and rest as long as that took, since
        lookups use the catalog too. Does nothing in a later recount.
        """
        started_s = self._clock.monotonic_s()
        calls = [self._call(COUNT, namespace, prefix, Level.HOT, *arguments) for prefix in prefixes]
        await self._run(calls, self._deadline())
        await asyncio.sleep(self._clock.monotonic_s() - started_s)

    async def _in_each_slot(self, script: str, mark: bytes, namespaces: Sequence[NamespaceId]) -> list[int]:
        """Run a script of a recount on the totals of every slot."""
        slots = range(NUM_SLOTS if self._nodes.is_cluster else 1)
        replies: list[int] = []
        for start in range(0, len(slots), _BATCH):
            tags = [(slot, self._nodes.tag_of(slot)) for slot in slots[start : start + _BATCH]]
            calls: list[Call] = [(slot, ("EVAL", script, 1, _totals(tag), mark, *namespaces)) for slot, tag in tags]
            replies += await self._run(calls, self._deadline())
        return replies

    async def lack_totals(self, namespace: NamespaceId, prefixes: Sequence[PrefixHash], *, deadline: Deadline) -> bool:
        """Whether the totals of a namespace are gone from the slot of any of its entries."""
        self._check_open()
        slots = {self._nodes.slot_of(prefix.hex()) for prefix in prefixes}
        calls: list[Call] = [(slot, ("HEXISTS", _totals(self._nodes.tag_of(slot)), namespace)) for slot in slots]
        return not all(await self._run(calls, deadline))

    async def manifest(self, namespace: NamespaceId, *, deadline: Deadline) -> bytes | None:
        """The manifest beside the namespace's records in this Redis."""
        self._check_open()
        data = await self._nodes.one(("GET", manifest_name(namespace)), deadline=deadline)
        return None if data is None else bytes(data)

    async def register_again(self, *, deadline: Deadline) -> None:
        """Register again those of this catalog's namespaces that Redis has lost."""
        found = await self.namespaces(deadline=deadline)
        for namespace, tenant in list(self._tenants.items()):  # others are opened during the calls
            if namespace not in found:
                await self._nodes.one(("HSET", _NAMESPACES, namespace, tenant.encode()), deadline=deadline)

    async def next_names(self, count: int, *, deadline: Deadline) -> list[bytes]:
        """About `count` names of any kind, of entries and of records. Each call continues where the last one ended, and
        starts over at the end.
        """
        self._check_open()
        cursor, self._names_cursor = self._names_cursor or "", None  # starts over if the cursor has become invalid
        names, self._names_cursor = await self._nodes.scan("*", cursor, count, deadline=deadline)
        return names

    async def are_stored(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> list[bool]:
        """Whether these servers hold records. Per key, in order."""
        self._check_open()
        calls: list[Call] = [(self._nodes.slot_of(key.prefix.hex()), ("EXISTS", format_name(key))) for key in keys]
        return [bool(reply) for reply in await self._run(calls, deadline)]

    def ownership(self, lease_s: float) -> Ownership:
        return RedisOwnership(self._nodes.client, lease_s=lease_s, gate=self._gate)

    def mark_book(self) -> MarkBook:
        return RedisMarkBook(self._nodes.client, gate=self._gate)

    def pending_log(self, scope: str, lease_s: float) -> PendingLog:
        """The pending writes to a cold tier; the arguments are those of `RedisPendingLog`."""
        return RedisPendingLog(self._nodes.client, scope, lease_s=lease_s, gate=self._gate)

    def text_store(self, kind: TextStoreKind) -> TextStore:
        return RedisTextStore(self._nodes.client, kind, gate=self._gate)

    async def write_counters(self, counters: list[ServerCounters], *, deadline: Deadline) -> None:
        """Say, for all services, that entries were compared with records when the servers had these counters."""
        self._check_open()
        await self._nodes.one(("SET", _COUNTERS, format_counters(counters)), deadline=deadline)

    async def read_counters(self, *, deadline: Deadline) -> list[ServerCounters] | None:
        """The servers' counters when a service last compared entries with records; `None`: they are not known."""
        self._check_open()
        text = await self._nodes.one(("GET", _COUNTERS), deadline=deadline)
        return None if text is None else parse_counters(bytes(text).decode(errors="replace"))

    async def info(self, section: str, *, deadline: Deadline) -> list[dict[str, str]]:
        """Each node's `INFO <section>`."""
        self._check_open()
        return await self._nodes.info(section, deadline=deadline)

    # helpers

    async def _entries(
        self, namespace: NamespaceId, prefixes: Sequence[PrefixHash], deadline: Deadline
    ) -> list[bytes | None]:
        """The entries as they are stored, in one round trip per node."""
        if not prefixes:
            return []
        if self._nodes.is_cluster:
            calls: list[Call] = [
                (self._nodes.slot_of(prefix.hex()), ("GET", entry_name(namespace, prefix))) for prefix in prefixes
            ]
            return await self._nodes.run(calls, deadline=deadline)
        parts = [(0, GetEntries(namespace, prefixes[at : at + _BATCH])) for at in range(0, len(prefixes), _BATCH)]
        entries = await self._nodes.run(parts, deadline=deadline)
        return list(chain.from_iterable(entries))

    def _call(
        self, script: Script, namespace: NamespaceId, prefix: PrefixHash, level: Level, *arguments: Argument
    ) -> Call:
        """A script call and its slot; `scripts.py` describes the arguments."""
        shape, text = self._shape(namespace), prefix.hex()
        slot = self._nodes.slot_of(text)
        tag = self._nodes.tag_of(slot)
        row = shape.row_at(level)
        keys = (entry_name(namespace, prefix), _totals(tag), _tombstones(tag))
        common = (namespace, shape.num_bytes, int(level), row, row + shape.row_bytes - 1, shape.rows_at)
        return slot, ("EVALSHA", script.sha, 3, *keys, *common, self._now_s(), self._tombstones_kept(), *arguments)

    async def _run(self, calls: Sequence[Call], deadline: Deadline) -> list[Any]:
        replies: list[Any] = []
        for start in range(0, len(calls), _BATCH):
            replies += await self._nodes.run(calls[start : start + _BATCH], deadline=deadline)
        if (repaired := self._nodes.num_repaired) != self._repairs_reported:
            await self.mark_incomplete(deadline=deadline)  # a damaged part was removed
            self._repairs_reported = repaired
        return replies

    async def _everywhere(self, command: Callable[[bytes], Command], deadline: Deadline) -> list[Any]:
        """Run a command, made from a hash tag, on the totals or tombstones of every slot."""
        slots = range(NUM_SLOTS if self._nodes.is_cluster else 1)
        return await self._nodes.run([(slot, command(self._nodes.tag_of(slot))) for slot in slots], deadline=deadline)

    def _deadline(self) -> Deadline:
        return Deadline.after(_CALL_S, self._clock)

    def _tombstones_kept(self) -> int:
        """Tombstones that are kept per slot."""
        return max(4, TOMBSTONES_MAX // NUM_SLOTS) if self._nodes.is_cluster else TOMBSTONES_MAX


def _totals(tag: bytes) -> bytes:
    return b"c1t/{%s}" % tag


def _tombstones(tag: bytes) -> bytes:
    return b"c1d/{%s}" % tag
