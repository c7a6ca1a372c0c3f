"""What a level may hold, and for how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.errors import InvalidRequest
from kvstore.eviction.holdings import Quota

__all__ = ["RetentionRules", "shares"]

_SLACK_SHARE_MIN, _SLACK_SHARE_MAX = 0.03, 0.08
_EVICTED_SHARE_MIN, _EVICTED_SHARE_MAX = 0.06, 0.2
_AHEAD_BYTES = 256 << 20
"""What may be written while a round works, and what it should be worth: a round takes a tenth of a second at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionRules:
    """What a level may hold.

    Attributes:
        budget_bytes: Of all records; `None`: no limit.
        quotas: By tenant: what is kept for it, and what it may take at most.
        ttl_s: What was neither stored nor read for so long leaves; `None`: no limit.
        start_share: Of the budget: eviction starts above, so that it is ahead of what comes while it works.
        stop_share: Of the budget: and goes on down to this, since each start reads the whole catalog.
        period_s: The totals are looked at so often, and at once when a put finds too little room.
        is_private: The tier has one owner, this process, and a bound of its own: what it says is used counts, whole
            blocks and all, and nothing leaves while the catalog may lack records.
    """

    budget_bytes: int | None = None
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    ttl_s: int | None = None
    start_share: float = 0.97
    stop_share: float = 0.92
    period_s: float = 1.0
    is_private: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.stop_share <= self.start_share <= 1:
            raise InvalidRequest(
                "eviction stops at a share of the budget that is not above the one where it starts, both up to 1",
                start_share=self.start_share,
                stop_share=self.stop_share,
            )

    @property
    def near_share(self) -> float:
        """Of the budget: above it the level is as good as full, also when a round has just ended."""
        return self.stop_share - (self.start_share - self.stop_share) / 2

    @property
    def hold_nothing(self) -> bool:
        """Whether there is neither a budget nor a time nor a quota to keep to: then nobody need look."""
        return self.budget_bytes is None and self.ttl_s is None and not self.quotas

    def excess_bytes(self, used_bytes: int, start_bytes: int | None = None) -> int:
        """What must leave when so much is used; 0: nothing.

        Args:
            used_bytes: Of the budget.
            start_bytes: Where eviction starts now, and by as much earlier it stops; `None`: as the rules say.
        """
        if self.budget_bytes is None:
            return 0
        start = int(self.budget_bytes * self.start_share) if start_bytes is None else start_bytes
        if used_bytes <= start:
            return 0
        return used_bytes - start + int(self.budget_bytes * (self.start_share - self.stop_share))


def shares(budget_bytes: int) -> tuple[float, float]:
    """Of the budget, where eviction should start and where it should stop: 3% below it and 6% below that, or up to 8%
    and 20% of a small one, which is full again very soon.
    """
    ahead = _AHEAD_BYTES / budget_bytes
    start = 1 - min(_SLACK_SHARE_MAX, max(_SLACK_SHARE_MIN, ahead))
    return start, start - min(_EVICTED_SHARE_MAX, max(_EVICTED_SHARE_MIN, ahead))
