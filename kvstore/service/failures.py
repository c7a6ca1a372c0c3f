"""How often an address may show a wrong token."""

from __future__ import annotations

import math
from collections import OrderedDict

from kvstore.runtime.clock import SYSTEM_CLOCK, Clock

__all__ = ["FailureLimit"]


class FailureLimit:
    """Counts wrong tokens by address. After too many in a window, the address waits until the window has ended.

    Args:
        failures_max: Failures per window.
        window_s: Length of a window, which begins with the first failure.
        addresses_max: Addresses to remember; beyond, those that failed least recently are forgotten.
        clock: To measure with.
    """

    def __init__(
        self,
        *,
        failures_max: int = 10,
        window_s: float = 60.0,
        addresses_max: int = 4096,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._failures_max = failures_max
        self._window_s = window_s
        self._addresses_max = addresses_max
        self._clock = clock
        self._counts: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def wait_s(self, address: str) -> int:
        """Whole seconds that an address has to wait; 0: it need not."""
        started_s, count = self._counts.get(address, (float("-inf"), 0))
        left_s = started_s + self._window_s - self._clock.monotonic_s()
        return math.ceil(left_s) if count >= self._failures_max and left_s > 0 else 0

    def failed(self, address: str) -> None:
        """Note that an address has shown an unknown token."""
        now_s = self._clock.monotonic_s()
        started_s, count = self._counts.get(address, (float("-inf"), 0))
        if now_s - started_s >= self._window_s:
            started_s, count = now_s, 0
        self._counts[address] = (started_s, count + 1)
        self._counts.move_to_end(address)
        while len(self._counts) > self._addresses_max:
            self._counts.popitem(last=False)
