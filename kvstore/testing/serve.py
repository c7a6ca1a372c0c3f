"""Services in processes of their own: `kvstore serve`, to kill, freeze and start again, and that of a directory."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import kvstore
from kvstore.client import BlockingStore, ClientOptions
from kvstore.errors import KVStoreError
from kvstore.runtime.deadline import Deadline
from kvstore.testing.servers.process import ServerProcess
from kvstore.wire.private_place import private_socket_path

ROOT = Path(kvstore.__file__).resolve().parent.parent
"""The source tree."""

_PATIENCE_S = 120.0
_END_S = 20.0
_RESIDENT = re.compile(r"VmRSS:\s+(\d+) kB")


def bare_environment() -> dict[str, str]:
    """This process's environment without settings of ours and of S3; child processes import this source tree."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("KVSTORE_", "AWS_"))}
    path = [str(ROOT), *filter(None, [bare.get("PYTHONPATH")])]
    return {**bare, "PYTHONPATH": os.pathsep.join(path)}


IN_MEMORY = {"hot": "memory:", "cold": "memory:", "memory_bytes": "64MiB", "admin_listen": "off"}
"""Settings of a service that keeps nothing."""


class RunningService:
    """Asks a service.

    Attributes:
        url: Where it listens.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def status(self) -> Mapping[str, Any]:
        """What it reports, as soon as it answers.

        Raises:
            RuntimeError: It has ended, or does not answer within two minutes.
        """
        with BlockingStore(self.url, options=ClientOptions(num_data_connections=1)) as store:
            ends_s = time.monotonic() + _PATIENCE_S
            while True:
                try:
                    return store.status(deadline=Deadline.after(2.0))
                except KVStoreError as error:
                    if self._has_ended() or time.monotonic() > ends_s:
                        raise RuntimeError(f"the service does not answer: {error}\n{self.log_tail()}") from None
                    time.sleep(0.05)

    def counters(self) -> Mapping[str, float]:
        """Its counters since it was started, by name with labels."""
        counters: Mapping[str, float] = self.status()["counters"]
        return counters

    def settle(self) -> None:
        """Return when every saved record is in the slower tiers.

        Raises:
            TimeoutError: They are not within two minutes.
        """
        ends_s = time.monotonic() + _PATIENCE_S
        while True:
            queues = self.status()["write_back"]
            if not any(queue["records"] for queue in queues.values()):
                return
            if time.monotonic() > ends_s:
                raise TimeoutError(f"records do not reach the slower tiers: {queues}")
            time.sleep(0.05)

    def log_tail(self) -> str:
        """The last characters that it wrote, where that is known."""
        return ""

    def _has_ended(self) -> bool:
        return False


class PrivateService(RunningService):
    """The embedded service of a directory, which engines or clients start.

    Attributes:
        directory: Where its records are.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(f"unix:{private_socket_path(directory)}")
        self.directory = directory

    def end(self) -> None:
        """End it at once; by itself it would end some seconds after its last client. Idempotent."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            give_up_s = time.monotonic() + _END_S
            while (pids := private_service_pids(self.directory)) and time.monotonic() < give_up_s:
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
                time.sleep(0.1)


def private_service_pids(directory: Path) -> list[int]:
    """The processes of a directory's embedded service: those that have it on their command lines."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                command = (entry / "cmdline").read_bytes().split(b"\0")
                if b"kvstore.service" in command and os.fsencode(directory) in command:
                    found.append(int(entry.name))
    return found


class Service(RunningService):
    """`kvstore serve`; a context manager that leaves nothing running.

    Args:
        folder: For its socket and its log.
        flags: Settings, as flags of `kvstore serve`.
        name: Tells services in one folder apart.
        environment: Further environment variables.
        launcher: Command that becomes the service by `exec`, in front of it.
        module: What is run.

    Attributes:
        url: The flag `listen`, by default a Unix socket, the same one for equal folders and names.
        process: The process.
    """

    def __init__(
        self,
        folder: Path,
        flags: Mapping[str, str],
        *,
        name: str = "service",
        environment: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
        module: str = "kvstore.cli",
    ) -> None:
        super().__init__(flags.get("listen", f"unix:{folder / name}.sock"))
        command = [*launcher, sys.executable, "-m", module, "serve"]
        for flag, value in {**flags, "listen": self.url}.items():
            command += [f"--{flag.replace('_', '-')}", value]
        env = {**bare_environment(), "XDG_CACHE_HOME": str(folder), **(environment or {})}
        self.process = ServerProcess(command, folder / f"{name}.log", env)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def resident_bytes(self) -> int:
        """Memory that the process has resident now, shared memory included."""
        found = _RESIDENT.search(Path(f"/proc/{self.pid}/status").read_text())
        assert found is not None
        return int(found[1]) << 10

    def log_tail(self) -> str:
        """The last 2,000 characters that it wrote."""
        return self.process.log_tail()

    def start(self) -> None:
        """Return when it takes engines."""
        log = self.process.log
        old_bytes = log.stat().st_size if log.exists() else 0
        self.process.start()
        self.process.wait_ready(lambda: b"\nready: " in b"\n" + log.read_bytes()[old_bytes:], _PATIENCE_S)

    def _has_ended(self) -> bool:
        return not self.process.running

    def freeze(self) -> None:
        self.process.freeze()

    def thaw(self) -> None:
        self.process.thaw()

    def kill(self) -> None:
        """SIGKILL, and wait. Idempotent."""
        self.process.kill9()

    def stop(self) -> None:
        """An orderly end, with everything written. Idempotent."""
        self.process.stop(_PATIENCE_S)
        assert self.process.exit_status == 0, self.log_tail()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
