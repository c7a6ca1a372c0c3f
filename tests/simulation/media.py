"""What the simulated servers keep: records as bytes. Whatever happens to one is told to whoever watches."""

from __future__ import annotations

import random
from collections.abc import Iterable
from enum import Enum
from typing import Protocol

from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.tiers.base import PutOutcome


class Gone(Enum):
    """Why a record is no longer where it was."""

    EVICTED = "evicted by the server, which had been told that it may"
    DELETED = "deleted by a service"
    QUARANTINED = "quarantined by a service"
    DAMAGED = "damaged where it stood"
    FLUSHED = "the server lost everything"


class Watcher(Protocol):
    def stored(self, medium: Medium, key: RecordKey) -> None: ...

    def allowed(self, medium: Medium, key: RecordKey) -> None: ...

    def gone(self, medium: Medium, key: RecordKey, why: Gone) -> None: ...


class Medium:
    """Records of one server.

    Args:
        name: For traces.
        capacity_bytes: Beyond, what may be evicted is, longest allowed first, as `volatile-*` policies do; `None`: no
            bound.
        watcher: Told of changes, after them.
    """

    def __init__(self, name: str, capacity_bytes: int | None, watcher: Watcher) -> None:
        self.name = name
        self.records: dict[RecordKey, bytes] = {}
        self.manifests: dict[NamespaceId, bytes] = {}
        self.quarantined: dict[RecordKey, bytes] = {}
        self.evictable: dict[RecordKey, None] = {}
        self.used_bytes = 0
        self.capacity_bytes = capacity_bytes
        self.num_evicted = 0
        self.is_full = False
        self._watcher = watcher

    def put(self, key: RecordKey, data: bytes) -> PutOutcome:
        if key in self.records:
            self.evictable.pop(key, None)  # whoever is told that it exists may rely on it
            return PutOutcome.EXISTS
        if self.is_full or not self._make_room(len(data)):
            return PutOutcome.FULL
        self.records[key] = data
        self.used_bytes += len(data)
        self._watcher.stored(self, key)
        return PutOutcome.STORED

    def put_evictable(self, key: RecordKey, data: bytes) -> PutOutcome:
        if key in self.records:
            return PutOutcome.EXISTS  # may go or must stay as before
        outcome = self.put(key, data)
        if outcome is PutOutcome.STORED:
            self.allow_eviction([key])
        return outcome

    def _make_room(self, num_bytes: int) -> bool:
        if self.capacity_bytes is None:
            return True
        if self.used_bytes + num_bytes > self.capacity_bytes:
            for key in list(self.evictable):
                self.take(key, Gone.EVICTED)
                if self.used_bytes + num_bytes <= self.capacity_bytes:
                    break
        return self.used_bytes + num_bytes <= self.capacity_bytes

    def take(self, key: RecordKey, why: Gone) -> bool:
        """Remove a record. False: it is not there."""
        data = self.records.pop(key, None)
        if data is None:
            return False
        self.used_bytes -= len(data)
        self.evictable.pop(key, None)
        if why is Gone.QUARANTINED:
            self.quarantined[key] = data
        self.num_evicted += why is Gone.EVICTED
        self._watcher.gone(self, key, why)
        return True

    def allow_eviction(self, keys: Iterable[RecordKey]) -> None:
        for key in keys:
            if key in self.records:
                self.evictable[key] = None
                self._watcher.allowed(self, key)

    def evict_some(self, numbers: random.Random, share: float) -> int:
        """Let go of some of what may go, as expiry does; returns how many."""
        going = [key for key in self.evictable if numbers.random() < share]
        for key in going:
            self.take(key, Gone.EVICTED)
        return len(going)

    def damage(self, key: RecordKey, numbers: random.Random) -> None:
        """Spoil a record where it stands; it keeps its size."""
        before = self.records[key]
        changed = mangled(before, numbers, list(self.records.values()))
        self.records[key] = changed if len(changed) == len(before) else before[:-1] + bytes([before[-1] ^ 1])
        self._watcher.gone(self, key, Gone.DAMAGED)

    def flush(self) -> None:
        """Lose everything."""
        for key in list(self.records):
            self.take(key, Gone.FLUSHED)
        self.manifests.clear()


def mangled(data: bytes, numbers: random.Random, others: list[bytes]) -> bytes:
    """Other bytes than `data`: a flipped bit, an end that is missing or torn, another record."""
    kind = numbers.randrange(5)
    at = numbers.randrange(len(data))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes(len(data) - at) if any(data[at:]) else data[:-1]
    other = numbers.choice(others) if others else data
    if kind == 2 and other != data:
        return other
    if kind == 3 and other[192:] != data[192:]:
        return data[:192] + other[192:]
    changed = bytearray(data)
    changed[at] ^= 1 << numbers.randrange(8)
    return bytes(changed)
