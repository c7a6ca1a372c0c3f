"""What is special about the private service of one directory: exactly one runs, and its log stays small."""

from __future__ import annotations

import fcntl
import logging
import logging.handlers
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.errors import Unavailable
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.service.listener import unix_accepts

__all__ = ["AnotherRuns", "log_to", "only_service_of"]

_LOCK_S = 15.0
_POLL_S = 0.05
_LOG_BYTES_MAX = 1 << 20


class AnotherRuns(Unavailable):
    """The directory has its service already; this one is not needed."""


@contextmanager
def only_service_of(directory: Path, socket_path: Path) -> Iterator[None]:
    """Hold the directory's lock. A predecessor that is closing is waited for.

    Raises:
        AnotherRuns: It holds the lock and accepts clients, or does not let go.
    """
    run = directory / "run"
    run.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(run / "service.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        ends_s = SYSTEM_CLOCK.monotonic_s() + _LOCK_S
        while not _try_lock(descriptor):
            if unix_accepts(str(socket_path)) or SYSTEM_CLOCK.monotonic_s() > ends_s:
                raise AnotherRuns("another service holds this directory", directory=directory)
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)  # frees the lock, as the end of the process would


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def log_to(path: Path) -> None:
    """Log into `path` and one older file beside it, a megabyte each."""
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=_LOG_BYTES_MAX, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
