"""The other end of a raw transfer, a process of its own: `python -m benchmarks.peer unix:/path` or `tcp://host:port`.

Each request is an order, a message's size and a count. The process sends that many messages, or receives them and then
answers. Each connection has a thread.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
from collections.abc import Sequence
from contextlib import closing

from kvstore.wire.address import TcpAddress, UnixAddress, parse_address

__all__ = ["ORDER", "RECEIVE", "RECEIVED", "SEND", "receive", "tune"]

ORDER = struct.Struct("<cQQ")
SEND, RECEIVE, RECEIVED = b"S", b"R", b"k"
_SOCKET_BUFFER_BYTES = 4 << 20
"""The kernel may give less."""


def receive(connection: socket.socket, target: memoryview) -> None:
    """Fill `target`.

    Raises:
        ConnectionError: The other side ended before.
    """
    while len(target):
        count = connection.recv_into(target)
        if count == 0:
            raise ConnectionError("the other side of a raw transfer ended")
        target = target[count:]


def tune(connection: socket.socket) -> None:
    """Small messages at once over TCP, whose buffers grow by themselves; large buffers for a Unix socket."""
    if connection.family == socket.AF_INET:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    else:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)


def _main(url: str) -> None:
    address = parse_address(url)
    if isinstance(address, UnixAddress):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(address.path))
    else:
        assert isinstance(address, TcpAddress)
        listener = socket.create_server((address.host, address.port))
    listener.listen()
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve, args=(connection,), daemon=True).start()


def _serve(connection: socket.socket) -> None:
    buffers: list[memoryview] = []
    with closing(connection):
        tune(connection)
        try:
            while True:
                buffers = _obey(connection, buffers)
        except ConnectionError:
            return


def _obey(connection: socket.socket, buffers: Sequence[memoryview]) -> list[memoryview]:
    """One order; returns the buffers for the next, which are kept while they fit: fresh ones would be slower."""
    head = bytearray(ORDER.size)
    receive(connection, memoryview(head))
    order, message_bytes, count = ORDER.unpack(head)
    if len(buffers) != count or len(buffers[0]) != message_bytes:
        buffers = [memoryview(bytearray(b"\1") * message_bytes) for _ in range(count)]
    for buffer in buffers:
        if order == SEND:
            connection.sendall(buffer)
        else:
            receive(connection, buffer)
    if order == RECEIVE:
        connection.sendall(RECEIVED)
    return list(buffers)


if __name__ == "__main__":
    _main(*sys.argv[1:])
