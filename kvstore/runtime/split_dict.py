"""A large dict that does not stop other threads when it grows."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from itertools import chain
from typing import TypeVar

__all__ = ["SplitDict"]

K = TypeVar("K", bound=bytes | int)
V = TypeVar("V")

_PARTS = 61
"""A prime, since integer keys (object addresses, counters) share low bits. Keys of bytes end in bytes of a digest."""


class SplitDict(MutableMapping[K, V]):
    """A mapping spread over 61 dicts. A dict that grows moves all its keys in one step, during which no other thread
    runs Python code; here a step moves one part. Slower than a dict. Iteration is not in insertion order, but in the
    same order in every process.
    """

    def __init__(self) -> None:
        self._parts: tuple[dict[K, V], ...] = tuple({} for _ in range(_PARTS))

    def _part(self, key: K) -> dict[K, V]:
        return self._parts[(key if isinstance(key, int) else key[-1]) % _PARTS]

    def __getitem__(self, key: K) -> V:
        return self._part(key)[key]

    def __setitem__(self, key: K, value: V) -> None:
        self._part(key)[key] = value

    def __delitem__(self, key: K) -> None:
        del self._part(key)[key]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes | int) and key in self._parts[(key if isinstance(key, int) else key[-1]) % _PARTS]

    def __iter__(self) -> Iterator[K]:
        return chain.from_iterable(self._parts)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __bool__(self) -> bool:
        return any(self._parts)

    def setdefault(self, key: K, default: V) -> V:
        return self._part(key).setdefault(key, default)

    def popitem(self) -> tuple[K, V]:
        for part in reversed(self._parts):
            if part:
                return part.popitem()
        raise KeyError("nothing is left")
