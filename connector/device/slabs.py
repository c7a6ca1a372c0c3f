"""Host pages cut from slabs.

torch pins memory in powers of two and never splits what it has pinned (pytorch/pytorch#150517): a page of 1.1 MiB
would take 2 MiB. Slabs are powers of two themselves, and hold eight of the largest pages or more, so that at most an
eighth of what is pinned is wasted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

__all__ = ["Slabs"]

_PAGES_MIN = 8
_ALIGN_BYTES = 512


class Slabs:
    """Cuts pages from slabs of pinned memory. A slab is free again when the last of its pages is. Safe from any thread.

    Args:
        page_bytes_max: Size of the largest page that is asked for again and again; larger ones get their own memory.
        allocate: Pins memory.

    Attributes:
        slab_bytes: Size of a slab.
    """

    def __init__(self, page_bytes_max: int, allocate: Callable[[int], torch.Tensor]) -> None:
        self.slab_bytes = 1 << (_PAGES_MIN * page_bytes_max - 1).bit_length()
        self._page_bytes_max = page_bytes_max
        self._allocate = allocate
        self._lock = threading.Lock()
        self._slab: torch.Tensor | None = None
        self._cut_bytes = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """uint8 `[num_bytes]`, content undefined; nobody else's as long as it is referred to.

        Raises:
            InvalidRequest: As `allocate`.
        """
        if num_bytes > self._page_bytes_max:
            return self._allocate(num_bytes)
        with self._lock:
            if self._slab is None or self._cut_bytes + num_bytes > self.slab_bytes:
                self._slab, self._cut_bytes = self._allocate(self.slab_bytes), 0
            page = self._slab[self._cut_bytes : self._cut_bytes + num_bytes]
            self._cut_bytes += -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
            return page

    def prepare(self, total_bytes: int) -> None:
        """Pin slabs for so many bytes of pages now: pinning is slow and stalls the device, while torch pins what was
        given back without asking the driver."""
        slabs = [self._allocate(self.slab_bytes) for _ in range(-(-total_bytes // self.slab_bytes))]
        del slabs
