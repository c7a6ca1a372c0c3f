"""A real service process, to kill and freeze: a `DictStore` behind the real listener, sessions and wire."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import uvloop

import kvstore
from kvstore.api import PageStore
from kvstore.service.main import serve
from kvstore.service.server import Server
from kvstore.testing.dict_store import DictStore
from kvstore.wire.address import parse_address

_START_S = 60.0


class ServiceProcess:
    """Starts a service on `url`; a context manager that leaves nothing running.

    Args:
        url: `unix:` or `tcp://`.
        slow: Calls of the store wait until their deadlines.
    """

    def __init__(self, url: str, *, slow: bool = False) -> None:
        self.url = url
        self._slow = slow
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return when it accepts."""
        command = [sys.executable, "-m", "kvstore.testing.service_process", self.url, *(["slow"] if self._slow else [])]
        root = Path(kvstore.__file__).parent.parent
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root)
        assert self._process.stdout is not None
        ready = self._process.stdout.readline()
        if b"ready" not in ready:
            raise RuntimeError(f"the service of the test did not start on {self.url}")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def freeze(self) -> None:
        """SIGSTOP, and return when it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        stat = Path(f"/proc/{self.pid}/stat")
        ends_s = time.monotonic() + _START_S
        while stat.read_text().rsplit(")", 1)[1].split()[0] != "T":
            if time.monotonic() > ends_s:
                raise RuntimeError("the service of the test does not stop")
            time.sleep(0.001)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and return when it is gone. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def __enter__(self) -> ServiceProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@asynccontextmanager
async def _store(slow: bool) -> AsyncIterator[PageStore]:
    store = DictStore()
    if slow:
        store.gate.clear()
    yield store


def _main(url: str, *options: str) -> None:
    store, addresses = _store("slow" in options), [parse_address(url)]
    uvloop.run(serve(store, Server, addresses, on_ready=lambda _: print("ready", flush=True)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
