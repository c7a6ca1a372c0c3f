"""How long requests wait for the answer to their lookup, and an engine's first ones for the namespace before it."""

from __future__ import annotations

from connector.scheduler.requests import RequestState
from connector.settings import ConnectorSettings
from kvstore.runtime.clock import Clock
from kvstore.runtime.meters import Meters

__all__ = [
    "Patience",
    "awaits_more",
    "look_again",
]

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


_LOOK_AGAIN_S = 0.02
"""The last page of a prompt comes some 10 ms after the prefill engine's answer."""

_LOOK_AGAIN_SHARE = 0.2
"""The pause as a share of the time waited so far: the later something is, the less often it is asked for."""


def awaits_more(state: RequestState, *, there_tokens: int, cap_tokens: int, now_s: float, meters: Meters) -> bool:
    """Whether more is promised than is there, and there is time left to wait for it.

    Args:
        state: The request; its promise is forgotten once it is kept or its time is over.
        there_tokens: What the store or the engine itself has.
        cap_tokens: No hit is longer, whatever is promised.
        now_s: Monotonic time.
        meters: Counters.
    """
    handoff = state.handoff
    if handoff is None:
        return False
    if state.handoff_until_s is None:
        state.handoff_until_s = now_s + handoff.wait_s
    arrived = there_tokens >= min(handoff.tokens, cap_tokens)
    if not arrived and now_s < state.handoff_until_s:
        return True
    meters.add("connector_handoffs", outcome="arrived" if arrived else "late")
    state.handoff = None
    return False


def look_again(state: RequestState, now_s: float) -> bool:
    """Whether it is time to ask the store once more for a request that awaits something."""
    assert state.handoff is not None and state.handoff_until_s is not None and state.asked_s is not None
    waited_s = now_s - (state.handoff_until_s - state.handoff.wait_s)
    return now_s - state.asked_s >= max(_LOOK_AGAIN_S, _LOOK_AGAIN_SHARE * waited_s)
