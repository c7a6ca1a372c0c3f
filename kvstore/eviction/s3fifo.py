"""S3-FIFO: three first-in-first-out queues that let what is used once leave quickly.

Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. The paper's queues hold objects that leave
alone; here only free boundaries leave, so a queue's head is its first *free* boundary.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import count
from typing import ClassVar

from kvstore.eviction.base import FreeNodes, Policy
from kvstore.eviction.prefixes import Key, Node
from kvstore.runtime.collector import let_go

__all__ = ["S3Fifo"]

_SMALL, _MAIN = 0, 1
_SMALL_SHARE = 0.1
"""Of the bytes held, for newcomers; the paper's choice."""
_USES_MAX = 3
"""Counted per boundary, as in the paper: more would keep what was popular once."""


class S3Fifo(Policy):
    """Newcomers wait in a small queue, and only those used meanwhile move to the main one.

    What left the small queue is remembered by name (as many as are held): when it comes again it goes to the main
    queue at once.
    """

    name: ClassVar[str] = "s3fifo"

    def __init__(self) -> None:
        self._queues = (FreeNodes(_SMALL), FreeNodes(_MAIN))
        self._bytes = [0, 0]
        self._num_held = 0
        self._uses: dict[Key, int] = {}  # since it came to its place in the queue
        self._ghosts: OrderedDict[Key, None] = OrderedDict()
        self._places = count()

    def came(self, node: Node) -> None:
        is_known = node.key in self._ghosts
        if is_known:
            del self._ghosts[node.key]
        # what is handed over by another policy with uses to its name has passed the small queue's test
        self._enqueue(node, _MAIN if is_known or node.num_uses > 1 else _SMALL)
        self._num_held += 1

    def used(self, node: Node) -> None:
        self._uses[node.key] = min(_USES_MAX, self._uses.get(node.key, 0) + 1)

    def freed(self, node: Node) -> None:
        self._queues[node.queue].push(node)

    def left(self, node: Node) -> None:
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
