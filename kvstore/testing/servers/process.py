"""One server process: it logs to a file, takes the signals of fault tests, and never outlives us."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvstore.testing.forking import ForkedProcess
from kvstore.testing.warm_services import start_warm

# PR_SET_PDEATHSIG = 1: the kernel kills the child when its parent dies, however that happened.
_LAUNCHER = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)

Fork = Callable[[Sequence[str], Mapping[str, str], int], ForkedProcess | None]
"""Called with a command, the whole environment, and the descriptor to write to; `None`: it must be started."""


class ServerFailed(RuntimeError):
    """A server did not start, did not become ready, or ended by itself; the message ends with its log."""


def serves(url: str) -> bool:
    """Whether a server answers there over HTTP that it is well."""
    try:
        with urllib.request.urlopen(url, timeout=5.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


class ServerProcess:
    """A child process that is started again under the same command after `kill9`.

    Args:
        command: Program and arguments.
        log: File that stdout and stderr are appended to.
        env: The whole environment.
        fork: Starts the command without its imports, or says that it cannot.

    Attributes:
        exit_status: Of the last process that `kill9` or `stop` ended, negative for a signal; `None` before.
    """

    def __init__(
        self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None, fork: Fork = start_warm
    ) -> None:
        self.command = [str(part) for part in command]
        self.log = log
        self._env = dict(os.environ if env is None else env)
        self._fork = fork
        self._child: subprocess.Popen[bytes] | ForkedProcess | None = None
        self.exit_status: int | None = None

    @property
    def pid(self) -> int:
        """The process id.

        Raises:
            ServerFailed: It is not running.
        """
        if self._child is None or self._child.poll() is not None:
            raise ServerFailed(f"not running: {self.command[0]}")
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """Start the process, which does not mean that it is ready."""
        if self.running:
            return
        launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *self.command]
        with self.log.open("ab") as log:
            # A session of its own: Ctrl-C reaches us, and we end it.
            self._child = self._fork(self.command, self._env, log.fileno()) or subprocess.Popen(
                launcher, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._env, start_new_session=True
            )

    def wait_ready(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Ask `ready` until it says yes.

        Raises:
            ServerFailed: The process ended, or time is up.
        """
        give_up_s, pause_s = time.monotonic() + timeout_s, 0.01
        while not ready():
            if not self.running or time.monotonic() > give_up_s:
                what = "is not ready" if self.running else "ended by itself"
                raise ServerFailed(f"{self.command[0]} {what} after at most {timeout_s} s\n{self.log_tail()}")
            time.sleep(pause_s)
            pause_s = min(0.1, 1.2 * pause_s)

    def log_tail(self) -> str:
        """The last 2,000 characters that the process wrote."""
        return self.log.read_text(errors="replace")[-2000:] if self.log.exists() else ""

    def freeze(self) -> None:
        """SIGSTOP, and return when it has stopped: connections stay open and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)
        stat = Path(f"/proc/{self.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)

    def thaw(self) -> None:
        """SIGCONT: it continues where `freeze` stopped it."""
        os.kill(self.pid, signal.SIGCONT)

    def kill9(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._end(signal.SIGKILL, 10.0)

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the process: politely first, by force after `timeout_s`. Idempotent."""
        if self.running:
            self.thaw()
        try:
            self._end(signal.SIGTERM, timeout_s)
        except subprocess.TimeoutExpired:
            self.kill9()

    def _end(self, signal_number: signal.Signals, timeout_s: float) -> None:
        if self._child is None:
            return
        if self._child.poll() is None:
            self._child.send_signal(signal_number)
        self.exit_status = self._child.wait(timeout_s)
        self._child = None
