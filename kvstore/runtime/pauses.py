"""Avoids pauses of all threads: by the cyclic collector, by deallocation, by a dict that grows."""

from __future__ import annotations

import gc
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar

_AT_ONCE = 512

_num_paused = 0
_was_on = True


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disable the cyclic collector of the whole process inside the block: with a million live objects each collection
    stops all threads noticeably. Use it on the event loop, for seconds, around work that makes no cycles. Nests.
    """
    global _num_paused, _was_on
    if _num_paused == 0:
        _was_on = gc.isenabled()
    _num_paused += 1
    gc.disable()
    try:
        yield
    finally:
        _num_paused -= 1
        if _num_paused == 0 and _was_on:
            gc.enable()


@contextmanager
def collector_spared() -> Iterator[None]:
    """Exempt all objects that exist now from collection inside the block, in the whole process: objects that were made
    while the collector was paused would otherwise all be searched in the first collection after it resumes.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def age_objects() -> None:
    """Move all objects of the process to the collector's oldest generation. At the end of a block of `collector_paused`
    it has the objects that were made there searched by the next full collection, instead of all at once by the next
    allocation, which stops all threads. Takes microseconds, however many objects there are. It ends what
    `collector_spared` does early, which costs time and nothing else.
    """
    gc.freeze()
    gc.unfreeze()


def empty_in_pieces(*containers: list[Any] | MutableMapping[Any, Any]) -> None:
    """Empty large containers piece by piece: dropped whole, they would stop all threads until all objects are gone."""
    for container in containers:
        if isinstance(container, list):
            while container:
                del container[-_AT_ONCE:]
        else:
            while container:
                container.popitem()


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
