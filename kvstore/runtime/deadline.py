"""Deadlines: points in time after which an answer is useless."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType

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

    def scope(self, what: str) -> AbstractAsyncContextManager[None]:
        """Cancel the block at the deadline.

        Raises:
            Unavailable: The block was still running at the deadline; the message begins with `what`.
        """
        return _Scope(self, what)


class _Scope(AbstractAsyncContextManager[None]):
    """A class, and it raises its own error only after the timeout's: a generator's error (Python 3.12 on) or a cause
    would refer to the frames of the block, which refer to it. Such a cycle keeps what is in these frames, like records,
    until the cyclic collector runs.
    """

    def __init__(self, deadline: Deadline, what: str) -> None:
        self._deadline = deadline
        self._what = what

    async def __aenter__(self) -> None:
        self._timeout = asyncio.timeout(self._deadline.remaining_s)
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        is_late = isinstance(error, TimeoutError)
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            is_late = True
        finally:
            del self._timeout  # it has the task, which may have the error
        if is_late:
            raise Unavailable(f"{self._what} {LATE}")
