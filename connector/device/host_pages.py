"""Pages of host memory, cut from one fixed piece.

A rank takes its host memory once, at start: pinning more later would stall the engine's thread and the device, and
torch pins in powers of two and never splits what it has pinned (pytorch/pytorch#150517).
"""

from __future__ import annotations

import threading

import torch

from kvstore.errors import InternalError
from kvstore.runtime.arena import FreeRanges

__all__ = ["PAGE_ALIGN_BYTES", "HostPages", "PageShare"]

PAGE_ALIGN_BYTES = 512


class HostPages:
    """Cuts pages of any size from `memory` and joins what is given back. Safe from any thread.

    Args:
        memory: uint8 `[bytes]`, contiguous.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._address = memory.data_ptr()
        self._lock = threading.Lock()
        self._free = FreeRanges(memory.numel())
        self._taken: dict[int, int] = {}  # start to bytes

    def take(self, num_bytes: int) -> torch.Tensor | None:
        """uint8 `[num_bytes]`, content undefined; `None`: no free range is large enough."""
        needed = max(1, -(-num_bytes // PAGE_ALIGN_BYTES)) * PAGE_ALIGN_BYTES
        with self._lock:
            start = self._free.take(needed)
            if start is None:
                return None
            self._taken[start] = needed
        return self._memory[start : start + num_bytes]

    def put(self, page: torch.Tensor) -> None:
        """Give back a page; nobody may touch it any more.

        Raises:
            InternalError: It is no page of this memory, or was given back before.
        """
        start = page.data_ptr() - self._address
        with self._lock:
            needed = self._taken.pop(start, None)
            if needed is None:
                raise InternalError("no such page was taken", start=start, page_bytes=page.numel())
            self._free.give(start, needed)


class PageShare:
    """What one user may take of a rank's host pages. Safe from any thread.

    Args:
        pages: The pages.
        limit_bytes: Most bytes in use at a time.
    """

    def __init__(self, pages: HostPages, limit_bytes: int) -> None:
        self._pages = pages
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._used_bytes = 0

    def take(self, num_bytes: int) -> torch.Tensor | None:
        """As `HostPages.take`; `None` also when the limit is reached."""
        with self._lock:
            if self._used_bytes + num_bytes > self._limit_bytes:
                return None
            self._used_bytes += num_bytes
        page = self._pages.take(num_bytes)
        if page is None:
            self._count(-num_bytes)
        return page

    def put(self, page: torch.Tensor) -> None:
        """As `HostPages.put`."""
        self._pages.put(page)
        self._count(-page.numel())

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._used_bytes += num_bytes

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def is_half_used(self) -> bool:
        """Whether half of the limit, or more, is in use."""
        return 2 * self._used_bytes >= self._limit_bytes
