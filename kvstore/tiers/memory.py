"""Records in this process's memory: a byte budget, LRU eviction, pins for leases."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass

from kvstore.errors import InternalError, InvalidRequest
from kvstore.format.record import Record
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.runtime.arena import Arena
from kvstore.runtime.bounded_map import Latest
from kvstore.runtime.buffers import fresh_buffer
from kvstore.runtime.deadline import Deadline
from kvstore.tiers.base import Entry, PutOutcome, Tier, TierUsage
from kvstore.tiers.verify import is_same, open_off_loop

RECORD_OVERHEAD_BYTES = 1024
"""The cost of a record beside its bytes: header, key and index entries; about 1 KiB in CPython 3.11."""

_MANIFESTS_MAX = 1024
ARENA_BYTES_MIN = 64 << 10
"""Smaller buffers do not use the arena: a socket is as fast for them."""


@dataclass(eq=False, slots=True)
class _Slot:
    """One record with its pins.

    Attributes:
        cost_bytes: Its charge against the budget.
        num_pins: Above zero it is not evicted.
        pinned_for: The owner that its pinned bytes count for.
        removed: Deleted while pinned: no reader finds it, but its bytes stay until the last pin ends.
    """

    record: Record
    cost_bytes: int
    num_pins: int = 0
    removed: bool = False
    pinned_for: str = ""


@dataclass(eq=False, slots=True)
class Pin:
    """A receipt for a pinned record; return it with `MemoryTier.unpin`, exactly once.

    Attributes:
        added_bytes: What it added to the tier's `pinned_bytes`; 0: the record was pinned already.
    """

    record: Record
    added_bytes: int
    _slot: _Slot
    _returned: bool = False


class MemoryTier(Tier):
    """Keeps `Record` objects: a put copies nothing, a get returns the same immutable object and ignores `allocate`.

    The synchronous core (`peek`, `insert`, `pin`, `remove` and others) never waits; the `Tier` methods build on it. All
    methods but `buffer` belong to one event loop's thread.

    Attributes:
        pinned_bytes: Those of `used_bytes` that pins keep.
        pinned_by: `pinned_bytes` by owner.
        owner_of: Returns the owner of a namespace; set by the tier's owner.
        on_changed: Called with the key of each record that was stored or removed; `None`: with none.
        num_evicted: Records that were evicted to make room for others.

    Args:
        budget_bytes: Limit for headers, payloads and `RECORD_OVERHEAD_BYTES` per record.
        name: Shown in metrics and answers.
        arena: Where `buffer` takes its memory from; closed with the tier.
    """

    def __init__(self, budget_bytes: int, *, name: str = "memory", arena: Arena | None = None) -> None:
        if budget_bytes <= 0:
            raise InvalidRequest("the memory tier's budget must be positive", budget_bytes=budget_bytes)
        self.name = name
        self.arena = arena
        self.limit_bytes = budget_bytes
        self.used_bytes = 0
        self.pinned_bytes = 0
        self.num_evicted = 0
        self.pinned_by: Counter[str] = Counter()
        self.owner_of: Callable[[NamespaceId], str] = lambda _: ""
        self.on_changed: Callable[[RecordKey], None] | None = None
        self._slots: dict[RecordKey, _Slot] = {}
        self._idle: OrderedDict[RecordKey, _Slot] = OrderedDict()  # not pinned, least recently used first
        self._at: dict[NamespaceId, dict[PrefixHash, dict[int, int]]] = {}  # a bit per slice, by group
        self._manifests = Latest[NamespaceId, bytes](_MANIFESTS_MAX)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: RecordKey) -> bool:
        return key in self._slots

    def boundaries(self, namespace: NamespaceId) -> Mapping[PrefixHash, Mapping[int, int]]:
        """Every boundary of a namespace that has a record here: by group, a bit for each slice that is here."""
        return self._at.get(namespace, {})

    def buffer(self, num_bytes: int) -> memoryview:
        """Uninitialised memory for a record to put here, in the arena if there is room. May be called in any thread."""
        if self.arena is not None and num_bytes >= ARENA_BYTES_MIN:
            buffer = self.arena.take(num_bytes)
            if buffer is not None:
                return buffer
        return fresh_buffer(num_bytes)

    def held(self, key: RecordKey) -> Record | None:
        """The record, as it stands: it is neither verified again nor marked as used."""
        slot = self._slots.get(key)
        return None if slot is None else slot.record

    def peek(self, key: RecordKey) -> Record | None:
        """Return the record and mark it used, without verifying its payload again."""
        slot = self._slots.get(key)
        if slot is None:
            return None
        if slot.num_pins == 0:
            self._idle.move_to_end(key)
        return slot.record

    def insert(self, record: Record) -> PutOutcome:
        """Keep a record (not a copy), evicting the least recently used unpinned ones.

        `FULL`: it would not fit even if everything unpinned were evicted; then nothing is.

        Raises:
            Closed: The tier is closed.
        """
        self._check_open()
        if record.key in self._slots:
            return PutOutcome.EXISTS
        cost_bytes = record.num_bytes + RECORD_OVERHEAD_BYTES
        if self.pinned_bytes + cost_bytes > self.limit_bytes:
            return PutOutcome.FULL
        while self.used_bytes + cost_bytes > self.limit_bytes:
            self.remove(next(iter(self._idle)))
            self.num_evicted += 1
        slot = _Slot(record, cost_bytes)
        self._slots[record.key] = self._idle[record.key] = slot
        self._add_slice(record.key)
        self.used_bytes += cost_bytes
        if self.on_changed is not None:
            self.on_changed(record.key)
        return PutOutcome.STORED

    def pin(self, key: RecordKey) -> Pin | None:
        """Pin a record; `None`: it is absent. A record that is pinned twice is unpinned twice."""
        slot = self._slots.get(key)
        if slot is None:
            return None
        slot.num_pins += 1
        if slot.num_pins > 1:
            return Pin(slot.record, 0, slot)
        del self._idle[key]
        self.pinned_bytes += slot.cost_bytes
        slot.pinned_for = self.owner_of(key.namespace)
        self.pinned_by[slot.pinned_for] += slot.cost_bytes
        return Pin(slot.record, slot.cost_bytes, slot)

    def unpin(self, pin: Pin) -> None:
        """End a pin; its record may be evicted again, the most recently unpinned last.

        Raises:
            InternalError: The pin was returned before.
        """
        slot = pin._slot
        if pin._returned:
            raise InternalError("a pin was given back twice", key=slot.record.key)
        pin._returned = True
        slot.num_pins -= 1
        if slot.num_pins > 0:
            return
        self.pinned_bytes -= slot.cost_bytes
        self.pinned_by[slot.pinned_for] -= slot.cost_bytes
        if not self.pinned_by[slot.pinned_for]:
            del self.pinned_by[slot.pinned_for]
        if slot.removed:
            self.used_bytes -= slot.cost_bytes
        else:
            self._idle[slot.record.key] = slot

    def _add_slice(self, key: RecordKey) -> None:
        groups = self._at.setdefault(key.namespace, {}).setdefault(key.prefix, {})
        groups[key.group] = groups.get(key.group, 0) | 1 << key.slice

    def _remove_slice(self, key: RecordKey) -> None:
        boundaries = self._at[key.namespace]
        groups = boundaries[key.prefix]
        groups[key.group] &= ~(1 << key.slice)
        if not groups[key.group]:
            del groups[key.group]
        if not groups:
            del boundaries[key.prefix]
        if not boundaries:
            del self._at[key.namespace]

    def evict_first(self, key: RecordKey) -> None:
        """Have a record evicted before all others, unless it is pinned or used until then."""
        if key in self._idle:
            self._idle.move_to_end(key, last=False)

    def drop_idle(self, key: RecordKey) -> bool:
        """Remove a record that is not pinned. False: it was not there, or is pinned."""
        return key in self._idle and self.remove(key)

    def remove(self, key: RecordKey) -> bool:
        """Hide a record from new readers; pins keep its bytes. False: it was not there."""
        slot = self._slots.pop(key, None)
        if slot is None:
            return False
        self._remove_slice(key)
        if self.on_changed is not None:
            self.on_changed(key)
        if slot.num_pins > 0:
            slot.removed = True
        else:
            del self._idle[key]
            self.used_bytes -= slot.cost_bytes
        return True

    async def head(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> list[int | None]:
        self._check(deadline)
        return [None if (slot := self._slots.get(key)) is None else slot.record.num_bytes for key in keys]

    async def get(
        self, key: RecordKey, *, deadline: Deadline, allocate: Callable[[int], memoryview] | None = None
    ) -> Record | None:
        self._check(deadline)
        record = self.peek(key)
        if record is None:
            return None
        async with deadline.scope("verifying a record in memory"):
            opened = await open_off_loop(record.data, key)
        if not isinstance(opened, str):
            return record
        await self.quarantine(key, opened, seen=record, deadline=deadline)
        return None

    async def put(self, record: Record, *, deadline: Deadline) -> PutOutcome:
        self._check(deadline)
        return self.insert(record)

    async def delete(self, key: RecordKey, *, deadline: Deadline) -> bool:
        self._check(deadline)
        return self.remove(key)

    async def quarantine(self, key: RecordKey, reason: str, *, seen: Record | None = None, deadline: Deadline) -> bool:
        """Drop the record and count it: this tier keeps no damaged bytes."""
        self._check_open()
        slot = self._slots.get(key)
        if slot is None or not (seen is None or slot.record is seen or is_same(slot.record.data, seen.data)):
            return False
        self.remove(key)
        return self._quarantined(key, reason)

    async def scan(self, namespace: NamespaceId | None = None) -> AsyncIterator[Entry]:
        self._check_open()
        for entry in [Entry(key, slot.record.num_bytes) for key, slot in self._slots.items()]:
            if namespace in (None, entry.key.namespace):
                yield entry

    async def put_manifest(self, namespace: NamespaceId, manifest: bytes, *, deadline: Deadline) -> None:
        self._check(deadline)
        self._manifests[namespace] = bytes(manifest)

    async def get_manifest(self, namespace: NamespaceId, *, deadline: Deadline) -> bytes | None:
        self._check(deadline)
        return self._manifests.get(namespace)

    async def usage(self, *, deadline: Deadline) -> TierUsage:
        self._check(deadline)
        return TierUsage(len(self._slots), self.used_bytes, self.limit_bytes, self.num_quarantined, "memory_bytes")

    async def aclose(self) -> None:
        self._closed = True
        for key in list(self._slots):
            self.remove(key)
        self._manifests.clear()
        if self.arena is not None:
            self.arena.close()
