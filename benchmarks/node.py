"""A node for benchmarks: a service of its own, its processor time, and a wait until it is idle."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvstore.testing.serve import ROOT, Service

__all__ = ["WORK", "Node", "cpu_s_with_children", "temporary_folder", "timed"]

WORK = ROOT / ".work"
"""Checkpoints, logs, and what vLLM compiles: kept between runs."""

_IDLE_S = 60.0
_QUIET_POLLS = 3


class Node(Service):
    """`kvstore serve` on a Unix socket.

    Args:
        folder: For its socket and log.
        name: Tells nodes in one folder apart.
        hot: As the setting, and `cold`.
        memory_bytes: As the setting.
        environment: Further environment variables.
        further: Further settings, as flags.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        hot: str = "memory:",
        cold: str = "memory:",
        memory_bytes: int = 1 << 30,
        environment: Mapping[str, str] | None = None,
        **further: str,
    ) -> None:
        flags = {"hot": hot, "cold": cold, "memory_bytes": str(memory_bytes), **further}
        super().__init__(folder, flags, name=name, environment=environment)

    def cpu_s(self) -> float:
        """Seconds that the service's threads have computed so far."""
        times = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(path.read_text().split()[0]) for path in times) / 1e9

    def wait_idle(self) -> float:
        """Wait until nothing is saved any more and nothing waits for a slower tier; returns the seconds it took.

        Raises:
            TimeoutError: It takes over a minute.
        """
        started_s = moved_s = time.monotonic()
        saves, quiet_polls = -1.0, 0
        while quiet_polls < _QUIET_POLLS:
            if time.monotonic() - started_s > _IDLE_S:
                raise TimeoutError("the service still works on what was saved")
            time.sleep(0.1)
            status = self.status()
            seen = sum(value for name, value in status["counters"].items() if name.startswith("saves"))
            if seen == saves and not any(queue["records"] for queue in status["write_back"].values()):
                quiet_polls += 1
            else:
                saves, quiet_polls, moved_s = seen, 0, time.monotonic()
        return moved_s - started_s

    def __exit__(self, *_: object) -> None:
        self.stop()  # a killed one would leave work to the next one


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
