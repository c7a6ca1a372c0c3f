"""A rank's host memory: one fixed piece, taken at start, from which pages are cut.

Pinning more later would stall the engine's thread and the device. torch pins in powers of two, on the NUMA node where
the pinning thread runs, and never splits what it has pinned (pytorch/pytorch#150517). So a rank pins exactly what it
needs itself. From memory of another node a GPU reads at a third to two thirds of its rate.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from connector.logs import LOG
from kvstore.errors import InternalError
from kvstore.runtime.arena import FreeRanges

_ALIGN_BYTES = 512


def aligned(num_bytes: int) -> int:
    """The bytes up to where the next page may begin."""
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


class HostPages:
    """Cuts pages of any size from `memory` and joins what is given back. Safe from any thread.

    Args:
        memory: uint8 `[bytes]`, contiguous.
        limit_bytes: Most bytes in use at a time; the rest is for gaps between pages. By default no limit.
    """

    def __init__(self, memory: torch.Tensor, limit_bytes: int | None = None) -> None:
        self._memory = memory
        self._address = memory.data_ptr()
        self._limit_bytes = limit_bytes if limit_bytes is not None else memory.numel()
        self._lock = threading.Lock()
        self._free = FreeRanges(memory.numel())
        self._taken: dict[int, int] = {}  # start to bytes
        self.used_bytes = 0

    def take(self, num_bytes: int) -> torch.Tensor | None:
        """uint8 `[num_bytes]`, content undefined; `None`: the limit is reached, or no free range is large enough."""
        needed = aligned(max(1, num_bytes))
        with self._lock:
            if self.used_bytes + num_bytes > self._limit_bytes:
                return None
            start = self._free.take(needed)
            if start is None:
                return None
            self._taken[start] = needed
            self.used_bytes += num_bytes
        return self._memory[start : start + num_bytes]

    def put(self, page: torch.Tensor) -> None:
        """Give back a page, which no thread may touch any more.

        Raises:
            InternalError: It is no page of this memory, or was given back before.
        """
        start = page.data_ptr() - self._address
        with self._lock:
            needed = self._taken.pop(start, None)
            if needed is None:
                raise InternalError("no such page was taken", start=start, page_bytes=page.numel())
            self._free.give(start, needed)
            self.used_bytes -= page.numel()

    @property
    def is_half_used(self) -> bool:
        """Whether half of the limit, or more, is in use."""
        return 2 * self.used_bytes >= self._limit_bytes


def near_processors(pci_address: str, system: Path = Path("/sys")) -> frozenset[int]:
    """Processors of the NUMA node that a PCI device (`0000:3b:00.0`) is on; empty: the system does not tell."""
    found: set[int] = set()
    with suppress(OSError, ValueError):
        for part in (system / "bus/pci/devices" / pci_address / "local_cpulist").read_text().strip().split(","):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def pin_near(
    num_bytes: int, processors: frozenset[int], *, register: Callable[[int, int], None], release: Callable[[int], None]
) -> torch.Tensor:
    """uint8 `[num_bytes]` of new memory, zero, on the NUMA node of `processors` if it can be, registered.

    Linux places a page where the thread that touches it first is running. A thread of our own does that and registers
    the memory, so that neither its place nor an error that CUDA remembers for a thread is the caller's.

    Args:
        num_bytes: More than none.
        processors: Where to touch it; empty: anywhere.
        register: Pins memory, given its address and size.
        release: Undoes that, given its address, once no reference to the memory is left.

    Raises:
        Exception: What `register` raises; the memory is freed.
    """
    mapping = _Mapping(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):  # fewer pages to pin; a child would copy each on write
        with suppress(OSError):
            mapping.madvise(advice)
    piece = torch.frombuffer(mapping, dtype=torch.uint8)
    address = piece.data_ptr()

    def touch_and_register() -> None:
        where = "on any NUMA node: that of the device is not known"
        if processors:
            try:
                os.sched_setaffinity(0, processors)
                where = "near the device"
            except OSError:
                where = "on any NUMA node: this process may not run on the processors of the device's"
        ctypes.memset(address, 0, num_bytes)
        register(address, num_bytes)
        mapping.release = lambda: release(address)
        LOG.info("kvstore: %d MiB of host memory are pinned, %s", num_bytes >> 20, where)

    with ThreadPoolExecutor(1, thread_name_prefix="pinning") as thread:
        thread.submit(touch_and_register).result()
    return piece


class _Mapping(mmap.mmap):
    """Memory that a tensor keeps alive; released, then unmapped, when the last view of it has gone."""

    release: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.release is not None and not sys.is_finalizing():  # the process's end undoes it anyway
            self.release()
