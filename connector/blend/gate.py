"""The gate: turns blending off for a model whose blended answers differ too much from exact ones. Pure."""

from __future__ import annotations

from collections import deque

_LEAST_AUDITS = 8
"""Before these the mean of a few audits says little."""
_MOST_AUDITS = 64
"""The mean is over this many of the latest audits, so that a model's documents may change."""


class Gate:
    """Judges the audits of one engine's model.

    Args:
        kl_max: The largest mean difference of the next token's distribution, in nats, that is allowed.

    Attributes:
        is_open: Requests may be blended. Once closed it stays so until the engine is started again.
    """

    def __init__(self, kl_max: float) -> None:
        self.kl_max = kl_max
        self.is_open = True
        self._seen: deque[float] = deque(maxlen=_MOST_AUDITS)

    @property
    def num_audits(self) -> int:
        """The audits in the mean."""
        return len(self._seen)

    @property
    def mean_kl(self) -> float:
        return sum(self._seen) / max(1, len(self._seen))

    def note(self, kl: float) -> bool:
        """Note an audit. True: this one has closed the gate."""
        self._seen.append(kl)
        # written so that a difference that is no number closes it too
        if not self.is_open or len(self._seen) < _LEAST_AUDITS or self.mean_kl <= self.kl_max:
            return False
        self.is_open = False
        return True
