"""A real Redis on a free loopback port."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvstore.testing.servers.install import find_or_install
from kvstore.testing.servers.ports import free_ports
from kvstore.testing.servers.process import ServerFailed, ServerProcess

__all__ = ["RedisServer", "redis_server"]

_READY_S = 20.0
_START_ATTEMPTS = 3


class RedisServer:
    """A handle on one server process; its data is in memory only and gone with it."""

    def __init__(self, process: ServerProcess, port: int, password: str | None) -> None:
        self.process = process
        self.host = "127.0.0.1"
        self.port = port
        self.password = password

    @property
    def url(self) -> str:
        login = f":{self.password}@" if self.password else ""
        return f"redis://{login}{self.host}:{self.port}/0"

    def start(self) -> None:
        """Start and wait until it answers."""
        self.process.start()
        self.process.wait_ready(self._answers, _READY_S)

    def restart(self) -> None:
        """Start again on the same port, empty, whether it was killed or still runs."""
        self.process.stop()
        self.start()

    def kill9(self) -> None:
        self.process.kill9()

    def freeze(self) -> None:
        self.process.freeze()

    def thaw(self) -> None:
        self.process.thaw()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((self.host, self.port), timeout=1.0) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        return False


@contextlib.contextmanager
def redis_server(
    *, maxmemory_bytes: int | None = None, password: str | None = None, arguments: tuple[str, ...] = ()
) -> Iterator[RedisServer]:
    """Run a Redis of our own for the length of the block; with `maxmemory_bytes` it refuses writes beyond (noeviction).

    Raises:
        CannotInstall: There is no Redis and it could not be installed; the message says what to do.
        ServerFailed: It did not start.
    """
    program = find_or_install(["redis-server"], ["redis-server", "redis-tools"])
    with tempfile.TemporaryDirectory(prefix="kvstore-redis-") as folder:
        for attempt in range(_START_ATTEMPTS):
            (port,) = free_ports(1)
            command = [str(program.program("redis-server")), "--port", str(port), "--bind", "127.0.0.1"]
            command += ["--save", "", "--appendonly", "no", "--dir", folder]
            if maxmemory_bytes is not None:
                command += ["--maxmemory", str(maxmemory_bytes), "--maxmemory-policy", "noeviction"]
            if password is not None:
                command += ["--requirepass", password]
            process = ServerProcess([*command, *arguments], Path(folder, "redis.log"), program.environment())
            server = RedisServer(process, port, password)
            try:
                try:
                    server.start()
                except ServerFailed:  # most likely somebody took the port between our look and its bind
                    if attempt + 1 == _START_ATTEMPTS:
                        raise
                    continue
                yield server
                return
            finally:
                process.stop()
