"""A service over memory and a directory, in a process to kill, freeze and start again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstore.client import BlockingStore
from kvstore.errors import KVStoreError
from kvstore.runtime.deadline import Deadline

__all__ = ["DirectoryService"]

_PATIENCE_S = 20.0


class DirectoryService:
    """`kvstore serve` on a Unix socket with its records in a directory; a context manager that leaves nothing running.

    Attributes:
        url: For engines.
        records: Folder of the records.
    """

    def __init__(self, folder: Path, *, verifies: bool = True) -> None:
        self.url = f"unix:{folder / 'service.sock'}"
        self.records = folder / "records"
        self._log = folder / "service.log"
        self._module = "kvstore.cli" if verifies else "tests.connector.support.unverified"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return when it answers."""
        command = [sys.executable, "-m", self._module, "serve", "--listen", self.url, "--memory-bytes", "512MiB"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([*command, "--cold", f"file://{self.records}"], stdout=log, stderr=log)
        self.status()

    def status(self) -> Mapping[str, Any]:
        with BlockingStore(self.url) as store:
            ends_s = time.monotonic() + _PATIENCE_S
            while True:
                try:
                    return store.status(deadline=Deadline.after(2.0))
                except KVStoreError:
                    assert self._process is not None
                    if self._process.poll() is not None or time.monotonic() > ends_s:
                        raise RuntimeError(f"the service does not answer:\n{self._log.read_text()[-2000:]}") from None
                    time.sleep(0.05)

    def settle(self) -> None:
        """Return when every saved record is on disk."""
        ends_s = time.monotonic() + _PATIENCE_S
        while any(queue["records"] for queue in self.status()["write_back"].values()):
            assert time.monotonic() < ends_s, "records do not reach the disk"
            time.sleep(0.05)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """An orderly end, with everything written."""
        assert self._process is not None
        self._process.terminate()
        assert self._process.wait(_PATIENCE_S) == 0

    def __enter__(self) -> DirectoryService:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
