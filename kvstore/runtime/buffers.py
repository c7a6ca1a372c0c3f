"""Uninitialised memory to receive bytes into."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["fresh_buffer"]


def fresh_buffer(num_bytes: int) -> memoryview:
    """A writable buffer of unspecified content; all of it must be written before it is read.

    Unlike a `bytearray`, it is not zeroed, which would block the event loop: the page faults of the first touch are
    taken by whoever fills the buffer, often a thread.
    """
    array: Any = np.empty(num_bytes, np.uint8)
    return memoryview(array)
