"""The records of a directory: an index in memory, in order of use, and its log on disk, so that a restart is fast.

The log is one file of 64-byte entries after a 64-byte head: a snapshot, then additions and removals. An addition is
logged before its file appears, a removal after its file is gone. So after a crash the log may name a record that is
absent, which is a miss, but it lacks no file. The operating system keeps what a killed process wrote; after a power
failure the directory is scanned instead.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import xxhash

from kvstore.format.names import PACKED_KEY_BYTES, pack_key, unpack_key
from kvstore.model.keys import RecordKey
from kvstore.runtime.files import read_regular

_log = logging.getLogger(__name__)

Held = dict[bytes, int]
"""Bytes of each record by its packed key, oldest first."""

_HEAD = struct.Struct("<4sHHQ16s16s16x")  # magic, version, clean, entries of the snapshot, their checksum, boot
_ENTRY = struct.Struct("<52sIB3xI")  # packed key, bytes, kind, checksum of what precedes it
_MAGIC, _VERSION = b"KVI1", 1
_ADDED, _REMOVED = 1, 2
ENTRY_BYTES = _ENTRY.size
_TAIL_ENTRIES_MIN = 1 << 17
"""The tail is merged into the snapshot once it is longer than this (8 MiB) and than twice the snapshot."""
assert _HEAD.size == ENTRY_BYTES == 64


def replay(data: bytes, boot: bytes) -> Held | None:
    """The records that the log in `data` names; `None`: it is no log, is damaged, or may be incomplete.

    Args:
        data: The whole file.
        boot: Identifies the machine's current boot: after another one, an unclean log may be incomplete.
    """
    if len(data) < _HEAD.size:
        return None
    magic, version, clean, num_entries, checksum, written_in = _HEAD.unpack_from(data)
    stop = _HEAD.size + num_entries * ENTRY_BYTES
    if (magic, version) != (_MAGIC, _VERSION) or stop > len(data):
        return None
    if xxhash.xxh3_128_digest(memoryview(data)[_HEAD.size : stop]) != checksum:
        return None
    if not clean and written_in != boot:
        return None
    held = _snapshot(data, stop)
    for at in range(stop, len(data) - ENTRY_BYTES + 1, ENTRY_BYTES):
        packed, num_bytes, kind, check = _ENTRY.unpack_from(data, at)
        if check != _check(data[at : at + ENTRY_BYTES - 4]):
            return None
        if kind == _ADDED:
            held.pop(packed, None)
            held[packed] = num_bytes
        else:
            held.pop(packed, None)
    return held


def _snapshot(data: bytes, stop: int) -> Held:
    """The snapshot's entries. Without a Python loop over fields: a million entries take about half a second."""
    sizes = np.frombuffer(data, "<u4", (stop - _HEAD.size) // 4, _HEAD.size)[PACKED_KEY_BYTES // 4 :: ENTRY_BYTES // 4]
    keys = (data[at : at + PACKED_KEY_BYTES] for at in range(_HEAD.size, stop, ENTRY_BYTES))
    return dict(zip(keys, sizes.tolist(), strict=True))


def _pack_snapshot(held: Iterable[tuple[bytes, int]], *, clean: bool, boot: bytes) -> bytes:
    entries = b"".join(_entry(packed, num_bytes, _ADDED) for packed, num_bytes in held)
    digest = xxhash.xxh3_128_digest(entries)
    return _HEAD.pack(_MAGIC, _VERSION, clean, len(entries) // ENTRY_BYTES, digest, boot) + entries


def _entry(packed: bytes, num_bytes: int, kind: int) -> bytes:
    entry = _ENTRY.pack(packed, num_bytes, kind, 0)
    return entry[:-4] + _check(entry[:-4]).to_bytes(4, "little")


def _check(data: bytes) -> int:
    return int(xxhash.xxh32_intdigest(data))


class IndexLog:
    """The log of one directory; its methods may run in any thread.

    Args:
        boot: Identifies the machine's current boot. `None`: the system's boot id.
    """

    def __init__(self, path: Path, boot: bytes | None = None) -> None:
        self._path = path
        self._boot = boot if boot is not None else _this_boot()
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._num_bytes = 0
        self._fold_at_bytes = 0

    def resume(self) -> Held | None:
        """Continue an earlier owner's log and return its records; `None`: there is no log that can be trusted.

        Raises:
            OSError: The file exists but cannot be used.
        """
        try:
            data = read_regular(self._path)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in (errno.EISDIR, errno.EINVAL, errno.ENXIO):
                raise
            _log.warning("the index is no regular file, so the start is slow: remove it path=%s", self._path)
            return None
        held = replay(data, self._boot)
        if held is None:
            return None
        _, _, _, num_entries, checksum, _ = _HEAD.unpack_from(data)
        fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:  # from now on it can be trusted until the machine reboots
            os.pwrite(fd, _HEAD.pack(_MAGIC, _VERSION, 0, num_entries, checksum, self._boot), 0)
            os.ftruncate(fd, len(data) // ENTRY_BYTES * ENTRY_BYTES)
            os.fsync(fd)
        finally:
            os.close(fd)
        fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        with self._lock:
            self._use(fd, len(data) // ENTRY_BYTES * ENTRY_BYTES, num_entries)
        return held

    def begin(self, held: Iterable[tuple[bytes, int]]) -> None:
        """Start a new log with these records.

        Raises:
            OSError: It cannot be written.
        """
        with self._lock:
            self._replace(_pack_snapshot(held, clean=False, boot=self._boot), durable=True)

    def added(self, key: RecordKey, num_bytes: int) -> None:
        """Log a file that is about to appear under the key's name.

        Raises:
            OSError: The entry cannot be written: do not create the file.
        """
        self._append(_entry(pack_key(key), num_bytes, _ADDED))

    def removed(self, key: RecordKey) -> None:
        """Log that the key's file is gone. Never fails: a log that cannot be written is dropped."""
        try:
            self._append(_entry(pack_key(key), 0, _REMOVED))
        except OSError:
            self.drop()

    def drop(self) -> None:
        """Remove the log: the next owner scans the directory. Idempotent."""
        with self._lock:
            self._close()
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def end(self, order: Iterable[bytes]) -> None:
        """Replace the log by a snapshot that survives a power failure. Idempotent.

        Args:
            order: Packed keys in order of use; other records come last.

        Raises:
            OSError: It cannot be written; the log stays as it was.
        """
        with self._lock:
            if self._fd is None:
                return
            held = replay(read_regular(self._path), self._boot)
            if held is not None:
                ordered = [(packed, num_bytes) for packed in order if (num_bytes := held.pop(packed, None)) is not None]
                snapshot = _pack_snapshot([*ordered, *held.items()], clean=True, boot=self._boot)
                self._replace(snapshot, durable=True)
            self._close()

    def _append(self, entry: bytes) -> None:
        with self._lock:
            if self._fd is None:  # dropped, or not started
                return
            if os.write(self._fd, entry) < len(entry):
                os.ftruncate(self._fd, self._num_bytes)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            self._num_bytes += len(entry)
            if self._num_bytes >= self._fold_at_bytes:
                self._fold()

    def _fold(self) -> None:
        """Merge the tail into the snapshot: a second or two for a million records, while writers wait."""
        self._fold_at_bytes = 2 * self._num_bytes  # if it fails, the disk is full, and the log keeps growing
        with contextlib.suppress(OSError):
            held = replay(read_regular(self._path), self._boot)
            if held is not None:
                self._replace(_pack_snapshot(held.items(), clean=False, boot=self._boot), durable=False)

    def _replace(self, snapshot: bytes, *, durable: bool) -> None:
        new = self._path.with_suffix(".new")
        new.unlink(missing_ok=True)
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            done = 0
            while done < len(snapshot):
                done += os.write(fd, memoryview(snapshot)[done : done + (1 << 26)])
            if durable:
                os.fsync(fd)
            new.replace(self._path)
            if durable:
                _sync_folder(self._path.parent)
        except BaseException:
            os.close(fd)
            new.unlink(missing_ok=True)
            raise
        self._use(fd, len(snapshot), len(snapshot) // ENTRY_BYTES)

    def _use(self, fd: int, num_bytes: int, num_entries: int) -> None:
        self._close()
        self._fd, self._num_bytes = fd, num_bytes
        self._fold_at_bytes = ENTRY_BYTES * (num_entries + max(2 * num_entries, _TAIL_ENTRIES_MIN))

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _this_boot() -> bytes:
    """16 bytes that differ after each boot; zeros if the system has none."""
    with contextlib.suppress(OSError, ValueError):
        return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    return bytes(16)


_BLOCK_BYTES = 4096
_INODE_BYTES = 512


def cost_bytes(num_bytes: int) -> int:
    """The charge for a file of `num_bytes`: whole filesystem blocks and an inode."""
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES + _INODE_BYTES


class Index:
    """Keys with sizes, least recently used first, under a byte budget.

    The budget includes running writes, and the `quarantined_bytes` of files that are no records any more. Keys are kept
    packed, 52 bytes each: a million of them take 0.2 GB, and are loaded in about a second.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.quarantined_bytes = 0
        self._reserved_bytes = 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: RecordKey) -> bool:
        return pack_key(key) in self._sizes

    def in_order(self) -> list[bytes]:
        """The packed keys in order of use. Slow for a million: not for the event loop."""
        return list(self._sizes)

    def packed(self) -> list[bytes]:
        """The packed keys in no order, which is much faster."""
        return list(dict.keys(self._sizes))

    def held(self, packed: Iterable[bytes]) -> Iterator[tuple[RecordKey, int]]:
        """Those of some packed keys that are still here, with their bytes."""
        return ((unpack_key(one), num_bytes) for one in packed if (num_bytes := self._sizes.get(one)) is not None)

    def load(self, held: Held) -> None:
        """Fill an empty index."""
        self._sizes = OrderedDict(held)
        sizes = np.fromiter(held.values(), np.int64, len(held))
        self.used_bytes = int(((sizes + _BLOCK_BYTES - 1) // _BLOCK_BYTES * _BLOCK_BYTES + _INODE_BYTES).sum())

    def size_of(self, key: RecordKey) -> int | None:
        """Bytes of the record, or `None`. Not a use."""
        return self._sizes.get(pack_key(key))

    def touch(self, key: RecordKey) -> None:
        """Mark a record as used."""
        self._sizes.move_to_end(pack_key(key))

    def add(self, key: RecordKey, num_bytes: int) -> None:
        """Add a file. A known one keeps its size and place."""
        packed = pack_key(key)
        if packed not in self._sizes:
            self._sizes[packed] = num_bytes
            self.used_bytes += cost_bytes(num_bytes)

    def remove(self, key: RecordKey) -> bool:
        """Remove a file. False: it was not known."""
        num_bytes = self._sizes.pop(pack_key(key), None)
        if num_bytes is None:
            return False
        self.used_bytes -= cost_bytes(num_bytes)
        return True

    def reserve(self, num_bytes: int) -> list[RecordKey] | None:
        """Make room for a file and reserve it until `unreserve`.

        Returns:
            The evicted records, which the caller removes from the disk. `None`: the file cannot fit.
        """
        cost = cost_bytes(num_bytes)
        if self.quarantined_bytes + self._reserved_bytes + cost > self.limit_bytes:
            return None
        self._reserved_bytes += cost
        return self.shrink()

    def unreserve(self, num_bytes: int) -> None:
        """End a reservation, after the file was written or not."""
        self._reserved_bytes -= cost_bytes(num_bytes)

    def shrink(self) -> list[RecordKey]:
        """Remove the least recently used records that are over the budget, and return them."""
        victims: list[RecordKey] = []
        while self._sizes and self.used_bytes + self.quarantined_bytes + self._reserved_bytes > self.limit_bytes:
            packed, num_bytes = self._sizes.popitem(last=False)
            self.used_bytes -= cost_bytes(num_bytes)
            victims.append(unpack_key(packed))
        return victims
