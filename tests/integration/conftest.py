"""A service over a directory, a client of an empty Redis, and each kind of medium that a tier stores on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from kvstore.testing.servers import RedisServer
from kvstore.testing.tier_contract import RawMedium
from tests.connector.support.service import DirectoryService
from tests.contract.media import FilesystemMedium, RedisMedium, S3Medium


@pytest.fixture
def service(tmp_path: Path) -> Iterator[DirectoryService]:
    with DirectoryService(tmp_path) as running:
        yield running


@pytest.fixture
async def client(shared_redis: RedisServer) -> AsyncIterator[Redis]:
    """Of the shared Redis, which is empty."""
    shared_redis.flush()
    async with Redis(host=shared_redis.host, port=shared_redis.port) as client:
        yield client


@pytest.fixture(params=["directory", "redis", "s3"])
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RawMedium]:
    if request.param == "directory":
        yield FilesystemMedium(tmp_path / "records")
    elif request.param == "redis":
        server: RedisServer = request.getfixturevalue("shared_redis")
        server.flush()
        found = RedisMedium(server.url)
        yield found
        found.raw.close()
        server.flush()
    else:
        yield S3Medium(request.getfixturevalue("shared_rgw"))
