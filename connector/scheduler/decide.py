"""Load or recompute: how much of a hit to take. Pure.

A hit may be taken in part: what is in the node's memory is fast, what is in a cold tier may take longer than computing
it. Within one tier every further token costs the same to fetch and more to compute, so part of what a tier offers is
never better than all or nothing of it: only the furthest resume point of each tier is an option.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Choice", "Option", "choose"]

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
