"""The only source of time, so that tests and simulations can replace it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two kinds of time: monotonic, to measure durations, and wall-clock, for timestamps."""

    def monotonic_s(self) -> float:
        """Seconds on a clock that never jumps; only differences have meaning."""
        ...

    def wall_ms(self) -> int:
        """Milliseconds since the Unix epoch; may jump, never used for a deadline."""
        ...


class SystemClock:
    """The operating system's clocks."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


SYSTEM_CLOCK: Clock = SystemClock()
