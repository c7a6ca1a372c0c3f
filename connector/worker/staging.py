"""Memory for records in flight: reused, since faulting in fresh memory costs as much as copying a page."""

from __future__ import annotations

from typing import Any

import torch

from kvstore.runtime.arena import Arena
from kvstore.runtime.buffers import fresh_buffer

__all__ = ["RecordMemory", "view"]

_RECORD_BYTES = 96 << 20
"""Room for a dozen records of some MiB being received, and as many being sent."""


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
