"""Real servers for tests and the demo: installed when absent, on free ports, ended with their owner. See README.md."""

from kvstore.testing.servers.ceph import CephRgw, ceph_rgw
from kvstore.testing.servers.install import CannotInstall
from kvstore.testing.servers.redis import RedisServer, redis_server, valkey_server
from kvstore.testing.servers.redis_group import RedisCluster, RedisSentinel, redis_cluster, redis_sentinel
from kvstore.testing.servers.redis_tls import TlsRedis, redis_tls_server

__all__ = [
    "CannotInstall",
    "CephRgw",
    "RedisCluster",
    "RedisSentinel",
    "RedisServer",
    "TlsRedis",
    "ceph_rgw",
    "redis_cluster",
    "redis_sentinel",
    "redis_server",
    "redis_tls_server",
    "valkey_server",
]
