"""When to stop asking a tier, and when to try again."""

from __future__ import annotations

from kvstore.errors import InvalidRequest

__all__ = ["Breaker"]


class Breaker:
    """Opens after `failures_max` failures in a row, or after one call that hung for `hang_s` or longer.

    A call hung if its deadline came, or its caller left, after at least `notice_s`, and no other call has been answered
    since it started. So neither callers with little time left nor slow but living tiers open it.

    Args:
        failures_max: Failures in a row.
        notice_s: A shorter wait proves nothing.
        hang_s: A single wait of this length, up to the deadline, is proof.
        delay_first_s: Wait before the first probe; doubled with each that fails.
        delay_max_s: The longest wait, and so the latest that a tier is used again once it is back; each wait costs one
            small request.
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
        self.delay_s = delay_first_s
        self.is_open = False

    def succeeded(self, now_s: float) -> None:
        """Note that a caller's call was answered: failures are forgotten."""
        self._answered_s = now_s
        self._num_failures = 0
        if not self.is_open:
            self.delay_s = self._delay_first_s

    def failed(self) -> bool:
        """Note that the tier or the network refused a caller's call. True: the breaker opened just now."""
        return self._count(is_proof=False)

    def ran_out(self, started_s: float, now_s: float, *, by_deadline: bool) -> bool:
        """Note that a caller's call was not answered by its deadline, or before its caller left. True: opened now."""
        answered_since = self._answered_s is not None and self._answered_s >= started_s
        if answered_since or now_s - started_s < self._notice_s:
            return False
        return self._count(is_proof=by_deadline and now_s - started_s >= self._hang_s)

    def gave_proof(self) -> bool:
        """Note that somebody has seen for certain that the tier does not answer. True: the breaker opened just now."""
        return self._count(is_proof=True)

    def _count(self, *, is_proof: bool) -> bool:
        if self.is_open:
            return False
        self._num_failures += 1
        self.is_open = is_proof or self._num_failures >= self._failures_max
        return self.is_open

    def probe_failed(self) -> None:
        """Double the wait before the next probe."""
        self.delay_s = min(2 * self.delay_s, self._delay_max_s)

    def probe_succeeded(self) -> None:
        """Close. The delay is kept until a caller's call succeeds, so that a flapping tier is probed less often."""
        self.is_open = False
        self._num_failures = 0
