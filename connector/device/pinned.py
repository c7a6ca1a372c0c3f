"""One large piece of pinned host memory, near its device.

torch pins powers of two, on whichever NUMA node the pinning thread runs. A rank pins once, at start, what it needs
exactly; from memory of the other node a GPU reads at a third to two thirds of its rate.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

__all__ = ["near_processors", "pin_near"]

_log = logging.getLogger("vllm.kvstore")  # below vLLM's logger, so that its handlers and levels apply


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
        release: Undoes that, given its address, once nobody refers to the memory.

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
        _log.info("kvstore: %d MiB of host memory are pinned, %s", num_bytes >> 20, where)

    with ThreadPoolExecutor(1, thread_name_prefix="pinning") as thread:
        thread.submit(touch_and_register).result()
    return piece


class _Mapping(mmap.mmap):
    """Memory that a tensor keeps alive; released, then unmapped, when the last view of it has gone."""

    release: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.release is not None and not sys.is_finalizing():  # the process's end undoes it anyway
            self.release()
