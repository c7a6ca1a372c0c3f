"""Files that are read at the start and again when they change: credentials, encryption keys, certificates."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from kvstore.errors import InvalidRequest
from kvstore.runtime.files import open_regular

_log = logging.getLogger(__name__)

Value = TypeVar("Value")


class Watched(Generic[Value]):
    """The value of a source, which is loaded again when the source changes. Safe from any thread.

    A change counts once two polls in a row see the same new state. A file that is rewritten in place is empty or half
    written for an instant, and what it holds then must not count.

    If the changed source is invalid or unreadable, that is logged once as an error, and the previous value stays: a
    typing mistake locks no client out. A token or key that was removed in an invalid file stays valid until the file is
    corrected.

    Args:
        what: What people call the value, like "credentials".
        state: Returns a value that differs once the source has changed.
        load: Reads and parses the source.
        poll_s: How often the owner should call `poll`.
        settles: Whether a change must be seen twice; false for a source that is never half written.

    Attributes:
        value: The value in force.
        num_loaded: How often a new value was accepted, the first one included.
        num_refused: How often the changed source was invalid.
        problem: Why the source as it is now is not in force; empty: it is.

    Raises:
        InvalidRequest: The source is invalid at the start.
    """

    def __init__(
        self,
        what: str,
        state: Callable[[], object],
        load: Callable[[], Value],
        *,
        poll_s: float = 1.0,
        settles: bool = True,
    ) -> None:
        self.poll_s = poll_s
        self.what = what
        self._state = state
        self._load = load
        self._settles = settles
        self._lock = threading.Lock()
        self._seen = self._candidate = state()
        self.value = load()
        self.num_loaded, self.num_refused = 1, 0
        self.problem = ""

    def poll(self) -> bool:
        """Check whether the source has changed, and load it then. True: the value is a new one.

        Blocks while it reads: call it in a thread.
        """
        with self._lock:
            state = self._state()
            is_settled = state == self._candidate or not self._settles
            self._candidate = state
            if state == self._seen or not is_settled:
                return False
            try:
                value = self._load()
            except InvalidRequest as error:
                if self._settles and self._state() != state:
                    return False  # it changed again: the next polls decide
                self._seen = state
                self.num_refused += 1
                self.problem = str(error)
                _log.error("keeping the previous %s until this is corrected: %s", self.what, error)
                return False
            if self._settles and self._state() != state:
                return False
            self._seen = state
            self.value, self.problem = value, ""
            self.num_loaded += 1
        _log.info("reloaded the %s", self.what)
        return True


def state_of(*paths: Path) -> tuple[object, ...]:
    """A value that differs once one of these files has changed, appeared or disappeared."""
    return tuple(_state_of(path) for path in paths)


def _state_of(path: Path) -> object:
    try:
        stat = path.stat()
    except OSError as error:
        return str(error)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_mode


def read_guarded(path: Path, *, what: str, field: str, mode_bits: int, bytes_max: int) -> bytes:
    """The content of a file that other users may not write, or not even read.

    Args:
        what: What errors call it.
        field: The setting that names it.
        mode_bits: Permissions that it must not have: 0o022, or 0o077 for a secret.
        bytes_max: Further bytes are not read.

    Raises:
        InvalidRequest: The file cannot be read, or has one of these permissions.
    """
    try:
        with open(open_regular(path), "rb") as file:
            if os.fstat(file.fileno()).st_mode & mode_bits:
                action, remedy = ("write", "go-w") if mode_bits == 0o022 else ("read", "600")
                raise InvalidRequest(
                    f"other users may {action} the {what}: run chmod {remedy} on it", field=field, path=path
                )
            return file.read(bytes_max)
    except OSError as error:
        raise InvalidRequest(
            f"cannot read the {what}", field=field, path=path, error=error.strerror or error
        ) from error
