"""The two stores of the exactness matrix: `embedded:`, and a service over Redis and S3."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import struct
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvstore.client import BlockingStore, ClientOptions
from kvstore.client.embedded import private_socket_path
from kvstore.errors import KVStoreError
from kvstore.runtime.deadline import Deadline
from kvstore.testing.servers import CephRgw, RedisServer
from kvstore.testing.servers.process import ServerProcess

__all__ = ["PATIENT", "EmbeddedStore", "SharedStore", "TestedStore", "shared_store", "wait_for_engine"]

_PATIENCE_S = 120.0
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
        connector: Extra config of the connector.
        environment: For the engines.
    """

    __test__ = False  # pytest: no class of tests
    connector: Mapping[str, Any]
    environment: Mapping[str, str]

    @abstractmethod
    def forget(self) -> None:
        """End the service when all is written, so that what comes next reads from the slower tiers."""

    @abstractmethod
    def socket_path(self) -> Path:
        """The service's socket."""

    @property
    def url(self) -> str:
        """Where the service listens."""
        return f"unix:{self.socket_path()}"

    def settle(self) -> None:
        """Return when every saved record has reached the slower tiers."""
        _wait(lambda: not any(queue["records"] for queue in self.status()["write_back"].values()), "records are stuck")

    def num_served_from(self, tier: str) -> float:
        """Records that a tier has given since the service was started."""
        return self.status()["counters"].get(f'served_records{{tier="{tier}"}}', 0.0)

    def num_corrupt(self) -> float:
        """Records that did not pass verification since the service was started."""
        counters = self.status()["counters"]
        return sum(number for name, number in counters.items() if name.startswith("corrupt_records"))

    def status(self) -> Mapping[str, Any]:
        """What the service says of itself; waits until it answers."""
        ends_s = time.monotonic() + _PATIENCE_S
        with BlockingStore(self.url, options=ClientOptions(num_data_connections=1)) as store:
            while True:
                try:
                    return store.status(deadline=Deadline.after(5.0))
                except KVStoreError:
                    if time.monotonic() > ends_s:
                        raise
                    time.sleep(0.05)


class EmbeddedStore(TestedStore):
    """A private service, as engines start it where nothing is set up: memory and a directory.

    Attributes:
        directory: Where its records are.
    """

    def __init__(self, folder: Path) -> None:
        self.directory = folder / "kvstore"
        self.connector = {"url": "embedded:", "memory_bytes": "256MiB", "disk_bytes": "1GiB", **PATIENT}
        self.environment = {"XDG_CACHE_HOME": str(folder), **_PATIENT_SERVICE}

    def socket_path(self) -> Path:
        return private_socket_path(self.directory)

    def forget(self) -> None:
        """It ends by itself some seconds after its last client left; here it is told to."""
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(self.socket_path()))
            pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            os.kill(pid, signal.SIGTERM)
            _wait(lambda: not _runs(pid), "the private service does not end")


class SharedStore(TestedStore):
    """`kvstore serve` with Redis and S3 behind it; `shared_store` makes one."""

    def __init__(self, folder: Path, redis: RedisServer, rgw: CephRgw) -> None:
        self._redis = redis
        self._socket = folder / "kvstore.sock"
        self.connector = {"url": f"unix:{self._socket}", **PATIENT}
        self.environment = {}
        bucket = f"exactness-{secrets.token_hex(6)}"  # the gateway is shared: nothing of another test may be found
        rgw.create_bucket(bucket)
        command = [sys.executable, "-m", "kvstore.cli", "serve", "--listen", f"unix:{self._socket}"]
        command += ["--hot", redis.url, "--cold", f"s3://{bucket}/pages", "--memory-bytes", "512MiB"]
        env = {name: value for name, value in os.environ.items() if not name.startswith(("KVSTORE_", "AWS_"))}
        env |= {
            "AWS_ENDPOINT_URL_S3": rgw.endpoint_url,
            "AWS_ACCESS_KEY_ID": rgw.access_key,
            "AWS_SECRET_ACCESS_KEY": rgw.secret_key,
            "AWS_REGION": rgw.region,
            "XDG_CACHE_HOME": str(folder),
            **_PATIENT_SERVICE,
        }
        self._service = ServerProcess(command, folder / "service.log", env)

    def socket_path(self) -> Path:
        return self._socket

    def start(self) -> None:
        self._service.start()
        self._service.wait_ready(lambda: _accepts(self._socket), _PATIENCE_S)

    def forget(self) -> None:
        self.settle()
        self.stop()
        self.start()

    def forget_hot(self) -> None:
        """Empty Redis and the service's memory: from now on pages come from S3."""
        self.settle()
        self.stop()
        self.empty_redis()
        self.start()

    def empty_redis(self) -> None:
        with socket.create_connection((self._redis.host, self._redis.port), timeout=10.0) as connection:
            connection.sendall(b"FLUSHALL\r\n")
            assert connection.recv(64).startswith(b"+OK")

    def stop(self) -> None:
        self._service.stop(timeout_s=_PATIENCE_S)


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

        _wait(is_there, "the engine does not connect")


@contextlib.contextmanager
def shared_store(folder: Path, redis: RedisServer, rgw: CephRgw) -> Iterator[SharedStore]:
    """Run a service over an empty Redis and an empty bucket for the length of the block."""
    store = SharedStore(folder, redis, rgw)
    store.empty_redis()  # it is shared as well
    try:
        store.start()
        yield store
    finally:
        store.stop()


def _runs(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _accepts(path: Path) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(path))
        return True
    return False


def _wait(condition: Callable[[], bool], otherwise: str) -> None:
    ends_s = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > ends_s:
            raise TimeoutError(f"{otherwise} after {_PATIENCE_S} s")
        time.sleep(0.05)
