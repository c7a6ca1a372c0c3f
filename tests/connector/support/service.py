"""A store service in a process to kill, freeze and start again."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from kvstore.client import BlockingStore
from kvstore.errors import KVStoreError
from kvstore.runtime.deadline import Deadline
from kvstore.testing.servers.process import ServerProcess

__all__ = ["DirectoryService", "Service"]

_PATIENCE_S = 60.0


class Service:
    """`kvstore serve` on a Unix socket; a context manager that leaves nothing running.

    Args:
        folder: For its socket and log.
        flags: Settings, as flags of `kvstore serve`.
        environment: Further environment variables.
        launcher: Command that becomes the service by `exec`, in front of it.
        module: What is run.

    Attributes:
        url: For engines; the same for every service of one folder, so that one takes over from another.
    """

    def __init__(
        self,
        folder: Path,
        flags: Mapping[str, str],
        *,
        environment: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
        module: str = "kvstore.cli",
    ) -> None:
        self.url = f"unix:{folder / 'service.sock'}"
        command = [*launcher, sys.executable, "-m", module, "serve", "--listen", self.url]
        for name, value in flags.items():
            command += [f"--{name.replace('_', '-')}", value]
        own = {name: value for name, value in os.environ.items() if not name.startswith(("KVSTORE_", "AWS_"))}
        self._process = ServerProcess(command, folder / "service.log", {**own, **(environment or {})})

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        """Return when it answers."""
        self._process.start()
        self.status()

    def status(self) -> Mapping[str, Any]:
        with BlockingStore(self.url) as store:
            ends_s = time.monotonic() + _PATIENCE_S
            while True:
                try:
                    return store.status(deadline=Deadline.after(2.0))
                except KVStoreError:
                    if not self._process.running or time.monotonic() > ends_s:
                        raise RuntimeError(f"the service does not answer:\n{self._process.log_tail()}") from None
                    time.sleep(0.05)

    def settle(self, patience_s: float = _PATIENCE_S) -> None:
        """Return when every saved record is in the slower tiers."""
        ends_s = time.monotonic() + patience_s
        while True:
            queues = self.status()["write_back"]
            if not any(queue["records"] for queue in queues.values()):
                return
            assert time.monotonic() < ends_s, f"records do not reach the slower tiers: {queues}"
            time.sleep(0.05)

    def leases_end(self, patience_s: float = _PATIENCE_S) -> bool:
        """Whether every lease is given back in time, none by running out, and nothing is held in memory for one."""
        ends_s = time.monotonic() + patience_s
        while (leases := self.status()["leases"])["active"] and time.monotonic() < ends_s:
            time.sleep(0.05)
        return (leases["active"], leases["expired"], leases["pinned_bytes"]) == (0, 0, 0)

    def freeze(self) -> None:
        self._process.freeze()

    def thaw(self) -> None:
        self._process.thaw()

    def kill(self) -> None:
        """SIGKILL, and wait. Idempotent."""
        self._process.kill9()

    def stop(self) -> None:
        """An orderly end, with everything written."""
        self._process.stop(_PATIENCE_S)
        assert self._process.exit_status == 0, self._process.log_tail()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class DirectoryService(Service):
    """Keeps its records in memory and a directory, which is read anew at each start: tests change files meanwhile.

    Args:
        folder: For its socket, log and records.
        flags: Further settings.
        verifies: Whether records are checked.

    Attributes:
        records: Folder of the records.
    """

    def __init__(self, folder: Path, flags: Mapping[str, str] | None = None, *, verifies: bool = True) -> None:
        self.records = folder / "records"
        flags = {"memory_bytes": "512MiB", "cold": f"file://{self.records}", **(flags or {})}
        module = "kvstore.cli" if verifies else "tests.connector.support.unverified"
        super().__init__(folder, flags, module=module)

    def stop(self) -> None:
        super().stop()
        (self.records / "index").unlink(missing_ok=True)
