"""How long requests wait for the answer to their lookup, and an engine's first ones for the namespace before it."""

from __future__ import annotations

from connector.scheduler.ledger import RequestState
from connector.settings import ConnectorSettings
from kvstore.runtime.clock import Clock

__all__ = ["Patience"]

_FIRST_FACTOR = 10
"""An engine's first requests have so many times the time: the namespace is being opened, a private service started, and
on a busy machine both take seconds. Until the first answer, and once: a service that never answers costs it once."""


class Patience:
    """Decides whether a request still waits.

    Args:
        settings: `lookup_timeout_ms`.
        clock: Time.
    """

    def __init__(self, settings: ConnectorSettings, clock: Clock) -> None:
        self._timeout_s = settings.lookup_timeout_ms / 1000
        self._clock = clock
        self._first_ends_s: float | None = None
        self._answered_s: float | None = None

    def lasts(self, state: RequestState) -> bool:
        """Whether a request still has time; the first question starts it."""
        now = self._clock.monotonic_s()
        if state.asked_s is None:
            state.asked_s = now
        return now - state.asked_s < self.seconds(state, state.asked_s)

    def seconds(self, state: RequestState, since_s: float) -> float:
        """How long a request may wait that began to at a monotonic time."""
        timeout_s = self._timeout_s
        if self._first_ends_s is None:
            self._first_ends_s = since_s + _FIRST_FACTOR * timeout_s
        if self._answered_s is None or since_s <= self._answered_s:  # those that came together keep their time
            timeout_s = max(timeout_s, self._first_ends_s - since_s)
        if state.handoff is None:
            return timeout_s
        # something is there, or soon will be: worth more patience than a lookup that may find nothing
        return max(timeout_s, state.handoff.wait_s)

    def answered(self) -> None:
        """Note that a lookup was answered; on any thread."""
        if self._answered_s is None:
            self._answered_s = self._clock.monotonic_s()
