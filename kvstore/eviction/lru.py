"""Least recently used, longest prefixes first."""

from __future__ import annotations

from typing import ClassVar

from kvstore.eviction.base import FreeNodes, Policy
from kvstore.eviction.prefixes import Node

__all__ = ["Lru"]


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

    def empty_in_pieces(self) -> None:
        self._free.empty_in_pieces()
