"""`auto`: tries every candidate in small on a sample of the live prompts, and follows the one that hits most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstore.eviction.cache import PrefixCache
from kvstore.eviction.candidates import CANDIDATES, Candidate
from kvstore.eviction.holdings import Holdings
from kvstore.eviction.prefixes import Key
from kvstore.eviction.sampling import PrefixSample

__all__ = ["COPY_BOUNDARIES", "Auto"]

COPY_BOUNDARIES = 4096
"""A copy holds about so many boundaries, some 2 MB. Where no more are held in all, it is exact."""
_DECIDE_EVERY = 32
"""Prompts of the sample between decisions: a change costs a pass over all that is held."""
_MEMORY_PROMPTS = 4000
"""Prompts of the sample after which a hit counts a third: a day's other half may need another policy."""
_LEAD = 1.03
"""Less of a lead is noise, and not worth a change."""


@dataclass(slots=True)
class _Copy:
    """One candidate, as it would fare.

    Attributes:
        score: Tokens it hit, older ones counting less.
    """

    candidate: Candidate
    cache: PrefixCache
    score: float = 0.0


class Auto:
    """Chooses among candidates by what each would have hit, had it been followed all along.

    No single policy wins: with little room the ones that let newcomers wait do, with much room `lru` does, and where
    between depends on the traffic. A copy costs about as much as the real thing per prompt of the sample, which is
    small where the real thing is large.

    Args:
        candidates: The first is followed until another leads.
        budget_bytes: Of what is really held.
        boundary_bytes: Of a usual boundary.
    """

    def __init__(self, candidates: Sequence[Candidate] = CANDIDATES, *, budget_bytes: int, boundary_bytes: int) -> None:
        num_held = max(1, budget_bytes // boundary_bytes)
        self._sample = PrefixSample(COPY_BOUNDARIES / num_held)
        share = self._sample.share
        self._copies = [
            _Copy(
                candidate,
                PrefixCache(
                    Holdings(int(budget_bytes * share), candidate.make_policy),
                    candidate.make_admission(max(1, int(num_held * share))),
                ),
            )
            for candidate in candidates
        ]
        self._current = self._copies[0]
        self._num_sampled = 0

    @property
    def current(self) -> Candidate:
        """The candidate to follow now."""
        return self._current.candidate

    @property
    def scores(self) -> Mapping[str, float]:
        """What each candidate hit of the sample lately, in tokens."""
        return {copy.candidate.name: copy.score for copy in self._copies}

    def observe(self, path: Sequence[Key], tokens: Sequence[int], sizes: Sequence[int], now: float) -> bool:
        """A prompt was looked up, and will be saved as far as it is not held. True: `current` has changed.

        Args:
            path: The prompt's boundaries, ascending.
            tokens: Tokens below each.
            sizes: Bytes of each one's records.
            now: The caller's clock.
        """
        if not path or not self._sample.takes(path):
            return False
        for copy in self._copies:
            holdings = copy.cache.holdings
            held = holdings.leading(path)
            copy.score = copy.score * (1 - 1 / _MEMORY_PROMPTS) + (tokens[held - 1] if held else 0)
            holdings.use(path[:held], now)
            copy.cache.save(path, tokens, sizes, now)
        self._num_sampled += 1
        if self._num_sampled % _DECIDE_EVERY:
            return False
        best = max(self._copies, key=lambda copy: copy.score)
        if best.score <= self._current.score * _LEAD:
            return False
        self._current = best
        return True
