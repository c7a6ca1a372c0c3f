"""Limits the load on an endpoint: fewer concurrent requests after `SlowDown`, and a budget for retries."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.meters import Meters
from kvstore.runtime.turns import Turns
from kvstore.tiers.s3.failures import Throttled, Transient

T = TypeVar("T")

_ATTEMPTS = 3
_RETRIES_KEPT = 32.0
_EARNED = 0.1
_BACKOFF_FIRST_S = 0.05
"""The longest wait before the first retry; doubled for the second one."""
_PAUSE_S = 0.2
_GOLDEN = 0.6180339887498949


class RetryBudget:
    """Allows 32 retries, and after that one for every ten requests that succeed.

    So retries add at most a tenth to the load on a failing endpoint, for any number of callers.
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
        """Count a request that succeeded."""
        self._left = min(_RETRIES_KEPT, self._left + _EARNED)


class Pace:
    """Sends requests, a changing number at a time, first come first served. After a `SlowDown` it is half as many, and
    none starts for 0.2 s; after as many successes as run at a time it is one more.

    Args:
        meters: Counts `s3_throttled` and `s3_retries`.
    """

    def __init__(self, num_requests_max: int, meters: Meters | None = None) -> None:
        self.window = float(num_requests_max)
        self._limit = num_requests_max
        self._turns = Turns(num_requests_max)
        self._retries = RetryBudget()
        self._meters = meters or Meters()
        self._resume_s = 0.0
        self._spread = (os.getpid() * _GOLDEN) % 1.0  # each process has its own sequence

    async def send(self, request: Callable[[], Awaitable[T]]) -> T:
        """Run a request; up to twice more after a `Transient` error, if the budget allows.

        If cancelled while waiting, it leaves the queue.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                async with self.turn():
                    answer = await request()
            except Transient as error:
                if isinstance(error, Throttled):
                    self._meters.add("s3_throttled")
                if attempt == _ATTEMPTS or not self._retries.take():
                    raise
                self._meters.add("s3_retries")
                self._spread = (self._spread + _GOLDEN) % 1.0  # requests that failed together return one by one
                await asyncio.sleep(_BACKOFF_FIRST_S * 2 ** (attempt - 1) * (0.5 + 0.5 * self._spread))
                continue
            self._retries.earn()
            return answer

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Run a block as one request; `Throttled` from it slows the next ones down."""
        async with self._turns.turn():
            if (pause_s := self._resume_s - SYSTEM_CLOCK.monotonic_s()) > 0:
                await asyncio.sleep(pause_s)
            try:
                yield
            except Throttled:
                self._slow_down()
                raise
            self._set(min(self._limit, self.window + 1 / self.window))

    def _slow_down(self) -> None:
        now_s = SYSTEM_CLOCK.monotonic_s()
        if now_s >= self._resume_s:  # once for all requests that were in flight
            self._set(max(1.0, self.window / 2))
            self._resume_s = now_s + _PAUSE_S

    def _set(self, window: float) -> None:
        self.window, self._turns.limit = window, int(window)
