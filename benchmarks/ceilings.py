"""What the machine does with the same bytes and nothing else: copies, files, transfers between two processes."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.measure import Ceiling
from benchmarks.peer import ORDER, RECEIVE, RECEIVED, SEND, receive, tune
from kvstore.testing.servers.ports import free_ports
from kvstore.testing.servers.process import ServerProcess
from kvstore.wire.address import TcpAddress, UnixAddress, parse_address

__all__ = ["Mover", "Peer", "PlainFiles", "memcpy", "tcp_peer", "unix_peer"]

_TIMEOUT_S = 20.0
_ROOT = Path(__file__).resolve().parent.parent

Buffer = bytearray | memoryview


def memcpy(sources: Sequence[Buffer], targets: Sequence[Buffer]) -> Ceiling:
    """Copy each source to its target, which is as long, in one thread."""
    pairs = [
        (np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8))
        for source, target in zip(sources, targets, strict=True)
    ]

    def run() -> None:
        for source, target in pairs:
            np.copyto(target, source)

    return Ceiling("memcpy", run)


class Mover(Protocol):
    """Moves raw bytes to the place that is measured, and back."""

    def puts(self, sources: Sequence[Buffer], num_connections: int = 1) -> Ceiling:
        """Move buffers of one size there, as many at a time as there are connections."""

    def gets(self, targets: Sequence[memoryview], num_connections: int = 1) -> Ceiling:
        """Fill buffers of one size from there."""


class PlainFiles(Mover):
    """A file for each buffer, in as many threads as there are connections. Writes do not wait for the disk, and reads
    find the files in the system's memory.

    Args:
        folder: Of the files; the caller removes it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def puts(self, sources: Sequence[Buffer], num_connections: int = 1) -> Ceiling:
        """Write each buffer to a new file. That of the turn before is removed."""
        turns = [count() for _ in sources]

        def write(index: int) -> None:
            turn = next(turns[index])
            (self._folder / f"{turn - 1} {index}").unlink(missing_ok=True)
            with open(self._folder / f"{turn} {index}", "wb", buffering=0) as file:
                file.write(sources[index])

        return self._ceiling(write, len(sources), num_connections)

    def gets(self, targets: Sequence[memoryview], num_connections: int = 1) -> Ceiling:
        """Fill each buffer from a file of its own."""
        paths = [self._folder / f"read {index}" for index in range(len(targets))]
        for path, target in zip(paths, targets, strict=True):
            path.write_bytes(target)

        def read(index: int) -> None:
            with open(paths[index], "rb", buffering=0) as file:
                file.readinto(targets[index])

        return self._ceiling(read, len(targets), num_connections)

    def _ceiling(self, move: Callable[[int], None], num_buffers: int, num_threads: int) -> Ceiling:
        def run() -> None:
            with ThreadPoolExecutor(num_threads) as threads:
                for _ in threads.map(move, range(num_buffers)):
                    pass

        return Ceiling("plain files" if num_threads == 1 else f"plain files x {num_threads}", run)


class Peer(Mover):
    """A process that sends and receives raw bytes over one connection, or over several, each with a thread here.

    Args:
        connect: Makes one connection.
        name: What its ceilings are called.
    """

    def __init__(self, connect: Callable[[], socket.socket], name: str) -> None:
        self._connect = connect
        self._name = name
        self._connections: list[socket.socket] = []
        self._threads: ThreadPoolExecutor | None = None

    def puts(self, sources: Sequence[Buffer], num_connections: int = 1) -> Ceiling:
        """Send buffers of one size, until the peer has them all."""

        def send(connection: socket.socket, share: Sequence[Buffer]) -> None:
            connection.sendall(ORDER.pack(RECEIVE, len(share[0]), len(share)))
            for source in share:
                connection.sendall(source)
            if connection.recv(1) != RECEIVED:
                raise ConnectionError("the other side of a raw transfer ended")

        return self._ceiling(send, sources, num_connections)

    def gets(self, targets: Sequence[memoryview], num_connections: int = 1) -> Ceiling:
        """Fill buffers of one size."""

        def fill(connection: socket.socket, share: Sequence[memoryview]) -> None:
            connection.sendall(ORDER.pack(SEND, len(share[0]), len(share)))
            for target in share:
                receive(connection, target)

        return self._ceiling(fill, targets, num_connections)

    def _ceiling(
        self, move: Callable[[socket.socket, Sequence[Any]], None], buffers: Sequence[Any], num_connections: int
    ) -> Ceiling:
        """Each connection moves its share: every so-manieth buffer."""
        while len(self._connections) < num_connections:
            self._connections.append(self._connect())
        connections = self._connections[:num_connections]
        shares = [share for index in range(num_connections) if (share := buffers[index::num_connections])]
        if num_connections == 1:
            return Ceiling(self._name, lambda: move(connections[0], buffers))
        self._threads = self._threads or ThreadPoolExecutor(thread_name_prefix="raw transfer")
        threads = self._threads

        def run() -> None:
            for ended in [threads.submit(move, *pair) for pair in zip(connections, shares, strict=False)]:
                ended.result()

        return Ceiling(f"{self._name} x {num_connections}", run)

    def close(self) -> None:
        """Idempotent."""
        if self._threads is not None:
            self._threads.shutdown()
        for connection in self._connections:
            connection.close()


@contextmanager
def unix_peer(folder: Path) -> Iterator[Peer]:
    """A peer on a Unix socket in `folder`; its process ends with the block."""
    with _peer(f"unix:{folder / 'peer.sock'}", folder, "raw Unix socket") as peer:
        yield peer


@contextmanager
def tcp_peer(folder: Path) -> Iterator[Peer]:
    """A peer on the loopback; its process ends with the block, its log is in `folder`."""
    (port,) = free_ports(1)
    with _peer(f"tcp://127.0.0.1:{port}", folder, "raw loopback TCP") as peer:
        yield peer


@contextmanager
def _peer(url: str, folder: Path, name: str) -> Iterator[Peer]:
    env = {**os.environ, "PYTHONPATH": str(_ROOT)}
    process = ServerProcess([sys.executable, "-m", "benchmarks.peer", url], folder / "peer.log", env)
    peer = Peer(lambda: _connect(url), name)

    def connects() -> bool:
        try:
            _connect(url).close()
        except OSError:
            return False
        return True

    try:
        process.start()
        process.wait_ready(connects, _TIMEOUT_S)
        yield peer
    finally:
        peer.close()
        process.stop()


def _connect(url: str) -> socket.socket:
    address = parse_address(url)
    if isinstance(address, UnixAddress):
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(address.path))
        except OSError:
            connection.close()
            raise
    else:
        assert isinstance(address, TcpAddress)
        connection = socket.create_connection((address.host, address.port))
    connection.settimeout(_TIMEOUT_S)
    tune(connection)
    return connection
