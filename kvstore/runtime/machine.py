"""How much memory there is, on the machine and in the container."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

__all__ = ["container_bytes", "machine_bytes", "usable_bytes"]

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def machine_bytes() -> int:
    """Memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def container_bytes(limits: Iterable[Path] = _CGROUP_LIMITS) -> int | None:
    """The container's limit, or `None` where there is none below the machine's memory."""
    for path in limits:
        with suppress(OSError, ValueError):
            limit_bytes = int(path.read_text())
            return limit_bytes if limit_bytes < machine_bytes() else None
    return None


def usable_bytes() -> int:
    """Memory that the processes of this machine, or of this container, have together."""
    return container_bytes() or machine_bytes()
