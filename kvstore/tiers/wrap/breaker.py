"""When to stop asking a tier, and when to try again."""

from __future__ import annotations

from kvstore.errors import InvalidRequest

__all__ = ["Breaker"]


class Breaker:
    """Opens after `failures_max` failures in a row, or after one call that hung for `hang_s` or longer.

    Args:
        failures_max: Failures in a row.
        hang_s: A call that ran into its deadline after this long shows that the tier hangs; one with less time shows
            nothing, since a healthy tier may need longer than a caller had left.
        delay_first_s: Wait before the first probe; doubled with each that fails.
        delay_max_s: The longest wait.
    """

    def __init__(
        self,
        *,
        failures_max: int = 3,
        hang_s: float = 0.2,
        delay_first_s: float = 0.25,
        delay_max_s: float = 15.0,
    ) -> None:
        if failures_max < 1 or not 0 < delay_first_s <= delay_max_s or hang_s < 0:
            raise InvalidRequest("the limits of a circuit breaker are out of range", failures_max=failures_max)
        self._failures_max = failures_max
        self._hang_s = hang_s
        self._delay_first_s = delay_first_s
        self._delay_max_s = delay_max_s
        self._num_failures = 0
        self.delay_s = delay_first_s
        self.is_open = False

    def succeeded(self) -> None:
        """A call of a caller went well: the slate is clean."""
        self._num_failures = 0
        if not self.is_open:
            self.delay_s = self._delay_first_s

    def failed(self, *, took_s: float, timed_out: bool) -> bool:
        """A call of a caller failed. True: the breaker opened just now."""
        if self.is_open or (timed_out and took_s < self._hang_s):
            return False
        self._num_failures += 1
        if self._num_failures < self._failures_max and not timed_out:
            return False
        self.is_open = True
        return True

    def probe_failed(self) -> None:
        """Wait twice as long before the next one."""
        self.delay_s = min(2 * self.delay_s, self._delay_max_s)

    def probe_succeeded(self) -> None:
        """Closed again. The delay stays grown until a caller's call succeeds, so that a flapping tier is asked less."""
        self.is_open = False
        self._num_failures = 0
