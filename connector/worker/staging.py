"""Host buffers for pages on their way: reused, since fresh memory costs as much to fault in as a page costs to copy."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import torch

__all__ = ["BufferPool", "view"]


class BufferPool:
    """uint8 buffers of a few sizes, at most `limit_bytes` in all. Safe from any thread.

    A buffer that somebody may still write to or read from is not put back: `drop` it.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
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
        return torch.empty(num_bytes, dtype=torch.uint8)

    def put(self, buffer: torch.Tensor) -> None:
        """Give a buffer back; nobody else may touch it any more."""
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


def view(buffer: torch.Tensor) -> memoryview:
    """The bytes of a host buffer."""
    array: Any = buffer.numpy()
    return memoryview(array)
