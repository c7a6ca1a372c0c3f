"""Ends saving on an engine whose ranks do not answer."""

from __future__ import annotations

import logging

from connector.losses import Lost
from connector.scheduler.saves import Saves
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock

__all__ = ["Watchdog"]

_log = logging.getLogger("vllm.kvstore")  # below vLLM's logger, so that its handlers and levels apply

_STEPS = 1000
_PATIENCE_S = 60.0
"""A rank answers within its save's deadline, ten seconds. An idle engine makes a thousand steps in seconds, one that
stands still makes none: only both together say that no answer will come."""


class Watchdog:
    """Watches the oldest save in flight, from step to step.

    A vLLM that does not call a rank's hooks as we expect leaves saves unanswered, and with them the ranks' room and
    the engine's blocks for ever. What a rank has not copied in so many steps it never will: the blocks are given back.

    Args:
        saves: What is watched.
        clock: Time.

    Attributes:
        has_ended_saves: Nothing may be saved any more.
    """

    def __init__(self, saves: Saves, clock: Clock = SYSTEM_CLOCK) -> None:
        self._saves = saves
        self._clock = clock
        self._job_id: int | None = None
        self._steps = 0
        self._since_s = 0.0
        self.has_ended_saves = False

    def on_step(self) -> None:
        """Give up all saves if the oldest was not answered for 1,000 steps and a minute. Called once for each step."""
        job_id = self._saves.oldest_job_id
        if job_id is None or job_id != self._job_id:
            self._job_id, self._steps = job_id, 0
            if job_id is not None:
                self._since_s = self._clock.monotonic_s()
            return
        self._steps += 1
        if self._steps < _STEPS or self._clock.monotonic_s() - self._since_s < _PATIENCE_S:
            return
        self.has_ended_saves = True
        num_lost = self._saves.abandon(Lost.UNANSWERED)
        _log.error(
            "kvstore: nothing is saved any more: the ranks did not answer %d saves in many steps: this vLLM does not"
            " call the connector as it should; please report its version and how the engine is run",
            num_lost,
        )
