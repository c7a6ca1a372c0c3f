"""A real service process, to kill and freeze: a `DictStore` behind the real listener, sessions and wire."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

import uvloop

from kvstore.api import PageStore
from kvstore.service.main import serve
from kvstore.service.server import Server
from kvstore.testing.dict_store import DictStore
from kvstore.testing.forking import ForkedProcess
from kvstore.testing.serve import ROOT, bare_environment
from kvstore.testing.waiting import eventually
from kvstore.testing.warm_services import start_warm
from kvstore.wire.address import parse_address


class ServiceProcess:
    """Starts a service on `url`; a context manager that leaves nothing running.

    Args:
        url: `unix:` or `tcp://`.
        slow: Calls of the store wait until their deadlines.
    """

    def __init__(self, url: str, *, slow: bool = False) -> None:
        self.url = url
        self._slow = slow
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._output: IO[bytes] | None = None

    def start(self) -> None:
        """Return when it accepts."""
        command = [sys.executable, "-m", "kvstore.testing.service_process", self.url, *(["slow"] if self._slow else [])]
        read_end, write_end = os.pipe()
        self._output = os.fdopen(read_end, "rb")
        with os.fdopen(write_end, "wb") as output:
            environment = bare_environment()
            self._process = start_warm(command, environment, write_end) or subprocess.Popen(
                command, stdout=output, cwd=ROOT, env=environment
            )
        if not any(b"ready" in line for line in self._output):
            self.kill()
            raise RuntimeError(f"the service of the test did not start on {self.url}")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def freeze(self) -> None:
        """SIGSTOP, and return when it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        stat = Path(f"/proc/{self.pid}/stat")
        eventually(lambda: stat.read_text().rsplit(")", 1)[1].split()[0] == "T", why="the service does not stop")

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and return when it is gone. Idempotent."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._output is not None:
            self._output.close()

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


def main(arguments: Sequence[str]) -> int:
    """Serve on an address until killed; `slow` may follow it."""
    url, *options = arguments
    store, addresses = _store("slow" in options), [parse_address(url)]
    uvloop.run(serve(store, Server, addresses, on_ready=lambda _: print("ready", flush=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
