"""Records in Redis, and a general client of it for those who keep other things there. See README.md.

`open_control(location)` is an async context manager that gives a `redis.asyncio.Redis` or `RedisCluster` for the Redis
that a setting names: standalone, sentinel or cluster, with or without TLS. `compose` enters it and passes it on.
"""

from kvstore.tiers.redis.control import open_control
from kvstore.tiers.redis.tier import RedisTier

__all__ = ["RedisTier", "open_control"]
