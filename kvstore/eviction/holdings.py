"""The held boundaries under one budget: their prefix tree, policies and quotas, and their eviction to make room."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvstore.eviction.policies import Policy
from kvstore.eviction.prefixes import NORMAL, Key, Node
from kvstore.runtime.pauses import empty_in_pieces

SHARED = 0
"""The pool of all tenants without a quota."""


@dataclass(frozen=True, slots=True)
class Quota:
    """The share of one tenant.

    Attributes:
        guaranteed_bytes: While it holds no more than these, none of it is evicted for other tenants.
        maximum_bytes: Beyond these it evicts its own boundaries, and is the first to be evicted for others; `None`: no
            limit of its own.
    """

    guaranteed_bytes: int = 0
    maximum_bytes: int | None = None


@dataclass(slots=True)
class Pool:
    """The boundaries that count against one quota, and their order of eviction.

    Attributes:
        policy: Ranks them.
        quota: Their guarantee and maximum.
        used_bytes: Bytes of their records here.
        elsewhere_bytes: Bytes that count against the quota but are held, and evicted, elsewhere.
    """

    policy: Policy
    quota: Quota = Quota()
    used_bytes: int = 0
    elsewhere_bytes: int = 0

    @property
    def over_guarantee_bytes(self) -> int:
        return self.used_bytes + self.elsewhere_bytes - self.quota.guaranteed_bytes

    @property
    def turn(self) -> tuple[bool, int]:
        """Of pools that may give, the lowest gives first."""
        return not self.is_over_maximum(), -self.over_guarantee_bytes

    def is_over_maximum(self, need_bytes: int = 0) -> bool:
        """Whether the pool would be over its maximum with `need_bytes` more."""
        maximum = self.quota.maximum_bytes
        return maximum is not None and self.used_bytes + self.elsewhere_bytes + need_bytes > maximum


class Holdings:
    """The boundaries that are held, under one budget and the quotas of some tenants.

    A tenant takes at most its maximum, and nothing within its guarantee is evicted for others.

    Args:
        budget_bytes: Limit of all boundaries together.
        make_policy: Makes a new policy; each pool has its own.
    """

    def __init__(self, budget_bytes: int, make_policy: Callable[[], Policy]) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._make_policy = make_policy
        self._nodes: dict[Key, Node] = {}
        self._pools: dict[int, Pool] = {SHARED: Pool(make_policy())}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: Key) -> bool:
        return key in self._nodes

    def discard(self) -> None:
        """Drop all state piece by piece, so that other threads are not stopped; unusable afterwards."""
        for pool in self._pools.values():
            pool.policy.discard()
        empty_in_pieces(self._nodes)

    def get(self, key: Key) -> Node | None:
        return self._nodes.get(key)

    def nodes(self) -> Iterator[Node]:
        """All held boundaries, in the order in which they were added."""
        return iter(self._nodes.values())

    def pool(self, index: int) -> Pool:
        """The pool of that index; created when it does not exist."""
        pool = self._pools.get(index)
        if pool is None:
            pool = self._pools[index] = Pool(self._make_policy())
        return pool

    def use_policy(self, make_policy: Callable[[], Policy]) -> None:
        """Rank with another policy from now on; every held boundary is added to it, the least recently used first."""
        self._make_policy = make_policy
        for pool in self._pools.values():
            pool.policy = make_policy()
        # the sort is stable: of boundaries that were used together, parents still come before their children
        for node in sorted(self._nodes.values(), key=lambda node: node.last_use):
            self._pools[node.pool].policy.added(node)

    def leading(self, path: Sequence[Key]) -> int:
        """How many of a prompt's boundaries, from its start, are held."""
        held = 0
        for key in path:
            if key not in self._nodes:
                break
            held += 1
        return held

    def use(self, path: Sequence[Key], now: float) -> None:
        """Record that a lookup was served by these boundaries, ascending; those not held are skipped."""
        for key in reversed(path):
            node = self._nodes.get(key)
            if node is not None:
                node.num_uses += 1
                node.last_use = now
                node.priority = NORMAL  # what a hint expected has happened, or will not
                self._pools[node.pool].policy.used(node)

    def add(
        self,
        key: Key,
        parent: Key | None,
        *,
        tokens: int,
        num_bytes: int,
        now: float,
        num_uses: int = 0,
        pool: int = SHARED,
        owner: str = "",
    ) -> Node:
        """Hold a boundary that was not held, without a check of the budget."""
        assert key not in self._nodes
        parent_node = self._nodes.get(parent) if parent is not None else None
        node = Node(key, parent_node, tokens=tokens, num_bytes=num_bytes, pool=pool, last_use=now, owner=owner)
        node.num_uses = num_uses
        if parent_node is not None:
            parent_node.num_holds += 1
        self._nodes[key] = node
        self.used_bytes += num_bytes
        of_pool = self.pool(pool)
        of_pool.used_bytes += num_bytes
        of_pool.policy.added(node)
        return node

    def mark(self, node: Node, priority: int) -> None:
        """Give a held boundary another priority, until it is used."""
        node.priority = priority
        self._pools[node.pool].policy.marked(node)

    def pin(self, node: Node) -> None:
        """Keep a boundary, and so its parents, until it was unpinned as often as it was pinned."""
        node.num_holds += 1

    def unpin(self, node: Node) -> None:
        node.num_holds -= 1
        if node.num_holds == 0 and node.is_held:
            self._pools[node.pool].policy.freed(node)

    def remove(self, node: Node) -> None:
        """Stop holding a boundary. Its children stay, though no lookup can use them, and are evicted in their turn."""
        del self._nodes[node.key]
        node.is_held = False
        self.used_bytes -= node.num_bytes
        pool = self._pools[node.pool]
        pool.used_bytes -= node.num_bytes
        if node.parent is not None:
            self.unpin(node.parent)

    def evict(self, need_bytes: int, pool: int = SHARED) -> list[Node]:
        """Make room for `need_bytes` in one pool; returns the evicted boundaries in order, each before its parent.

        Evicts less when nothing more is free: the caller checks `fits`.
        """
        evicted: list[Node] = []
        of_pool = self.pool(pool)
        while of_pool.is_over_maximum(need_bytes) and (node := of_pool.policy.victim()) is not None:
            self.remove(node)
            evicted.append(node)
        victims = self._victims(of_pool)
        while self.used_bytes + need_bytes > self.budget_bytes and (node := next(victims, None)) is not None:
            self.remove(node)
            evicted.append(node)
        return evicted

    def expire(self, before: float) -> list[Node]:
        """Remove boundaries that were last used before a time, as `drop` does."""
        return self.drop(lambda node: node.last_use < before)

    def drop(self, leaves: Callable[[Node], bool]) -> list[Node]:
        """Remove the boundaries for which `leaves` is true, except those with a pin or a child that stays; returns
        them in order, each before its parent.
        """
        waiting = [node for node in self._nodes.values() if node.num_holds == 0 and leaves(node)]
        dropped: list[Node] = []
        while waiting:
            node = waiting.pop()
            self.remove(node)
            dropped.append(node)
            parent = node.parent
            if parent is not None and parent.is_held and parent.num_holds == 0 and leaves(parent):
                waiting.append(parent)
        return dropped

    def fits(self, num_bytes: int, pool: int = SHARED) -> bool:
        """Whether `num_bytes` more in one pool are within the budget and the pool's maximum."""
        return self.used_bytes + num_bytes <= self.budget_bytes and not self.pool(pool).is_over_maximum(num_bytes)

    def _victims(self, needing: Pool) -> Iterator[Node]:
        """Boundaries to evict for `needing`, each removed before the next one is asked for: first of pools over their
        maximum, then of the pool furthest over its guarantee, last of `needing` itself. A pool within its guarantee
        gives nothing to others.
        """
        giving = [(pool.turn, index, pool) for index, pool in self._pools.items() if pool.over_guarantee_bytes > 0]
        heapq.heapify(giving)
        while giving:
            _, index, pool = heapq.heappop(giving)
            if (node := pool.policy.victim()) is not None:
                yield node
                if pool.over_guarantee_bytes > 0:  # a pool's turn changes only when it gives
                    heapq.heappush(giving, (pool.turn, index, pool))
        while (node := needing.policy.victim()) is not None:
            yield node
