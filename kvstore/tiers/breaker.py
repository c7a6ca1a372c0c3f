"""A circuit breaker: when calls to a tier or a server are refused, and when it is probed again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.deadline import Deadline


class Breaker:
    """Opens after `failures_max` failures in a row, or after one call that hung for `hang_s` or longer.

    A call counts as a failure if it waited for `notice_s` or longer, then ended by its deadline or its caller's
    cancellation, and no other call has been answered since it started. So neither callers with little time left nor
    slow but living tiers open the breaker.

    Args:
        failures_max: Failures in a row.
        notice_s: Shorter waits are not counted.
        hang_s: One wait of this length that ended by its deadline opens the breaker.
        delay_first_s: Wait before the first probe; doubled after each probe that fails.
        delay_max_s: The longest wait, and so the longest time until a tier that is back is used again.

    Attributes:
        on_open: Called with the reason when the end of a call opens the breaker.
    """

    def __init__(
        self,
        *,
        failures_max: int = 3,
        notice_s: float = 0.05,
        hang_s: float = 0.5,
        delay_first_s: float = 0.25,
        delay_max_s: float = 1.0,
    ) -> None:
        if failures_max < 1 or not 0 < delay_first_s <= delay_max_s or not 0 <= notice_s <= hang_s:
            raise InvalidRequest("the limits of a circuit breaker are out of range", failures_max=failures_max)
        self._failures_max = failures_max
        self._notice_s = notice_s
        self._hang_s = hang_s
        self._delay_first_s = delay_first_s
        self._delay_max_s = delay_max_s
        self._num_failures = 0
        self._answered_s: float | None = None
        self.on_open: Callable[[str], None] = lambda _: None
        self.delay_s = delay_first_s
        self.is_open = False

    @contextmanager
    def observe(
        self,
        deadline: Deadline,
        clock: Clock = SYSTEM_CLOCK,
        *,
        is_asked: bool = True,
        answers: tuple[type[Unavailable], ...] = (),
        ignored: tuple[type[Unavailable], ...] = (),
    ) -> Iterator[None]:
        """Run a call, and count how it ended.

        Args:
            is_asked: False: it may end without a request to the tier, so its success proves nothing.
            answers: Errors that prove that the tier answers: a probe would not meet them, and would close the breaker.
            ignored: Errors that tell neither that the tier answers nor that it does not.
        """
        started_s = clock.monotonic_s()
        try:
            yield
        except ignored:
            raise
        except answers:
            self._answered(clock)
            raise
        except Unavailable as error:
            waited_s = clock.monotonic_s() - started_s
            if not deadline.expired:
                self._count(str(error))
            elif self._is_hang(started_s, waited_s):
                self._count(str(error), is_proof=waited_s >= self._hang_s)
            raise
        except asyncio.CancelledError:
            if self._is_hang(started_s, clock.monotonic_s() - started_s):
                self._count("its callers were cancelled before it answered: check its load and the network")
            raise
        if is_asked:
            self._answered(clock)

    def _answered(self, clock: Clock) -> None:
        self._answered_s = clock.monotonic_s()
        self._num_failures = 0
        if not self.is_open:
            self.delay_s = self._delay_first_s

    def _is_hang(self, started_s: float, waited_s: float) -> bool:
        answered_since = self._answered_s is not None and self._answered_s >= started_s
        return not answered_since and waited_s >= self._notice_s

    def _count(self, reason: str, *, is_proof: bool = False) -> None:
        if not self.is_open:
            self._num_failures += 1
            if is_proof or self._num_failures >= self._failures_max:
                self.is_open = True
                self.on_open(reason)

    def open(self) -> bool:
        """Open now, because the tier certainly does not answer. False: it was open."""
        if self.is_open:
            return False
        self.is_open = True
        return True

    def probe_failed(self) -> None:
        """Double the wait before the next probe."""
        self.delay_s = min(2 * self.delay_s, self._delay_max_s)

    def probe_succeeded(self) -> None:
        """Close. The delay is kept until a call succeeds, so that a flapping tier is probed less often."""
        self.is_open = False
        self._num_failures = 0
