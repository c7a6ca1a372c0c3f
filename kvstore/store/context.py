"""What the parts of one store share."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.runtime.background import Background
from kvstore.runtime.clock import Clock
from kvstore.runtime.instruments import Instruments
from kvstore.runtime.meters import Meters
from kvstore.store.limits import StoreLimits
from kvstore.tiers.base import Tier
from kvstore.tiers.memory import MemoryTier


@dataclass(frozen=True, slots=True)
class StoreContext:
    """The tiers of one `TieredStore`, its limits and instruments, and the owner of its background tasks."""

    memory: MemoryTier
    hot: Tier | None
    cold: Tier | None
    limits: StoreLimits
    instruments: Instruments
    background: Background

    @property
    def slower(self) -> tuple[Tier, ...]:
        """The tiers below memory, fastest first."""
        return tuple(tier for tier in (self.hot, self.cold) if tier is not None)

    @property
    def clock(self) -> Clock:
        return self.instruments.clock

    @property
    def meters(self) -> Meters:
        return self.instruments.meters
