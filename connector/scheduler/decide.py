"""Load or recompute: how much of a hit to fetch, and how long to wait for it. Pure.

A hit may be taken in part: records in the node's memory are fast, records in a cold tier may take longer than the
computation. Within one tier every further token costs the same to fetch and more to compute. So a part of what a tier
offers is never better than all or nothing of it, and only the furthest resume point of each tier is an option.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from connector.scheduler.costs import Costs
from kvstore.api import Lookup

_MARGIN = 2.0
"""Fetching must look this many times as expensive as computing before it is given up. Measurements on a busy machine
are sometimes off by half. A hit that does not pay costs its request a little time, bounded by the fetch's deadline. A
hit that is given up costs processors that all requests share."""

_SLACK_S = 0.05
"""And it must take this much longer: less would go unnoticed, and noise would decide."""

_CEILING_S_MIN = 0.8
"""A fetch may always take this long. The recompute time of a short prompt is less than the delays of a busy machine,
and a good hit should not be lost to these. A tier that does not answer is noticed sooner, by its stall timeout."""


class HitPolicy:
    """Decides how much of a hit to fetch, by what this engine has measured.

    Args:
        most_s: The longest wait for any fetch.
        always: Take all of every hit, and wait for it as long as allowed.
    """

    def __init__(self, costs: Costs, *, most_s: float, always: bool = False) -> None:
        self._costs = costs
        self._most_s = most_s
        self._always = always

    def choose(self, lookup: Lookup, local_tokens: int, *, now_s: float) -> Choice:
        """How much to take of a hit that reaches beyond `local_tokens`, the engine's own: the furthest resume point,
        unless a nearer one, or nothing, is clearly faster in total.
        """
        longest = lookup.resume_tokens
        if self._always:
            return Choice(longest, fetch_s=0.0, compute_s=None)
        options = {longest: self._costs.fetch_s({}, now_s=now_s)}  # unknown counts as nothing: a fetch makes it known
        for offer in lookup.offers:
            if local_tokens < offer.resume_tokens <= longest:
                beyond = _beyond(offer.tier_bytes, offer.resume_tokens, local_tokens)
                options[offer.resume_tokens] = self._costs.fetch_s(beyond, now_s=now_s)
        compute_s = self._costs.prefill.seconds(local_tokens, longest)
        best, fetch_s = longest, options[longest]
        if compute_s is not None:
            options[local_tokens] = 0.0
            for nearer in sorted(options, reverse=True)[1:]:
                # each against the best so far: a nearer one must be clearly faster than the one it replaces
                rest_s = self._costs.prefill.seconds(nearer, best)
                if rest_s is not None and options[best] - options[nearer] > _MARGIN * rest_s + _SLACK_S:
                    best = nearer
        return Choice(best, fetch_s, compute_s)

    def ceiling_s(self, local_tokens: int, resume_tokens: int) -> float:
        """The longest wait for a fetch: the time that computing would take, and at most `most_s`.

        A useless wait of that length loses as much as there was to gain.
        """
        compute_s = None if self._always else self._costs.prefill.seconds(local_tokens, resume_tokens)
        return self._most_s if compute_s is None else min(self._most_s, max(_CEILING_S_MIN, compute_s))


@dataclass(frozen=True, slots=True)
class Choice:
    """What to take of a hit.

    Attributes:
        resume_tokens: The resume point to fetch. If it is the engine's own hit, nothing is fetched.
        fetch_s: What fetching the longest option would take at best, as far as is known.
        compute_s: What computing it instead would take; `None` while that is not known.
    """

    resume_tokens: int
    fetch_s: float
    compute_s: float | None


def _beyond(tier_bytes: Mapping[str, int], resume_tokens: int, local_tokens: int) -> dict[str, int]:
    """The part of an offer that lies beyond the engine's own hit; the offer counts bytes from the first token on."""
    return {tier: num_bytes * (resume_tokens - local_tokens) // resume_tokens for tier, num_bytes in tier_bytes.items()}
