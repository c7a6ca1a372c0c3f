"""Blocking calls on record files. Every method may run in any thread; the filesystem's own atomicity is the lock."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.format.names import ROOT, format_name, manifest_name, pack_key, parse_name
from kvstore.format.record import Record
from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.tiers.base import PutOutcome
from kvstore.tiers.filesystem.failures import is_full, unavailable
from kvstore.tiers.filesystem.index_log import Held, IndexLog
from kvstore.tiers.filesystem.reading import damage_of, holds, opened, read_opened

__all__ = ["Fsync", "RecordFiles"]

_log = logging.getLogger(__name__)

Fsync = Literal["none", "data"]
"""`none`: an acknowledged record may be lost or cut short by a power failure; its checksums turn that into a miss.
`data`: fdatasync before a record gets its name; an acknowledged record's bytes survive, at a disk flush per record
(about 1 ms on NVMe, 10 ms on a disk). Directories are never synced: a lost name is a miss too."""

_QUARANTINE_FILES_MAX = 64


class RecordFiles:
    """The files of one directory.

    Args:
        root: Made if absent, readable by its owner only.
        fsync: See `Fsync`.
        quarantine_bytes_max: Bytes of records that are kept aside; beyond, the oldest are removed.

    Attributes:
        quarantined_bytes: Bytes of what is kept aside now.
    """

    def __init__(self, root: Path, fsync: Fsync = "none", *, quarantine_bytes_max: int = 256 << 20) -> None:
        if fsync not in ("none", "data"):
            raise InvalidRequest("fsync must be 'none' or 'data'", seen=fsync)
        self.root = root
        self.num_quarantined = 0
        self.quarantined_bytes = 0
        self._quarantine_bytes_max = quarantine_bytes_max
        self.on_quarantine: Callable[[RecordKey, str], None] | None = None
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
        try:
            for folder in (self.root, self._temp, self._quarantine, self.root / ROOT):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_fd = _lock(self.root / "LOCK")
            for leftover in self._temp.glob("*.tmp"):
                leftover.unlink(missing_ok=True)
            self._bound_quarantine()
        except OSError as error:
            raise unavailable(error, "open the directory", self.root) from error

    def held(self) -> Held:
        """What is held, oldest first: from an earlier owner's log or, if that cannot be trusted, from the directory.

        From now on the log notes what is added and removed. If the disk is too full for a new log there is none, and
        the next owner reads the directory again.

        Raises:
            Unavailable: The directory cannot be read.
        """
        try:
            held = self._log.resume()
        except OSError as error:
            raise unavailable(error, "read the index", self.root) from error
        if held is None:
            held = {pack_key(key): num_bytes for key, num_bytes in self.recover()}
            try:
                self._log.begin(held.items())
            except OSError as error:
                _log.warning("the index cannot be written, the next start will be slow error=%s", error)
                self._log.drop()
        return held

    def end_log(self, order: Iterable[bytes]) -> None:
        """Write what is held to the log, in order of use. Idempotent."""
        try:
            self._log.end(order)
        except OSError as error:
            _log.warning("the index cannot be written, the order of use is lost error=%s", error)

    def recover(self) -> list[tuple[RecordKey, int]]:
        """Every whole record with its bytes, oldest file first. A record of the wrong size is quarantined."""
        found: list[tuple[int, RecordKey, int]] = []
        try:
            for path in self._candidates():
                try:
                    key = parse_name(str(path.relative_to(self.root)))
                except InvalidRequest:
                    _log.debug("not a record, left alone path=%s", path)
                    continue
                with opened(path) as file:
                    status = os.fstat(file)
                    reason = damage_of(file, key)
                    if reason is None:
                        found.append((status.st_mtime_ns, key, status.st_size))
                    else:
                        self._put_aside(key, reason, file)
        except OSError as error:
            raise unavailable(error, "read the directory", self.root) from error
        found.sort()
        return [(key, num_bytes) for _, key, num_bytes in found]

    def names(self) -> list[tuple[RecordKey, int]]:
        """Every record by its name alone, with its file's size; no record is read or changed.

        Raises:
            Unavailable: There is no such directory, or it cannot be read.
        """
        found = []
        try:
            if not (self.root / ROOT).is_dir():
                raise Unavailable("there are no records: check the path", path=self.root)
            for path in self._candidates():
                with contextlib.suppress(InvalidRequest, FileNotFoundError):  # not ours, or gone meanwhile
                    found.append((parse_name(str(path.relative_to(self.root))), path.stat().st_size))
        except OSError as error:
            raise unavailable(error, "read the directory", self.root) from error
        return found

    def sizes(self, keys: Iterable[RecordKey]) -> list[int | None]:
        """For each key the size of the file that has its name, or `None`."""
        found: list[int | None] = []
        for key in keys:
            try:
                found.append(self._path(key).lstat().st_size)
            except FileNotFoundError:
                found.append(None)
            except OSError as error:
                raise unavailable(error, "look for a record", self._path(key)) from error
        return found

    def _candidates(self) -> Iterator[Path]:
        for folder, folders, names in os.walk(self.root / ROOT, followlinks=False):
            folders.sort()
            for name in names:
                path = Path(folder, name)
                if path.is_file() and not path.is_symlink() and name != "manifest":
                    yield path

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
                    return PutOutcome.EXISTS, self._note_size(record.key, path)
                except OSError:
                    self._note_size(record.key, path)
                    raise
            return PutOutcome.STORED, record.num_bytes
        except OSError as error:
            if is_full(error):
                return PutOutcome.FULL, 0
            raise unavailable(error, "write a record", path) from error
        finally:
            with contextlib.suppress(OSError):
                temp.unlink()

    def read(self, key: RecordKey, buffer: memoryview) -> Record | None:
        """Read a record of exactly `len(buffer)` bytes and verify it; what does not match its seal is quarantined.

        `None`: it is not there, was put aside, or another one of another size has the name by now.
        """
        path = self._path(key)
        try:
            with opened(path) as file:
                record = read_opened(file, buffer, key)
                if not isinstance(record, str):
                    return record
                if self._put_aside(key, record, file):
                    return None
        except FileNotFoundError:
            self._strike_out(key)
            return None
        except OSError as error:
            raise unavailable(error, "read a record", path) from error
        return self.read(key, buffer)  # it was removed while it was read, and perhaps put again

    def remove(self, key: RecordKey) -> bool:
        """Remove a record's file. False: it was not there."""
        path = self._path(key)
        with self._lock_of(key):
            try:
                path.unlink()
            except FileNotFoundError:
                self._log.removed(key)
                return False
            except OSError as error:
                raise unavailable(error, "remove a record", path) from error
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

    def quarantine(self, key: RecordKey, reason: str, seen: Record | None = None) -> tuple[bool, int]:
        """Put aside a record that was found bad, but no other than `seen` (`None`: whatever stands there).

        Returns:
            Whether it was put aside, and the size of the file that has the name now (0: none).
        """
        path = self._path(key)
        try:
            with opened(path) as file:
                if (seen is None or holds(file, seen.data)) and self._put_aside(key, reason, file):
                    return True, 0
        except FileNotFoundError:
            self._strike_out(key)
            return False, 0
        except OSError as error:
            raise unavailable(error, "quarantine a record", path) from error
        with self._lock_of(key):
            return False, self._note_size(key, path)

    def _put_aside(self, key: RecordKey, reason: str, file: int) -> bool:
        """Rename a record out of reach, count and log it, and drop the oldest beyond the limits.

        False: the name is free by now, or has another file than the open one. In a process beside the owner
        (`kvstore verify`) the owner may put another one between our look and the renaming, microseconds later.
        """
        path = self._path(key)
        name = f"{SYSTEM_CLOCK.wall_ms():016d}-{format_name(key).replace('/', '_')}"
        with self._lock_of(key):
            try:
                if not os.path.samestat(path.lstat(), os.fstat(file)):
                    return False
                path.rename(self._quarantine / name)
            except FileNotFoundError:
                self._log.removed(key)
                return False
            except OSError as error:
                raise unavailable(error, "quarantine a record", path) from error
            self._log.removed(key)
        self.num_quarantined += 1
        if self.on_quarantine is not None:
            self.on_quarantine(key, reason)
        _log.warning("record quarantined key=%s reason=%s file=%s", key, reason, self._quarantine / name)
        with contextlib.suppress(OSError):  # another thread may do the same; the next quarantine finishes the job
            self._bound_quarantine()
        return True

    def write_manifest(self, namespace: NamespaceId, manifest: bytes) -> None:
        """Keep a namespace's description; the last one written stays."""
        path = self.root / manifest_name(namespace)
        temp = self._new_temp()
        try:
            self._write_temp(temp, memoryview(manifest))
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temp.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temp.unlink()
            raise unavailable(error, "write a manifest", path) from error

    def read_manifest(self, namespace: NamespaceId) -> bytes | None:
        """The description that was kept, or `None`."""
        path = self.root / manifest_name(namespace)
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unavailable(error, "read a manifest", path) from error

    def _strike_out(self, key: RecordKey) -> None:
        """Tell the log of a file that another process has removed."""
        with self._lock_of(key):
            if not self._path(key).exists():
                self._log.removed(key)

    def _lock_of(self, key: RecordKey) -> threading.Lock:
        """Held while a name appears or goes and the log is told, so that the log's last entry on it is right."""
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

    def _note_size(self, key: RecordKey, path: Path) -> int:
        """Note and return the size of the file that has a name although our write did not put it there; 0: none."""
        try:
            num_bytes = path.stat().st_size
            self._log.added(key, num_bytes)
        except OSError:
            self._log.removed(key)
            return 0
        return num_bytes

    def _bound_quarantine(self) -> None:
        kept_bytes = 0
        newest_first = sorted(self._quarantine.iterdir(), reverse=True)  # names start with the time
        for index, path in enumerate(newest_first):
            num_bytes = path.stat().st_size
            if index >= _QUARANTINE_FILES_MAX or kept_bytes + num_bytes > self._quarantine_bytes_max:
                path.unlink(missing_ok=True)
            else:
                kept_bytes += num_bytes
        self.quarantined_bytes = kept_bytes


def _lock(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise Unavailable(
            "another process has this directory open: end it, or give this service a directory of its own",
            path=path.parent,
        ) from error
    except OSError:
        os.close(fd)
        raise
    return fd
