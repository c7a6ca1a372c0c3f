"""Limits the load on an endpoint: fewer concurrent requests when it says `SlowDown`, and a budget for retries."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.turns import Turns
from kvstore.tiers.s3.failures import Throttled

__all__ = ["Pace", "RetryBudget", "backoff_s", "next_window"]

_RETRIES_KEPT = 32.0
_EARNED = 0.1
_BACKOFF_FIRST_S = 0.05
_BACKOFF_MAX_S = 2.0
_PAUSE_S = 0.2
_GOLDEN = 0.6180339887498949


class RetryBudget:
    """Allows 32 retries, and after that one for every ten requests that succeed.

    So retries add at most a tenth to the load on a failing endpoint, however many callers it has.
    """

    def __init__(self) -> None:
        self._left = _RETRIES_KEPT

    def take(self) -> bool:
        """Whether one more request may be a retry."""
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def earn(self) -> None:
        """Note a request that succeeded."""
        self._left = min(_RETRIES_KEPT, self._left + _EARNED)


def backoff_s(attempt: int, spread: float) -> float:
    """Seconds to wait before retry number `attempt` (from 1): doubling, half of it spread out.

    Args:
        spread: From 0 to 1, different for each retry, so that requests that failed together do not return together.
    """
    return float(min(_BACKOFF_MAX_S, _BACKOFF_FIRST_S * 2 ** (attempt - 1)) * (0.5 + 0.5 * spread))


def next_window(window: float, *, limit: int, slowed: bool) -> float:
    """Concurrent requests to allow: half as many after a `SlowDown`, one more after a whole window of successes."""
    return max(1.0, window / 2) if slowed else min(float(limit), window + 1 / window)


class Pace:
    """Lets a changing number of requests run, first come first served; after a `SlowDown` none begins for 0.2 s."""

    def __init__(self, num_requests_max: int, clock: Clock = SYSTEM_CLOCK) -> None:
        self.window = float(num_requests_max)
        self._limit = num_requests_max
        self._turns = Turns(num_requests_max)
        self._clock = clock
        self._resume_s = 0.0
        self._spread = (os.getpid() * _GOLDEN) % 1.0

    def spread(self) -> float:
        """A number from 0 to 1, far from the previous ones; each process has its own sequence."""
        self._spread = (self._spread + _GOLDEN) % 1.0
        return self._spread

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Run a block as one request; `Throttled` from it slows the next ones down.

        If cancelled while waiting, it leaves the queue.
        """
        async with self._turns.turn():
            if (pause_s := self._resume_s - self._clock.monotonic_s()) > 0:
                await asyncio.sleep(pause_s)
            try:
                yield
            except Throttled:
                self._slow_down()
                raise
            self._set(next_window(self.window, limit=self._limit, slowed=False))

    def _slow_down(self) -> None:
        now_s = self._clock.monotonic_s()
        if now_s >= self._resume_s:  # requests that were in flight then only repeat the message
            self._set(next_window(self.window, limit=self._limit, slowed=True))
            self._resume_s = now_s + _PAUSE_S

    def _set(self, window: float) -> None:
        self.window, self._turns.limit = window, int(window)
