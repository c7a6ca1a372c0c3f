"""Host memory for records in flight, and a thread that makes memory resident before the first load needs it.

Memory is reused, since faulting in fresh memory costs as much as copying a page. It becomes resident at its first
touch, with a page fault for every 4 KiB, and vLLM allocates a CPU cache without touching it. A first hit of some
hundred MiB would spend more time on page faults than on anything else.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from connector.device.base import Device
from kvstore.runtime.arena import Arena
from kvstore.runtime.buffers import fresh_buffer
from kvstore.runtime.machine import leave_pinned_core, populate_paced, spare_bytes

_RECORD_BYTES = 96 << 20
"""For a dozen records of some MiB that are received, and as many that are sent."""
_WARMED_BYTES_MAX = 512 << 20


class RecordMemory:
    """This process's own memory for records that are made, or received, where no memory is shared with the service. A
    buffer's memory is reused once no reference is left, connections included.

    None is taken before the first record needs it. `take` belongs to the store's thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arena: Arena | None = None
        self._is_opened = False

    def take(self, num_bytes: int) -> memoryview:
        """Writable memory of exactly `num_bytes`, content undefined; warm unless very much is in flight."""
        with self._lock:
            if not self._is_opened:
                self._is_opened, self._arena = True, Arena.open(_RECORD_BYTES, ahead_bytes=_RECORD_BYTES)
            buffer = self._arena.take(num_bytes) if self._arena is not None else None
        return buffer if buffer is not None else fresh_buffer(num_bytes)

    def close(self) -> None:
        """Close the memory; what was taken stays valid. Idempotent."""
        with self._lock:
            self._is_opened = True
            if self._arena is not None:
                self._arena.close()


class ScratchPages:
    """Pages of host memory to decode into, one for each thread that decodes. Safe from any thread.

    Args:
        pages: Each has room for the largest page of a slice.

    Attributes:
        device: Reads the pages.
    """

    def __init__(self, device: Device, pages: Iterable[torch.Tensor]) -> None:
        self.device = device
        self._free = deque(pages)

    @contextmanager
    def page(self, num_bytes: int) -> Iterator[torch.Tensor]:
        """uint8 `[num_bytes]`, content undefined, for the block alone."""
        page = self._free.pop()  # the most recently used one: it may still be in the processor's cache
        try:
            assert num_bytes <= page.numel()
            yield page[:num_bytes]
        finally:
            self._free.append(page)


class Warmer:
    """Touches ranges of memory, each from its start, on a thread of its own, paced; no content changes.

    It touches at most 512 MiB, and less if memory is scarce: an engine's cache may be larger than its memory.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._ranges = tuple(ranges)
        self._end = threading.Event()
        self.num_bytes = 0
        self._thread = threading.Thread(target=self._run, name="kvstore-warmer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        leave_pinned_core()
        left_bytes = min(_WARMED_BYTES_MAX, spare_bytes())
        with suppress(OSError):  # a system that cannot, or has no memory left
            for index, (address, num_bytes) in enumerate(self._ranges):
                share = min(num_bytes, left_bytes // (len(self._ranges) - index))
                start, stop = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, address + share
                whole_bytes = max(0, stop - start) // mmap.PAGESIZE * mmap.PAGESIZE
                self.num_bytes += populate_paced(start, whole_bytes, self._end)
                left_bytes -= share

    def wait(self, timeout_s: float) -> bool:
        """Wait until all memory is touched. False: not in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Stop touching memory. Idempotent."""
        self._end.set()
        self._thread.join()


def memory_ranges(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Address and size of the host memory of tensors, each allocation once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return list(storages.items())


def view(buffer: torch.Tensor) -> memoryview:
    """The bytes of a host buffer."""
    array: Any = buffer.numpy()
    return memoryview(array)
