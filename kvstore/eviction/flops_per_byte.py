"""Saved prefill FLOPs per stored byte, weighted by recency.

Pan et al., "Marconi: Prefix Caching for the Era of Hybrid LLMs", MLSys 2025 (arXiv 2411.19379), rank what to evict by
recency plus the compute that a hit saves per stored byte: with recurrent layers a state takes the same bytes after ten
tokens as after ten thousand. They tune the weight of the two by replaying recent requests on a grid. Here recency is an
inflation term as in GreedyDual-Size (Cao and Irani, USITS 1997), which needs no weight and keeps each rank valid until
the next use: a boundary's rank is its FLOPs per byte, times 1 + its uses, plus the highest rank evicted so far.
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

    def empty_in_pieces(self) -> None:
        self._free.empty_in_pieces()

    def _rank(self, node: Node) -> None:
        saved = self._cost.span(node.tokens - node.span_tokens, node.tokens)
        node.rank = self._inflation + saved * (1 + node.num_uses) / max(1, node.num_bytes)
        if node.num_holds == 0:
            self._free.push(node)
