"""Load or recompute: how much of a hit to take. Pure.

A hit may be reached in parts: what lies in the node's memory is quick, what lies in a cold tier may take longer than
computing it. Within one tier every further token costs the same to fetch and more to compute, so a part of what a tier
offers is never better than all or nothing of it: only the furthest resume point of each tier is an option.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Choice", "Option", "choose"]

_MARGIN = 2.0
"""Fetching must look so many times as expensive as computing before it is given up. What is measured on a busy machine
is off by a half now and then; a hit that is taken though it does not pay costs its request a little time, which the
deadline of its fetch bounds, while a hit that is given up costs processors that all requests share."""

_SLACK_S = 0.05
"""And so much longer: below, nobody would notice, and noise decides."""


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
        resume_tokens: The resume point to fetch; the local tokens for nothing.
        fetch_s: What fetching the longest would take at best, as far as it is known.
        compute_s: What computing instead of fetching the longest would take; `None` while it is not known.
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
    """Take the longest option, unless a shorter one, or nothing, is clearly quicker in all.

    Args:
        options: By ascending resume point, each above `local_tokens`; at least one.
        local_tokens: What the engine has itself.
        compute_s: Seconds to compute the tokens from a start to a stop, or `None`: not known.
        fetch_s: Seconds until an option's bytes are in blocks. What is not known of it counts nothing: trying is how
            it becomes known.
    """
    longest = options[-1]
    fetching, computing = fetch_s(longest), compute_s(local_tokens, longest.resume_tokens)
    best, best_fetch_s = longest.resume_tokens, fetching
    if computing is None:
        return Choice(best, fetching, computing)
    shorter = [*((option.resume_tokens, fetch_s(option)) for option in reversed(options[:-1])), (local_tokens, 0.0)]
    for resume_tokens, shorter_s in shorter:
        # each against the best so far: a shorter one must be clearly quicker than what it takes the place of
        rest_s = compute_s(resume_tokens, best)
        if rest_s is not None and best_fetch_s - shorter_s > _MARGIN * rest_s + _SLACK_S:
            best, best_fetch_s = resume_tokens, shorter_s
    return Choice(best, fetching, computing)
