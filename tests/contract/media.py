"""What lies behind a tier, reached without its code: files, values of a Redis in any topology, objects of S3."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import redis
from redis.cluster import ClusterNode

from kvstore.format.header_v1 import HEADER_BYTES
from kvstore.format.names import format_name
from kvstore.model.keys import RecordKey
from kvstore.runtime.io_loops import IoLoop
from kvstore.testing.servers import CephRgw, RedisCluster, RedisSentinel
from kvstore.testing.tier_contract import RawMedium
from kvstore.tiers.base import Tier
from kvstore.tiers.filesystem import FilesystemTier
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis.reading import STRIPE_BYTES
from kvstore.tiers.s3 import S3Tier

BUDGET_BYTES = 1 << 30
"""Of each directory."""
_NUMBERS = itertools.count()


class FilesystemMedium(RawMedium):
    """Reaches into the files."""

    def __init__(self, root: Path) -> None:
        self.root = root

    async def open_tier(self) -> Tier:
        return await FilesystemTier.open(self.root, budget_bytes=BUDGET_BYTES)

    async def read(self, key: RecordKey) -> bytes | None:
        path = self.root / format_name(key)
        return path.read_bytes() if path.exists() else None

    async def write(self, key: RecordKey, data: bytes) -> None:
        (self.root / format_name(key)).write_bytes(data)


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
        if self.raw.strlen(name) > HEADER_BYTES:  # it has no stripes, and a scan is slow among many records
            self.raw.set(name, data)
            return
        found = self.raw.scan_iter(match=name.replace("{", "\\{") + ".*", count=10_000)
        stripes = sorted(set(found), key=lambda name: int(name.split(b".")[-1]))
        if not stripes:
            self.raw.set(name, data)
            return
        self.raw.set(name, data[:HEADER_BYTES])
        for index, stripe in enumerate(stripes):
            start = HEADER_BYTES + index * STRIPE_BYTES
            self.raw.set(stripe, data[start : start + STRIPE_BYTES])


class S3Medium(RawMedium):
    """Reaches the objects with the fixture's own signed requests."""

    def __init__(self, server: CephRgw) -> None:
        self.server = server
        self.bucket = f"contract-{next(_NUMBERS)}"
        self.prefix = "some/prefix"
        self.io_loops: Sequence[IoLoop] = ()
        server.create_bucket(self.bucket)

    async def open_tier(self) -> Tier:
        location = self.server.location(self.bucket, self.prefix)
        return await S3Tier.open(location, credentials=self.server.credentials, io_loops=self.io_loops)

    def path(self, key: RecordKey) -> str:
        return f"/{self.bucket}/{self.prefix}/{format_name(key)}"

    async def read(self, key: RecordKey) -> bytes | None:
        status, body = await asyncio.to_thread(self.server.request, "GET", self.path(key))
        assert status in (200, 404)
        return body if status == 200 else None

    async def write(self, key: RecordKey, data: bytes) -> None:
        status, body = await asyncio.to_thread(self.server.request, "PUT", self.path(key), data)
        assert status == 200, body


def raw_sentinel(group: RedisSentinel) -> redis.Redis:
    """A client of the primary of this moment."""
    return redis.Redis(host="127.0.0.1", port=group.primary().port)


def raw_cluster(group: RedisCluster) -> redis.RedisCluster:
    """A client of all nodes, begun at one that lives."""
    return redis.RedisCluster(startup_nodes=[ClusterNode("127.0.0.1", one.port) for one in group.primaries()])
