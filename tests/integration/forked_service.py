"""A service that starts in milliseconds: forked from one that has imported everything, killed like any other."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_PARENT = """
import ctypes, os, signal, sys
import kvstore.catalog.redis.pending, kvstore.catalog.redis.reconcile, kvstore.tiers.redis, kvstore.tiers.s3
from kvstore.service.main import main

signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets children as they end
print("ready", flush=True)
for _ in sys.stdin:
    child = os.fork()
    if child:
        print(child, flush=True)
        continue
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG: killed when its parent ends
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for number, source in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(source, number)
    os._exit(main(sys.argv[2:]))
"""
_END_S = 60.0


class ForkedService:
    """`python -m kvstore.service` with these arguments, any number of times, one at a time.

    Args:
        arguments: Of the service.
        log: File that stdout and stderr are appended to.
        env: The whole environment.
    """

    def __init__(self, arguments: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-c", _PARENT, str(log), *arguments]
        self._log = log
        self._env = dict(env)
        self._parent: subprocess.Popen[str] | None = None
        self._child: tuple[int, int] | None = None  # the process and a descriptor that becomes readable when it ends

    @property
    def running(self) -> bool:
        return self._child is not None and not select.select([self._child[1]], [], [], 0)[0]

    def start(self) -> None:
        """Start the process, which does not mean that it is ready."""
        if self._parent is None:
            self._parent = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._env
            )
            assert self._answer() == "ready"
        self.kill9()
        assert self._parent.stdin is not None
        self._parent.stdin.write("\n")
        self._parent.stdin.flush()
        pid = int(self._answer())
        self._child = pid, os.pidfd_open(pid)

    def _answer(self) -> str:
        assert self._parent is not None and self._parent.stdout is not None
        return self._parent.stdout.readline().strip()

    def kill9(self) -> None:
        """SIGKILL, and wait until it is gone. Idempotent."""
        if self._child is None:
            return
        (pid, ended), self._child = self._child, None
        if not select.select([ended], [], [], 0)[0]:
            os.kill(pid, signal.SIGKILL)
        assert select.select([ended], [], [], _END_S)[0], f"process {pid} does not end"
        os.close(ended)

    def log_tail(self) -> str:
        """The last 2,000 characters that the service wrote."""
        return self._log.read_text(errors="replace")[-2000:] if self._log.exists() else ""

    def close(self) -> None:
        """Leave nothing running. Idempotent."""
        self.kill9()
        if self._parent is not None:
            self._parent.communicate(timeout=_END_S)
            self._parent = None
