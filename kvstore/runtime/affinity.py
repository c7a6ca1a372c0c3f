"""CPU affinity of threads."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["leave_pinned_core"]


def leave_pinned_core() -> None:
    """If the calling thread is pinned to one core, allow it, and the threads it starts, the parent process's cores.

    Threads inherit the affinity of the thread that starts them. Inference engines pin each compute thread to one core;
    a thread started from one of these would compete with it for that core. A wider set of cores is a deliberate
    placement (a NUMA node, `taskset`) and is kept.
    """
    with suppress(OSError, AttributeError):  # not supported on this system, or the parent has exited
        if len(os.sched_getaffinity(0)) == 1:
            os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
