"""Whether hints gain hits: two simulations of one sample of the prompts, without hints and with them. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from kvstore.eviction.auto import COPY_BOUNDARIES, PrefixSample, save_prompt
from kvstore.eviction.hints import Hint, Hinted
from kvstore.eviction.holdings import Holdings
from kvstore.eviction.policies import Lru
from kvstore.eviction.prefixes import NORMAL, Key
from kvstore.runtime.bounded_map import Latest

_MEMORY_PROMPTS = 1000
"""Sampled prompts of an owner after which a difference in hits has decayed to 1/e: its hints may become better."""
_GAIN, _SURE = 0.01, 2.0
"""The share of an owner's hits that its hints must add to be followed, and how many times its standard error the gain
must be: less is chance."""
_OWNERS_MAX = 1024
_NO_SCORE = (0.0, 0.0, 0.0)
_SLACK = 64


class Marks:
    """The hints that apply to held boundaries, until their time is over.

    Args:
        holdings: What they apply to; `Hinted` policies follow them.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._until: list[tuple[float, int, Key]] = []
        self._latest: dict[Key, int] = {}
        self._number = 0

    def set(self, key: Key, hint: Hint, now: float) -> None:
        """Apply a hint to a boundary; a later hint replaces an earlier one. One that is not held gets none."""
        if (node := self._holdings.get(key)) is not None:
            self._holdings.mark(node, hint.priority)
            self._number += 1
            self._latest[key] = self._number
            heapq.heappush(self._until, (now + hint.for_s, self._number, key))
            if len(self._until) > 2 * len(self._holdings) + _SLACK:
                self._forget()

    def expire(self, now: float) -> None:
        """End the hints whose time is over."""
        while self._until and self._until[0][0] <= now:
            _, number, key = heapq.heappop(self._until)
            if self._latest.get(key) == number:
                del self._latest[key]
                if (node := self._holdings.get(key)) is not None and node.priority != NORMAL:
                    self._holdings.mark(node, NORMAL)

    def _forget(self) -> None:
        """Forget hints that were replaced, and those of boundaries that are no longer held."""
        self._until = [one for one in self._until if self._latest.get(one[2]) == one[1] and one[2] in self._holdings]
        self._latest = {key: number for _, number, key in self._until}
        heapq.heapify(self._until)


class HintTrial:
    """Decides for each owner whether to follow its hints: as long as its prompts hit more with hints than without.

    Both simulations hold what was looked up, under `lru`, and evict for all owners together; in one of them all hints
    are followed.

    Args:
        budget_bytes: Budget of the real tier.
        boundary_bytes: Bytes of a typical boundary.
    """

    def __init__(self, *, budget_bytes: int, boundary_bytes: int) -> None:
        self._sample = PrefixSample(COPY_BOUNDARIES / max(1, budget_bytes // boundary_bytes))
        budget_bytes = int(budget_bytes * self._sample.share)
        self._plain = Holdings(budget_bytes, Lru)
        self._hinted = Holdings(budget_bytes, lambda: Hinted(Lru()))
        self._marks = Marks(self._hinted)
        self._scores = Latest[str, tuple[float, float, float]](_OWNERS_MAX)
        """By owner: hit tokens without hints, how many more with them, and the sum of the squares of the differences;
        older ones count less."""

    def follows(self, owner: str) -> bool:
        """Whether to follow an owner's hints now."""
        hits, gained, squares = self._scores.get(owner, _NO_SCORE)
        return gained > _GAIN * hits and gained > _SURE * math.sqrt(squares)

    def observe(
        self, path: Sequence[Key], tokens: Sequence[int], sizes: Sequence[int], now: float, *, owner: str = ""
    ) -> None:
        """Note a lookup of a prompt of an owner. Arguments as for `Auto.observe`."""
        self._marks.expire(now)
        if not path or not self._sample.takes(path):
            return
        found = []
        for holdings in (self._plain, self._hinted):
            held = holdings.leading(path)
            found.append(tokens[held - 1] if held else 0)
            holdings.use(path[:held], now)
            save_prompt(holdings, path, tokens, sizes, now=now, owner=owner)
        hits, gained, squares = self._scores.get(owner, _NO_SCORE)
        kept, more = 1 - 1 / _MEMORY_PROMPTS, found[1] - found[0]
        self._scores[owner] = hits * kept + found[0], gained * kept + more, squares * kept + more * more

    def hint(self, key: Key, hint: Hint, now: float) -> None:
        """Note a hint for a boundary of a prompt that was looked up."""
        self._marks.set(key, hint, now)
