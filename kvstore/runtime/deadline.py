"""Deadlines: points in time after which an answer is useless."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvstore.errors import Unavailable
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock

LATE = "did not end before its deadline"
"""How the message of an error at a deadline ends."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on the monotonic clock, passed unchanged through all layers of one call."""

    at_s: float
    clock: Clock = SYSTEM_CLOCK

    @classmethod
    def after(cls, seconds: float, clock: Clock = SYSTEM_CLOCK) -> Deadline:
        """The point `seconds` from now."""
        return cls(clock.monotonic_s() + seconds, clock)

    @property
    def remaining_s(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self.at_s - self.clock.monotonic_s())

    @property
    def expired(self) -> bool:
        return self.remaining_s <= 0.0

    def earlier(self, seconds: float) -> Deadline:
        """The earlier one of this deadline and `seconds` from now."""
        return Deadline(min(self.at_s, self.clock.monotonic_s() + seconds), self.clock)

    @asynccontextmanager
    async def scope(self, what: str) -> AsyncIterator[None]:
        """Cancel the block at the deadline.

        Raises:
            Unavailable: The block was still running at the deadline; the message begins with `what`.
        """
        is_late = False
        try:
            async with asyncio.timeout(self.remaining_s):
                yield
        except TimeoutError:
            # raised below: the cause's traceback would have the timeout, which has this task, which may have the error:
            # such a cycle would keep what the caller's frames have until the cyclic collector runs
            is_late = True
        if is_late:
            raise Unavailable(f"{what} {LATE}")
