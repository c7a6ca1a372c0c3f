"""Opens and locks files without waiting, also under a name that belongs to a pipe or a device."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

NO_MORE_FILES = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit of open files (fs.file-max)",
}
"""The next step where no file can be opened, and no connection, by the number of the error."""


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file; a new one may be read by its owner only.

    Args:
        path: The file, or a link to it.
        flags: As for `os.open`.

    Raises:
        OSError: It cannot be opened. A directory, pipe, device or socket is `EISDIR`, `ENXIO` or `EINVAL`.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(number, "expected a regular file", str(path))
    return descriptor


def read_regular(path: Path, bytes_max: int = -1) -> bytes:
    """The content of a regular file; bytes beyond `bytes_max`, if it is not negative, are not read.

    Raises:
        OSError: As `open_regular`, or it cannot be read.
    """
    with open(open_regular(path), "rb") as file:
        return file.read(bytes_max)


def try_lock(descriptor: int) -> bool:
    """Take the exclusive lock on an open file, without waiting. False: another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
