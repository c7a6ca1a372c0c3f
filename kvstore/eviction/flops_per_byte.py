"""Saved prefill FLOPs per stored byte, weighted by recency.

Pan et al., "Marconi: Prefix Caching for the Era of Hybrid LLMs", MLSys 2025 (arXiv 2411.19379), rank what to evict by
recency plus the compute that a hit saves per byte that it occupies: with recurrent layers a state costs the same bytes
behind ten tokens as behind ten thousand. They tune the weight of the two by replaying recent requests on a grid; here
recency is an inflation, as in GreedyDual-Size (Cao and Irani, USITS 1997), which needs no weight and keeps each rank
valid until the next use: a boundary's rank is its FLOPs per byte, once for each use, plus the rank of the last
boundary that left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvstore.eviction.base import FreeNodes, Policy
from kvstore.eviction.prefixes import Node

__all__ = ["FlopsPerByte", "PrefillCost"]


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """FLOPs of computing a span of a prompt.

    Attributes:
        per_token: Of the layers that work on each token alone: twice the weights that a token passes.
        per_pair: Of attention, for each pair of a token with one before it.
    """

    per_token: float = 1.4e10
    per_pair: float = 5.2e5

    def span(self, start_tokens: int, stop_tokens: int) -> float:
        """FLOPs of the tokens from `start_tokens` to `stop_tokens`, given all before."""
        pairs = (stop_tokens * stop_tokens - start_tokens * start_tokens) / 2
        return self.per_token * (stop_tokens - start_tokens) + self.per_pair * pairs


class FlopsPerByte(Policy):
    """Evicts the free boundary that saved least per byte and longest ago.

    Args:
        cost: What a span costs to compute; by default about that of a dense model of 7 billion weights.
    """

    name: ClassVar[str] = "flops_per_byte"

    def __init__(self, cost: PrefillCost | None = None) -> None:
        self._cost = cost or PrefillCost()
        self._free = FreeNodes()
        self._level = 0.0

    def came(self, node: Node) -> None:
        node.queue = 0
        self._rank(node)

    def used(self, node: Node) -> None:
        self._rank(node)

    def freed(self, node: Node) -> None:
        self._free.push(node)

    def victim(self) -> Node | None:
        node = self._free.pop()
        if node is not None:
            self._level = max(self._level, node.rank)
        return node

    def let_go(self) -> None:
        self._free.let_go()

    def _rank(self, node: Node) -> None:
        saved = self._cost.span(node.tokens - node.span_tokens, node.tokens)
        node.rank = self._level + saved * (1 + node.num_uses) / max(1, node.num_bytes)
        if node.num_holds == 0:
            self._free.push(node)
