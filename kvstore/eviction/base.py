"""What a policy is: an order in which free boundaries leave."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from itertools import count
from typing import ClassVar

from kvstore.eviction.prefixes import Node
from kvstore.runtime.collector import let_go
from kvstore.runtime.split_dict import SplitDict

__all__ = ["FreeNodes", "Policy"]

_SLACK = 64


class Policy(ABC):
    """Ranks the boundaries of one budget. Pure: no I/O, no clock, no randomness.

    The caller guarantees that `came` is a node's first call and `left` its last, that a node's parent came before it,
    and that `used` is called for the longest prefix first, down to the first boundary of the prompt. The policy
    guarantees that what `victim` returns is held and free.
    """

    name: ClassVar[str]
    """As settings and reports spell it."""

    @abstractmethod
    def came(self, node: Node) -> None:
        """A boundary is now held; `node.is_free` says whether it may leave."""

    @abstractmethod
    def used(self, node: Node) -> None:
        """A lookup was served by this boundary; `num_uses` and `last_use` say so already."""

    @abstractmethod
    def freed(self, node: Node) -> None:
        """Nothing hangs on this boundary any more."""

    def left(self, node: Node) -> None:  # noqa: B027 - most policies keep nothing of what left
        """The boundary is held no longer, whether it was chosen here or left for another reason."""

    @abstractmethod
    def victim(self) -> Node | None:
        """The boundary to evict next, which is then forgotten here; `None`: nothing is free."""

    @abstractmethod
    def let_go(self) -> None:
        """Forget all, piece by piece, so that other threads go on meanwhile; of no use afterwards."""


class FreeNodes:
    """The free boundaries of one queue, lowest rank first; of equal ranks, whichever was put there first.

    Ranks change and boundaries stop being free far more often than one leaves, so what is outdated stays until it
    comes up, or until it is most of what is here.
    """

    def __init__(self, queue: int = 0) -> None:
        self._queue = queue
        self._heap: list[tuple[float, int, Node]] = []
        self._arrivals = count()
        self._compact_at = _SLACK

    def push(self, node: Node) -> None:
        """Offer a free boundary at its present rank."""
        heapq.heappush(self._heap, (node.rank, next(self._arrivals), node))
        if len(self._heap) > self._compact_at:
            self._compact()

    def pop(self) -> Node | None:
        """Take the lowest; `None`: nothing is free."""
        while self._heap:
            rank, _, node = heapq.heappop(self._heap)
            if self._is_current(rank, node):
                return node
        return None

    def let_go(self) -> None:
        """Forget all, piece by piece."""
        let_go(self._heap)

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
        for entry in first.values():  # not in one step, for which all other threads would stop
            heapq.heappush(kept, entry)
        outdated, self._heap = self._heap, kept
        let_go(outdated, first)
        self._compact_at = 2 * len(kept) + _SLACK
