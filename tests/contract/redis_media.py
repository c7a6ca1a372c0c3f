"""A Redis as the tier contract's medium: values reached with a general client, in any topology."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis
from redis.cluster import ClusterNode

from kvstore.format.header_v1 import HEADER_BYTES
from kvstore.format.names import format_name
from kvstore.model.keys import RecordKey
from kvstore.runtime.io_loops import IoLoop
from kvstore.testing.servers import RedisCluster, RedisSentinel
from kvstore.testing.tier_contract import RawMedium
from kvstore.tiers.base import Tier
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis.reading import STRIPE_BYTES


class RedisMedium(RawMedium):
    """Reaches the values with a general client.

    Args:
        url: What the tier is given.
        raw: The client; the caller closes it.

    Attributes:
        io_loops: Where tiers that are opened from now on move bytes.
    """

    def __init__(self, url: str, raw: Any = None) -> None:
        self.url = url
        self.io_loops: Sequence[IoLoop] = ()
        self.raw = redis.Redis.from_url(url) if raw is None else raw

    async def open_tier(self) -> Tier:
        return RedisTier(self.url, io_loops=self.io_loops)

    async def read(self, key: RecordKey) -> bytes | None:
        return self.raw.get(format_name(key))

    async def write(self, key: RecordKey, data: bytes) -> None:
        """Keeps the cut of a striped record: each value is replaced by what `data` has at its place."""
        name = format_name(key)
        assert self.raw.exists(name)
        found = self.raw.scan_iter(match=name.replace("{", "\\{") + ".*", count=10_000)
        stripes = sorted(set(found), key=lambda name: int(name.split(b".")[-1]))
        if not stripes:
            self.raw.set(name, data)
            return
        self.raw.set(name, data[:HEADER_BYTES])
        for index, stripe in enumerate(stripes):
            start = HEADER_BYTES + index * STRIPE_BYTES
            self.raw.set(stripe, data[start : start + STRIPE_BYTES])


def raw_sentinel(group: RedisSentinel) -> redis.Redis:
    """A client of the primary of this moment."""
    return redis.Redis(host="127.0.0.1", port=group.primary().port)


def raw_cluster(group: RedisCluster) -> redis.RedisCluster:
    """A client of all nodes, begun at one that lives."""
    return redis.RedisCluster(startup_nodes=[ClusterNode("127.0.0.1", one.port) for one in group.primaries()])
