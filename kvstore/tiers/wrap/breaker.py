"""When to stop asking a tier, and when to try again."""

from __future__ import annotations

from kvstore.errors import InvalidRequest

__all__ = ["Breaker"]


class Breaker:
    """Opens after `failures_max` failures in a row, or after one call that hung for `hang_s` or longer.

    A call hung when its deadline came, or its caller left, after at least `notice_s`, and no other call was answered
    since it started. So callers with little time left, or with slow but living tiers, switch nothing off.

    Args:
        failures_max: Failures in a row.
        notice_s: A shorter wait shows nothing.
        hang_s: A single wait of this length up to the deadline is proof.
        delay_first_s: Wait before the first probe; doubled with each that fails.
        delay_max_s: The longest wait: a tier is used again so long after its return at the latest, for the price of
            one small question per wait.
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
        """A caller's call was answered: the slate is clean."""
        self._answered_s = now_s
        self._num_failures = 0
        if not self.is_open:
            self.delay_s = self._delay_first_s

    def failed(self) -> bool:
        """A caller's call was refused by the tier or the network. True: the breaker opened just now."""
        return self._count(is_proof=False)

    def ran_out(self, started_s: float, now_s: float, *, by_deadline: bool) -> bool:
        """A caller's call was not answered: its deadline came, or the caller went away. True: opened just now."""
        answered_since = self._answered_s is not None and self._answered_s >= started_s
        if answered_since or now_s - started_s < self._notice_s:
            return False
        return self._count(is_proof=by_deadline and now_s - started_s >= self._hang_s)

    def _count(self, *, is_proof: bool) -> bool:
        if self.is_open:
            return False
        self._num_failures += 1
        self.is_open = is_proof or self._num_failures >= self._failures_max
        return self.is_open

    def probe_failed(self) -> None:
        """Wait twice as long before the next one."""
        self.delay_s = min(2 * self.delay_s, self._delay_max_s)

    def probe_succeeded(self) -> None:
        """Closed again. The delay stays grown until a caller's call succeeds, so that a flapping tier is asked less."""
        self.is_open = False
        self._num_failures = 0
