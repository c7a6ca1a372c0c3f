"""What an `OSError` means for a tier, and what to do about it."""

from __future__ import annotations

import errno
from pathlib import Path

from kvstore.errors import Unavailable

__all__ = ["is_full", "unavailable"]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

_NEXT_STEP = {
    errno.EACCES: "check the owner and the permissions of the directory",
    errno.EPERM: "check the permissions, and that the filesystem has hard links",
    errno.EOPNOTSUPP: "use a filesystem that has hard links and flock",
    errno.EMLINK: "use a filesystem that has hard links",
    errno.EROFS: "mount the filesystem writable",
    errno.EIO: "check the disk and the kernel log",
    errno.ESTALE: "mount the network filesystem again",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit of open files (fs.file-max)",
    errno.ENOTDIR: "remove the file that stands where a directory is expected",
}


def is_full(error: OSError) -> bool:
    """True when there is no room: the disk, a quota or a file size limit."""
    return error.errno in _FULL


def unavailable(error: OSError, action: str, path: Path) -> Unavailable:
    """The error for a tier's caller, naming the path, the errno and the next step."""
    code = errno.errorcode.get(error.errno or 0, str(error.errno))
    next_step = _NEXT_STEP.get(error.errno or 0, "check that the directory is mounted and writable")
    return Unavailable(f"cannot {action}: {next_step}", errno=code, path=path)
