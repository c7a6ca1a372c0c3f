"""How long requests wait for the answer to their lookup, and an engine's first ones for the namespace before it."""

from __future__ import annotations

from connector.scheduler.ledger import RequestState
from connector.settings import ConnectorSettings
from kvstore.runtime.clock import Clock

__all__ = ["Patience"]

_OPENING_FACTOR, _OPENING_MAX_S = 30, 10.0
"""An engine's first requests wait for the namespace for so many times the time of a lookup: a private service may have
to be started, which takes up to four seconds on a busy machine. `Opening.is_coming` ends it where nothing comes."""

_FIRST_FACTOR, _FIRST_MAX_S = 10, 3.0
"""And so many times for the first answer of a service, which may have been started just now. Both are spent once: a
service that never answers costs them once."""


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
        if state.lookup is None and self._answered_s is None:  # it waits for the namespace
            seconds = max(self._timeout_s, min(_OPENING_FACTOR * self._timeout_s, _OPENING_MAX_S))
        else:
            seconds = self.for_answer_s(state, state.asked_s)
        return now - state.asked_s < seconds

    def for_answer_s(self, state: RequestState, since_s: float) -> float:
        """How long a request may wait for the answer to its lookup, from a monotonic time on."""
        timeout_s = self._timeout_s
        if self._first_ends_s is None:
            self._first_ends_s = since_s + min(_FIRST_FACTOR * timeout_s, _FIRST_MAX_S)
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
