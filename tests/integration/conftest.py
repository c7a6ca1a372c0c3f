"""A service over a directory, and a client of an empty Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from kvstore.testing.servers import RedisServer
from tests.connector.support.service import DirectoryService


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
