"""Eviction policies: each ranks the boundaries that are free to be evicted."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from typing import ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.eviction.prefixes import Node
from kvstore.runtime.pauses import empty_in_pieces

Rank = float | tuple[int, float]
"""A plain rank, or one within a priority."""

Value = TypeVar("Value", float, npt.NDArray[np.float64])
"""Of one boundary, or of many: an array with one number each."""

_SLACK = 64
"""Heap entries below which a compaction is not worth its cost."""


class Policy(ABC):
    """Ranks the boundaries of one budget. Pure: no I/O, no clock, no randomness.

    The caller guarantees that `added` is a node's first call, that a node's parent is added before it, and that `used`
    is called for the longest prefix first, down to the first boundary of the prompt. The policy guarantees that the
    node from `victim` is held and free.
    """

    name: ClassVar[str]
    """As settings and reports spell it."""

    def __init__(self) -> None:
        self._free = FreeNodes()

    def added(self, node: Node) -> None:
        """A boundary is now held; it is free once `node.num_holds` is 0."""
        self._rank(node)

    def used(self, node: Node) -> None:
        """A lookup was served by this boundary; `num_uses` and `last_use` are updated already."""
        self._rank(node)

    def freed(self, node: Node) -> None:
        """The boundary has become free: `node.num_holds` is 0."""
        self._free.push(node)

    def marked(self, node: Node) -> None:  # noqa: B027 - most policies ignore hints
        """A hint has changed `node.priority`."""

    def victim(self) -> Node | None:
        """The boundary to evict next, which the policy no longer offers; `None`: nothing is free."""
        return self._free.pop()

    def discard(self) -> None:
        """Drop all state piece by piece, so that other threads are not stopped; the policy is unusable afterwards."""
        self._free.discard()

    def _rank(self, node: Node) -> None:
        node.rank = self.rank(node.tokens, node.span_tokens, node.num_bytes, node.num_uses, node.last_use)
        if node.num_holds == 0:
            self._free.push(node)

    @abstractmethod
    def rank(self, tokens: Value, span_tokens: Value, num_bytes: Value, num_uses: Value, last_use: Value) -> Value:
        """The rank of boundaries that are just added or used, from the attributes of a `Node`; the lowest is evicted
        first.
        """


class Lru(Policy):
    """Evicts the free boundary that was used longest ago.

    Works best when most boundaries that are used again fit into the budget. With far less room, prompts that never
    return evict those that would.
    """

    name: ClassVar[str] = "lru"

    def rank(self, tokens: Value, span_tokens: Value, num_bytes: Value, num_uses: Value, last_use: Value) -> Value:
        return last_use


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """FLOPs of computing a span of a prompt.

    Attributes:
        per_token: Of the layers that process each token independently: twice the weights that are active per token.
        per_pair: Of attention, for each pair of a token and an earlier one.
    """

    per_token: float = 1.4e10
    per_pair: float = 5.2e5

    def span(self, start_tokens: Value, stop_tokens: Value) -> Value:
        """FLOPs of the tokens from `start_tokens` to `stop_tokens`, given the KV of all tokens before."""
        pairs = (stop_tokens * stop_tokens - start_tokens * start_tokens) / 2
        return self.per_token * (stop_tokens - start_tokens) + self.per_pair * pairs


class FlopsPerByte(Policy):
    """Evicts the free boundary that saves the fewest FLOPs per byte, weighted by recency and number of uses.

    Follows Pan et al., "Marconi: Prefix Caching for the Era of Hybrid LLMs", MLSys 2025 (arXiv 2411.19379). They rank
    by recency plus the compute that a hit saves per stored byte, and tune the weight of the two by replaying recent
    requests. With recurrent layers this matters: a state takes the same bytes after ten tokens as after ten thousand.

    Here recency is an inflation term as in GreedyDual-Size (Cao and Irani, USITS 1997). It needs no weight and keeps
    each rank valid until the next use. A boundary's rank is its FLOPs per byte, times 1 + its uses, plus the highest
    rank evicted so far.

    Args:
        cost: The cost of a span; by default roughly that of a dense model of 7 billion weights.
    """

    name: ClassVar[str] = "flops_per_byte"

    def __init__(self, cost: PrefillCost | None = None) -> None:
        super().__init__()
        self._cost = cost or PrefillCost()
        self._inflation = 0.0

    def victim(self) -> Node | None:
        node = super().victim()
        if node is not None:
            self._inflation = max(self._inflation, node.rank)
        return node

    def rank(self, tokens: Value, span_tokens: Value, num_bytes: Value, num_uses: Value, last_use: Value) -> Value:
        saved = self._cost.span(tokens - span_tokens, tokens)
        rank: Value = self._inflation + saved * (1 + num_uses) / (num_bytes + (num_bytes == 0))
        return rank


class FreeNodes:
    """A priority queue of free boundaries, lowest rank first; of equal ranks, the one that was pushed first.

    Ranks change and boundaries stop being free far more often than one is evicted. So outdated entries stay in the heap
    until they are popped, or until they are most of it.

    Args:
        order: Ranks a boundary instead of `node.rank`.
    """

    def __init__(self, order: Callable[[Node], Rank] = attrgetter("rank")) -> None:
        self._order = order
        self._heap: list[tuple[Rank, int, Node]] = []
        self._arrivals = count()
        self._compact_at = _SLACK

    def push(self, node: Node) -> None:
        """Add a free boundary at its present rank."""
        heapq.heappush(self._heap, (self._order(node), next(self._arrivals), node))
        if len(self._heap) > self._compact_at:
            self._compact()

    def pop(self) -> Node | None:
        """Remove and return the lowest; `None`: nothing is free."""
        while self._heap:
            rank, _, node = heapq.heappop(self._heap)
            if self._is_current(rank, node):
                return node
        return None

    def discard(self) -> None:
        """Drop all entries piece by piece."""
        empty_in_pieces(self._heap)

    def _compact(self) -> None:
        first: dict[int, tuple[Rank, int, Node]] = {}
        for entry in self._heap:
            rank, arrival, node = entry
            if self._is_current(rank, node):
                known = first.get(id(node))
                if known is None or arrival < known[1]:
                    first[id(node)] = entry
        kept = list(first.values())
        heapq.heapify(kept)
        self._heap = kept
        self._compact_at = 2 * len(kept) + _SLACK

    def _is_current(self, rank: Rank, node: Node) -> bool:
        return node.is_held and node.num_holds == 0 and self._order(node) == rank
