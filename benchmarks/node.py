"""A node for benchmarks: a service of its own, its processor time, and a wait until it is idle."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvstore.client import BlockingStore, ClientOptions
from kvstore.runtime.deadline import Deadline
from kvstore.testing.servers.process import ServerProcess

__all__ = ["WORK", "Node", "cpu_s_with_children", "temporary_folder", "timed"]

WORK = Path(__file__).resolve().parent.parent / ".work"
"""Checkpoints, logs, and what vLLM compiles: kept between runs."""

_ROOT = Path(__file__).resolve().parent.parent
_START_S = 20.0
_SETTLE_S = 60.0
_QUIET_POLLS = 3


class Node:
    """`kvstore serve` on a Unix socket.

    Args:
        folder: For its socket and log.
        name: Tells nodes in one folder apart.
        hot: As the setting, and `cold`.
        memory_bytes: As the setting.
        stall_timeout_ms: As the setting; `None` leaves its default.
        admin_listen: As the setting; `None` leaves its default.
        events_endpoint: As the setting; `None`: it publishes nothing.

    Attributes:
        admin_url: Of the administration, if `admin_listen` is set.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        hot: str = "memory:",
        cold: str = "memory:",
        memory_bytes: int = 1 << 30,
        stall_timeout_ms: int | None = None,
        admin_listen: str | None = None,
        events_endpoint: str | None = None,
    ) -> None:
        self._path = folder / f"{name}.sock"
        self.admin_url = None if admin_listen is None else f"http://{admin_listen}"
        command = [sys.executable, "-m", "kvstore.cli", "serve", "--listen", f"unix:{self._path}"]
        command += ["--hot", hot, "--cold", cold, "--memory-bytes", str(memory_bytes)]
        command += ["--stall-timeout-ms", str(stall_timeout_ms)] if stall_timeout_ms is not None else []
        command += ["--admin-listen", admin_listen] if admin_listen is not None else []
        command += ["--events-endpoint", events_endpoint] if events_endpoint is not None else []
        env = {key: value for key, value in os.environ.items() if not key.startswith("KVSTORE_")}
        path = [str(_ROOT), *filter(None, [env.get("PYTHONPATH")])]
        env |= {"PYTHONPATH": os.pathsep.join(path), "XDG_CACHE_HOME": str(folder)}
        self._process = ServerProcess(command, folder / f"{name}.log", env)

    @property
    def url(self) -> str:
        return f"unix:{self._path}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        """Return when it accepts."""
        self._process.start()
        self._process.wait_ready(self._accepts, _START_S)

    def stop(self) -> None:
        """Idempotent."""
        self._process.stop(_START_S)

    def cpu_s(self) -> float:
        """Seconds that the service's threads have computed so far."""
        times = Path(f"/proc/{self._process.pid}/task").glob("*/schedstat")
        return sum(int(path.read_text().split()[0]) for path in times) / 1e9

    def counters(self) -> Mapping[str, float]:
        counters: Mapping[str, float] = self._status()["counters"]
        return counters

    def settle(self) -> float:
        """Wait until nothing is saved any more and nothing waits for a slower tier; returns the seconds it took.

        Raises:
            TimeoutError: It takes over a minute.
        """
        started_s = moved_s = time.monotonic()
        saves, quiet_polls = -1.0, 0
        while quiet_polls < _QUIET_POLLS:
            if time.monotonic() - started_s > _SETTLE_S:
                raise TimeoutError("the service still works on what was saved")
            time.sleep(0.1)
            status = self._status()
            seen = sum(value for name, value in status["counters"].items() if name.startswith("saves"))
            if seen == saves and not any(queue["records"] for queue in status["write_back"].values()):
                quiet_polls += 1
            else:
                saves, quiet_polls, moved_s = seen, 0, time.monotonic()
        return moved_s - started_s

    def _status(self) -> dict[str, Any]:
        with BlockingStore(self.url, options=ClientOptions(name="benchmark", num_data_connections=1)) as store:
            return dict(store.status(deadline=Deadline.after(10.0)))

    def _accepts(self) -> bool:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(self._path))
            return True
        return False

    def __enter__(self) -> Node:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A short path, as Unix sockets need."""
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def cpu_s_with_children() -> float:
    """Seconds that this process and those it has started, which still run, have computed so far."""
    pids = [os.getpid()]
    for children in Path("/proc/self/task").glob("*/children"):
        pids += map(int, children.read_text().split())
    ticks = 0
    for pid in pids:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def timed(runs: Sequence[Any]) -> float:
    """Seconds that calls take one after the other."""
    started_s = time.perf_counter()
    for run in runs:
        run()
    return time.perf_counter() - started_s
