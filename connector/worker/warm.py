"""Makes host memory resident in the background, before the first load has to pay for it.

Fresh memory becomes resident at its first touch, with a page fault for every 4 KiB. A first hit of some hundred MiB
would spend more time on that than on anything else. vLLM allocates a CPU cache without touching it.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch

from kvstore.runtime.machine import leave_pinned_core, populate_paced, spare_bytes

__all__ = ["Warmer", "memory_ranges"]

_LIMIT_BYTES = 512 << 20


class Warmer:
    """Touches ranges of memory, each from its start, on a thread of its own, paced; no content changes.

    Together at most 512 MiB, and less if memory is scarce: if an engine's cache is larger than its memory, we must not
    be the ones to exhaust it.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._ranges = tuple(ranges)
        self._end = threading.Event()
        self.num_bytes = 0
        self._thread = threading.Thread(target=self._run, name="kvstore-warmer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        leave_pinned_core()
        left_bytes = min(_LIMIT_BYTES, spare_bytes())
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
