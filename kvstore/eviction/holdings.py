"""What is held under a budget: the forest, its policy, and who leaves when room is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass

from kvstore.eviction.base import Policy
from kvstore.eviction.prefixes import Key, Node
from kvstore.runtime.collector import let_go

__all__ = ["Holdings", "Pool", "Quota"]

SHARED = 0
"""The pool of all tenants without a quota."""


@dataclass(frozen=True, slots=True)
class Quota:
    """What one tenant gets.

    Attributes:
        guaranteed_bytes: Within these nothing of it leaves on behalf of others.
        maximum_bytes: Beyond these it evicts its own, and leaves before all others; `None`: no limit of its own.
    """

    guaranteed_bytes: int = 0
    maximum_bytes: int | None = None


@dataclass(slots=True)
class Pool:
    """Boundaries that count against one budget, and the order in which they leave.

    Attributes:
        policy: Ranks them.
        quota: What they may take, and what is kept for them.
        used_bytes: What they take.
        elsewhere_bytes: What they take beside these, where somebody else decides.
    """

    policy: Policy
    quota: Quota = Quota()
    used_bytes: int = 0
    elsewhere_bytes: int = 0

    @property
    def over_guarantee_bytes(self) -> int:
        return self.used_bytes + self.elsewhere_bytes - self.quota.guaranteed_bytes

    def is_over_maximum(self, need_bytes: int = 0) -> bool:
        """Whether it would be, with so much more."""
        maximum = self.quota.maximum_bytes
        return maximum is not None and self.used_bytes + self.elsewhere_bytes + need_bytes > maximum


class Holdings:
    """The boundaries that are held, under one budget and the quotas of some tenants.

    A tenant takes at most its maximum, and within what is guaranteed to it nothing leaves for others' needs.

    Args:
        budget_bytes: What all boundaries may take together.
        make_policy: A fresh policy; each pool has its own.
        nodes: Where to keep what is held; an empty one. By default a dict.
    """

    def __init__(
        self, budget_bytes: int, make_policy: Callable[[], Policy], nodes: MutableMapping[Key, Node] | None = None
    ) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._make_policy = make_policy
        self._nodes: MutableMapping[Key, Node] = {} if nodes is None else nodes
        self._pools: dict[int, Pool] = {SHARED: Pool(make_policy())}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: Key) -> bool:
        return key in self._nodes

    def let_go(self) -> None:
        """Forget all, piece by piece, so that other threads go on meanwhile; of no use afterwards."""
        for pool in self._pools.values():
            pool.policy.let_go()
        let_go(self._nodes)

    def get(self, key: Key) -> Node | None:
        return self._nodes.get(key)

    def nodes(self) -> Iterator[Node]:
        """All that is held; in a dict, parents before what hangs on them where both came in that order."""
        return iter(self._nodes.values())

    def pool(self, index: int) -> Pool:
        """The pool of that index, made when it is new."""
        room = self._pools.get(index)
        if room is None:
            room = self._pools[index] = Pool(self._make_policy())
        return room

    def use_policy(self, make_policy: Callable[[], Policy]) -> None:
        """Rank with another policy from now on; it is told of all that is held, longest unused first."""
        self._make_policy = make_policy
        for pool in self._pools.values():
            pool.policy = make_policy()
        # a stable sort: of one prompt's boundaries, parents still come before what hangs on them
        for node in sorted(self._nodes.values(), key=lambda node: node.last_use):
            self._pools[node.pool].policy.came(node)

    def leading(self, path: Sequence[Key]) -> int:
        """How many of a prompt's boundaries, from its start, are held."""
        held = 0
        for key in path:
            if key not in self._nodes:
                break
            held += 1
        return held

    def use(self, path: Sequence[Key], now: float) -> None:
        """A lookup was served by these boundaries, ascending; those not held are passed over."""
        for key in reversed(path):
            node = self._nodes.get(key)
            if node is not None:
                node.num_uses += 1
                node.last_use = now
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
    ) -> Node:
        """Hold a boundary that was not held, whatever the budget says."""
        assert key not in self._nodes
        below = self._nodes.get(parent) if parent is not None else None
        node = Node(key, below, tokens=tokens, num_bytes=num_bytes, pool=pool, last_use=now)
        node.num_uses = num_uses
        if below is not None:
            below.num_holds += 1
        self._nodes[key] = node
        self.used_bytes += num_bytes
        room = self.pool(pool)
        room.used_bytes += num_bytes
        room.policy.came(node)
        return node

    def pin(self, node: Node) -> None:
        """Keep a boundary and all below it until `unpin`, as often as it was pinned."""
        node.num_holds += 1

    def unpin(self, node: Node) -> None:
        self._release(node)

    def remove(self, node: Node) -> None:
        """A boundary is held no longer. What hangs on it stays, as the start of nothing, and is evicted in its turn."""
        del self._nodes[node.key]
        node.is_held = False
        self.used_bytes -= node.num_bytes
        room = self._pools[node.pool]
        room.used_bytes -= node.num_bytes
        room.policy.left(node)
        if node.parent is not None:
            self._release(node.parent)

    def _release(self, node: Node) -> None:
        node.num_holds -= 1
        if node.num_holds == 0 and node.is_held:
            self._pools[node.pool].policy.freed(node)

    def evict(self, need_bytes: int, pool: int = SHARED) -> list[Node]:
        """Make room for `need_bytes` of one pool: returns what left, in order, each before the boundary below it.

        Less than asked for when nothing more is free: the caller looks at `fits`.
        """
        gone: list[Node] = []
        room = self.pool(pool)
        while room.is_over_maximum(need_bytes) and (node := room.policy.victim()) is not None:
            self.remove(node)
            gone.append(node)
        while self.used_bytes + need_bytes > self.budget_bytes and (node := self._next_victim(room)) is not None:
            self.remove(node)
            gone.append(node)
        return gone

    def expire(self, before: float) -> list[Node]:
        """What was last used before a time leaves, as `drop` does it."""
        return self.drop(lambda node: node.last_use < before)

    def drop(self, leaves: Callable[[Node], bool]) -> list[Node]:
        """What `leaves` says leaves, unless something else hangs on it: returns it in order, each before the boundary
        below it.
        """
        waiting = [node for node in self._nodes.values() if node.num_holds == 0 and leaves(node)]
        gone: list[Node] = []
        while waiting:
            node = waiting.pop()
            self.remove(node)
            gone.append(node)
            below = node.parent
            if below is not None and below.is_held and below.num_holds == 0 and leaves(below):
                waiting.append(below)
        return gone

    def fits(self, num_bytes: int, pool: int = SHARED) -> bool:
        """Whether so much more of one pool is within the budget and its maximum."""
        return self.used_bytes + num_bytes <= self.budget_bytes and not self.pool(pool).is_over_maximum(num_bytes)

    def _next_victim(self, needing: Pool) -> Node | None:
        """Of whoever is over its maximum, then of whoever is furthest over what is guaranteed to it; last, of `needing`
        itself. Nobody gives way for others within its guarantee.
        """
        if len(self._pools) == 1:
            return needing.policy.victim()
        giving = [pool for pool in self._pools.values() if pool.over_guarantee_bytes > 0 and pool.used_bytes]
        giving.sort(key=lambda pool: (not pool.is_over_maximum(), -pool.over_guarantee_bytes))
        for pool in (*giving, *([needing] if needing not in giving else [])):
            if (node := pool.policy.victim()) is not None:
                return node
        return None
