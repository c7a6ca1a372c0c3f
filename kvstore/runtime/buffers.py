"""Fresh memory to receive bytes into."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["fresh_buffer"]


def fresh_buffer(num_bytes: int) -> memoryview:
    """A writable buffer of unspecified content, for somebody who writes all of it before anybody reads.

    A `bytearray` is zeroed where it is made, which on an event loop costs a millisecond for each few MiB; here the
    first touch of each page is left to whoever fills the buffer, often a thread.
    """
    array: Any = np.empty(num_bytes, np.uint8)
    return memoryview(array)
