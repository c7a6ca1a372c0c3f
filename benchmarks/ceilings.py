"""What the machine can do without us: a copy in memory, and bytes through a socket from another process."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable
from statistics import median

import numpy as np

__all__ = ["RUNS", "best_rate", "loopback_rate", "memcpy_rate", "socket_pair_rate"]

RUNS = 5
_CHUNK = 2 << 20


def best_rate(work: Callable[[], object], num_bytes: int, runs: int = RUNS) -> float:
    """Bytes per second of `work`, the median of some runs after one to warm up."""
    work()
    seconds = []
    for _ in range(runs):
        started_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started_s)
    return num_bytes / median(seconds)


def memcpy_rate(num_bytes: int) -> float:
    """One core copying between two buffers; make them larger than the processor's caches."""
    source = np.ones(num_bytes, dtype=np.uint8)
    target = np.zeros(num_bytes, dtype=np.uint8)
    return best_rate(lambda: np.copyto(target, source), num_bytes)


def socket_pair_rate(num_bytes: int) -> float:
    """Another process sends through a Unix socket pair, we receive into one buffer."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return _receive_rate(ours, theirs, num_bytes)


def loopback_rate(num_bytes: int) -> float:
    """The same through a TCP connection on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    return _receive_rate(ours, theirs, num_bytes)


def _receive_rate(ours: socket.socket, theirs: socket.socket, num_bytes: int) -> float:
    sender = multiprocessing.get_context("fork").Process(target=_send, args=(theirs, num_bytes), daemon=True)
    sender.start()
    theirs.close()
    buffer = memoryview(bytearray(_CHUNK))

    def receive() -> None:
        ours.sendall(b"g")
        left = num_bytes
        while left:
            received = ours.recv_into(buffer[: min(left, _CHUNK)])
            if not received:
                raise RuntimeError("the sender of a raw transfer ended early")
            left -= received

    try:
        return best_rate(receive, num_bytes)
    finally:
        ours.close()
        sender.join(10)


def _send(theirs: socket.socket, num_bytes: int) -> None:
    chunk = memoryview(bytes(_CHUNK))
    while theirs.recv(1):
        left = num_bytes
        while left:
            left -= theirs.send(chunk[: min(left, _CHUNK)])
