"""How many records are read from one tier at a time: few while it is slow, more while it is quick."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvstore.runtime.clock import Clock

__all__ = ["FetchGate", "next_window"]


def next_window(window: int, took_s: float, *, quick_s: float, limit: int) -> int:
    """The number of reads to allow next, after one that took `took_s`.

    Reads share a link. With too many at once none of them ends for a long time, which a stage cannot tell from a tier
    that hangs. So the window grows while single reads stay well under that time, and shrinks when they do not.
    """
    if took_s < quick_s:
        return min(limit, window + 1)
    if took_s > 2 * quick_s:
        return max(1, window - 1)
    return window


class FetchGate:
    """Lets a changing number of reads run, first come first served."""

    def __init__(self, clock: Clock, *, quick_s: float, limit: int) -> None:
        self.window = min(4, limit)
        self.num_running = 0
        self._clock = clock
        self._quick_s = quick_s
        self._limit = limit
        self._waiters: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Run a block as one of the reads. If cancelled while waiting, the place in the queue is given up."""
        if self.num_running >= self.window or self._waiters:
            await self._wait()
        else:
            self.num_running += 1
        started_s = self._clock.monotonic_s()
        try:
            yield
        finally:
            took_s = self._clock.monotonic_s() - started_s
            self.window = next_window(self.window, took_s, quick_s=self._quick_s, limit=self._limit)
            self._leave()

    async def _wait(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(turn)
        try:
            await turn  # whoever sets it has counted us as running
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._leave()
            raise

    def _leave(self) -> None:
        self.num_running -= 1
        while self._waiters and self.num_running < self.window:
            turn = self._waiters.popleft()
            if not turn.done():
                self.num_running += 1
                turn.set_result(None)
