"""What the machine does with the same bytes and nothing else: a copy in memory, a transfer between two processes."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.measure import Ceiling
from benchmarks.peer import ORDER, RECEIVE, RECEIVED, SEND, receive, tune
from kvstore.testing.servers.ports import free_ports
from kvstore.testing.servers.process import ServerProcess
from kvstore.wire.address import TcpAddress, UnixAddress, parse_address

__all__ = ["Peer", "memcpy", "tcp_peer", "unix_peer"]

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


class Peer:
    """A process that sends and receives raw bytes over one connection."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._connection = connection
        self._name = name

    def puts(self, sources: Sequence[Buffer]) -> Ceiling:
        """Send buffers of one size, until the peer has them all."""

        def run() -> None:
            self._connection.sendall(ORDER.pack(RECEIVE, len(sources[0]), len(sources)))
            for source in sources:
                self._connection.sendall(source)
            if self._connection.recv(1) != RECEIVED:
                raise ConnectionError("the other side of a raw transfer ended")

        return Ceiling(self._name, run)

    def gets(self, targets: Sequence[memoryview]) -> Ceiling:
        """Fill buffers of one size."""

        def run() -> None:
            self._connection.sendall(ORDER.pack(SEND, len(targets[0]), len(targets)))
            for target in targets:
                receive(self._connection, target)

        return Ceiling(self._name, run)


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
    connections: list[socket.socket] = []

    def connects() -> bool:
        try:
            connections.append(_connect(url))
        except OSError:
            return False
        return True

    try:
        process.start()
        process.wait_ready(connects, _TIMEOUT_S)
        yield Peer(connections[0], name)
    finally:
        for connection in connections:
            connection.close()
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
