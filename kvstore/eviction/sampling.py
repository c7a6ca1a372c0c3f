"""Samples prompts by prefix: those that share more than a common start are sampled together or not at all."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.eviction.prefixes import Key, spread

__all__ = ["PrefixSample"]

_COMMON_SHARE = 1 / 64
_COMMON_MIN = 16
"""A boundary is common when this many prompts, and this share of all prompts, contain it."""
_HALVE_AT = 1 << 14
"""Prompts after which counts are halved and boundaries seen once are dropped: bounds memory and ages old starts."""


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
            self._halve()
        common = max(_COMMON_MIN, self._num_seen * _COMMON_SHARE)
        counts = self._counts
        for key in path:
            seen = counts.get(key, 0) + 1
            counts[key] = seen
            if seen < common:
                return spread(key) < self._threshold
        return bool(path)  # all its boundaries are common: part of every sample

    def _halve(self) -> None:
        self._counts = {key: seen // 2 for key, seen in self._counts.items() if seen > 1}
        self._num_seen //= 2
