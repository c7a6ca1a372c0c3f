"""Real servers for tests and the demo: installed when absent, on free ports, ended with their owner. See README.md."""

from kvstore.testing.servers.ceph import CephRgw, ceph_rgw
from kvstore.testing.servers.install import CannotInstall
from kvstore.testing.servers.redis import RedisServer, redis_server

__all__ = ["CannotInstall", "CephRgw", "RedisServer", "ceph_rgw", "redis_server"]
