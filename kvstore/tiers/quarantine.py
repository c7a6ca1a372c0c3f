"""How much a process keeps of what it puts aside in a tier that others share."""

from __future__ import annotations

__all__ = ["QuarantineBudget"]


class QuarantineBudget:
    """Keeps records that are put aside, for people to look at, up to a limit; what comes later is removed at once.

    Args:
        limit_bytes: Of all records that this process keeps aside in its life.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def keeps(self, num_bytes: int) -> bool:
        """Whether one more of this size is kept; it counts from now on."""
        if self.used_bytes + num_bytes > self.limit_bytes:
            return False
        self.used_bytes += num_bytes
        return True
