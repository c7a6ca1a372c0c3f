"""Memory that this process shares with the service, registered with the GPU, which then copies records from where they
are: no thread reads them, and they are not copied in host memory first.

Only memory that the service has touched is registered. Registering touches the rest, which would be charged to the
engine's container, and could be more than that may use.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from connector.device.streams import Streams
from connector.logs import LOG
from kvstore.errors import InvalidRequest
from kvstore.runtime.arena import ArenaView

_MOST_BYTES = 256 << 20
"""Registered in one call, which holds a lock of the driver: some tens of milliseconds."""
_LEAST_BYTES = 16 << 20
"""Shorter ranges wait until they have grown."""
_HOLE_BYTES = 1 << 20
"""Untouched memory between two ranges that is registered with them: a record rarely ends at the end of its memory."""
RETRY_S = 60.0

_unreleased: list[object] = []
"""Refers to memory that no tensor refers to and that is still registered. It stays mapped until it is released, and to
the end of the process if it never is: CUDA would refuse what is mapped there next."""


@dataclass(frozen=True, eq=False, slots=True)
class _Registered:
    """What is registered of one memory. Replaced as a whole, so that readers need no lock.

    Attributes:
        starts: Of the pieces, ascending.
        pieces: uint8, each over its memory, which stays registered and mapped as long as the tensor is referred to.
    """

    view: ArenaView | None = None
    address: int = 0
    starts: tuple[int, ...] = ()
    pieces: tuple[torch.Tensor, ...] = ()

    def at(self, start: int, num_bytes: int) -> tuple[torch.Tensor, ...] | None:
        """The parts of a range, one for each piece that it is in; `None`: not all of it is registered."""
        parts, stop = [], start + num_bytes
        index = bisect_right(self.starts, start) - 1
        while start < stop:
            if not (0 <= index < len(self.pieces) and self.starts[index] <= start):
                return None
            first = start - self.starts[index]
            part = self.pieces[index][first : first + stop - start]
            if not part.numel():
                return None
            parts.append(part)
            start += part.numel()
            index += 1
        return tuple(parts) or None


class RegisteredMemory:
    """Safe from any thread. One thread of its own registers, and releases: either may take a second, and wait for the
    device.

    Args:
        streams: Of the device.
        least_bytes: Shorter ranges are not registered; tests make it small.
        most_bytes: Longer ones are registered in pieces.
    """

    def __init__(self, streams: Streams, *, least_bytes: int = _LEAST_BYTES, most_bytes: int = _MOST_BYTES) -> None:
        self._streams = streams
        self._least_bytes = least_bytes
        self._most_bytes = most_bytes
        self._changed = threading.Condition()
        self._now = _Registered()
        self._to_drop: deque[_Registered] = deque()
        self._to_release: deque[tuple[int, memoryview]] = deque()  # by address
        _unreleased.append(self._to_release)
        self._to_do = False
        self._refused_s = 0.0
        self._num_adopted = 0
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        """Bytes of what was adopted last that are registered."""
        return sum(piece.numel() for piece in self._now.pieces)

    def adopt(self, view: ArenaView | None) -> None:
        """Register what has memory of a view, soon; returns at once. Called again, it continues with what has got
        memory since. What was adopted before is released once no tensor of it is left. `None`: nothing is shared now.

        If it cannot be registered that is logged, and `at` finds nothing; it is tried again after a minute.
        """
        with self._changed:
            if self._is_closed:
                return
            if self._now.view is not view:
                self._to_drop.append(self._now)
                self._now = _Registered() if view is None else _Registered(view, _address_of(view.memory))
                self._refused_s = 0.0
                self._num_adopted += 1
            is_refused = bool(self._refused_s) and time.monotonic() < self._refused_s + RETRY_S
            if (view is None or is_refused) and not self._to_drop and not self._to_release:
                return
            self._to_do = True
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kvstore-registering", daemon=True)
                thread.start()
                self._thread = thread
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all that `adopt` found is registered. False: not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._to_do, timeout_s)

    def close(self, timeout_s: float = 1.0) -> None:
        """Register no more, and release what no load refers to. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def at(self, view: ArenaView, start: int, num_bytes: int) -> tuple[torch.Tensor, ...] | None:
        """uint8, together over a range of the view, read-only; they keep it registered. `None`: it is not, at least not
        yet.
        """
        now = self._now
        return now.at(start, num_bytes) if now.view is view else None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._to_do or self._is_closed)
                if self._is_closed:
                    self._now = _Registered()
            self._to_drop.clear()
            while self._to_release:
                self._release(*self._to_release.popleft())
            if self._is_closed:
                return
            num_adopted = self._num_adopted
            self._register(self._now)
            with self._changed:
                self._to_do = self._num_adopted > num_adopted or bool(self._to_drop or self._to_release)
                self._changed.notify_all()

    def _release(self, address: int, memory: memoryview) -> None:
        try:
            self._streams.release(address)
        except InvalidRequest as error:
            _unreleased.append(memory)
            LOG.debug("kvstore: %s", error)

    def _register(self, now: _Registered) -> None:
        """Register what has memory, until another memory is adopted."""
        view = now.view
        if view is None or (self._refused_s and time.monotonic() < self._refused_s + RETRY_S):
            return
        try:
            for start, num_bytes in self._unregistered(view, now):
                piece = self._piece(view.memory, now.address + start, num_bytes)
                if not self._add(view, start, piece):  # the service has started again
                    return
        except (InvalidRequest, OSError) as error:
            self._refuse(view, error)

    def _add(self, view: ArenaView, start: int, piece: torch.Tensor) -> bool:
        with self._changed:
            now = self._now
            if now.view is not view or self._is_closed:
                return False
            index = bisect_right(now.starts, start)
            starts = (*now.starts[:index], start, *now.starts[index:])
            pieces = (*now.pieces[:index], piece, *now.pieces[index:])
            self._now = _Registered(view, now.address, starts, pieces)
        level = logging.DEBUG if now.pieces else logging.INFO
        LOG.log(level, "kvstore: the GPU reads the service's memory itself, %d MiB so far", self.num_bytes >> 20)
        return True

    def _refuse(self, view: ArenaView, error: Exception) -> None:
        with self._changed:
            if self._now.view is not view:
                return
            is_first, self._refused_s = not self._refused_s, time.monotonic()
        if is_first:
            LOG.warning("kvstore: %s: records are copied in host memory first", error)

    def _unregistered(self, view: ArenaView, now: _Registered) -> Iterator[tuple[int, int]]:
        """Ranges that have memory and are not registered: start and size."""
        start = 0
        for begin, piece in (*zip(now.starts, now.pieces, strict=True), (len(view.memory), None)):
            while start < begin and (range_ := _resident(view, start)) is not None and range_[0] < begin:
                first, stop = range_[0], min(range_[1], begin)
                for at in range(first, stop, self._most_bytes):
                    num_bytes = min(self._most_bytes, stop - at)
                    if num_bytes >= self._least_bytes:
                        yield at, num_bytes
                start = stop
            start = begin + (piece.numel() if piece is not None else 0)

    def _piece(self, memory: memoryview, address: int, num_bytes: int) -> torch.Tensor:
        self._streams.register(address, num_bytes)
        # made from an address, since torch warns of memory that may not be written
        bytes_of_piece: Any = (ctypes.c_uint8 * num_bytes).from_address(address)
        weakref.finalize(bytes_of_piece, self._to_release.append, (address, memory)).atexit = False
        return torch.frombuffer(bytes_of_piece, dtype=torch.uint8)


def _resident(view: ArenaView, start: int) -> tuple[int, int] | None:
    """The first range that has memory, small holes included."""
    found = view.resident(start)
    while found is not None and (after := view.resident(found[1])) is not None and after[0] - found[1] <= _HOLE_BYTES:
        found = found[0], after[1]
    return found


def _address_of(data: memoryview) -> int:
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address
