"""Host buffers for pages in flight: reused, since faulting in fresh memory costs as much as copying a page."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from kvstore.runtime.arena import Arena
from kvstore.runtime.buffers import fresh_buffer

__all__ = ["BufferPool", "RecordMemory", "view"]

_RECORD_BYTES = 96 << 20
"""Room for a dozen records of some MiB being received, and as many being sent."""


class BufferPool:
    """uint8 buffers of a few sizes, at most `limit_bytes` in all. Safe from any thread.

    A buffer that may still be written or read must not be put back: `drop` it.

    Args:
        limit_bytes: Limit for all buffers together.
        allocate: Makes a buffer of a given size; plain memory by default.
    """

    def __init__(self, limit_bytes: int, allocate: Callable[[int], torch.Tensor] | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._allocate = allocate or _plain_memory
        self._lock = threading.Lock()
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._free_bytes = 0
        self._used_bytes = 0

    def take(self, num_bytes: int) -> torch.Tensor | None:
        """A buffer of exactly `num_bytes`, its content undefined, or `None` when the limit is reached."""
        with self._lock:
            if self._used_bytes + num_bytes > self._limit_bytes:
                return None
            self._used_bytes += num_bytes
            if self._free[num_bytes]:
                self._free_bytes -= num_bytes
                return self._free[num_bytes].pop()
            # make room among buffers of other sizes, so that used and free together keep the limit
            for size, buffers in self._free.items():
                while buffers and self._used_bytes + self._free_bytes > self._limit_bytes:
                    buffers.pop()
                    self._free_bytes -= size
        try:
            return self._allocate(num_bytes)
        except BaseException:
            with self._lock:
                self._used_bytes -= num_bytes
            raise

    def prepare(self, num_bytes: int, total_bytes: int) -> list[torch.Tensor]:
        """Make buffers of a size in advance; returned so that the caller may warm them."""
        count = min(total_bytes, self._limit_bytes) // num_bytes
        made = [self._allocate(num_bytes) for _ in range(count)]
        with self._lock:
            self._free[num_bytes] += made
            self._free_bytes += num_bytes * count
        return made

    def put(self, buffer: torch.Tensor) -> None:
        """Return a buffer; nobody may touch it any more."""
        with self._lock:
            self._used_bytes -= buffer.numel()
            self._free_bytes += buffer.numel()
            self._free[buffer.numel()].append(buffer)

    def drop(self, buffer: torch.Tensor) -> None:
        """Count a buffer as gone without using it again: its memory is freed when its last user is done."""
        with self._lock:
            self._used_bytes -= buffer.numel()

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def is_half_used(self) -> bool:
        """Whether half of the limit, or more, is in use."""
        return 2 * self._used_bytes >= self._limit_bytes


class RecordMemory:
    """Memory for records in flight; a buffer's memory is reused once nobody holds it, connections included.

    `take` belongs to the store's thread.
    """

    def __init__(self) -> None:
        self._arena = Arena.open(_RECORD_BYTES, ahead_bytes=_RECORD_BYTES)

    def take(self, num_bytes: int) -> memoryview:
        """Writable memory of exactly `num_bytes`, content undefined; warm unless very much is in flight."""
        buffer = self._arena.take(num_bytes) if self._arena is not None else None
        return buffer if buffer is not None else fresh_buffer(num_bytes)

    def close(self) -> None:
        """Close the memory; what was taken stays valid. Idempotent."""
        if self._arena is not None:
            self._arena.close()


def view(buffer: torch.Tensor) -> memoryview:
    """The bytes of a host buffer."""
    array: Any = buffer.numpy()
    return memoryview(array)


def _plain_memory(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)
