"""Calls that a tier refuses although it answers: what is shown of them, and when the log says so."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from kvstore.errors import Unavailable
from kvstore.runtime.clock import Clock

_log = logging.getLogger(__name__)

WRITES = frozenset(("put", "delete", "delete_all", "allow_eviction", "quarantine", "put_manifest"))
"""Calls of a tier that change what it holds."""

_SHOWN_S = 30.0
"""How long a refused write says something about the tier, unless a later one is done."""
_QUIET_S = 10.0
"""A tier that is nearly full refuses some writes and does others: the log says so once, until it refuses none."""


class Refused(Unavailable):
    """The medium answers, and refuses this kind of call: for want of a right, over a quota, as a replica."""


class PartDown(Unavailable):
    """A part of the medium does not answer, like one node of a cluster. Others may, so calls of other keys go on."""


@dataclass(slots=True)
class _Refusal:
    since_s: float
    last_s: float = 0.0
    why: str = ""
    is_over: bool = False  # a later call of the kind was done
    told: set[str] = field(default_factory=set)


class Refusals:
    """The kinds of calls that one tier refuses."""

    def __init__(self, tier: str, clock: Clock) -> None:
        self._tier = tier
        self._clock = clock
        self._by_call: dict[str, _Refusal] = {}

    @property
    def of_writes(self) -> str:
        """Why the tier refuses writes now, with the next step; empty: it does them, or this is unknown."""
        now_s = self._clock.monotonic_s()
        for call, one in self._by_call.items():
            if call in WRITES and not one.is_over and now_s - one.last_s < _SHOWN_S:
                return one.why
        return ""

    def add(self, call: str, why: str, text: str = "") -> None:
        """Note that a call was refused.

        Args:
            call: The kind of call, like `put`.
            why: In fixed words, with the next step.
            text: For the log, with details; by default `why`.
        """
        now_s = self._clock.monotonic_s()
        one = self._by_call.setdefault(call, _Refusal(now_s))
        one.last_s, one.why, one.is_over = now_s, why, False
        if why not in one.told:
            one.told.add(why)
            _log.warning("tier %s refuses %s, its other calls go on: %s", self._tier, call, text or why)

    def done(self, call: str) -> None:
        """Note that a call was done."""
        if (one := self._by_call.get(call)) is None:
            return
        one.is_over = True
        now_s = self._clock.monotonic_s()
        if now_s - one.last_s >= _QUIET_S:
            del self._by_call[call]
            _log.info("tier %s no longer refuses %s, after %.0f s", self._tier, call, now_s - one.since_s)
