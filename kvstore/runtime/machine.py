"""The machine: how much memory and disk it has, memory made resident ahead of use, the cores of a thread."""

from __future__ import annotations

import ctypes
import os
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def machine_bytes() -> int:
    """Memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def container_bytes() -> int | None:
    """The container's limit, or `None` where there is none below the machine's memory."""
    for path in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):
            limit_bytes = int(path.read_text())
            return limit_bytes if limit_bytes < machine_bytes() else None
    return None


def usable_bytes() -> int:
    """Memory that the processes of this machine, or of this container, have together."""
    return container_bytes() or machine_bytes()


def disk_size_and_free(directory: Path) -> tuple[int, int]:
    """Bytes of the file system where `directory` is or will be, and how many of them are free."""
    # not `Path.exists`, which raises where this user may not look
    usage = shutil.disk_usage(next(path for path in (directory, *directory.parents) if os.path.exists(path)))
    return usage.total, usage.free


_MADV_POPULATE_WRITE = 23
_SPARE_SHARE = 16
_STEP_BYTES = 256 << 10
_REST_FACTOR = 4
_LONGEST_REST_S = 0.1


def populate_paced(address: int, num_bytes: int, end: threading.Event) -> int:
    """Make a range of memory resident with a fifth of a core at most, in steps of 256 KiB with pauses. Its content is
    kept, also while others write to it. Releases the GIL.

    Paced, rather than run at a low priority: the kernel locks the process's mappings during a step, and Python code
    around it holds the GIL. A thread that is preempted while it holds either stops all others.

    Args:
        address: Aligned to a page.
        num_bytes: A multiple of the page size.
        end: Stop early when set.

    Returns:
        The bytes that are resident now: all, or fewer when `end` was set.

    Raises:
        OSError: The system does not support it (Linux does since 5.14), or has no memory left.
    """
    done = 0
    while done < num_bytes and not end.is_set():
        step = min(_STEP_BYTES, num_bytes - done)
        started_s = time.perf_counter()
        if _libc.madvise(ctypes.c_void_p(address + done), ctypes.c_size_t(step), _MADV_POPULATE_WRITE) != 0:
            raise OSError(ctypes.get_errno(), "madvise")
        done += step
        end.wait(min(_REST_FACTOR * (time.perf_counter() - started_s), _LONGEST_REST_S))
    return done


def spare_bytes() -> int:
    """How much memory a process may make resident ahead of use: a sixteenth of what the machine has available, since
    other processes do the same.
    """
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return (int(line.split()[1]) << 10) // _SPARE_SHARE
    return 0


_libc = ctypes.CDLL(None, use_errno=True)


def leave_pinned_core() -> None:
    """If the calling thread is pinned to one core, allow it, and the threads it starts, the parent process's cores.

    Threads inherit the affinity of the thread that starts them. Inference engines pin each compute thread to one core;
    a thread started from one of these would compete with it for that core. A wider set of cores is a deliberate
    placement (a NUMA node, `taskset`) and is kept.
    """
    with suppress(OSError, AttributeError):  # not supported on this system, or the parent has exited
        if len(os.sched_getaffinity(0)) == 1:
            os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
