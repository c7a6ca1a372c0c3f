"""Which ways records can take on a GPU, each tried as an engine tries it at start. An engine takes the way that works;
`kvstore doctor --engine vllm` shows which that is.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from connector.device.streams import Streams

_REGISTERED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TriedPath:
    """One way of a record's bytes.

    Attributes:
        name: `pinned`: copies to and from pinned host memory, without which an engine is not cached. `in_place`: the
            GPU copies records from the service's memory; otherwise they are copied in host memory first. `kernels`: the
            GPU verifies records and decodes tiles; otherwise processors do. `encoding`: it encodes tiles; otherwise
            processors do. An engine tries that only if it stores tiles.
        problem: Why it does not work; empty: it works.
    """

    name: str
    problem: str = ""


def try_paths(streams: Streams) -> list[TriedPath]:
    """Try each way on a device. Takes some seconds if Triton has to compile its kernels."""
    return [try_path(name, streams) for name in _TRIES]


def try_path(name: str, streams: Streams) -> TriedPath:
    """Try one way on a device.

    Args:
        name: As of `TriedPath`.
    """
    try:
        _TRIES[name](streams)
    except Exception as error:  # noqa: BLE001 - of torch, Triton, the compiler that it calls, or the device
        lines = str(error).splitlines()
        return TriedPath(name, f"{type(error).__name__}: {lines[0] if lines else ''}")
    return TriedPath(name)


def _pin(streams: Streams) -> None:
    streams.host_arena(mmap.PAGESIZE)


def _register(streams: Streams) -> None:
    """Register shared memory that this process may only read, as the service's is."""
    file = os.memfd_create("kvstore-probe")
    try:
        os.ftruncate(file, _REGISTERED_BYTES)
        with mmap.mmap(file, _REGISTERED_BYTES) as writable:
            writable[:] = bytes(_REGISTERED_BYTES)
        memory = mmap.mmap(file, _REGISTERED_BYTES, prot=mmap.PROT_READ)
    finally:
        os.close(file)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    streams.register(address, _REGISTERED_BYTES)
    streams.release(address)


def _compile(streams: Streams) -> None:
    from connector.device.kernels import check_kernels  # it needs Triton

    check_kernels(streams)


def _encode(streams: Streams) -> None:
    from connector.device.kernels import check_encoding  # it needs Triton

    check_encoding(streams)


_TRIES: dict[str, Callable[[Streams], None]] = {
    "pinned": _pin,
    "in_place": _register,
    "kernels": _compile,
    "encoding": _encode,
}
