"""Where a user's private service keeps its files and listens: the same for the service and all its clients."""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from kvstore.errors import InvalidRequest
from kvstore.wire.address import UNIX_PATH_BYTES_MAX


def default_directory() -> Path:
    """`$XDG_CACHE_HOME/kvstore`, by default `~/.cache/kvstore`."""
    cache = os.getenv("XDG_CACHE_HOME", "")  # a convention of the system, not a setting of ours
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "kvstore"


def private_socket_path(directory: Path) -> Path:
    """Where the private service of a directory listens; the same for all its clients.

    Inside the directory or, if that path would be too long for a socket, in a private folder for temporary files.

    Raises:
        InvalidRequest: The private folder belongs to another user, or others have access to it.
    """
    path = directory / "run" / "service.sock"
    if len(os.fsencode(path)) + 16 <= UNIX_PATH_BYTES_MAX:  # room for the pid that a listener appends for a moment
        return path
    digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"kvstore-{os.geteuid()}-{digest}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise InvalidRequest("a folder for a private socket must be its user's alone", path=folder)
    return folder / "service.sock"
