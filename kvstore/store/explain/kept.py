"""Mappings of what peers report: bounded in number and bytes, each and all together; the oldest leave.

`kvstore.runtime.budget` bounds what must stay until its holder gives it back: it refuses, or lets its callers wait.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Generic, TypeVar

from kvstore.model.outcome import Outcome

Key = TypeVar("Key")
Value = TypeVar("Value")

ENTRY_BYTES = 768
"""About what a report takes without its texts."""


class Room:
    """The bytes that several `Kept` may take together. Beyond, the one that takes most loses its oldest entry."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.used_bytes = 0
        self.all: list[Kept[object, object]] = []

    def make_room(self) -> None:
        """Drop entries until the rest fits."""
        while self.used_bytes > self.bytes_max:
            max(self.all, key=lambda kept: kept.used_bytes).drop_oldest()


class Kept(Generic[Key, Value]):
    """The latest entries by key. Belongs to one event loop.

    Args:
        room: Shared with others.
        most: How many.
        bytes_max: How many bytes in all.
    """

    def __init__(self, room: Room, most: int, bytes_max: int) -> None:
        self.entries: OrderedDict[Key, Value] = OrderedDict()
        self.used_bytes = 0
        self._sizes: dict[Key, int] = {}
        self._room = room
        self._most = most
        self._bytes_max = bytes_max
        room.all.append(self)  # type: ignore[arg-type]

    def put(self, key: Key, value: Value, num_bytes: int) -> None:
        """Keep an entry, in place of an earlier one with this key."""
        if key in self.entries:
            self._drop(key)
        self.entries[key] = value
        self._sizes[key] = num_bytes
        self._add(num_bytes)
        while len(self.entries) > self._most or self.used_bytes > self._bytes_max:
            self.drop_oldest()
        self._room.make_room()

    def drop_oldest(self) -> None:
        """Drop the entry that was put first."""
        self._drop(next(iter(self.entries)))

    def _drop(self, key: Key) -> None:
        del self.entries[key]
        self._add(-self._sizes.pop(key))

    def _add(self, num_bytes: int) -> None:
        self.used_bytes += num_bytes
        self._room.used_bytes += num_bytes


def bytes_of(outcome: Outcome) -> int:
    """About the memory that a report takes."""
    texts = [outcome.request, outcome.reason, *outcome.detail, *outcome.detail.values()]
    return ENTRY_BYTES + sum(map(sys.getsizeof, texts))
