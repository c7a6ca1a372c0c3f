"""Records in Redis. See README.md."""

from kvstore.tiers.redis.tier import RedisTier

__all__ = ["RedisTier"]
