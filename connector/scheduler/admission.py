"""How much of a hit to fetch, and how long to wait for it: `decide` with costs that this engine has measured itself."""

from __future__ import annotations

from collections.abc import Mapping

from connector.scheduler.costs import FetchCosts, PrefillCosts
from connector.scheduler.decide import Choice, Option, choose
from kvstore.api import Lookup, Staged

__all__ = ["Admission"]

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
