"""The interface of an eviction policy: it ranks the boundaries that are free to be evicted."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from itertools import count
from typing import ClassVar

from kvstore.eviction.prefixes import Node
from kvstore.runtime.pauses import SplitDict, empty_in_pieces

__all__ = ["FreeNodes", "Policy"]

_SLACK = 64
"""Heap entries below which a compaction is not worth its cost."""


class Policy(ABC):
    """Ranks the boundaries of one budget. Pure: no I/O, no clock, no randomness.

    The caller guarantees that `added` is a node's first call and `removed` its last, that a node's parent is added
    before it, and that `used` is called for the longest prefix first, down to the first boundary of the prompt. The
    policy guarantees that what `victim` returns is held and free.
    """

    name: ClassVar[str]
    """As settings and reports spell it."""

    @abstractmethod
    def added(self, node: Node) -> None:
        """A boundary is now held; it is free once `node.num_holds` is 0."""

    @abstractmethod
    def used(self, node: Node) -> None:
        """A lookup was served by this boundary; `num_uses` and `last_use` are updated already."""

    @abstractmethod
    def freed(self, node: Node) -> None:
        """The boundary has become free: `node.num_holds` is 0."""

    def removed(self, node: Node) -> None:  # noqa: B027 - most policies keep nothing of removed boundaries
        """The boundary is no longer held, whether `victim` chose it or it was removed for another reason."""

    @abstractmethod
    def victim(self) -> Node | None:
        """The boundary to evict next, which the policy no longer offers; `None`: nothing is free."""

    @abstractmethod
    def empty_in_pieces(self) -> None:
        """Drop all state piece by piece, so that other threads are not stopped; the policy is unusable afterwards."""


class FreeNodes:
    """A priority queue of free boundaries, lowest rank first; of equal ranks, the one that was pushed first.

    Ranks change and boundaries stop being free far more often than one is evicted. So outdated entries stay in the heap
    until they are popped, or until they are most of it.
    """

    def __init__(self, queue: int = 0) -> None:
        self._queue = queue
        self._heap: list[tuple[float, int, Node]] = []
        self._arrivals = count()
        self._compact_at = _SLACK

    def push(self, node: Node) -> None:
        """Add a free boundary at its present rank."""
        heapq.heappush(self._heap, (node.rank, next(self._arrivals), node))
        if len(self._heap) > self._compact_at:
            self._compact()

    def pop(self) -> Node | None:
        """Remove and return the lowest; `None`: nothing is free."""
        while self._heap:
            rank, _, node = heapq.heappop(self._heap)
            if self._is_current(rank, node):
                return node
        return None

    def empty_in_pieces(self) -> None:
        """Drop all entries piece by piece."""
        empty_in_pieces(self._heap)

    def _is_current(self, rank: float, node: Node) -> bool:
        return node.is_held and node.num_holds == 0 and node.rank == rank and node.queue == self._queue

    def _compact(self) -> None:
        first: SplitDict[int, tuple[float, int, Node]] = SplitDict()
        for entry in self._heap:
            rank, arrival, node = entry
            if self._is_current(rank, node):
                known = first.get(id(node))
                if known is None or arrival < known[1]:
                    first[id(node)] = entry
        kept: list[tuple[float, int, Node]] = []
        for entry in first.values():  # `heapify` would stop all other threads until it has finished
            heapq.heappush(kept, entry)
        outdated, self._heap = self._heap, kept
        empty_in_pieces(outdated, first)
        self._compact_at = 2 * len(kept) + _SLACK
