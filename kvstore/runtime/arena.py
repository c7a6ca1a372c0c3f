"""Shared memory that buffers are allocated from: made resident ahead of use, reused, readable by other processes.

Fresh memory is the largest cost of receiving a record: the first touch of each 4 KiB page faults, in a virtual machine
twice, in the guest and in the host. And a process that maps the arena reads a record where it is, without a copy.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import struct
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.runtime.machine import populate_paced, spare_bytes

_HEAD = struct.Struct("<Q")
_HEAD_BYTES = 64
_GRAIN_BYTES = 16 << 10
_WARM_STEP_BYTES = 8 << 20
_CALM_S = 2.0
"""Pause before more memory is made resident: the engine whose records used it up computes now, and needs the cores."""
_COLLECTED_AT_ONCE = 64
"""Dropped buffers whose memory one call frees if there is room without the others. There are thousands when a namespace
is deleted, and to free them all would hold the caller's event loop."""
_F_SEAL_FUTURE_WRITE = 0x10


@dataclass(frozen=True, slots=True)
class Place:
    """Where a buffer is in an arena.

    Attributes:
        offset: Of the buffer's first byte, from the arena's start.
        num_bytes: Bytes of the buffer, or of its first part.
        stamp: The number at `offset - 64` for as long as the buffer is valid; never zero.
    """

    offset: int
    num_bytes: int
    stamp: int


class Arena:
    """Allocates buffers in a memory file; made with `open`.

    Each buffer has a stamp in front of it, which is erased before its memory is reused: a reader that finds the same
    stamp after reading knows that it has read this buffer. All methods may be called in any thread, and buffers may be
    dropped in any: threads that receive records take memory here. `take` and `place` wait for each other.

    Attributes:
        id: 16 random bytes that identify this arena.
        capacity_bytes: Its size. It takes memory only as that is used, or warmed.
        descriptor: Of the memory file; -1 once closed.
    """

    def __init__(self, descriptor: int, capacity_bytes: int, ahead_bytes: int) -> None:
        self.id = secrets.token_bytes(16)
        self.capacity_bytes = capacity_bytes
        self.descriptor = descriptor
        self._memory: mmap.mmap | None = mmap.mmap(descriptor, capacity_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._lock = threading.Lock()  # of all below; dropping a buffer needs no lock: it only adds to `_returned`
        self._stamp = 0
        self._stamps: dict[int, int] = {}  # of live buffers, by start
        self._free = FreeRanges(capacity_bytes)
        self._returned: deque[tuple[int, int]] = deque()  # dropped in any thread, not yet free
        self._used_stop = 0
        self._warmer = _Warmer(self._address, capacity_bytes, ahead_bytes)

    @classmethod
    def open(cls, capacity_bytes: int, *, ahead_bytes: int = 0) -> Arena | None:
        """Create an arena; `None` where the system does not support it.

        Args:
            capacity_bytes: Its least size; rounded up to 16 KiB.
            ahead_bytes: How much memory beyond what was used is kept resident, by a thread that takes a fifth of a core
                at most.
        """
        capacity_bytes = _rounded(capacity_bytes)
        try:
            descriptor = memory_file(capacity_bytes)
        except OSError:
            return None
        try:
            arena = cls(descriptor, capacity_bytes, ahead_bytes)
            # no peer can map it for writing, so none can corrupt it
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        except (OSError, ValueError):
            os.close(descriptor)
            return None
        arena._warmer.start()
        return arena

    @classmethod
    def over(cls, descriptor: int, capacity_bytes: int, *, ahead_bytes: int = 0) -> Arena:
        """Allocate in a memory file that another process made and reads.

        Args:
            descriptor: Of the file. The arena closes it, unless this raises.
            capacity_bytes: As its maker says.
            ahead_bytes: As for `open`.

        Raises:
            Unavailable: It cannot be mapped for writing, may shrink, or is smaller than its maker says.
        """
        try:
            _check_size_is_sealed(descriptor)
            arena = cls(descriptor, capacity_bytes, ahead_bytes)
        except (OSError, ValueError) as error:
            raise Unavailable("shared memory cannot be mapped", error=error) from error
        arena._warmer.start()
        return arena

    def take(self, num_bytes: int) -> memoryview | None:
        """Allocate a buffer of unspecified content; `None`: no free range is large enough.

        Its memory is freed when the last view of it is dropped.
        """
        memory = self._memory
        if memory is None:
            return None
        needed = _rounded(_HEAD_BYTES + num_bytes)
        with self._lock:
            start, is_all_free = None, False
            while start is None and not is_all_free:
                is_all_free = self._collect()
                start = self._free.take(needed)
            if start is None:
                return None
            self._used_stop = max(self._used_stop, start + needed)
            self._warmer.want(self._used_stop)
            self._stamp += 1
            self._stamps[start] = self._stamp
            _HEAD.pack_into(memory, start, self._stamp)
        buffer: Any = np.frombuffer(memory, np.uint8, num_bytes, start + _HEAD_BYTES)
        weakref.finalize(buffer, self._returned.append, (start, needed)).atexit = False
        return memoryview(buffer)

    def fits(self, num_bytes: int) -> bool:
        """Whether `take` returns a buffer when nothing else is taken."""
        return _rounded(_HEAD_BYTES + num_bytes) <= self.capacity_bytes

    def place(self, view: memoryview) -> Place | None:
        """Where a buffer, or its first part, is in this arena; `None`: it is not."""
        address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        offset = address - self._address
        with self._lock:
            stamp = self._stamps.get(offset - _HEAD_BYTES) if self._memory is not None else None
        return Place(offset, len(view), stamp) if stamp is not None else None

    def close(self) -> None:
        """Stop the warming, close the descriptor and allocate no more; live buffers stay valid. Idempotent."""
        self._warmer.stop()
        self._memory = None  # unmapped with the last buffer
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _collect(self) -> bool:
        """Free the memory of some dropped buffers; the caller has the lock. Returns whether that of all is free. Their
        stamps are erased first, so that a reader who still has their places sees that the content has changed."""
        memory = self._memory
        for _ in range(_COLLECTED_AT_ONCE):
            if not self._returned or memory is None:
                return True
            start, size = self._returned.popleft()
            del self._stamps[start]
            _HEAD.pack_into(memory, start, 0)
            self._free.give(start, size)
        return not self._returned


class ArenaView:
    """Another process's arena, for reading.

    Args:
        descriptor: Of the arena; the caller closes it.
        capacity_bytes: As its owner says.

    Raises:
        Unavailable: It cannot be mapped, or is smaller than its owner says.
    """

    def __init__(self, descriptor: int, capacity_bytes: int) -> None:
        try:
            _check_size_is_sealed(descriptor)
            self._memory = mmap.mmap(descriptor, capacity_bytes, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise Unavailable("shared memory cannot be mapped", error=error) from error
        self._bytes: Any = np.frombuffer(self._memory, np.uint8)
        self._descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self._descriptor).atexit = False

    @property
    def memory(self) -> memoryview:
        """All of it, read-only; mapped as long as this view or one of its parts is referred to."""
        return memoryview(self._bytes)

    def resident(self, start: int) -> tuple[int, int] | None:
        """The first range at or behind `start` that has memory, which its owner or a reader has touched; `None`: there
        is none. Who touches the rest first is charged for it.
        """
        try:
            first = os.lseek(self._descriptor, start, os.SEEK_DATA)
            stop = os.lseek(self._descriptor, first, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # there is a hole only
                return None
            raise
        return first, min(stop, len(self._bytes))

    def at(self, place: Place) -> memoryview:
        """The bytes at a place, read-only. They may get another content at any time: call `holds` after reading them.

        The mapping lasts as long as this view of it, also when its owner has ended.

        Raises:
            InvalidRequest: No such place.
        """
        start, stop = place.offset, place.offset + place.num_bytes
        if not (_HEAD_BYTES <= start <= stop <= len(self._bytes) and place.stamp):
            raise InvalidRequest("no such place in the shared memory", place=place)
        return memoryview(self._bytes[start:stop])

    def holds(self, place: Place) -> bool:
        """Whether all that was read at a place until now was its buffer's. False: the buffer was freed before.

        No barrier is needed. Thousands of instructions of the interpreter lie between the last read and this one, more
        than any processor reorders.
        """
        (stamp,) = _HEAD.unpack_from(self._memory, place.offset - _HEAD_BYTES)
        return bool(stamp == place.stamp)


def memory_file(num_bytes: int) -> int:
    """A descriptor of a new memory file whose size never changes, so that no process that maps it can fault.

    Raises:
        OSError: The system does not support it.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    descriptor = os.memfd_create("kvstore", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_size_is_sealed(descriptor: int) -> None:
    if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise Unavailable("shared memory that may shrink would fault its readers")


class _Warmer:
    """A thread that makes an arena's memory resident ahead of its use, paced to leave the cores to others."""

    def __init__(self, address: int, capacity_bytes: int, ahead_bytes: int) -> None:
        self._address = address
        self._capacity_bytes = capacity_bytes
        self._ahead_bytes = ahead_bytes
        self._warm_stop = 0
        self._wanted_stop = min(ahead_bytes, capacity_bytes)
        self._wake = threading.Event()
        self._end = threading.Event()
        self._is_off = ahead_bytes <= 0
        self._thread = threading.Thread(target=self._run, name="arena-warmer", daemon=True)

    def start(self) -> None:
        if not self._is_off:
            self._wake.set()
            self._thread.start()

    def want(self, used_stop: int) -> None:
        """Keep the memory after `used_stop` resident; in large steps, so that not every buffer wakes the thread."""
        if not self._is_off and used_stop + self._ahead_bytes // 2 > self._wanted_stop < self._capacity_bytes:
            self._wanted_stop = min(used_stop + self._ahead_bytes, self._capacity_bytes)
            self._wake.set()

    def stop(self) -> None:
        self._is_off = True
        self._end.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._end.is_set():
            self._wake.wait()
            self._wake.clear()
            if self._warm_stop:
                self._end.wait(_CALM_S)
            with suppress(OSError):  # an old kernel, or no memory: then its users take the faults
                while (
                    self._warm_stop < self._wanted_stop and not self._end.is_set() and spare_bytes() > _WARM_STEP_BYTES
                ):
                    step = min(_WARM_STEP_BYTES, self._capacity_bytes - self._warm_stop)
                    self._warm_stop += populate_paced(self._address + self._warm_stop, step, self._end)


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _GRAIN_BYTES) * _GRAIN_BYTES


class FreeRanges:
    """Allocates ranges by best fit, and joins what is given back with its free neighbours. Not thread-safe.

    Best fit tends to use memory again that was used before, which is resident.

    Args:
        capacity_bytes: Size of the memory.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._sizes: list[tuple[int, int]] = []  # (bytes, start), ascending
        self._starts: dict[int, int] = {}  # start to bytes
        self._stops: dict[int, int] = {}  # stop to start
        if capacity_bytes:
            self._list(0, capacity_bytes)

    def take(self, num_bytes: int) -> int | None:
        """Where a range of `num_bytes` (at least 1) starts; `None`: no free range is large enough."""
        index = bisect_left(self._sizes, (num_bytes, 0))
        if index == len(self._sizes):
            return None
        size, start = self._sizes[index]
        self._unlist(start, size)
        if size > num_bytes:
            self._list(start + num_bytes, size - num_bytes)
        return start

    def give(self, start: int, num_bytes: int) -> None:
        """Take back a range that `take` returned."""
        stop = start + num_bytes
        if (before := self._stops.get(start)) is not None:
            self._unlist(before, start - before)
            start = before
        if (after_bytes := self._starts.get(stop)) is not None:
            self._unlist(stop, after_bytes)
            stop += after_bytes
        self._list(start, stop - start)

    def _list(self, start: int, size: int) -> None:
        insort(self._sizes, (size, start))
        self._starts[start] = size
        self._stops[start + size] = start

    def _unlist(self, start: int, size: int) -> None:
        del self._sizes[bisect_left(self._sizes, (size, start))]
        del self._starts[start]
        del self._stops[start + size]
