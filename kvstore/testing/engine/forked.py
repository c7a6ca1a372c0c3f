"""Engines that are forked from a process which has imported vLLM already, for suites of many engines."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

ORDER_BYTES_MAX = 128 << 10
_READY_S = 180.0
_SERVERS_MAX = 3
"""Each takes some 600 MiB."""

_LATE = ("AWS_", "KVSTORE_", "XDG_", "VLLM_CPU_", "VLLM_ENABLE_V1_MULTIPROCESSING")
"""Names of environment variables that nothing reads while vLLM is imported, so that engines may differ in them."""


class ForkedEngine:
    """An engine's process, as `subprocess.Popen` shows one.

    Attributes:
        pid: It leads a session and a process group of its own.
        stdin: What it reads.
    """

    def __init__(self, pid: int, stdin: int, report: int) -> None:
        self.pid = pid
        self.stdin = os.fdopen(stdin, "wb")
        self._report = report
        self._status: int | None = None

    def poll(self) -> int | None:
        """Exit status, negative for a signal; `None` while it runs."""
        return self._status if self._status is not None else self._await(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Exit status, once there is one.

        Raises:
            subprocess.TimeoutExpired: It still runs.
        """
        status = self._status if self._status is not None else self._await(timeout)
        if status is None:
            raise subprocess.TimeoutExpired("engine", timeout or 0.0)
        return status

    def _await(self, timeout_s: float | None) -> int | None:
        if not select.select([self._report], [], [], timeout_s)[0]:
            return None
        # empty: the fork server was killed, and its engines with it
        self._status = int(os.read(self._report, 32) or b"-9")
        os.close(self._report)
        return self._status


class _ForkServer:
    """Our side of one; the log of the engine that it was made for has what it says when it cannot start."""

    def __init__(self, environment: Mapping[str, str], output: int) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_READY_S)
        command = [sys.executable, "-m", "kvstore.testing.engine.fork_server", str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._engines: list[ForkedEngine] = []

    @property
    def is_idle(self) -> bool:
        return all(engine.poll() is not None for engine in self._engines)

    def fork(self, spec: Mapping[str, Any], environment: Mapping[str, str], output: int, answers: int) -> ForkedEngine:
        order = json.dumps({"spec": spec, "environment": environment}).encode()
        assert len(order) <= ORDER_BYTES_MAX, f"an engine's environment is too large: {len(order)} bytes"
        stdin_read, stdin_write = os.pipe()
        report_read, report_write = os.pipe()
        try:
            socket.send_fds(self._control, [order], [stdin_read, output, answers, report_write])
            answer = self._control.recv(32)
            if not answer:
                raise ConnectionResetError
        except BaseException as error:
            os.close(stdin_write)
            os.close(report_read)
            if isinstance(error, ConnectionError):
                raise OSError(f"the process that engines start from ended (exit {self._child.wait()})") from error
            raise
        finally:
            os.close(stdin_read)
            os.close(report_write)
        engine = ForkedEngine(int(answer), stdin_write, report_read)
        self._engines = [*(other for other in self._engines if other.poll() is None), engine]
        return engine

    def close(self) -> None:
        self._control.close()
        self._child.kill()
        self._child.wait()


class _ForkServers:
    """One for each environment, the idle ones ended when there are too many."""

    def __init__(self) -> None:
        self._by_environment: dict[frozenset[tuple[str, str]], _ForkServer] = {}
        self._lock = threading.Lock()

    def fork(self, spec: Mapping[str, Any], environment: Mapping[str, str], output: int, answers: int) -> ForkedEngine:
        early = {name: value for name, value in environment.items() if not name.startswith(_LATE)}
        early.pop("PYTEST_CURRENT_TEST", None)
        key = frozenset(early.items())
        with self._lock:
            server = self._by_environment.pop(key, None) or _ForkServer(early, output)
            self._by_environment[key] = server  # the last that was used stands last
            idle = [key for key, other in self._by_environment.items() if other is not server and other.is_idle]
            for key in idle[: max(0, len(self._by_environment) - _SERVERS_MAX)]:
                self._by_environment.pop(key).close()
            try:
                return server.fork(spec, environment, output, answers)
            except OSError:  # it is of no further use: the next engine gets a new one
                self._by_environment.pop(key).close()
                raise

    def close(self) -> None:
        for server in self._by_environment.values():
            server.close()


_fork_servers: _ForkServers | None = None


@contextlib.contextmanager
def warm_starts() -> Iterator[None]:
    """Within the block engines are forked from a process that has imported vLLM; with its end all of them are killed.

    An engine is then as fresh as any, but for its imports: what they depend on (environment, hash seed) is as given.
    """
    global _fork_servers
    _fork_servers = servers = _ForkServers()
    try:
        yield
    finally:
        _fork_servers = None
        servers.close()


def start_warm(
    spec: Mapping[str, Any], environment: Mapping[str, str], output: int, answers: int
) -> ForkedEngine | None:
    """Fork an engine; `None` outside of `warm_starts`.

    Args:
        spec: As JSON.
        environment: All of it.
        output: Descriptor for what it prints.
        answers: Descriptor for what it says to us. Both stay open here.

    Raises:
        OSError: The fork server could not be started.
    """
    return None if _fork_servers is None else _fork_servers.fork(spec, environment, output, answers)
