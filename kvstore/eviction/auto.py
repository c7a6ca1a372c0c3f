"""`auto`: simulates every candidate on a sample of the live prompts, and follows the one with the most hits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.eviction.cache import PrefixCache
from kvstore.eviction.candidates import CANDIDATES, Candidate
from kvstore.eviction.holdings import Holdings
from kvstore.eviction.prefixes import Key
from kvstore.eviction.sampling import PrefixSample

__all__ = ["COPY_BOUNDARIES", "Auto"]

COPY_BOUNDARIES = 4096
"""About how many boundaries each simulation holds. Where the tier holds no more than these, the simulation is exact."""
_DECIDE_EVERY = 32
"""Sampled prompts between decisions: a change of policy costs a pass over all held boundaries."""
_MEMORY_PROMPTS = 4000
"""Sampled prompts after which a hit's weight has decayed to 1/e: the best policy may change over a day."""
_LEAD = 1.03
"""The ratio by which another candidate's score must exceed the current one's: less is noise."""


@dataclass(slots=True)
class _Simulation:
    """A cache of the sample, managed by one candidate.

    Attributes:
        candidate: Its policy and admission rule.
        cache: What it holds.
        score: Hit tokens; older ones count less.
    """

    candidate: Candidate
    cache: PrefixCache
    score: float = 0.0


class Auto:
    """Chooses among candidates by the tokens that each would have hit, had it been followed all along.

    No single policy always wins: with a small budget, policies that make new boundaries prove themselves do; with a
    large one, `lru` does; the crossover depends on the traffic. Per sampled prompt a simulation costs about as much as
    the real cache does per prompt; the larger the cache, the smaller the sample.

    Args:
        candidates: The first is followed until another leads.
        budget_bytes: Budget of the real cache.
        boundary_bytes: Bytes of a typical boundary.
    """

    def __init__(self, candidates: Sequence[Candidate] = CANDIDATES, *, budget_bytes: int, boundary_bytes: int) -> None:
        num_held = max(1, budget_bytes // boundary_bytes)
        self._sample = PrefixSample(COPY_BOUNDARIES / num_held)
        share = self._sample.share
        self._simulations = [
            _Simulation(
                candidate,
                PrefixCache(
                    Holdings(int(budget_bytes * share), candidate.make_policy),
                    candidate.make_admission(max(1, int(num_held * share))),
                ),
            )
            for candidate in candidates
        ]
        self._current = self._simulations[0]
        self._num_sampled = 0

    @property
    def current(self) -> Candidate:
        """The candidate that is followed now."""
        return self._current.candidate

    def observe(self, path: Sequence[Key], tokens: Sequence[int], sizes: Sequence[int], now: float) -> bool:
        """Record a lookup of a prompt, whose missing boundaries will be saved. Returns whether `current` has changed.

        Args:
            path: The prompt's boundaries, ascending.
            tokens: Position of each, in tokens.
            sizes: Bytes of each one's records.
            now: Time on the caller's clock.
        """
        if not path or not self._sample.takes(path):
            return False
        for one in self._simulations:
            holdings = one.cache.holdings
            held = holdings.leading(path)
            one.score = one.score * (1 - 1 / _MEMORY_PROMPTS) + (tokens[held - 1] if held else 0)
            holdings.use(path[:held], now)
            one.cache.save(path, tokens, sizes, now)
        self._num_sampled += 1
        if self._num_sampled % _DECIDE_EVERY:
            return False
        best = max(self._simulations, key=lambda one: one.score)
        if best.score <= self._current.score * _LEAD:
            return False
        self._current = best
        return True
