"""Where the demo keeps its pages. Each backend ends everything that it started, however the block ends."""

from __future__ import annotations

import contextlib
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvstore.client import BlockingStore, ClientOptions, EmbeddedOptions
from kvstore.runtime.deadline import Deadline
from kvstore.testing.program import Say
from kvstore.testing.serve import PrivateService, RunningService, Service
from kvstore.testing.servers import CephRgw, RedisServer, ceph_rgw, redis_server

__all__ = ["Backend", "embedded", "real"]

_START_S = 20.0
_BUCKET = "kvstore-demo"


class Backend(ABC):
    """A service and its tiers.

    Attributes:
        service: The service.
        connector: Extra config for the engines.
        environment: Added to the engines' environment.
    """

    service: RunningService
    connector: Mapping[str, Any]
    environment: Mapping[str, str]

    @abstractmethod
    def restart(self) -> None:
        """End the service, so that the next engine meets a fresh one whose memory is empty."""


class _Embedded(Backend):
    """`embedded:` in a cache folder of its own: a private service with memory and a directory there."""

    def __init__(self, cache: Path) -> None:
        self.service: PrivateService = PrivateService(cache / "kvstore")
        self.connector = {"url": "embedded:", "memory_bytes": "1GiB", "disk_bytes": "4GiB"}
        self.environment = {"XDG_CACHE_HOME": str(cache)}

    def keep_running(self) -> BlockingStore:
        """Start the service as an engine would, and be a client of it, so that it outlives the engines."""
        sizes = EmbeddedOptions(directory=self.service.directory, memory_bytes=1 << 30, disk_bytes=4 << 30)
        store = BlockingStore("embedded:", embedded=sizes, options=ClientOptions(name="demo"))
        store.wait_ready(deadline=Deadline.after(_START_S))
        return store

    def restart(self) -> None:
        self.service.end()


class _Real(Backend):
    """`kvstore serve` with Redis as the hot tier and S3 as the cold one."""

    def __init__(self, folder: Path, redis: RedisServer, rgw: CephRgw) -> None:
        self.redis = redis
        flags = {"hot": redis.url, "cold": f"s3://{_BUCKET}/pages", "memory_bytes": "1GiB"}
        self.service: Service = Service(folder, flags, environment=rgw.environment)
        self.connector = {"url": self.service.url}
        self.environment = {"XDG_CACHE_HOME": str(folder)}

    def restart(self) -> None:
        self.service.stop()
        self.service.start()


@contextlib.contextmanager
def embedded(say: Say) -> Iterator[Backend]:
    """A private service, as an engine starts it where nothing is set up."""
    say("pages go to memory and a directory (embedded:)")
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-", ignore_cleanup_errors=True) as cache:
        backend = _Embedded(Path(cache))
        try:
            with backend.keep_running():
                yield backend
        finally:
            backend.restart()


@contextlib.contextmanager
def real(say: Say) -> Iterator[_Real]:
    """A real Redis, a real S3 gateway, and `kvstore serve` between them and the engines.

    Raises:
        CannotInstall: A server cannot be installed; the message says what to do.
    """
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-", ignore_cleanup_errors=True) as folder:
        say("starting a Redis and a Ceph S3 gateway")
        with redis_server() as redis, ceph_rgw() as rgw:
            rgw.create_bucket(_BUCKET)
            backend = _Real(Path(folder), redis, rgw)
            with backend.service:
                say("pages go to Redis and S3 (kvstore serve)")
                yield backend
