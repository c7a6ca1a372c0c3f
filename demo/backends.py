"""Where the demo keeps its pages. Each backend ends everything that it started, however the block ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvstore.client import BlockingStore, ClientOptions, EmbeddedOptions
from kvstore.client.embedded import private_socket_path
from kvstore.runtime.deadline import Deadline
from kvstore.testing.program import Say
from kvstore.testing.servers import CephRgw, RedisServer, ceph_rgw, redis_server
from kvstore.testing.servers.process import ServerProcess

__all__ = ["Backend", "embedded", "real"]

_DRAIN_S = 120.0
_END_S = 20.0
_BUCKET = "kvstore-demo"


class Backend(ABC):
    """A service and its tiers.

    Attributes:
        connector: Extra config for the engines.
        environment: Added to the engines' environment.
    """

    connector: Mapping[str, Any]
    environment: Mapping[str, str]

    @abstractmethod
    def socket_path(self) -> Path:
        """Where the service listens."""

    @abstractmethod
    def restart(self) -> None:
        """End the service, so that the next engine meets a fresh one whose memory is empty."""

    def counters(self) -> dict[str, float]:
        return dict(self._status()["counters"])

    def wait_saved(self) -> None:
        """Wait until all that was saved has reached the slower tiers.

        Raises:
            TimeoutError: It has not in two minutes.
        """
        give_up_s = time.monotonic() + _DRAIN_S
        while any(queue["records"] for queue in self._status()["write_back"].values()):
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"pages were not written to the slower tiers in {_DRAIN_S} s")
            time.sleep(0.1)

    def _status(self) -> dict[str, Any]:
        options = ClientOptions(name="demo", num_data_connections=1)
        with BlockingStore(f"unix:{self.socket_path()}", options=options) as store:
            return dict(store.status(deadline=Deadline.after(10.0)))


class _Embedded(Backend):
    """`embedded:` in a cache folder of its own: a private service with memory and a directory there."""

    def __init__(self, cache: Path) -> None:
        self._directory = cache / "kvstore"
        self.connector = {"url": "embedded:", "memory_bytes": "1GiB", "disk_bytes": "4GiB"}
        self.environment = {"XDG_CACHE_HOME": str(cache)}

    def keep_running(self) -> BlockingStore:
        """Start the service as an engine would, and be a client of it, so that it outlives the engines."""
        sizes = EmbeddedOptions(directory=self._directory, memory_bytes=1 << 30, disk_bytes=4 << 30)
        store = BlockingStore("embedded:", embedded=sizes, options=ClientOptions(name="demo"))
        store.wait_ready(deadline=Deadline.after(_END_S))
        return store

    def socket_path(self) -> Path:
        return private_socket_path(self._directory)

    def restart(self) -> None:
        """End it at once: by itself it would end some seconds after its last client."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            give_up_s = time.monotonic() + _END_S
            while (pids := _processes_naming(str(self._directory))) and time.monotonic() < give_up_s:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                time.sleep(0.1)


def _processes_naming(argument: str) -> list[int]:
    """Our own processes that have this very argument: a folder that no other demo has."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if argument.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


class _Real(Backend):
    """`kvstore serve` with Redis as the hot tier and S3 as the cold one."""

    def __init__(self, folder: Path, redis: RedisServer, rgw: CephRgw) -> None:
        self._redis = redis
        self._socket = folder / "kvstore.sock"
        self.connector = {"url": f"unix:{self._socket}"}
        self.environment = {"XDG_CACHE_HOME": str(folder)}
        command = [sys.executable, "-m", "kvstore.cli", "serve", "--listen", f"unix:{self._socket}"]
        command += ["--hot", redis.url, "--cold", f"s3://{_BUCKET}/pages", "--memory-bytes", "1GiB"]
        settings = {name for name in os.environ if name.startswith(("KVSTORE_", "AWS_"))}
        env = {name: value for name, value in os.environ.items() if name not in settings}
        env |= {
            "AWS_ENDPOINT_URL_S3": rgw.endpoint_url,
            "AWS_ACCESS_KEY_ID": rgw.access_key,
            "AWS_SECRET_ACCESS_KEY": rgw.secret_key,
            "AWS_REGION": rgw.region,
            "AWS_DEFAULT_REGION": rgw.region,
            "XDG_CACHE_HOME": str(folder),
        }
        self._service = ServerProcess(command, folder / "service.log", env)

    def socket_path(self) -> Path:
        return self._socket

    def start(self) -> None:
        self._service.start()
        self._service.wait_ready(self._answers, _END_S)

    def restart(self) -> None:
        self.stop()
        self.start()

    def stop(self) -> None:
        self._service.stop(timeout_s=_END_S)

    def flush_hot(self) -> None:
        """Empty Redis.

        Raises:
            RuntimeError: It refused.
        """
        with socket.create_connection((self._redis.host, self._redis.port), timeout=_END_S) as connection:
            connection.sendall(b"FLUSHALL\r\n")
            if not (answer := connection.recv(64)).startswith(b"+OK"):
                raise RuntimeError(f"Redis answered FLUSHALL with {answer!r}")

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(self._socket))
            return True
        return False


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
            try:
                backend.start()
                say("pages go to Redis and S3 (kvstore serve)")
                yield backend
            finally:
                backend.stop()
