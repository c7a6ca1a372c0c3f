"""Memory made resident before it is needed: each first touch of 4 KiB is a fault, in a virtual machine often two."""

from __future__ import annotations

import ctypes
import threading
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["populate", "populate_paced", "spare_bytes"]

_MADV_POPULATE_WRITE = 23
_SPARE_SHARE = 16
_STEP_BYTES = 256 << 10
_REST_FACTOR = 4
_LONGEST_REST_S = 0.1


def populate(address: int, num_bytes: int) -> None:
    """Make a range of memory resident; what stands in it stays, also while others write to it.

    Takes 0.1 to 25 us for each 4 KiB that were not resident, and does not hold the GIL meanwhile.

    Args:
        address: On a page's border.
        num_bytes: A multiple of a page.

    Raises:
        OSError: The system cannot (Linux 5.14 can), or has no memory left.
    """
    if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _MADV_POPULATE_WRITE) != 0:
        raise OSError(ctypes.get_errno(), "madvise")


def populate_paced(address: int, num_bytes: int, end: threading.Event) -> int:
    """Make a range resident with a fifth of a core at most, in steps of 256 KiB with pauses.

    Paced, and not at a low priority: the kernel locks the process's mappings during a step, and Python code holds the
    interpreter's lock around it. A thread that is not let run while it holds one of them stops all others.

    Args:
        address: On a page's border.
        num_bytes: A multiple of a page.
        end: Stop early when set.

    Returns:
        The bytes that are resident now: all, or fewer when `end` was set.

    Raises:
        OSError: See `populate`.
    """
    done = 0
    while done < num_bytes and not end.is_set():
        step = min(_STEP_BYTES, num_bytes - done)
        started_s = time.perf_counter()
        populate(address + done, step)
        done += step
        end.wait(min(_REST_FACTOR * (time.perf_counter() - started_s), _LONGEST_REST_S))
    return done


def spare_bytes() -> int:
    """What one may make resident beforehand: a sixteenth of what the machine has left, so that many together may."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return (int(line.split()[1]) << 10) // _SPARE_SHARE
    return 0


_libc = ctypes.CDLL(None, use_errno=True)
