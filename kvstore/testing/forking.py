"""Processes that are forked from one which has imported what they need, for suites that start hundreds of them.

An order is one message on a control socket with what to be and an environment, and four descriptors: its stdin, its
output, another one to write to, and where its exit status goes. The answer is its process number.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

_ORDER_BYTES_MAX = 128 << 10
_NUM_DESCRIPTORS = 4
_READY_S = 180.0
_PR_SET_PDEATHSIG = 1

Order = Mapping[str, Any]
Be = Callable[[Order, int], None]
"""Is the process: called with its order, and the descriptor to write to."""


class ForkedProcess:
    """A process, as `subprocess.Popen` shows one.

    Attributes:
        pid: It leads a session and a process group of its own.
        stdin: What it reads.
    """

    def __init__(self, pid: int, stdin: int, report: int) -> None:
        self.pid = pid
        self.stdin = os.fdopen(stdin, "wb")
        self._report = report
        self._status: int | None = None

    @property
    def returncode(self) -> int | None:
        """Exit status, once it was asked for."""
        return self._status

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
            raise subprocess.TimeoutExpired("forked process", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # the fork server has seen its end, and reports it next
                os.kill(self.pid, number)

    def _await(self, timeout_s: float | None) -> int | None:
        waiting = select.poll()  # `select.select` takes no descriptor above 1,023
        waiting.register(self._report, select.POLLIN)
        if not waiting.poll(None if timeout_s is None else timeout_s * 1000):
            return None
        # empty: the fork server was killed, and what it forked with it
        self._status = int(os.read(self._report, 32) or b"-9")
        os.close(self._report)
        return self._status


class _ForkServer:
    """Our side of one; the log of the process that it was made for has what it says when it cannot start."""

    def __init__(self, module: str, environment: Mapping[str, str], output: int) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_READY_S)
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._forked: list[ForkedProcess] = []

    @property
    def is_idle(self) -> bool:
        return all(process.poll() is not None for process in self._forked)

    def fork(self, order: Order, environment: Mapping[str, str], output: int, answers: int) -> ForkedProcess:
        message = json.dumps({**order, "environment": dict(environment)}).encode()
        assert len(message) <= _ORDER_BYTES_MAX, f"an order is too large: {len(message)} bytes"
        stdin_read, stdin_write = os.pipe()
        report_read, report_write = os.pipe()
        try:
            socket.send_fds(self._control, [message], [stdin_read, output, answers, report_write])
            answer = self._control.recv(32)
            if not answer:
                raise ConnectionResetError
        except BaseException as error:
            os.close(stdin_write)
            os.close(report_read)
            if isinstance(error, ConnectionError):
                raise OSError(f"the process that others are forked from ended (exit {self._child.wait()})") from error
            raise
        finally:
            os.close(stdin_read)
            os.close(report_write)
        process = ForkedProcess(int(answer), stdin_write, report_read)
        self._forked = [*(other for other in self._forked if other.poll() is None), process]
        return process

    def close(self) -> None:
        self._control.close()
        self._child.kill()
        self._child.wait()


class ForkServers:
    """One for each environment, the idle ones ended when there are too many. None but in the block of `running`.

    Args:
        module: What is run as a fork server; it calls `fork_on_demand`.
        late: How names of environment variables begin that nothing reads while it imports, so that they may differ.
        servers_max: How many are kept.
    """

    def __init__(self, module: str, late: tuple[str, ...], servers_max: int) -> None:
        self._module = module
        self._late = late
        self._servers_max = servers_max
        self._by_environment: dict[frozenset[tuple[str, str]], _ForkServer] = {}
        self._lock = threading.Lock()
        self._is_running = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within the block processes are forked; with its end all of them are killed."""
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False
            for server in self._by_environment.values():
                server.close()
            self._by_environment.clear()

    def fork(
        self, order: Order, environment: Mapping[str, str], output: int, answers: int | None = None
    ) -> ForkedProcess | None:
        """Start a process; `None` outside of `running`.

        Args:
            order: What it is to be, as JSON.
            environment: All of it.
            output: Descriptor for what it prints.
            answers: Descriptor for what it says to us; `None`: it says and reads nothing. Both stay open here.

        Raises:
            OSError: The fork server could not be started.
        """
        if not self._is_running:
            return None
        early = {name: value for name, value in environment.items() if not name.startswith(self._late)}
        early.pop("PYTEST_CURRENT_TEST", None)
        key = frozenset(early.items())
        with self._lock:
            server = self._by_environment.pop(key, None) or _ForkServer(self._module, early, output)
            self._by_environment[key] = server  # the last that was used stands last
            idle = [key for key, other in self._by_environment.items() if other is not server and other.is_idle]
            for key in idle[: max(0, len(self._by_environment) - self._servers_max)]:
                self._by_environment.pop(key).close()
            try:
                process = server.fork(order, environment, output, output if answers is None else answers)
            except OSError:  # it is of no further use: the next process gets a new one
                self._by_environment.pop(key).close()
                raise
        if answers is None:
            process.stdin.close()
        return process


def tie_to_parent(parent_pid: int) -> None:
    """End this process when its parent's thread that started it ends, or at once if that is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit("the process that wanted this one is gone")


def fork_on_demand(control_fd: int, be: Be) -> None:
    """In a fork server, when all is imported: fork until the other end of the control socket is closed."""
    gc.freeze()  # what is never freed should not be copied page by page where forked processes collect garbage
    woken, waking = os.pipe()
    os.set_blocking(waking, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waking)
    reports: dict[int, int] = {}
    with socket.socket(fileno=control_fd) as control:
        while True:
            ready = select.select([control.fileno(), woken], [], [])[0]
            if woken in ready:
                os.read(woken, 4096)
                _report_ended(reports)
            if control.fileno() not in ready:
                continue
            message, descriptors, _, _ = socket.recv_fds(control, _ORDER_BYTES_MAX, _NUM_DESCRIPTORS)
            if not message:
                return
            *streams, report = descriptors
            parent, pid = os.getpid(), os.fork()
            if pid == 0:
                break
            for stream in streams:
                os.close(stream)
            reports[pid] = report
            control.send(b"%d" % pid)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor in (woken, waking, report, *reports.values()):
        os.close(descriptor)
    os.setsid()
    tie_to_parent(parent)
    stdin, output, answers = streams
    for stream, standard in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(stream, standard)
    os.close(stdin)
    os.close(output)
    os.set_inheritable(answers, False)
    sys.stdin = os.fdopen(0, closefd=False)
    order = json.loads(message)
    os.environ.update(order["environment"])  # beside what was set while all was imported
    be(order, answers)


def _report_ended(reports: dict[int, int]) -> None:
    while reports:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        report = reports.pop(pid)
        os.write(report, b"%d" % os.waitstatus_to_exitcode(status))
        os.close(report)


def end_process(status: int = 0) -> NoReturn:
    """What the interpreter does at its end, but for taking every module apart: that is seconds of copying pages which
    are shared with the fork server."""
    threading._shutdown()  # type: ignore[attr-defined]  # the one way to end the threads of executors as well
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
