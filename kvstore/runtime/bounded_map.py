"""Mappings with a limit for each, and one for all together: when a limit is reached, the oldest entry is dropped.

`kvstore.runtime.budget` bounds what must stay until its holder gives it back: it refuses, or lets its callers wait.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Latest(OrderedDict[Key, Value]):
    """The entries that were set last, in that order.

    Attributes:
        most: How many.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.most:
            del self[next(iter(self))]


class SharedRoom:
    """The bytes that several maps may take together. Beyond, the one that takes most loses its oldest entry."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.used_bytes = 0
        self.all: list[BoundedMap[object, object]] = []

    def make_room(self) -> None:
        """Drop entries until the rest fits."""
        while self.used_bytes > self.bytes_max:
            max(self.all, key=lambda one: one.used_bytes).drop_oldest()


class BoundedMap(Generic[Key, Value]):
    """The latest entries by key. Belongs to one event loop.

    Args:
        room: Shared with others.
        most: How many.
        bytes_max: How many bytes in all.
    """

    def __init__(self, room: SharedRoom, most: int, bytes_max: int) -> None:
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


def starting_with(kept: BoundedMap[str, Value], start: str) -> list[Value]:
    """The entry under exactly this key; where there is none, those whose keys start with it."""
    if start in kept.entries:
        return [kept.entries[start]]
    return [value for key, value in kept.entries.items() if key.startswith(start)]
