"""Blocking calls on record files. Every method may run in any thread; the filesystem's own atomicity is the lock."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from kvstore.errors import CorruptRecord, InvalidRequest, Unavailable, UnsupportedFormat
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.manifest import MAX_MANIFEST_BYTES
from kvstore.format.names import ROOT, format_name, manifest_name, pack_key, record_key
from kvstore.format.record import Record
from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.files import NO_MORE_FILES, read_regular, try_lock
from kvstore.tiers.base import PutOutcome
from kvstore.tiers.filesystem.index import Held, IndexLog
from kvstore.tiers.verify import is_same, open_or_reason

_log = logging.getLogger(__name__)

Fsync = Literal["none", "data"]
"""`none`: an acknowledged record may be lost or cut short by a power failure; its checksums turn that into a miss.
`data`: fdatasync before a record gets its name; an acknowledged record's bytes survive, at a disk flush per record
(about 1 ms on NVMe, 10 ms on a disk). Directories are never synced: a lost name is a miss too."""

_QUARANTINE_FILES_MAX = 64
_NO_ROOM = {
    errno.ENOSPC: "the disk is full: make room there, or set a smaller disk_bytes",
    errno.EDQUOT: "the quota of the disk is used up: raise it, or set a smaller disk_bytes",
    errno.EFBIG: "a record is larger than a file may be: raise the limit (ulimit -f)",
}
_NEXT_STEP = {
    errno.EACCES: "check the owner and the permissions of the directory",
    errno.EPERM: "check the permissions, and that the filesystem has hard links",
    errno.EOPNOTSUPP: "use a filesystem that has hard links and flock",
    errno.EMLINK: "use a filesystem that has hard links",
    errno.EROFS: "mount the filesystem writable",
    errno.ENOSPC: "make room on the disk",
    errno.EDQUOT: "make room, or raise the quota of the disk",
    errno.EIO: "check the disk and the kernel log",
    errno.ESTALE: "mount the network filesystem again",
    **NO_MORE_FILES,
    errno.ENOTDIR: "remove the file that has the name of a directory",
    errno.EEXIST: "remove the file that has the name of a directory",
    errno.EISDIR: "remove the directory that has the name of a file",
    errno.EINVAL: "remove what is no regular file, or use a filesystem of another kind",
    errno.ENXIO: "remove what is no regular file",
}


class RecordFiles:
    """The files of one directory.

    Args:
        root: Made if absent, readable by its owner only.
        fsync: See `Fsync`.
        quarantine_bytes_max: Limit of the quarantine; beyond it, the oldest files are removed.

    Attributes:
        quarantined_bytes: Bytes in the quarantine now.
        on_quarantine: Called with each quarantined record, the reason and its file, in any thread; set by the owner.
        no_room: Why the last record found no room, and the next step; empty: it found room, or there is room now.
    """

    def __init__(self, root: Path, fsync: Fsync = "none", *, quarantine_bytes_max: int = 256 << 20) -> None:
        if fsync not in ("none", "data"):
            raise InvalidRequest("fsync must be 'none' or 'data'", seen=fsync)
        self.root = root
        self.quarantined_bytes = 0
        self.on_quarantine: Callable[[RecordKey, str, str], object] = lambda *_: None
        self.no_room = ""
        self._missing_bytes = 0
        self._quarantine_bytes_max = quarantine_bytes_max
        self._fsync = fsync
        self._temp = root / "tmp"
        self._quarantine = root / "quarantine"
        self._numbers = itertools.count()
        self._lock_fd: int | None = None
        self._log = IndexLog(root / "index")
        self._locks = [threading.Lock() for _ in range(64)]

    def open(self) -> None:
        """Make the directories, take the lock, and remove partial files of an earlier owner.

        Raises:
            Unavailable: Another process owns the directory, or it cannot be used.
        """
        with _translated("open the directory", self.root):
            for folder in (self.root, self._temp, self._quarantine, self.root / ROOT):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_fd = _lock(self.root / "LOCK")
            self._empty_temp()
            self._bound_quarantine(is_start=True)

    def held(self) -> Held:
        """The records, oldest first: from an earlier owner's log or, if that cannot be trusted, from the directory.

        From now on the log records additions and removals. If the disk is too full for a new log there is none, and the
        next owner scans the directory again.

        Raises:
            Unavailable: The directory cannot be read.
        """
        with _translated("read the index", self.root):
            held = self._log.resume()
        if held is None:
            held = {pack_key(key): num_bytes for key, num_bytes in self.recover()}
            try:
                self._log.begin(held.items())
            except OSError as error:
                _log.warning("the index cannot be written, the next start will be slow error=%s", error)
                self._log.drop()
        return held

    def end_log(self, order: Iterable[bytes]) -> None:
        """Write the records to the log, in order of use. Idempotent."""
        try:
            self._log.end(order)
        except OSError as error:
            _log.warning("the index cannot be written, the order of use is lost error=%s", error)

    def recover(self) -> list[tuple[RecordKey, int]]:
        """Every whole record with its bytes, oldest file first. A record of the wrong size is quarantined."""
        found: list[tuple[int, RecordKey, int]] = []
        with _translated("read the directory", self.root):
            for path, key in self._candidates():
                with _opened(path) as file:
                    status = os.fstat(file)
                    reason = _damage_of(file, key)
                    if reason is None:
                        found.append((status.st_mtime_ns, key, status.st_size))
                    else:
                        self._move_to_quarantine(key, reason, file)
        return [(key, num_bytes) for _, key, num_bytes in sorted(found)]

    def names(self) -> list[tuple[RecordKey, int]]:
        """Every record by its name alone, with its file's size; no record is read or changed.

        Raises:
            Unavailable: There is no such directory, or it cannot be read.
        """
        found = []
        with _translated("read the directory", self.root):
            if not (self.root / ROOT).is_dir():
                raise Unavailable("there are no records: check the path", path=self.root)
            for path, key in self._candidates():
                with contextlib.suppress(FileNotFoundError):  # removed since
                    found.append((key, path.stat().st_size))
        return found

    def sizes(self, keys: Iterable[RecordKey]) -> list[int | None]:
        """For each key the size of the file that has its name, or `None`."""
        found: list[int | None] = []
        for key in keys:
            with _translated("look for a record", self._path(key)):
                try:
                    found.append(self._path(key).lstat().st_size)
                except FileNotFoundError:
                    found.append(None)
        return found

    def _candidates(self) -> Iterator[tuple[Path, RecordKey]]:
        """The files with the name of a record."""
        for folder, folders, names in os.walk(self.root / ROOT, followlinks=False):
            folders.sort()
            for name in names:
                path = Path(folder, name)
                key = record_key(str(path.relative_to(self.root)))
                if key is not None and path.is_file() and not path.is_symlink():
                    yield path, key

    def close(self) -> None:
        """Release the directory for another owner. Idempotent."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def write(self, record: Record, victims: Iterable[RecordKey]) -> tuple[PutOutcome, int]:
        """Remove `victims`, then store `record` unless its name is taken.

        Returns:
            The outcome, and the size of the file that now has the name (0: none).
        """
        for victim in victims:
            self.remove(victim)
        path = self._path(record.key)
        temp = self._new_temp()
        try:
            self._write_temp(temp, record.data)
            with self._lock_of(record.key):
                try:
                    self._log.added(record.key, record.num_bytes)
                    self._link(temp, path)
                except FileExistsError:
                    return PutOutcome.EXISTS, self._log_size(record.key, path)
                except OSError:
                    self._log_size(record.key, path)
                    raise
            self.no_room = ""
            return PutOutcome.STORED, record.num_bytes
        except OSError as error:
            if error.errno in _NO_ROOM:
                self.no_room, self._missing_bytes = _NO_ROOM[error.errno], record.num_bytes
                return PutOutcome.FULL, 0
            raise _unavailable(error, "write a record", path) from error
        finally:
            with contextlib.suppress(OSError):
                temp.unlink()

    def look_for_room(self) -> None:
        """Clear `no_room` if the disk has room by now. Whether a quota has any shows only when a record is written."""
        if self.no_room == _NO_ROOM[errno.ENOSPC]:
            with _translated("read the size of the disk", self.root):
                disk = os.statvfs(self.root)
            has_files = disk.f_favail > 0 or disk.f_files == 0  # 0: they are not counted
            if has_files and disk.f_bavail * disk.f_frsize >= self._missing_bytes:
                self.no_room = ""

    def read(self, key: RecordKey, buffer: memoryview) -> Record | None:
        """Read a record of exactly `len(buffer)` bytes and verify it. A corrupt one is quarantined.

        `None`: it is absent, was quarantined, or another record of another size has the name by now.
        """
        path = self._path(key)
        while True:
            with _translated("read a record", path):
                try:
                    with _opened(path) as file:
                        record = _read_opened(file, buffer, key)
                        if not isinstance(record, str):
                            return record
                        if self._move_to_quarantine(key, record, file):
                            return None
                except FileNotFoundError:
                    return None
            # it was removed during the read, and may have been put again

    def remove(self, key: RecordKey) -> bool:
        """Remove a record's file. False: it was not there."""
        path = self._path(key)
        with self._lock_of(key), _translated("remove a record", path):
            try:
                path.unlink()
            except FileNotFoundError:
                self._log.removed(key)
                return False
            self._log.removed(key)
        return True

    def remove_all(self, keys: Iterable[RecordKey]) -> None:
        """Remove many records' files; those that cannot be removed are left, and the last error is raised."""
        failure: Unavailable | None = None
        for key in keys:
            try:
                self.remove(key)
            except Unavailable as error:
                failure = error
        if failure is not None:
            raise failure

    def quarantine(self, key: RecordKey, reason: str, seen: Record | None = None) -> bool:
        """Quarantine a corrupt record, but no other one than `seen` (`None`: any). False: nothing was quarantined."""
        path = self._path(key)
        with _translated("quarantine a record", path):
            try:
                with _opened(path) as file:
                    return (seen is None or _holds(file, seen.data)) and self._move_to_quarantine(key, reason, file)
            except FileNotFoundError:
                self.is_gone(key)
                return False

    def _move_to_quarantine(self, key: RecordKey, reason: str, file: int) -> bool:
        """Move a record into the quarantine, report it, and remove the oldest files beyond the limits.

        False: the name is free by now, or has another file than the open one. In a process beside the owner
        (`kvstore verify`) the owner may put another one between the check and the renaming, microseconds later.
        """
        path = self._path(key)
        target = self._quarantine / f"{SYSTEM_CLOCK.wall_ms():016d}-{format_name(key).replace('/', '_')}"
        with self._lock_of(key), _translated("quarantine a record", path):
            try:
                if not os.path.samestat(path.lstat(), os.fstat(file)):
                    return False
                path.rename(target)
            except FileNotFoundError:
                self._log.removed(key)
                return False
            self._log.removed(key)
        self.on_quarantine(key, reason, str(target))
        with contextlib.suppress(OSError):  # another thread may do the same; the next quarantine finishes the job
            self._bound_quarantine()
        return True

    def write_manifest(self, namespace: NamespaceId, manifest: bytes) -> None:
        """Keep a namespace's description, in place of an earlier one."""
        path = self.root / manifest_name(namespace)
        temp = self._new_temp()
        with _translated("write a manifest", path):
            try:
                self._write_temp(temp, memoryview(manifest))
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                temp.replace(path)
            except OSError:
                with contextlib.suppress(OSError):
                    temp.unlink()
                raise

    def read_manifest(self, namespace: NamespaceId) -> bytes | None:
        """The description that was kept, or `None`."""
        path = self.root / manifest_name(namespace)
        with _translated("read a manifest", path):
            try:
                return read_regular(path, MAX_MANIFEST_BYTES + 1)
            except FileNotFoundError:
                return None

    def is_gone(self, key: RecordKey) -> bool:
        """Whether no file has the name, as after another process has removed it; this is logged then."""
        with self._lock_of(key):
            is_gone = self.sizes([key]) == [None]
            if is_gone:
                self._log.removed(key)
        return is_gone

    def _lock_of(self, key: RecordKey) -> threading.Lock:
        """Held while a name appears or goes and this is logged, so that the last entry for the name is right."""
        return self._locks[key.prefix[0] % len(self._locks)]

    def _path(self, key: RecordKey) -> Path:
        return self.root / format_name(key)

    def _new_temp(self) -> Path:
        return self._temp / f"{next(self._numbers)}.tmp"

    def _write_temp(self, temp: Path, data: memoryview) -> None:
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            done = 0
            while done < len(data):
                done += os.write(fd, data[done:])
            if self._fsync == "data":
                os.fdatasync(fd)
        finally:
            os.close(fd)

    def _link(self, temp: Path, path: Path) -> None:
        try:
            os.link(temp, path)
        except FileNotFoundError:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.link(temp, path)

    def _log_size(self, key: RecordKey, path: Path) -> int:
        """Log and return the size of a file that our write did not put there; 0: there is none."""
        try:
            num_bytes = path.stat().st_size
            self._log.added(key, num_bytes)
        except OSError:
            self._log.removed(key)
            return 0
        return num_bytes

    def _empty_temp(self) -> None:
        foreign = [path for path in sorted(self._temp.glob("*.tmp")) if not _removed(path)]
        _log_foreign(foreign)
        taken = [int(path.stem) for path in foreign if path.stem.isdecimal()]
        self._numbers = itertools.count(max(taken, default=-1) + 1)

    def _bound_quarantine(self, *, is_start: bool = False) -> None:
        kept_bytes = num_kept = 0
        foreign = []
        for path in sorted(self._quarantine.iterdir(), reverse=True):  # names start with the time: newest first
            status = path.lstat()
            num_bytes = status.st_size
            if stat.S_ISDIR(status.st_mode):
                foreign.append(path)
            elif num_kept < _QUARANTINE_FILES_MAX and kept_bytes + num_bytes <= self._quarantine_bytes_max:
                num_kept, kept_bytes = num_kept + 1, kept_bytes + num_bytes
            elif not _removed(path):
                foreign.append(path)
        if is_start:
            _log_foreign(foreign)
        self.quarantined_bytes = kept_bytes


def _removed(path: Path) -> bool:
    """Remove a file. False: it cannot be removed, as a directory cannot."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _log_foreign(paths: list[Path]) -> None:
    if paths:
        _log.warning("not a file of this service, skipped: remove it path=%s others=%d", paths[0], len(paths) - 1)


def _lock(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not try_lock(fd):
            raise Unavailable(
                "another process has this directory open: end it (one of `embedded:` ends by itself some seconds after "
                "its last engine), or name another directory",
                path=path.parent,
            )
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def _translated(action: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unavailable(error, action, path) from error


def _unavailable(error: OSError, action: str, path: Path) -> Unavailable:
    """The error for a tier's caller, naming the path, the errno and the next step."""
    code = errno.errorcode.get(error.errno or 0, str(error.errno))
    next_step = _NEXT_STEP.get(error.errno or 0, "check that the directory is mounted and writable")
    return Unavailable(f"cannot {action}: {next_step}", errno=code, path=error.filename or path)


# One file, which may be anything: a record, a corrupt one, or another program's file under its name.


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor of the file that has this name. While it is open, no other file gets the same inode number.

    Raises:
        OSError: It cannot be opened.
    """
    try:  # without following a link, or blocking on a pipe
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        file = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)  # the link itself, to recognize it
    try:
        yield file
    finally:
        os.close(file)


def _read_opened(file: int, buffer: memoryview, key: RecordKey) -> Record | str | None:
    """The record in an open file, verified in `buffer`, or why it must be quarantined.

    `None`: it may be whole, but has another size than the buffer.
    """
    if not stat.S_ISREG(os.fstat(file).st_mode) or os.fstat(file).st_size != len(buffer):
        return _damage_of(file, key)
    if not _fill(file, buffer):
        return f"file was cut short while it was read expected={len(buffer)}"
    return open_or_reason(buffer, key)


def _damage_of(file: int, key: RecordKey) -> str | None:
    """Why an open file cannot be the record of its name, by header and size alone; `None`: it may be."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        return "this name has a link or a special file"
    try:
        header = HeaderV1.unpack(os.pread(file, HEADER_BYTES, 0))
    except (CorruptRecord, UnsupportedFormat) as error:
        return str(error)
    if header.key != key:
        return f"this name has another record seen={header.key}"
    if header.payload_bytes + HEADER_BYTES != status.st_size:
        return f"file has the wrong size expected={header.payload_bytes + HEADER_BYTES} seen={status.st_size}"
    return None


def _holds(file: int, data: memoryview) -> bool:
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
