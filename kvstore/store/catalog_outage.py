"""Since when the catalog has answered no call of one kind. The log has a line when that begins and one when it ends."""

from __future__ import annotations

import logging

from kvstore.errors import KVStoreError, next_step
from kvstore.runtime.clock import Clock

_log = logging.getLogger(__name__)

_LASTING_S = 1.0


class CatalogOutage:
    """Knows whether the catalog answers calls of one kind, and since when it does not, by how each call ended. A call
    that fails alone, as when a connection breaks, is no outage.

    Args:
        away: What the catalog does not do, and what that means, like `answers no lookups: tiers are asked instead`.
        back: What it does again afterwards, like `answers lookups`.

    Attributes:
        since_ms: When the first call failed since the last one that was answered, since the Unix epoch; `None`: none.
        reason: Why the last call failed, with the next step if that names one.
        is_lasting: A call failed a second or more after the first one.
    """

    def __init__(self, away: str, back: str, clock: Clock) -> None:
        self._away, self._back = away, back
        self._clock = clock
        self._failed_s = 0.0
        self.since_ms: int | None = None
        self.reason = ""
        self.is_lasting = False

    def failed(self, error: KVStoreError) -> None:
        """Note that a call failed."""
        self.reason, now_s = str(error), self._clock.monotonic_s()
        if self.since_ms is None:
            self._failed_s, self.since_ms = now_s, self._clock.wall_ms()
        elif now_s - self._failed_s >= _LASTING_S and not self.is_lasting:
            self.is_lasting = True
            cause, step = next_step(self.reason)
            _log.warning("the catalog %s (%s): %s", self._away, cause, step or "kvstore doctor names the fix")

    def answered(self) -> None:
        """Note that a call was answered."""
        if self.is_lasting:
            away_s = self._clock.monotonic_s() - self._failed_s
            _log.info("the catalog %s again after %.1f s", self._back, away_s)
        self.since_ms, self.reason, self.is_lasting = None, "", False
