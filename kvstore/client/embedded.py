"""The private service behind `embedded:`, started by the first client that finds none."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import kvstore
from kvstore.errors import Unavailable
from kvstore.runtime.files import open_regular, try_lock
from kvstore.wire.address import UnixAddress, unix_accepts
from kvstore.wire.private_place import default_directory, private_socket_path

_START_S = 20.0
_OPENMP = ("GOMP_", "KMP_", "OMP_")
_POLL_S = 0.02
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT
_LOG_BYTES_MAX = 1 << 20
_LAST_LINE_BYTES_MAX = 512
_PAUSE_FIRST_S, _PAUSE_MAX_S = 5.0, 60.0
"""Pause after a service that ended at once, doubling up to the second value: each start costs processor time."""


@dataclass(frozen=True, slots=True)
class EmbeddedOptions:
    """Options of a private service. Only the client that starts the service sets them; later clients use it as it is.

    Attributes:
        directory: Holds its records, socket, lock and log.
        memory_bytes: Size of its memory tier; `None`: the service's default.
        disk_bytes: Size of its directory; `None`: the service's default.
        idle_exit_s: It ends after this long without a client.
    """

    directory: Path = field(default_factory=default_directory)
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    idle_exit_s: float = 5.0


class EmbeddedService:
    """Finds or starts the private service of one directory."""

    def __init__(self, options: EmbeddedOptions) -> None:
        self._options = options
        self._directory = Path(os.path.abspath(options.directory))
        self._turn: asyncio.Lock | None = None
        self._said = ""
        self._pause_s = 0.0
        self._again_s = 0.0

    async def ensure(self) -> UnixAddress:
        """The address of the running service; starts it when there is none.

        Raises:
            Unavailable: It could not be started, now or a moment ago; the message has its last words and its log.
        """
        self._turn = self._turn or asyncio.Lock()
        async with self._turn:  # all connections of one client call it at the same time
            _reap()
            try:
                path = private_socket_path(self._directory)
                if unix_accepts(str(path)):
                    return UnixAddress(str(path))
                if asyncio.get_running_loop().time() < self._again_s:
                    raise self._ended()
                (self._directory / "run").mkdir(mode=0o700, parents=True, exist_ok=True)
                await self._start(path)
            except OSError as error:
                raise Unavailable(
                    "cannot start the private service", directory=self._directory, error=error.strerror or error
                ) from error
            return UnixAddress(str(path))

    async def _start(self, path: Path) -> None:
        """Start it, or wait until the holder of the lock has."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + _START_S
        process: subprocess.Popen[bytes] | None = None
        # a file of a few bytes: opening it blocks no longer than the connects around it
        with open(open_regular(self._directory / "run" / "starting.lock", _APPEND), "ab") as lock:  # noqa: ASYNC230
            while not unix_accepts(str(path)):
                if loop.time() >= ends_s:
                    raise Unavailable("the private service did not start in time", log=self._log_path)
                if process is None and try_lock(lock.fileno()) and not unix_accepts(str(path)):
                    process = self._spawn()
                if process is not None and process.poll() not in (None, 0):  # 0: it has detached itself
                    self._pause_s = min(max(2 * self._pause_s, _PAUSE_FIRST_S), _PAUSE_MAX_S)
                    self._again_s = loop.time() + self._pause_s
                    self._said = _last_line(self._log_path)
                    raise self._ended()
                await asyncio.sleep(_POLL_S)
        self._pause_s = 0.0

    def _ended(self) -> Unavailable:
        return Unavailable("the private service ended at once", said=self._said, log=self._log_path)

    @property
    def _log_path(self) -> Path:
        return self._directory / "service.log"

    def _spawn(self) -> subprocess.Popen[bytes]:
        options = self._options
        command = [sys.executable, "-m", "kvstore.service", "--embedded", "--detach"]
        command += ["--directory", str(self._directory)]
        command += ["--idle-exit-s", str(options.idle_exit_s)]
        if options.memory_bytes is not None:
            command += ["--memory-bytes", str(options.memory_bytes)]
        if options.disk_bytes is not None:
            command += ["--disk-bytes", str(options.disk_bytes)]
        with suppress(FileNotFoundError):
            if self._log_path.stat().st_size > _LOG_BYTES_MAX:
                self._log_path.replace(self._log_path.with_suffix(".log.1"))
        with open(open_regular(self._log_path, _APPEND), "ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=Path(kvstore.__file__).parent.parent,  # `-m` finds the same package that we are
                env=_service_environment(),
                start_new_session=True,
            )
        _started.append(process)
        return process


def _service_environment() -> dict[str, str]:
    """Our environment, without what pins OpenMP threads.

    vLLM preloads an OpenMP runtime and sets its cores through the environment. In a child process the two pin the first
    thread to the core of the engine's busiest thread. There a lookup of a millisecond took a third of a second.
    """
    environment = os.environ  # noqa: TID251 - handed on, not read
    return {name: value for name, value in environment.items() if not name.startswith(_OPENMP)}


_started: list[subprocess.Popen[bytes]] = []
"""Services that this process started, kept only to reap those that have ended."""


def _reap() -> None:
    _started[:] = [process for process in _started if process.poll() is None]


def _last_line(path: Path) -> str:
    with open(open_regular(path), "rb") as file:
        file.seek(max(0, path.stat().st_size - _LAST_LINE_BYTES_MAX))
        lines = file.read().decode(errors="replace").splitlines()
    return lines[-1] if lines else ""
