"""Where threads may run."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["leave_pinned_core"]


def leave_pinned_core() -> None:
    """Let the calling thread, and all that it starts, run where the parent process may run.

    Threads inherit the cores of whoever starts them. Inference engines pin their compute threads to one core each, so
    that whatever is started from such a thread would share that core with it and crawl. A wider set of cores is
    somebody's decision on placement (a NUMA node, `taskset`) and is kept.
    """
    with suppress(OSError, AttributeError):  # no such call on this system, or the parent is gone
        if len(os.sched_getaffinity(0)) == 1:
            os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
