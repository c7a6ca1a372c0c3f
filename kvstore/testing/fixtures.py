"""Pytest fixtures of real servers; load with `pytest_plugins = ["kvstore.testing.fixtures"]`.

Those that are called shared live as long as the run: a test that kills, freezes or fills one starts its own with
`redis_server()` or `ceph_rgw()`. The others belong to one module of tests, which may kill and freeze them. A server
that cannot be had fails the tests that need it, with what to do.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.testing.servers import (
    CephRgw,
    RedisCluster,
    RedisSentinel,
    RedisServer,
    TlsRedis,
    ceph_rgw,
    redis_cluster,
    redis_sentinel,
    redis_server,
    redis_tls_server,
)


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    """A Redis without a memory limit; use names of your own, or flush it."""
    with redis_server() as server:
        yield server


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[RedisCluster]:
    """Three primaries with a replica each; flush it."""
    with redis_cluster() as group:
        yield group


@pytest.fixture(scope="session")
def shared_rgw() -> Iterator[CephRgw]:
    """A Ceph gateway; make a bucket of your own."""
    with ceph_rgw() as server:
        yield server


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    """A cluster of the module's own."""
    with redis_cluster() as group:
        yield group


@pytest.fixture(scope="module")
def sentinel() -> Iterator[RedisSentinel]:
    """A primary, replicas and sentinels of the module's own."""
    with redis_sentinel() as group:
        yield group


@pytest.fixture(scope="module")
def tls() -> Iterator[TlsRedis]:
    """A server of the module's own that speaks TLS alone."""
    with redis_tls_server() as server:
        yield server
