"""What is special about the private service of a directory: only one runs, without a parent, with a small log."""

from __future__ import annotations

import logging
import logging.handlers
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvstore.client.embedded import try_lock
from kvstore.errors import Unavailable
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.service.listener import unix_accepts
from kvstore.service.logs import ServiceFormatter

__all__ = ["AnotherRuns", "detach", "log_to", "only_service_of"]

_LOCK_S = 15.0
_POLL_S = 0.05
_LOG_BYTES_MAX = 1 << 20


class AnotherRuns(Unavailable):
    """The directory has its service already; this one is not needed."""


@contextmanager
def only_service_of(directory: Path, socket_path: Path) -> Iterator[None]:
    """Hold the directory's lock; wait for a predecessor that is closing.

    Raises:
        AnotherRuns: Another service holds the lock and accepts clients, or does not release it.
    """
    run = directory / "run"
    run.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(run / "service.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        ends_s = SYSTEM_CLOCK.monotonic_s() + _LOCK_S
        while not try_lock(descriptor):
            if unix_accepts(str(socket_path)) or SYSTEM_CLOCK.monotonic_s() > ends_s:
                raise AnotherRuns("another service holds this directory", directory=directory)
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)  # frees the lock, as the end of the process would


def detach() -> Callable[[int], None]:
    """Continue in a forked child. The calling process exits with the status that the child reports, which leaves the
    child without a parent.

    An engine that ends kills all its descendants, but the service must outlive it, for the next one. The status shows
    the process that started us whether that worked.

    Returns:
        Reports the status, 0 for "ready"; only the first call counts.
    """
    ours, theirs = os.pipe()
    if os.fork() > 0:
        os.close(theirs)
        told = os.read(ours, 1)
        os._exit(told[0] if told else 1)  # no status: the child died
    os.close(ours)

    def tell(status: int) -> None:
        with suppress(BrokenPipeError):  # the parent was killed; that changes nothing for us
            os.write(theirs, bytes([status]))

    return tell


def log_to(path: Path) -> None:
    """Log to `path` and one rotated file beside it, a megabyte each."""
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=_LOG_BYTES_MAX, backupCount=1)
    handler.setFormatter(ServiceFormatter("%(asctime)s %(process)d %(levelname)s %(name)s: "))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
