"""The interface of an eviction policy: it ranks the boundaries that are free to be evicted."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

from kvstore.eviction.prefixes import Key, Node
from kvstore.runtime.collector import let_go
from kvstore.runtime.split_dict import SplitDict

__all__ = ["FlopsPerByte", "FreeNodes", "Lru", "Policy", "PrefillCost", "S3Fifo"]


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
    def let_go(self) -> None:
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

    def let_go(self) -> None:
        """Drop all entries piece by piece."""
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
        for entry in first.values():  # `heapify` would stop all other threads until it has finished
            heapq.heappush(kept, entry)
        outdated, self._heap = self._heap, kept
        let_go(outdated, first)
        self._compact_at = 2 * len(kept) + _SLACK


class Lru(Policy):
    """Evicts the free boundary that was used longest ago.

    Works best when most of what is used again fits into the budget. With far less room, prompts that never return
    evict those that would have.
    """

    name: ClassVar[str] = "lru"

    def __init__(self) -> None:
        self._free = FreeNodes()

    def added(self, node: Node) -> None:
        node.queue = 0
        node.rank = node.last_use
        if node.num_holds == 0:
            self._free.push(node)

    def used(self, node: Node) -> None:
        node.rank = node.last_use
        if node.num_holds == 0:
            self._free.push(node)

    def freed(self, node: Node) -> None:
        self._free.push(node)

    def victim(self) -> Node | None:
        return self._free.pop()

    def let_go(self) -> None:
        self._free.let_go()


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """FLOPs of computing a span of a prompt.

    Attributes:
        per_token: Of the layers that process each token independently: twice the weights that are active per token.
        per_pair: Of attention, for each pair of a token and an earlier one.
    """

    per_token: float = 1.4e10
    per_pair: float = 5.2e5

    def span(self, start_tokens: int, stop_tokens: int) -> float:
        """FLOPs of the tokens from `start_tokens` to `stop_tokens`, given the KV of all before."""
        pairs = (stop_tokens * stop_tokens - start_tokens * start_tokens) / 2
        return self.per_token * (stop_tokens - start_tokens) + self.per_pair * pairs


class FlopsPerByte(Policy):
    """Evicts the free boundary that saves the fewest FLOPs per byte, weighted by recency and number of uses.

    Args:
        cost: What a span costs to compute; by default roughly that of a dense model of 7 billion weights.
    """

    name: ClassVar[str] = "flops_per_byte"

    def __init__(self, cost: PrefillCost | None = None) -> None:
        self._cost = cost or PrefillCost()
        self._free = FreeNodes()
        self._inflation = 0.0

    def added(self, node: Node) -> None:
        node.queue = 0
        self._rank(node)

    def used(self, node: Node) -> None:
        self._rank(node)

    def freed(self, node: Node) -> None:
        self._free.push(node)

    def victim(self) -> Node | None:
        node = self._free.pop()
        if node is not None:
            self._inflation = max(self._inflation, node.rank)
        return node

    def let_go(self) -> None:
        self._free.let_go()

    def _rank(self, node: Node) -> None:
        saved = self._cost.span(node.tokens - node.span_tokens, node.tokens)
        node.rank = self._inflation + saved * (1 + node.num_uses) / max(1, node.num_bytes)
        if node.num_holds == 0:
            self._free.push(node)


_SMALL, _MAIN = 0, 1
_SMALL_SHARE = 0.1
"""Share of the held bytes for the small queue; the paper's choice."""
_USES_MAX = 3
"""Uses that are counted per boundary, as in the paper: with more, what was once popular would stay too long."""


class S3Fifo(Policy):
    """New boundaries enter a small queue; only those used again while they are there move to the main queue.

    Keys evicted from the small queue are remembered (ghosts; at most as many as boundaries are held): when one is added
    again, it enters the main queue at once.
    """

    name: ClassVar[str] = "s3fifo"

    def __init__(self) -> None:
        self._queues = (FreeNodes(_SMALL), FreeNodes(_MAIN))
        self._bytes = [0, 0]
        self._num_held = 0
        self._uses: dict[Key, int] = {}  # since it was enqueued, at most `_USES_MAX`
        self._ghosts: OrderedDict[Key, None] = OrderedDict()
        self._places = count()

    def added(self, node: Node) -> None:
        is_known = node.key in self._ghosts
        if is_known:
            del self._ghosts[node.key]
        # a boundary taken over from another policy with several uses has proven itself already
        self._enqueue(node, _MAIN if is_known or node.num_uses > 1 else _SMALL)
        self._num_held += 1

    def used(self, node: Node) -> None:
        self._uses[node.key] = min(_USES_MAX, self._uses.get(node.key, 0) + 1)

    def freed(self, node: Node) -> None:
        self._queues[node.queue].push(node)

    def removed(self, node: Node) -> None:
        self._num_held -= 1
        self._bytes[node.queue] -= node.num_bytes
        self._uses.pop(node.key, None)
        if node.queue == _SMALL:
            self._ghosts[node.key] = None
        while len(self._ghosts) > self._num_held:
            self._ghosts.popitem(last=False)

    def victim(self) -> Node | None:
        while True:
            is_small_full = self._bytes[_SMALL] > _SMALL_SHARE * (self._bytes[_SMALL] + self._bytes[_MAIN])
            first, second = (_SMALL, _MAIN) if is_small_full else (_MAIN, _SMALL)
            node = self._queues[first].pop() or self._queues[second].pop()
            if node is None:
                return None
            uses = self._uses.get(node.key, 0)
            if node.queue == _SMALL and uses > 1:
                self._uses.pop(node.key)
            elif node.queue == _MAIN and uses > 0:
                self._uses[node.key] = uses - 1
            else:
                return node
            self._bytes[node.queue] -= node.num_bytes
            self._enqueue(node, _MAIN)

    def let_go(self) -> None:
        for queue in self._queues:
            queue.let_go()
        let_go(self._uses, self._ghosts)

    def _enqueue(self, node: Node, queue: int) -> None:
        node.queue = queue
        node.rank = next(self._places)
        self._bytes[queue] += node.num_bytes
        if node.num_holds == 0:
            self._queues[queue].push(node)
