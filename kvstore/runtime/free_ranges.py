"""A free list: which ranges of a piece of memory are free. Pure; the memory itself is its user's."""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ["FreeRanges"]


class FreeRanges:
    """Allocates ranges by best fit, and joins what is given back with its free neighbours. Not thread-safe.

    Best fit tends to use memory again that was used before, which is resident.

    Args:
        capacity_bytes: Size of the memory.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._sizes: list[tuple[int, int]] = []  # (bytes, start), ascending
        self._starts: dict[int, int] = {}  # start to bytes
        self._stops: dict[int, int] = {}  # stop to start
        if capacity_bytes:
            self._list(0, capacity_bytes)

    def take(self, num_bytes: int) -> int | None:
        """Where a range of `num_bytes` (at least 1) starts; `None`: no free range is large enough."""
        index = bisect_left(self._sizes, (num_bytes, 0))
        if index == len(self._sizes):
            return None
        size, start = self._sizes[index]
        self._unlist(start, size)
        if size > num_bytes:
            self._list(start + num_bytes, size - num_bytes)
        return start

    def give(self, start: int, num_bytes: int) -> None:
        """Take back a range that `take` returned."""
        stop = start + num_bytes
        if (before := self._stops.get(start)) is not None:
            self._unlist(before, start - before)
            start = before
        if (after_bytes := self._starts.get(stop)) is not None:
            self._unlist(stop, after_bytes)
            stop += after_bytes
        self._list(start, stop - start)

    @property
    def free_bytes(self) -> int:
        """Bytes of all free ranges."""
        return sum(self._starts.values())

    def _list(self, start: int, size: int) -> None:
        insort(self._sizes, (size, start))
        self._starts[start] = size
        self._stops[start + size] = start

    def _unlist(self, start: int, size: int) -> None:
        del self._sizes[bisect_left(self._sizes, (size, start))]
        del self._starts[start]
        del self._stops[start + size]
