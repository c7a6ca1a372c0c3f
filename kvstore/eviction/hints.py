"""Hints: what clients expect of a prompt, and the order of eviction that follows from it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar

from kvstore.eviction.policies import FreeNodes, Policy, Value
from kvstore.eviction.prefixes import NORMAL, Node
from kvstore.model.prompt_hint import Wishes

RELEASED, RETAINED = 0, 100
"""The lowest and the highest priority."""
_DAY_S = 86_400.0
SAME_USE_S = 5.0
"""Uses of a boundary and of its parent that differ by no more are of one prompt: they are reported one by one."""


@dataclass(frozen=True, slots=True)
class Hint:
    """What a client expects of a prompt.

    Attributes:
        priority: From 0 to 100, `NORMAL` for none; of one owner's boundaries the lowest is evicted first. `RELEASED`:
            the prompt will not be used again. `RETAINED`: it will be, within `for_s`.
        for_s: Seconds that the priority holds, unless the prompt is used again before.
    """

    priority: int
    for_s: float

    @classmethod
    def of(cls, wishes: Wishes) -> Hint | None:
        """The hint in a client's wishes; `None`: there is none."""
        if wishes.release:
            return cls(RELEASED, _DAY_S)
        if not wishes.orders:
            return None
        is_plain = wishes.priority == NORMAL
        return cls(RETAINED if is_plain else wishes.priority, wishes.retain_s or _DAY_S)


class Hinted(Policy):
    """Follows another policy, and lets the hints of an owner decide which of its boundaries leave.

    The other policy decides whose bytes leave, as if there were no hints. That owner then gives the boundaries with the
    lowest priority, of at least as many bytes. The boundary that stays takes the place of the one that left. If it
    alone keeps shorter prefixes that would leave before that, the owner gives for each of these too. So hints exchange
    the places of one owner's boundaries, and no other owner loses bytes by them.

    When a released boundary leaves, its parent counts as released too, unless the parent was used since, or by other
    prompts as well.

    Args:
        inner: The other policy.
        follows: Returns whether an owner's hints are followed now.
    """

    name: ClassVar[str] = "hinted"

    def __init__(self, inner: Policy, follows: Callable[[str], bool] = lambda _: True) -> None:
        super().__init__()
        self._inner = inner
        self._follows = follows
        self._free_of: dict[str, FreeNodes] = {}
        self._given: dict[str, int] = {}
        """By owner: bytes that it gave for a boundary that has not moved yet."""
        self._stands_for: dict[Node, Node] = {}
        """Of a boundary that stays: itself or the prefix before it that is to be paid next."""

    def added(self, node: Node) -> None:
        self._inner.added(node)
        self._offer(node)

    def used(self, node: Node) -> None:
        self._stands_for.pop(node, None)
        self._inner.used(node)
        self._offer(node)

    def freed(self, node: Node) -> None:
        self._inner.freed(node)
        self._offer(node)

    def marked(self, node: Node) -> None:
        self._offer(node)

    def rank(self, tokens: Value, span_tokens: Value, num_bytes: Value, num_uses: Value, last_use: Value) -> Value:
        return self._inner.rank(tokens, span_tokens, num_bytes, num_uses, last_use)

    def victim(self) -> Node | None:
        usual = self._inner.victim()
        if usual is None:
            return None
        if not self._follows(usual.owner):
            return usual
        chosen = self._free_of[usual.owner].pop() or usual
        self._stands_for.pop(chosen, None)
        if chosen is usual:
            self._given.pop(usual.owner, None)
        else:
            self._pay(usual, self._given.pop(usual.owner, 0) + chosen.num_bytes, chosen.rank)
            self.freed(usual)
        parent = chosen.parent
        if chosen.priority == RELEASED and parent is not None and _goes_with(parent, chosen):
            parent.priority = RELEASED  # it is offered when it becomes free
        return chosen

    def _pay(self, node: Node, given: int, rank: float) -> None:
        """Pay for a boundary that stays, then for the prefixes that it alone keeps, with the bytes that its owner gave.
        Its rank is that of the one to be paid next. Once all are paid that would leave before `rank`, it is that.
        """
        unpaid = self._stands_for.pop(node, node)
        while given >= unpaid.num_bytes:
            given -= unpaid.num_bytes
            before = unpaid.parent
            if before is None or before.num_holds > 1 or before.rank >= rank:
                node.rank = rank
                return
            unpaid, node.rank = before, max(node.rank, before.rank)
        self._given[node.owner], self._stands_for[node] = given, unpaid

    def discard(self) -> None:
        self._stands_for.clear()
        self._inner.discard()
        for free in self._free_of.values():
            free.discard()

    def _offer(self, node: Node) -> None:
        if node.num_holds == 0:
            free = self._free_of.get(node.owner)
            if free is None:
                free = self._free_of[node.owner] = FreeNodes(attrgetter("priority", "rank"))
            free.push(node)


def _goes_with(parent: Node, child: Node) -> bool:
    """Whether a boundary was used by the prompts of its child alone: each turn of a conversation uses what the turns
    before it stored once more.
    """
    return (
        parent.priority == NORMAL
        and parent.last_use <= child.last_use + SAME_USE_S
        and parent.num_uses <= child.num_uses + 1
    )
