"""Load or recompute: how much of a hit to take. Pure.

A hit may be taken in part: what is in the node's memory is fast, what is in a cold tier may take longer than computing
it. Within one tier every further token costs the same to fetch and more to compute, so part of what a tier offers is
never better than all or nothing of it: only the furthest resume point of each tier is an option.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from connector.scheduler.costs import FetchCosts, PrefillCosts
from kvstore.api import Lookup, Staged

__all__ = [
    "Admission",
    "Choice",
    "Option",
    "choose",
]

_MARGIN = 2.0
"""Fetching must look this many times as expensive as computing before it is given up. Measurements on a busy machine
are sometimes off by half. A hit that does not pay costs its request a little time, bounded by the fetch's deadline; a
hit that is given up costs processors that all requests share."""

_SLACK_S = 0.05
"""And it must take this much longer: less would go unnoticed, and noise would decide."""


@dataclass(frozen=True, slots=True)
class Option:
    """One resume point and what it takes to get there.

    Attributes:
        resume_tokens: The resume point.
        tier_bytes: Bytes to read by tier.
    """

    resume_tokens: int
    tier_bytes: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.tier_bytes.values())


@dataclass(frozen=True, slots=True)
class Choice:
    """What to take of a hit.

    Attributes:
        resume_tokens: The resume point to fetch; the local tokens: nothing.
        fetch_s: What fetching the longest option would take at best, as far as is known.
        compute_s: What computing it instead would take; `None` while that is not known.
    """

    resume_tokens: int
    fetch_s: float
    compute_s: float | None


def choose(
    options: Sequence[Option],
    *,
    local_tokens: int,
    compute_s: Callable[[int, int], float | None],
    fetch_s: Callable[[Option], float],
) -> Choice:
    """Take the longest option, unless a shorter one, or nothing, is clearly faster in total.

    Args:
        options: By ascending resume point, each above `local_tokens`; at least one.
        local_tokens: What the engine has itself.
        compute_s: Seconds to compute the tokens from a start to a stop, or `None`: not known.
        fetch_s: Seconds until an option's bytes are in blocks. Unknown parts count as zero: trying is how they become
            known.
    """
    longest = options[-1]
    fetching, computing = fetch_s(longest), compute_s(local_tokens, longest.resume_tokens)
    best, best_fetch_s = longest.resume_tokens, fetching
    if computing is None:
        return Choice(best, fetching, computing)
    shorter = [*((option.resume_tokens, fetch_s(option)) for option in reversed(options[:-1])), (local_tokens, 0.0)]
    for resume_tokens, shorter_s in shorter:
        # each against the best so far: a shorter one must be clearly faster than the one it replaces
        rest_s = compute_s(resume_tokens, best)
        if rest_s is not None and best_fetch_s - shorter_s > _MARGIN * rest_s + _SLACK_S:
            best, best_fetch_s = resume_tokens, shorter_s
    return Choice(best, fetching, computing)


_CEILING_S_MIN = 0.8
"""A fetch may always take this long: the recompute time of a short prompt is less than the delays of a busy machine,
and a good hit should not be lost to these. A tier that does not answer at all is noticed sooner, by its silence."""

_MEMORY = "memory"
"""The node's memory tier, as a stage names its sources."""


class Admission:
    """Learns what prefill, each tier and loads cost, and decides how much of a hit to fetch.

    Belongs to the engine's thread.

    Args:
        always: Take all of every hit, and wait for it as long as allowed.
    """

    def __init__(self, *, always: bool = False) -> None:
        self._always = always
        self.prefill = PrefillCosts()
        self._tiers: dict[str, FetchCosts] = {}
        self._loads = FetchCosts()

    def choose(self, lookup: Lookup, local_tokens: int, *, now_s: float) -> Choice:
        """How much to take of a hit that reaches beyond `local_tokens`."""
        options = [
            Option(offer.resume_tokens, _above(offer.tier_bytes, offer.resume_tokens, local_tokens))
            for offer in lookup.offers
            if local_tokens < offer.resume_tokens <= lookup.resume_tokens
        ]
        if not options or options[-1].resume_tokens < lookup.resume_tokens:
            options.append(Option(lookup.resume_tokens, {}))
        return choose(
            options[-1:] if self._always else options,
            local_tokens=local_tokens,
            compute_s=(lambda start, stop: None) if self._always else self.prefill.seconds,
            fetch_s=lambda option: self._fetch_s(option, now_s),
        )

    def _fetch_s(self, option: Option, now_s: float) -> float:
        seconds = self._loads.seconds(option.num_bytes, now_s=now_s) or 0.0
        for tier, num_bytes in option.tier_bytes.items():
            if tier in self._tiers:
                seconds += self._tiers[tier].seconds(num_bytes, now_s=now_s) or 0.0
        return seconds

    def ceiling_s(self, local_tokens: int, resume_tokens: int, *, most_s: float) -> float:
        """The longest wait for a fetch: the time that computing would take, and at most `most_s`.

        A wait of that length in vain loses as much as there was to gain.
        """
        compute_s = None if self._always else self.prefill.seconds(local_tokens, resume_tokens)
        return most_s if compute_s is None else min(most_s, max(_CEILING_S_MIN, compute_s))

    def on_staged(self, staged: Staged, seconds: float, *, now_s: float) -> None:
        """Learn from an undisturbed fetch: one that delivered all it was asked for, or used all of its time."""
        num_records = sum(staged.sources.values())
        if num_records == 0:
            return
        sizes = {tier: staged.num_bytes * count // num_records for tier, count in staged.sources.items()}
        costs = {tier: self._tiers.setdefault(tier, FetchCosts()) for tier in sizes}
        known = {tier: costs[tier].seconds(sizes[tier], now_s=now_s) for tier in sizes}
        # what came from memory came at once: the time belongs to the slower tiers, if there are any
        slower = [tier for tier in sizes if tier != _MEMORY] or [_MEMORY]
        told = max(slower, key=lambda tier: (known[tier] is None, sizes[tier]))
        if all(known[tier] is not None for tier in slower if tier != told):
            rest_s = sum(known[tier] or 0.0 for tier in sizes if tier != told)
            costs[told].observe(sizes[told], max(0.0, seconds - rest_s), now_s=now_s)

    def on_loaded(self, num_bytes: int, seconds: float, *, now_s: float) -> None:
        """Learn from a load into blocks that the engine's own work did not delay."""
        self._loads.observe(num_bytes, seconds, now_s=now_s)


def _above(tier_bytes: Mapping[str, int], resume_tokens: int, local_tokens: int) -> dict[str, int]:
    """The part of an offer, given from the first token on, that is left to read when the engine has some itself."""
    return {tier: num_bytes * (resume_tokens - local_tokens) // resume_tokens for tier, num_bytes in tier_bytes.items()}
