"""S3-FIFO: three FIFO queues that evict quickly what is used only once.

Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. In the paper any object may be evicted; here
only free boundaries may, so a queue's head is its first *free* boundary.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import count
from typing import ClassVar

from kvstore.eviction.base import FreeNodes, Policy
from kvstore.eviction.prefixes import Key, Node
from kvstore.runtime.pauses import empty_in_pieces

__all__ = ["S3Fifo"]

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

    def empty_in_pieces(self) -> None:
        for queue in self._queues:
            queue.empty_in_pieces()
        empty_in_pieces(self._uses, self._ghosts)

    def _enqueue(self, node: Node, queue: int) -> None:
        node.queue = queue
        node.rank = next(self._places)
        self._bytes[queue] += node.num_bytes
        if node.num_holds == 0:
            self._queues[queue].push(node)
