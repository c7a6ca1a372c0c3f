"""Wraps a tier with limits, a circuit breaker and meters. See README.md."""

from kvstore.tiers.wrap.breaker import Breaker
from kvstore.tiers.wrap.guarded import GuardedTier, tell_put_aside

__all__ = ["Breaker", "GuardedTier", "tell_put_aside"]
