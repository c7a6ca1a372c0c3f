"""The two stores of the exactness matrix: `embedded:`, and a service over Redis and S3."""

from __future__ import annotations

import contextlib
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvstore.client import BlockingStore, ClientOptions
from kvstore.errors import KVStoreError
from kvstore.runtime.deadline import Deadline
from kvstore.testing.serve import PrivateService, RunningService, Service
from kvstore.testing.servers import CephRgw, RedisServer

__all__ = ["PATIENCE_S", "PATIENT", "EmbeddedStore", "SharedStore", "TestedStore", "shared_store", "wait_for_engine"]

PATIENCE_S = 120.0
PATIENT = {
    "lookup_timeout_ms": 60_000,
    "stall_timeout_ms": 60_000,
    "max_wait_ms": 120_000,
    "load_always": True,
}
_PATIENT_SERVICE = {"KVSTORE_STALL_TIMEOUT_MS": "30000", "KVSTORE_FETCH_TIMEOUT_MS": "30000"}
"""Hits are what these tests are about, and the machine may be busy: nothing is given up for being slow."""


class TestedStore(ABC):
    """A store for engines, whose memory can be emptied.

    Attributes:
        service: The store's.
        connector: Extra config of the connector.
        environment: For the engines.
    """

    __test__ = False  # pytest: no class of tests
    service: RunningService
    connector: Mapping[str, Any]
    environment: Mapping[str, str]

    @abstractmethod
    def forget(self) -> None:
        """End the service when all is written, so that what comes next reads from the slower tiers."""

    @property
    def url(self) -> str:
        """Where the service listens."""
        return self.service.url

    def num_served_from(self, tier: str) -> float:
        """Records that a tier has given since the service was started."""
        return self.service.counters().get(f'served_records{{tier="{tier}"}}', 0.0)

    def num_corrupt(self) -> float:
        """Records that did not pass verification since the service was started."""
        counters = self.service.counters()
        return sum(number for name, number in counters.items() if name.startswith("corrupt_records"))


class EmbeddedStore(TestedStore):
    """A private service, as engines start it where nothing is set up: memory and a directory.

    Attributes:
        directory: Where its records are.
    """

    def __init__(self, folder: Path) -> None:
        self.directory = folder / "kvstore"
        self.service: PrivateService = PrivateService(self.directory)
        self.connector = {"url": "embedded:", "memory_bytes": "256MiB", "disk_bytes": "1GiB", **PATIENT}
        self.environment = {"XDG_CACHE_HOME": str(folder), **_PATIENT_SERVICE}

    def forget(self) -> None:
        self.service.end()


class SharedStore(TestedStore):
    """`kvstore serve` with Redis and S3 behind it; `shared_store` makes one."""

    def __init__(self, folder: Path, redis: RedisServer, rgw: CephRgw) -> None:
        self._redis = redis
        bucket = f"exactness-{secrets.token_hex(6)}"  # the gateway is shared: nothing of another test may be found
        rgw.create_bucket(bucket)
        flags = {"hot": redis.url, "cold": f"s3://{bucket}/pages", "memory_bytes": "512MiB"}
        self.service: Service = Service(folder, flags, environment={**rgw.environment, **_PATIENT_SERVICE})
        self.connector = {"url": self.service.url, **PATIENT}
        self.environment = {}

    def forget(self) -> None:
        self.service.settle()
        self.service.stop()
        self.service.start()

    def forget_hot(self) -> None:
        """Empty Redis and the service's memory: from now on pages come from S3."""
        self.service.settle()
        self.service.stop()
        self._redis.flush()
        self.service.start()


def wait_for_engine(url: str, *, ranks: int = 1) -> None:
    """Return when an engine that was started, or outlived a restart of its service, can save and load.

    Its scheduler side and each rank have three connections, whoever asks has two; those of others may be about to end.
    """
    expected, seen = 2 + 3 * (1 + ranks), 0
    with BlockingStore(url, options=ClientOptions(num_data_connections=1)) as store:

        def is_there() -> bool:
            nonlocal seen
            with contextlib.suppress(KVStoreError):
                status = store.status(deadline=Deadline.after(5.0))
                connected = status["namespaces"] and status["service"]["sessions"] >= expected
                seen = seen + 1 if connected else 0
            return seen >= 5

        ends_s = time.monotonic() + PATIENCE_S
        while not is_there():
            if time.monotonic() > ends_s:
                raise TimeoutError(f"the engine does not connect within {PATIENCE_S} s")
            time.sleep(0.05)


@contextlib.contextmanager
def shared_store(folder: Path, redis: RedisServer, rgw: CephRgw) -> Iterator[SharedStore]:
    """Run a service over an empty Redis and an empty bucket for the length of the block."""
    redis.flush()  # it is shared
    store = SharedStore(folder, redis, rgw)
    with store.service:
        yield store
