"""Shared memory that buffers are cut from: touched before it is needed, used again, readable by other processes.

Fresh memory is what receiving a record costs most: the first touch of each 4 KiB is a fault, and a virtual machine pays
for it twice, in the guest and in the host. And a process that maps the arena reads a record with one copy in memory
instead of two through a socket.
"""

from __future__ import annotations

import ctypes
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
from kvstore.runtime.prefault import populate_paced, spare_bytes

__all__ = ["Arena", "ArenaView", "Place"]

_HEAD = struct.Struct("<Q")
_HEAD_BYTES = 64
_GRAIN_BYTES = 16 << 10
_WARM_STEP_BYTES = 8 << 20
_CALM_S = 2.0
"""Memory that was used is replaced some time later: whoever used it has an engine behind it that computes now."""
_F_SEAL_FUTURE_WRITE = 0x10


@dataclass(frozen=True, slots=True)
class Place:
    """Where bytes stand in an arena.

    Attributes:
        offset: From the arena's start.
        num_bytes: Of the bytes.
        stamp: Stands at `offset - 64` for as long as the bytes do; never zero.
    """

    offset: int
    num_bytes: int
    stamp: int


class Arena:
    """A range of memory of its own; made with `open`.

    Each buffer has a stamp in front of it that is gone before its memory is used again, so that whoever copied from it
    can tell whether all that he copied was still there. All methods but `close` belong to one thread; buffers may die
    in any.

    Attributes:
        id: 16 random bytes: which arena this is.
        capacity_bytes: Its size. It takes memory only as that is used, or warmed.
    """

    def __init__(self, descriptor: int, capacity_bytes: int, ahead_bytes: int) -> None:
        self.id = secrets.token_bytes(16)
        self.capacity_bytes = capacity_bytes
        self.descriptor = descriptor
        self._memory: mmap.mmap | None = mmap.mmap(descriptor, capacity_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._stamp = 0
        self._stamps: dict[int, int] = {}  # of living buffers, by start
        self._sizes: list[tuple[int, int]] = [(capacity_bytes, 0)]  # free ranges: (bytes, start), ascending
        self._starts = {0: capacity_bytes}  # the same: start to bytes
        self._stops = {capacity_bytes: 0}  # the same: stop to start
        self._returned: deque[tuple[int, int]] = deque()  # by whichever thread dropped a buffer last
        self._used_stop = 0
        self._warmer = _Warmer(self._address, capacity_bytes, ahead_bytes)

    @classmethod
    def open(cls, capacity_bytes: int, *, ahead_bytes: int = 0) -> Arena | None:
        """An arena, or `None` where the system has no such memory.

        Args:
            capacity_bytes: At least this much, rounded up to whole grains.
            ahead_bytes: So much free memory is kept warm, by a thread that takes a fifth of a core at most.
        """
        capacity_bytes = _rounded(capacity_bytes)
        try:
            descriptor = os.memfd_create("kvstore", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except (AttributeError, OSError):
            return None
        try:
            os.ftruncate(descriptor, capacity_bytes)
            arena = cls(descriptor, capacity_bytes, min(ahead_bytes, capacity_bytes))
            # from now on nobody maps it for writing, and it keeps its size: a peer can neither spoil nor fault us
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        except (OSError, ValueError):
            os.close(descriptor)
            return None
        arena._warmer.start()
        return arena

    def take(self, num_bytes: int) -> memoryview | None:
        """A buffer of unspecified content, or `None`: no free range is that large.

        Its memory returns when the last view of it is gone.
        """
        memory = self._memory
        if memory is None:
            return None
        self._collect()
        needed = _rounded(_HEAD_BYTES + num_bytes)
        index = bisect_left(self._sizes, (needed, 0))  # the smallest that fits: memory that was used before, if any
        if index == len(self._sizes):
            return None
        size, start = self._sizes[index]
        self._unlist(start, size)
        if size > needed:
            self._list(start + needed, size - needed)
        self._used_stop = max(self._used_stop, start + needed)
        self._warmer.want(self._used_stop)
        self._stamp += 1
        self._stamps[start] = self._stamp
        _HEAD.pack_into(memory, start, self._stamp)
        buffer: Any = np.frombuffer(memory, np.uint8, num_bytes, start + _HEAD_BYTES)
        weakref.finalize(buffer, self._returned.append, (start, needed)).atexit = False
        return memoryview(buffer)

    def place(self, view: memoryview) -> Place | None:
        """Where the bytes of a buffer, or of its first part, stand; `None`: not in this arena."""
        address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        offset = address - self._address
        stamp = self._stamps.get(offset - _HEAD_BYTES) if self._memory is not None else None
        return Place(offset, len(view), stamp) if stamp is not None else None

    @property
    def free_bytes(self) -> int:
        """Bytes of all free ranges."""
        self._collect()
        return sum(self._starts.values())

    def close(self) -> None:
        """End the warming, let go of descriptor and mapping, give no more buffers; living ones live on. Idempotent."""
        self._warmer.stop()
        self._memory = None  # unmapped with the last buffer
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _collect(self) -> None:
        """Take dead buffers' memory back: stamps first, so that nobody reads a new content under an old one."""
        memory = self._memory
        while self._returned and memory is not None:
            start, size = self._returned.popleft()
            del self._stamps[start]
            _HEAD.pack_into(memory, start, 0)
            stop = start + size
            if (before := self._stops.get(start)) is not None:
                self._unlist(before, start - before)
                start = before
            if (behind := self._starts.get(stop)) is not None:
                self._unlist(stop, behind)
                stop += behind
            self._list(start, stop - start)

    def _list(self, start: int, size: int) -> None:
        insort(self._sizes, (size, start))
        self._starts[start] = size
        self._stops[start + size] = start

    def _unlist(self, start: int, size: int) -> None:
        del self._sizes[bisect_left(self._sizes, (size, start))]
        del self._starts[start]
        del self._stops[start + size]


class ArenaView:
    """Another process's arena, for reading.

    Args:
        descriptor: Of the arena; stays the caller's.
        capacity_bytes: As its owner says.

    Raises:
        Unavailable: It cannot be mapped, or is smaller than its owner says.
    """

    def __init__(self, descriptor: int, capacity_bytes: int) -> None:
        try:
            if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise Unavailable("shared memory that may shrink would fault its readers")
            self._memory = mmap.mmap(descriptor, capacity_bytes, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise Unavailable("shared memory cannot be mapped", error=error) from error
        self._bytes: Any = np.frombuffer(self._memory, np.uint8)

    def copy(self, place: Place, target: memoryview) -> bool:
        """Copy the bytes to the start of `target`. False: they were gone before all were copied; `target` is scrap.

        Raises:
            InvalidRequest: No such place, or the target is too small.
        """
        start, stop = place.offset, place.offset + place.num_bytes
        if not (_HEAD_BYTES <= start <= stop <= len(self._bytes) and place.stamp and place.num_bytes <= len(target)):
            raise InvalidRequest("no such place in the shared memory", place=place, target_bytes=len(target))
        copied: Any = np.frombuffer(target, np.uint8, place.num_bytes)
        np.copyto(copied, self._bytes[start:stop])
        (stamp,) = _HEAD.unpack_from(self._memory, start - _HEAD_BYTES)
        return bool(stamp == place.stamp)


class _Warmer:
    """A thread that touches an arena's memory some way ahead of its use, at a pace that leaves the cores to others."""

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
        """Keep memory warm behind `used_stop`, in strides, so that the thread is not woken for every buffer."""
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
            with suppress(OSError):  # an old kernel, or no memory: then its users fault it in
                while (
                    self._warm_stop < self._wanted_stop and not self._end.is_set() and spare_bytes() > _WARM_STEP_BYTES
                ):
                    step = min(_WARM_STEP_BYTES, self._capacity_bytes - self._warm_stop)
                    self._warm_stop += populate_paced(self._address + self._warm_stop, step, self._end)


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _GRAIN_BYTES) * _GRAIN_BYTES
