"""Pytest fixtures of real servers; load with `pytest_plugins = ["kvstore.testing.fixtures"]`.

The servers live as long as the run and are shared: a test that kills, freezes or fills one starts its own with
`redis_server()`, `redis_cluster()` or `ceph_rgw()`. A server that cannot be had fails the tests that need it, with what
to do.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.testing.servers import CephRgw, RedisCluster, RedisServer, ceph_rgw, redis_cluster, redis_server


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
