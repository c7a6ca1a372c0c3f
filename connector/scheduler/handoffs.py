"""Waiting for what a prefill engine has promised: until when, and how often to look."""

from __future__ import annotations

from connector.scheduler.ledger import RequestState
from kvstore.runtime.meters import Meters

__all__ = ["awaits_more", "look_again"]

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
