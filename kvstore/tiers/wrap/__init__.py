"""What is put around a tier: limits, a circuit breaker, meters. See README.md."""

from kvstore.tiers.wrap.breaker import Breaker
from kvstore.tiers.wrap.guarded import GuardedTier, tell_put_aside

__all__ = ["Breaker", "GuardedTier", "tell_put_aside"]
