"""How many records are read from one tier at a time: fewer while it is slow, more while it is fast."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvstore.runtime.clock import Clock
from kvstore.runtime.turns import Turns

__all__ = ["FetchGate", "next_window"]


def next_window(window: int, took_s: float, *, quick_s: float, limit: int) -> int:
    """The number of concurrent reads to allow after one that took `took_s`.

    Reads share a link. With too many at once none of them ends for a long time, which a stage cannot tell from a tier
    that hangs. So the window grows while reads take less than `quick_s`, and shrinks when one takes twice that.
    """
    if took_s < quick_s:
        return min(limit, window + 1)
    if took_s > 2 * quick_s:
        return max(1, window - 1)
    return window


class FetchGate:
    """Lets a changing number of reads run, first come first served."""

    def __init__(self, clock: Clock, *, quick_s: float, limit: int) -> None:
        self._turns = Turns(min(4, limit))
        self._clock = clock
        self._quick_s = quick_s
        self._limit = limit

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Run a block as one of the reads. If cancelled while waiting, it leaves the queue."""
        async with self._turns.turn():
            started_s = self._clock.monotonic_s()
            try:
                yield
            finally:
                took_s = self._clock.monotonic_s() - started_s
                window = self._turns.limit
                self._turns.limit = next_window(window, took_s, quick_s=self._quick_s, limit=self._limit)

    @property
    def num_running(self) -> int:
        """Reads under way."""
        return self._turns.num_running
