"""A simulated tier: saves under admission and eviction, without records. What `auto` and `simulate` run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.eviction.admission import Admission
from kvstore.eviction.holdings import Holdings
from kvstore.eviction.prefixes import Key

__all__ = ["PrefixCache", "Saved"]


@dataclass(frozen=True, slots=True)
class Saved:
    """What a save did.

    Attributes:
        first: Index in the prompt of the first boundary that was written.
        stop: Index after the last one.
        num_evicted: Boundaries that were evicted for it.
    """

    first: int
    stop: int
    num_evicted: int

    @property
    def num_written(self) -> int:
        return self.stop - self.first


class PrefixCache:
    """Keeps the boundaries of prompts under a budget.

    Args:
        holdings: What is held, and its policy.
        admission: Which boundaries may be held.
    """

    def __init__(self, holdings: Holdings, admission: Admission) -> None:
        self.holdings = holdings
        self.admission = admission

    def save(self, path: Sequence[Key], tokens: Sequence[int], sizes: Sequence[int], now: float) -> Saved:
        """Hold what is not held of a prompt, shortest prefix first, as far as admission and budget allow.

        Args:
            path: The prompt's boundaries, ascending.
            tokens: Position of each, in tokens.
            sizes: Bytes of each one's records.
            now: Time on the caller's clock.
        """
        holdings = self.holdings
        first = holdings.leading(path)
        stop = max(first, self.admission.admit(path, tokens))
        num_evicted = 0
        held = holdings.get(path[first - 1]) if first else None
        if held is not None:
            holdings.pin(held)  # the start of the prompt is not evicted for its end
        index = first
        while index < stop:
            num_bytes = sizes[index]
            if not holdings.fits(num_bytes):
                num_evicted += len(holdings.evict(num_bytes))
                if not holdings.fits(num_bytes):
                    break
            parent = held.key if held is not None else None
            node = holdings.add(path[index], parent, tokens=tokens[index], num_bytes=num_bytes, now=now)
            node.num_holds += 1
            if held is not None:
                held.num_holds -= 1  # the pin; not free, since the new boundary is its child
            held = node
            index += 1
        if held is not None:
            holdings.unpin(held)
        return Saved(first, index, num_evicted)
