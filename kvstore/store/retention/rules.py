"""Budget, quotas and time to live: what the cold tier may hold, and when eviction starts and stops. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.errors import InvalidRequest
from kvstore.eviction.holdings import Quota

_SLACK_SHARE_MIN, _SLACK_SHARE_MAX = 0.03, 0.08
_EVICTED_SHARE_MIN, _EVICTED_SHARE_MAX = 0.06, 0.2
_AHEAD_BYTES = 256 << 20
"""What may be written during a round, which takes a tenth of a second at least; and the least a round should free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionRules:
    """What the cold tier may hold, and for how long."""

    start_share: float
    """Share of the budget above which eviction starts, early enough to keep ahead of new records."""
    stop_share: float
    """Share of the budget down to which it continues, since each start reads the whole catalog."""
    budget_bytes: int | None = None
    """For all records together; `None`: no limit."""
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    """By tenant: what it is guaranteed, and the most it may hold."""
    ttl_s: int | None = None
    """What was neither stored nor read for longer is evicted; `None`: no limit."""
    period_s: float = 1.0
    """How often the totals are read; also at once when a put does not fit."""
    is_private: bool = False
    """This process is the tier's only owner. The usage that the medium reports counts, whole blocks included, and
    nothing is evicted while the catalog may lack records."""

    def __post_init__(self) -> None:
        if not 0 < self.stop_share <= self.start_share <= 1:
            raise InvalidRequest(
                "eviction stops at a share of the budget that is not above the one where it starts, both up to 1",
                start_share=self.start_share,
                stop_share=self.stop_share,
            )

    @property
    def near_share(self) -> float:
        """Share of the budget above which the tier counts as nearly full, even just after a round."""
        return self.stop_share - (self.start_share - self.stop_share) / 2

    @property
    def hold_nothing(self) -> bool:
        """Whether there is no budget, time to live or quota to apply."""
        return self.budget_bytes is None and self.ttl_s is None and not self.quotas

    def excess_bytes(self, used_bytes: int, start_bytes: int | None) -> int:
        """Bytes to evict; 0: none.

        Args:
            used_bytes: Bytes used of the budget.
            start_bytes: Eviction starts above this instead of `start_share`, and stops lower by as much.
        """
        if self.budget_bytes is None:
            return 0
        start = int(self.budget_bytes * self.start_share) if start_bytes is None else start_bytes
        if used_bytes <= start:
            return 0
        return used_bytes - start + int(self.budget_bytes * (self.start_share - self.stop_share))


def shares(budget_bytes: int) -> tuple[float, float]:
    """Shares of the budget at which eviction should start and stop: 3% below it and 6% below that, or up to 8% and 20%
    for a small one, which is soon full again.
    """
    ahead = _AHEAD_BYTES / budget_bytes
    start = 1 - min(_SLACK_SHARE_MAX, max(_SLACK_SHARE_MIN, ahead))
    return start, start - min(_EVICTED_SHARE_MAX, max(_EVICTED_SHARE_MIN, ahead))
