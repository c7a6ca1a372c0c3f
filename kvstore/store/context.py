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


class StorePart:
    """Base of the parts of one store: each has at hand what all share."""

    def __init__(self, context: StoreContext) -> None:
        self._memory, self._hot, self._cold = context.memory, context.hot, context.cold
        self._limits, self._background = context.limits, context.background
        self._meters, self._clock = context.meters, context.clock
