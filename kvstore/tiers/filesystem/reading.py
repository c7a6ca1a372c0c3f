"""Reading one file that may be anything: a record, a damaged one, or what somebody else put under its name."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.errors import CorruptRecord, UnsupportedFormat
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.record import Record
from kvstore.model.keys import RecordKey
from kvstore.tiers.verify import is_same, open_or_reason

__all__ = ["damage_of", "holds", "opened", "read_opened"]


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of what stands under a name. While it is open, no other file gets the same inode number.

    Raises:
        OSError: It cannot be opened.
    """
    try:  # without following a link, or blocking on a pipe that was put there
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        file = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)  # the link itself, to tell it apart
    try:
        yield file
    finally:
        os.close(file)


def read_opened(file: int, buffer: memoryview, key: RecordKey) -> Record | str | None:
    """The record in an open file, verified in `buffer`, or why it must be put aside.

    `None`: it may be whole, but has another size than the buffer.
    """
    if not stat.S_ISREG(os.fstat(file).st_mode) or os.fstat(file).st_size != len(buffer):
        return damage_of(file, key)
    if not _fill(file, buffer):
        return f"file was cut short while it was read expected={len(buffer)}"
    return open_or_reason(buffer, key)


def damage_of(file: int, key: RecordKey) -> str | None:
    """Why an open file cannot be the record that its name says, judged by header and size alone; `None`: it may be."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        return "a link, or no file at all, stands under this name"
    try:
        header = HeaderV1.unpack(os.pread(file, HEADER_BYTES, 0))
    except (CorruptRecord, UnsupportedFormat) as error:
        return str(error)
    if header.key != key:
        return f"another record stands under this name seen={header.key}"
    if header.payload_bytes + HEADER_BYTES != status.st_size:
        return f"file has the wrong size expected={header.payload_bytes + HEADER_BYTES} seen={status.st_size}"
    return None


def holds(file: int, data: memoryview) -> bool:
    """Whether an open file has exactly these bytes."""
    if not stat.S_ISREG(os.fstat(file).st_mode) or os.fstat(file).st_size != len(data):
        return False
    buffer = memoryview(bytearray(len(data)))
    return _fill(file, buffer) and is_same(buffer, data)


def _fill(file: int, buffer: memoryview) -> bool:
    """Fill `buffer` from the start of an open file. False: it has become too short."""
    done = 0
    while done < len(buffer):
        num_bytes = os.preadv(file, [buffer[done:]], done)
        if num_bytes == 0:
            return False
        done += num_bytes
    return True
