"""Pages on their way from host memory to a GPU's blocks.

There are a few lanes, each a stream with memory for pages. A thread that gets a lane orders the copies of its own pages
and of those that wait and have room there, and waits once for all of them. Then it hands the lane to the next thread
that waits. If each thread ordered the copies of its own pages, they would compete for the interpreter's lock at every
call, and be the slower the more there are: on an H200 one thread placed 13.7 GB/s, and 16 placed 3.6 GB/s.

A lane's stream copies the pages to the GPU, verifies them if they come from shared memory, and decodes them at once.
When that is done their checks are made, if they have any. Then it waits for the fence that was recorded on the compute
stream when the load's step began, and writes the pages' rows: kernels ordered before it may still read the blocks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

from connector.device.base import Fence, PageScatter, SharedRecord, WrongSource, no_check
from connector.device.host_memory import aligned
from connector.device.rows import RowIndexes, RowPlan, join_planes, pack_indexes
from connector.device.streams import Piece, Stream, Streams
from kvstore.errors import InternalError, KVStoreError

if TYPE_CHECKING:  # it needs Triton
    from connector.device.kernels import DeviceKernels


CopyIn: TypeAlias = Callable[[torch.Tensor, Sequence[Piece]], None]
"""`Streams.copy_in`."""


class Cache(Protocol):
    """The group that a page belongs to.

    Attributes:
        plane_width: Bytes of the elements whose planes its pages are in host memory, unless they are canonical.
    """

    plane_width: int

    def scatter(self, indexes: RowIndexes, pages: torch.Tensor) -> None:
        """Order the copy of pages, which are consecutive there, to the cache on the current stream."""
        ...


@dataclass(eq=False, slots=True)
class PlannedPage:
    """A page and its plans. It does not change.

    Attributes:
        shared: Its source, if that is a record in shared memory.
        parts: Together the source as it is in host memory.
        num_bytes: Of the page in its canonical form.
        source_bytes: Of the form in which it arrives.
        width: Bytes of the elements whose planes the source is; 1: it is none.
        is_tiles: Whether the source is encoded in tiles.
        room_bytes: Room that it needs in a lane.
    """

    cache: Cache
    page: PageScatter
    plans: tuple[RowPlan, ...]
    shared: SharedRecord | None = field(init=False)
    parts: tuple[torch.Tensor, ...] = field(init=False)
    num_bytes: int = field(init=False)
    source_bytes: int = field(init=False)
    width: int = field(init=False)
    is_tiles: bool = field(init=False)
    room_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        source = self.page.source
        shared = self.shared = source if isinstance(source, SharedRecord) else None
        self.parts = (source,) if isinstance(source, torch.Tensor) else source.parts
        self.num_bytes = self.page.page_bytes
        self.source_bytes = sum([part.numel() for part in self.parts])
        self.width = self.cache.plane_width if shared is None else 1
        self.is_tiles = shared is not None and shared.tiles is not None
        is_canonical = self.width == 1 and not self.is_tiles
        self.room_bytes = aligned(self.num_bytes) + (0 if is_canonical else aligned(self.source_bytes))

    @property
    def alike(self) -> tuple[object, ...]:
        """Equal for pages that one operation decodes and writes, if they are adjacent."""
        keys = tuple(plan.key for plan in self.plans)
        return id(self.cache), self.is_tiles, self.width, self.page.first_block, len(self.page.block_ids[0]), keys


@dataclass(eq=False, slots=True)
class Placement:
    """Pages that a thread wants on the GPU.

    Attributes:
        told: Set when the pages are placed, when they failed, or when their thread gets `lane`.
        lane: The lane that its thread now has.
        error: Why they are not placed.
    """

    pages: Sequence[PlannedPage]
    after: Fence
    told: threading.Event = field(default_factory=threading.Event)
    lane: Lane | None = None
    error: KVStoreError | None = None

    @property
    def room_bytes(self) -> int:
        return sum(page.room_bytes for page in self.pages)

    def may_join(self, other: Placement) -> bool:
        """Whether the others' pages would not have to wait for this one's fence."""
        return self.after is other.after or (self.after.is_done() and other.after.is_done())


class Placer:
    """Gives a lane to one thread at a time, which orders the copies of other threads' pages too. The technique is
    from Hendler, Incze, Shavit, Tzafrir, "Flat combining and the synchronization-parallelism tradeoff", SPAA 2010.

    Attributes:
        lanes: All of them.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes = tuple(lanes)
        for lane in lanes:
            lane.ordering = lanes[0].ordering
        self._lock = threading.Lock()
        self._free = list(lanes)
        self._waiting: deque[Placement] = deque()

    def place(self, own: Placement) -> None:
        """Return when the pages are placed.

        Raises:
            KVStoreError: Ordering the copies of a page failed that were ordered together with these: then none of
                them is known to be placed.
            Exception: The same where it is this thread that ordered them, or of a page's check.
        """
        with self._lock:
            if self._free:  # then no page waits
                own.lane = self._free.pop()
            else:
                self._waiting.append(own)
        if own.lane is None:
            own.told.wait()
        if own.lane is not None:
            self._place_with_others(own, own.lane)
        error, own.error = own.error, None
        if error is not None:
            try:
                # without the frames of its traceback: they refer to the pages, and these to the memory that they are in
                raise error.with_traceback(None)
            finally:
                del error, own

    def _place_with_others(self, own: Placement, lane: Lane) -> None:
        batch = [own]
        try:
            with self._lock:
                while self._waiting and lane.has_room(batch, self._waiting[0]):
                    batch.append(self._waiting.popleft())
            lane.load(batch)
        except BaseException as error:
            for placement in batch[1:]:  # of its own for each thread, and without the traceback, which holds memory
                placement.error = InternalError("copies that were ordered together failed", error=repr(error))
            raise
        finally:
            with self._lock:
                next_one = self._waiting.popleft() if self._waiting else None
                if next_one is not None:
                    next_one.lane = lane
                else:
                    self._free.append(lane)
            for placement in batch[1:]:
                placement.told.set()
            if next_one is not None:
                next_one.told.set()


class Lane:
    """One stream, and the memory for pages on their way to the blocks.

    Args:
        streams: Of the device.
        num_bytes: Room for pages.
        kernels: Verify and decode records, if the device does.

    Attributes:
        ordering: Held by the thread that orders work. All lanes of a device have the same one: threads that order at
            the same time would pass the interpreter's lock to and fro.
        memory: uint8: pages in their canonical form, and behind them what they are decoded from.
        device_bytes: Memory of the device that it has taken.
    """

    def __init__(self, streams: Streams, num_bytes: int, kernels: DeviceKernels | None) -> None:
        self._stream: Stream = streams.side()
        self._host_memory = streams.host_memory
        self._copy_in = streams.copy_in
        self._kernels = kernels
        self.ordering = threading.Lock()
        self.memory = streams.device_memory(num_bytes)
        self.device_bytes = num_bytes + (kernels.device_bytes if kernels is not None else 0)

    def has_room(self, taken: Sequence[Placement], one: Placement) -> bool:
        """Whether pages fit behind others, and none of them has to wait for another's fence."""
        room_bytes = sum(each.room_bytes for each in taken) + one.room_bytes
        return room_bytes <= self.memory.numel() and one.may_join(taken[0])

    def fitting(self, pages: Sequence[PlannedPage]) -> Iterator[Sequence[PlannedPage]]:
        """The pages in as few parts as fit, in their order."""
        part: list[PlannedPage] = []
        room_bytes = self.memory.numel()
        for page in pages:
            if part and page.room_bytes > room_bytes:
                yield part
                part, room_bytes = [], self.memory.numel()
            part.append(page)
            room_bytes -= page.room_bytes
        yield part

    def load(self, placements: Sequence[Placement]) -> None:
        """Copy pages here and place each behind its fence; returns when all are placed. A placement whose check fails
        has an `error`, and none of its pages is placed. After an error of this nothing is done later either: the blocks
        may be given to others.
        """
        try:
            with self.ordering:
                stretches = list(self._stretches(placements))
                if stretches[-1].stop > self.memory.numel():  # CUDA is given addresses, and would write behind it
                    raise InternalError("pages must fit a lane", num_bytes=stretches[-1].stop)
                for stretch in stretches:
                    self._stream.run(partial(stretch.fetch, self.memory, self._copy_in))
                is_verified = self._verify(stretches)
                for stretch in stretches:  # while the copies run
                    stretch.pack(self._host_memory)
            if is_verified or any(page.page.check is not no_check for each in placements for page in each.pages):
                self._stream.settle()
                is_wrong = is_verified and self._kernels is not None and self._kernels.num_wrong > 0
                for placement in placements:
                    placement.error = _error(placement, is_wrong=is_wrong)
            with self.ordering:
                for stretch in stretches:
                    if stretch.placement.error is None:
                        # only here: the copies run beside what the engine computes until then
                        self._stream.wait(stretch.placement.after)
                        self._stream.run(partial(stretch.write, self.memory))
        finally:
            self._stream.settle()

    def _verify(self, stretches: Sequence[_Stretch]) -> bool:
        """Order the verification of pages that the device verifies; False: there are none."""
        digests, tiles = [], []
        for stretch in stretches:
            for page, target, source in stretch.placed:
                shared = page.shared
                if shared is not None and shared.tiles is not None:
                    tiles.append((source, target, shared.tiles))
                elif shared is not None and shared.digest is not None:
                    digests.append((target.start, page.num_bytes, shared.digest))
        if not digests and not tiles:
            return False
        if self._kernels is None:
            raise InternalError("this device verifies no records")
        self._stream.run(partial(self._kernels.order, self.memory, digests, tiles))
        return True

    def _stretches(self, placements: Sequence[Placement]) -> Iterator[_Stretch]:
        start = 0
        for placement in placements:
            for _, alike in groupby(placement.pages, key=lambda page: page.alike):
                stretch = _Stretch(placement, list(alike), start)
                start = stretch.stop
                yield stretch


@dataclass(eq=False, slots=True)
class _Stretch:
    """Pages of one placement that are alike: adjacent in a lane, and behind them what they are decoded from.

    Attributes:
        start: Of the first, in the lane.
        canonical_stop: Behind the last page.
        stop: Behind all.
        placed: Each page, where it is in the lane, and where its source arrives there.
        indexes: For each shape of piece where its rows are.
    """

    placement: Placement
    pages: Sequence[PlannedPage]
    start: int
    canonical_stop: int = field(init=False)
    stop: int = field(init=False)
    placed: list[tuple[PlannedPage, slice, slice]] = field(init=False)
    indexes: list[RowIndexes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.canonical_stop = self.start + sum([page.num_bytes for page in self.pages])
        self.stop = self.start + sum([page.room_bytes for page in self.pages])
        self.placed = []
        start, arrived = self.start, aligned(self.canonical_stop)
        for page in self.pages:
            target = source = slice(start, start + page.num_bytes)
            if page.is_tiles or page.width > 1:
                source = slice(arrived, arrived + page.source_bytes)
                arrived = aligned(source.stop) if page.is_tiles else source.stop
            self.placed.append((page, target, source))
            start = target.stop

    @torch.inference_mode()
    def fetch(self, memory: torch.Tensor, copy_in: CopyIn) -> None:
        pieces: list[Piece] = []
        for page, _, source in self.placed:
            start = source.start
            for part in page.parts:
                pieces.append((start, part))
                start += part.numel()
        copy_in(memory, pieces)
        if (width := self.pages[0].width) > 1:
            arrived = memory[self.placed[0][2].start : self.placed[-1][2].stop]
            join_planes(arrived, len(self.pages), width, memory[self.start : self.canonical_stop])

    def pack(self, allocate: Callable[[int], torch.Tensor]) -> None:
        first = self.pages[0].page
        shapes = list(zip(*(page.plans for page in self.pages), strict=True))
        self.indexes = [
            pack_indexes(
                plans,
                [page.page.block_ids for page in self.pages],
                first_block=first.first_block,
                is_alone=len(shapes) == 1,
                allocate=allocate,
            )
            for plans in shapes
        ]

    @torch.inference_mode()
    def write(self, memory: torch.Tensor) -> None:
        for index in self.indexes:
            self.pages[0].cache.scatter(index, memory[self.start : self.canonical_stop])


def _error(placement: Placement, *, is_wrong: bool) -> KVStoreError | None:
    """Why a placement's pages must not be written, of its own for each thread."""
    try:
        for page in placement.pages:
            page.page.check()  # first: memory that was reused says nothing about the record
    except KVStoreError as error:
        return error
    if is_wrong and any(page.shared is not None for page in placement.pages):
        return WrongSource("a record of these pages is damaged", pages=len(placement.pages))
    return None
