"""Which prompts belong to a sample of prefixes: all that share more than the common start, or none of them."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.eviction.prefixes import Key, spread

__all__ = ["PrefixSample"]

_COMMON_SHARE = 1 / 64
_COMMON_MIN = 16
"""A boundary is common when this many prompts, and this share of all, went through it."""
_HALVE_AT = 1 << 14
"""Prompts after which counts are halved and what was seen once is forgotten: bounds memory, and forgets old starts."""


class PrefixSample:
    """Draws a share of the live prefixes, where they diverge.

    Prompts that share a prefix must be in the sample together or not at all, or the sample's hit rate means nothing.
    But a chat's system prompt, or in some traces one root, is shared by all. So a prompt is followed along boundaries
    that are common, and the first one that is not common decides for everything that begins with it.

    Args:
        share: Of the prefixes, above 0; 1 or more takes all.
    """

    def __init__(self, share: float) -> None:
        self.share = min(1.0, share)
        self._threshold = int(self.share * (1 << 64))
        self._counts: dict[Key, int] = {}  # of boundaries that common ones lead to, and of the first ones
        self._num_seen = 0

    def takes(self, path: Sequence[Key]) -> bool:
        """Whether a prompt is in the sample; each is counted as seen."""
        if self.share >= 1.0:
            return True
        self._num_seen += 1
        if self._num_seen % _HALVE_AT == 0:
            self._halve()
        common = max(_COMMON_MIN, self._num_seen * _COMMON_SHARE)
        counts = self._counts
        for key in path:
            seen = counts.get(key, 0) + 1
            counts[key] = seen
            if seen < common:
                return spread(key) < self._threshold
        return bool(path)  # nothing but a common start: part of every sample

    def _halve(self) -> None:
        self._counts = {key: seen // 2 for key, seen in self._counts.items() if seen > 1}
        self._num_seen //= 2
