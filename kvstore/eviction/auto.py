"""`auto`: simulates every candidate on a sample of the prompts, and follows the one with the most hits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.eviction.candidates import CANDIDATES, Admission, Candidate
from kvstore.eviction.holdings import Holdings
from kvstore.eviction.prefixes import Key, spread

COPY_BOUNDARIES = 4096
"""About how many boundaries each simulation holds. Where the tier holds no more than these, the simulation is exact."""
_DECIDE_EVERY = 32
"""Sampled prompts between decisions: a change of policy costs a pass over all held boundaries."""
_MEMORY_PROMPTS = 4000
"""Sampled prompts after which a hit's weight has decayed to 1/e: the best policy may change over a day."""
_LEAD = 1.03
"""The ratio by which another candidate's score must exceed the current one's: less is noise."""
_COMMON_SHARE = 1 / 64
_COMMON_MIN = 16
"""A boundary is common when this many prompts, and this share of all prompts, contain it."""
_HALVE_AT = 1 << 14
"""Prompts after which counts are halved and boundaries seen once are dropped: bounds memory and ages old starts."""


@dataclass(slots=True)
class _Simulation:
    """A simulated tier for the sample, managed by one candidate; in `score` older hit tokens count less."""

    candidate: Candidate
    holdings: Holdings
    admission: Admission
    score: float = 0.0


class Auto:
    """Chooses among candidates by the tokens that each would have hit, had it been followed from the start.

    No single candidate always wins. With a small budget `second_sight` does, with a large one `lru`; the crossover
    depends on the traffic. Per sampled prompt a simulation costs about as much as the
    real tier does per prompt; the larger the tier, the smaller the sample.

    Args:
        candidates: The first is followed until another leads.
        budget_bytes: Budget of the real tier.
        boundary_bytes: Bytes of a typical boundary.
    """

    def __init__(self, candidates: Sequence[Candidate] = CANDIDATES, *, budget_bytes: int, boundary_bytes: int) -> None:
        num_held = max(1, budget_bytes // boundary_bytes)
        self._sample = PrefixSample(COPY_BOUNDARIES / num_held)
        share = self._sample.share
        self._simulations = [
            _Simulation(
                candidate,
                Holdings(int(budget_bytes * share), candidate.make_policy),
                candidate.make_admission(max(1, int(num_held * share))),
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
            held = one.holdings.leading(path)
            one.score = one.score * (1 - 1 / _MEMORY_PROMPTS) + (tokens[held - 1] if held else 0)
            one.holdings.use(path[:held], now)
            admitted = path[: one.admission.admit(path)]
            save_prompt(one.holdings, admitted, tokens, sizes, now=now)
        self._num_sampled += 1
        if self._num_sampled % _DECIDE_EVERY:
            return False
        best = max(self._simulations, key=lambda one: one.score)
        if best.score <= self._current.score * _LEAD:
            return False
        self._current = best
        return True


def save_prompt(
    holdings: Holdings,
    path: Sequence[Key],
    tokens: Sequence[int],
    sizes: Sequence[int],
    *,
    now: float,
    owner: str = "",
) -> tuple[int, int]:
    """Hold the missing boundaries of a prompt, shortest prefix first, as far as the budget allows. Returns how many
    were written, and how many were evicted for them.

    Args:
        path: Its boundaries that may be held, ascending; the rest as for `Auto.observe`.
        owner: Whose they are.
    """
    first = holdings.leading(path)
    num_evicted = 0
    held = holdings.get(path[first - 1]) if first else None
    if held is not None:
        holdings.pin(held)  # the start of the prompt is not evicted for its end
    index = first
    # a boundary behind a missing one is held only if a client named it in another prompt: it has one parent already
    while index < len(path) and path[index] not in holdings:
        num_bytes = sizes[index]
        if not holdings.fits(num_bytes):
            num_evicted += len(holdings.evict(num_bytes))
            if not holdings.fits(num_bytes):
                break
        parent = held.key if held is not None else None
        node = holdings.add(path[index], parent, tokens=tokens[index], num_bytes=num_bytes, now=now, owner=owner)
        node.num_holds += 1
        if held is not None:
            held.num_holds -= 1  # the pin; not free, since the new boundary is its child
        held = node
        index += 1
    if held is not None:
        holdings.unpin(held)
    return index - first, num_evicted


class PrefixSample:
    """Samples a share of the live prefixes, at the boundary where they diverge.

    Prompts that share a prefix must be in the sample together or not at all, or the sample's hit rate means nothing.
    But a system prompt, or in some traces one root block, is shared by almost all. So common boundaries are skipped,
    and a hash of a prompt's first boundary that is not common decides for all prompts that contain it.

    Args:
        share: Share of the prefixes, above 0; 1 or more takes all.
    """

    def __init__(self, share: float) -> None:
        self.share = min(1.0, share)
        self._threshold = int(self.share * (1 << 64))
        self._counts: dict[Key, int] = {}  # of prompts' first boundaries, and of those that follow a common one
        self._num_seen = 0

    def takes(self, path: Sequence[Key]) -> bool:
        """Whether a prompt is in the sample. Counts the prompt."""
        if self.share >= 1.0:
            return True
        self._num_seen += 1
        if self._num_seen % _HALVE_AT == 0:
            self._counts = {key: seen // 2 for key, seen in self._counts.items() if seen > 1}
            self._num_seen //= 2
        common = max(_COMMON_MIN, self._num_seen * _COMMON_SHARE)
        counts = self._counts
        for key in path:
            seen = counts.get(key, 0) + 1
            counts[key] = seen
            if seen < common:
                return spread(key) < self._threshold
        return bool(path)  # all its boundaries are common: part of every sample
