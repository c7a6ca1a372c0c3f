"""The contract of tiers on every form of Redis: Valkey, TLS with ACLs, sentinels, a cluster; real servers all.

Half-way through the contract the sentinels' primary, and one of the cluster's, is killed and its replica takes over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
import redis
import uvloop

from kvstore.testing.servers import (
    RedisCluster,
    RedisSentinel,
    RedisServer,
    TlsRedis,
    valkey_server,
)
from kvstore.testing.tier_contract import LastingTierContract, RawMedium
from kvstore.testing.waiting import eventually
from tests.contract.media import RedisMedium, raw_cluster, raw_sentinel

pytestmark = pytest.mark.servers

HALF_WAY = 20
"""Tests of the contract, of about 50, that come before a primary is killed."""


class FailOver:
    """Counts tests, and kills a primary before one of them."""

    def __init__(self, kill: Callable[[], None]) -> None:
        self._kill = kill
        self._num_tests = 0

    def before_a_test(self) -> None:
        self._num_tests += 1
        if self._num_tests == HALF_WAY:
            self._kill()


@pytest.fixture(scope="module")
def valkey() -> Iterator[RedisServer]:
    with valkey_server() as server:
        yield server


@pytest.fixture(scope="module")
def sentinel_failover(sentinel: RedisSentinel) -> FailOver:
    def kill() -> None:
        old = sentinel.primary()
        old.kill9()
        eventually(lambda: sentinel.primary() is not old and sentinel.primary() in sentinel.primaries())

    return FailOver(kill)


@pytest.fixture(scope="module")
def cluster_failover(cluster: RedisCluster) -> FailOver:
    def kill() -> None:
        cluster.primary_of(0).kill9()
        living = [server for server in cluster.servers if server.process.running]
        eventually(
            lambda: (
                len(cluster.primaries()) == 3
                and all(b"cluster_state:ok" in server.ask("CLUSTER", "INFO") for server in living)
            )
        )

    return FailOver(kill)


class TestValkey(LastingTierContract):
    """Valkey 9."""

    @pytest.fixture
    def medium(self, valkey: RedisServer) -> Iterator[RawMedium]:
        medium = RedisMedium(valkey.url)
        medium.raw.flushall()
        yield medium
        medium.raw.close()


class TestTlsAndAcl(LastingTierContract):
    """TLS with certificates on both sides, and a user with the rights that the documentation names and no more."""

    @pytest.fixture
    def medium(self, tls: TlsRedis) -> Iterator[RawMedium]:
        url = tls.url(options=f"?ssl_ca_certs={tls.ca_file}&ssl_certfile={tls.cert_file}&ssl_keyfile={tls.key_file}")
        raw = redis.Redis.from_url(url)
        for name in raw.scan_iter(match="*", count=10_000):
            raw.unlink(name)
        yield RedisMedium(tls.server.url, raw)
        raw.close()


# Its successor, a hook, would change the loop of every test of the run.
@pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture is deprecated")
class TestTlsAndAclOnUvloop(TestTlsAndAcl):
    """The loop of the service has a TLS of its own: the whole contract again."""

    @pytest.fixture
    def event_loop_policy(self) -> asyncio.AbstractEventLoopPolicy:
        return uvloop.EventLoopPolicy()


class TestSentinel(LastingTierContract):
    """Three sentinels, a primary and two replicas; the primary is killed half-way."""

    @pytest.fixture
    def medium(self, sentinel: RedisSentinel, sentinel_failover: FailOver) -> Iterator[RawMedium]:
        sentinel_failover.before_a_test()
        sentinel.flush()
        medium = RedisMedium(sentinel.url, raw_sentinel(sentinel))
        yield medium
        medium.raw.close()


class TestCluster(LastingTierContract):
    """Three primaries with a replica each; one primary is killed half-way."""

    @pytest.fixture
    def medium(self, cluster: RedisCluster, cluster_failover: FailOver) -> Iterator[RawMedium]:
        cluster_failover.before_a_test()
        cluster.flush()
        medium = RedisMedium(cluster.url, raw_cluster(cluster))
        yield medium
        medium.raw.close()
