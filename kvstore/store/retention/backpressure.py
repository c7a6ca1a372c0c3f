"""Back-pressure for a level with a budget: writers wait here until eviction has caught up."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Set

from kvstore.errors import Unavailable
from kvstore.model.keys import RecordKey
from kvstore.runtime.bounded_map import Latest
from kvstore.runtime.clock import Clock
from kvstore.runtime.deadline import Deadline

_WAIT_SHARE = 0.5
"""The share of a put's time spent on waiting; the rest is for the put itself."""
_COMPLETE_S = 1.0
"""The records of a boundary come from several ranks: within this time of one, another may be on its way."""
_RECENT_MAX = 16_384
_EARLIER_FIRST, _EARLIER_MAX = 1 / 64, 1 / 8
"""Shares of the budget by which eviction starts earlier: after a writer first had to wait, and at most."""
_EARLIER_KEPT = 15 / 16
"""What is kept of that share after a round in which no writer had to wait."""
_PRESUMED_S_MAX = 2.0
"""How long after the totals were read other services are presumed to keep their rate of writing."""
_RATE_KEPT = 0.5
"""The least that is kept of that rate at each reading, even if the totals have grown more slowly."""


class BudgetGate:
    """Tracks what a level holds between two readings of its totals, and admits no put beyond its budget.

    What other services have written since the last reading is extrapolated from what they wrote before it. A put that
    then does not fit causes another reading.

    Eviction is requested when the level is nearly full, and earlier if writers had to wait for it before, so that
    waiting is rare. If nothing can be evicted because everything is pinned, a put that does not fit is refused at once.
    While the totals cannot be read, everything is admitted.

    Args:
        budget_bytes: What the level may hold, in the unit of `settle`.
        start_bytes: Above this eviction is requested, at the latest.
        is_shared: Whether other services write to the level too.
    """

    def __init__(self, budget_bytes: int, start_bytes: int, clock: Clock, *, is_shared: bool = False) -> None:
        self.budget_bytes = budget_bytes
        self.ended_bytes = 0
        """Bytes that all puts have stored so far: what was stored while totals were read may not be in them."""
        self._start_bytes_max = start_bytes
        self._earlier_bytes = 0.0
        self._has_waited = False
        self._used_bytes = 0
        self._in_flight_bytes = 0
        self._waiting_bytes = 0
        self._clock = clock
        self._is_shared = is_shared
        self._settled_s = clock.monotonic_s()
        self._others_rate = 0.0  # bytes a second
        self._writing: Counter[bytes] = Counter()
        self._recent = Latest[bytes, float](_RECENT_MAX)
        self._is_suspended = True
        self._is_stuck = False
        self._freed = asyncio.Event()
        self._wanted = asyncio.Event()

    @property
    def used_bytes(self) -> int:
        """Bytes held, in flight, and presumed."""
        return self._used_bytes + self._in_flight_bytes + self._presumed_bytes

    @property
    def held_bytes(self) -> int | None:
        """Bytes in the last totals and since; `None`: the totals cannot be read."""
        return None if self._is_suspended else self._used_bytes

    @property
    def start_bytes(self) -> int:
        """Above this eviction is requested."""
        return self._start_bytes_max - int(self._earlier_bytes)

    @property
    def requested_bytes(self) -> int:
        """Bytes that are being written, or wait to be."""
        return self._in_flight_bytes + self._waiting_bytes

    @property
    def _presumed_bytes(self) -> int:
        """Bytes that other services have written since the totals were read, if they kept their rate."""
        if not self._others_rate:
            return 0
        return int(self._others_rate * min(self._clock.monotonic_s() - self._settled_s, _PRESUMED_S_MAX))

    def settle(self, used_bytes: int) -> None:
        """Note the level's totals, read just now."""
        now_s = self._clock.monotonic_s()
        if self._is_shared and not self._is_suspended and now_s > self._settled_s:
            rate = (used_bytes - self._used_bytes) / (now_s - self._settled_s)
            self._others_rate = max(rate, _RATE_KEPT * self._others_rate, 0.0)
        self._settled_s = now_s
        self._used_bytes = used_bytes
        self._is_suspended = False
        self._freed.set()

    def free(self, num_bytes: int) -> None:
        """Note that bytes were evicted."""
        self._used_bytes = max(0, self._used_bytes - num_bytes)
        self._is_stuck = False
        self._freed.set()

    def evicted(self) -> None:
        """Note the end of a round of eviction: the next one is requested earlier if a writer had to wait since."""
        if self._has_waited:
            earlier_bytes = max(2 * self._earlier_bytes, _EARLIER_FIRST * self.budget_bytes)
            self._earlier_bytes = min(earlier_bytes, _EARLIER_MAX * self.budget_bytes)
        else:
            self._earlier_bytes *= _EARLIER_KEPT
        self._has_waited = False

    def stuck(self) -> None:
        """Note that nothing more can be evicted for now."""
        self._is_stuck = True
        self._freed.set()

    def suspend(self) -> None:
        """Admit everything until the next `settle`: the totals cannot be read."""
        self._is_suspended = True
        self._others_rate = 0.0
        self._freed.set()

    def boundaries_in_flight(self) -> Set[bytes]:
        """Names (namespace and prefix) of boundaries that are being written, or wait to be."""
        return self._writing.keys()

    def boundaries_in_work(self) -> Set[bytes]:
        """Those in flight and those written a moment ago, which may not be complete yet."""
        since_s = self._clock.monotonic_s() - _COMPLETE_S
        return set(self._writing) | {name for name, at_s in self._recent.items() if at_s > since_s}

    def order(self) -> Mapping[bytes, float]:
        """The latest written boundaries, ranked from 0 to 1, since the catalog's times are whole seconds."""
        return {name: index / len(self._recent) for index, name in enumerate(self._recent)}

    async def take(self, key: RecordKey, num_bytes: int, deadline: Deadline) -> bool:
        """Reserve bytes for a put, until `end`. False: it does not fit, and nothing is evicted in time.

        If cancelled, nothing is reserved.
        """
        if not self._is_suspended and self.used_bytes + num_bytes > self.start_bytes:
            self._wanted.set()
        name = key.namespace + key.prefix
        self._writing[name] += 1
        is_taken = False
        try:
            is_taken = self._fits(num_bytes) or await self._wait(num_bytes, deadline)
        finally:
            if not is_taken:
                self._written(name)
        self._in_flight_bytes += num_bytes * is_taken
        return is_taken

    async def _wait(self, num_bytes: int, deadline: Deadline) -> bool:
        """Wait for part of the deadline until a put fits; returns whether it does, without suspending once it does."""
        self._waiting_bytes += num_bytes
        self._has_waited = True
        try:
            async with deadline.earlier(deadline.remaining_s * _WAIT_SHARE).scope("waiting for eviction"):
                while not self._fits(num_bytes):
                    if self._is_stuck or num_bytes > self.budget_bytes:
                        return False
                    self._wanted.set()
                    self._freed.clear()
                    await self._freed.wait()
        except Unavailable:
            return False
        finally:
            self._waiting_bytes -= num_bytes
        return True

    def _fits(self, num_bytes: int) -> bool:
        return self._is_suspended or self.used_bytes + num_bytes <= self.budget_bytes

    def end(self, key: RecordKey, num_bytes: int, *, is_stored: bool) -> None:
        """Note the end of a put that `take` had admitted, stored or not."""
        name = key.namespace + key.prefix
        self._written(name)
        self._recent[name] = self._clock.monotonic_s()
        self._in_flight_bytes -= num_bytes
        if is_stored:
            self._used_bytes += num_bytes
            self.ended_bytes += num_bytes
        else:
            self._freed.set()

    async def wanted(self, timeout_s: float) -> None:
        """Return when eviction is requested, or after `timeout_s`."""
        if self.used_bytes + self._waiting_bytes <= self.start_bytes:  # earlier requests have been met
            self._wanted.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._wanted.wait()
        except TimeoutError:
            pass
        self._wanted.clear()

    def _written(self, name: bytes) -> None:
        self._writing[name] -= 1
        if self._writing[name] <= 0:
            del self._writing[name]
