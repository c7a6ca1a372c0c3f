"""Where bytes are received: the caller's buffer, or a fresh one."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.errors import InvalidRequest
from kvstore.runtime.machine import fresh_buffer

__all__ = ["allocate_exactly"]


def allocate_exactly(num_bytes: int, allocate: Callable[[int], memoryview] | None) -> memoryview:
    """A writable view of exactly `num_bytes`, from `allocate` or fresh.

    Raises:
        InvalidRequest: `allocate` returned a buffer of another size, or a read-only one.
    """
    if allocate is None:
        return fresh_buffer(num_bytes)
    buffer = memoryview(allocate(num_bytes)).cast("B")
    if len(buffer) != num_bytes or buffer.readonly:
        raise InvalidRequest(
            "allocate must return a writable buffer of the size asked for",
            expected=num_bytes,
            seen=len(buffer),
            readonly=buffer.readonly,
        )
    return buffer
