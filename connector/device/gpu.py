"""Copies between a GPU's blocks and host pages. The engine's thread only orders them and waits for none.

Saving: the compute stream gathers blocks into a slot of the ring, so that what the engine orders next (zeroing,
copy-on-write, the next forward) may overwrite them. A side stream waits for the gather, splits the elements into byte
planes and copies them to pinned memory. Then the slot is free again.

Loading: a codec thread calls with a page and returns when it is placed. There are two lanes, each a stream with memory
for pages. A thread that gets a lane orders the copies of its own page and of those that wait and have room there, and
waits once for all of them. Then it hands the lane to the next thread that waits. If each thread ordered the copies of
its own page, they would compete for the interpreter's lock at every call, and be the slower the more there are. On an
H200 one such thread placed 13.7 GB/s, and 16 placed 3.6 GB/s. The lane's stream copies the pages to the GPU and joins
their planes at once. Then it waits for the fence that was recorded on the compute stream when the load's step began,
since kernels ordered before it may still read the blocks, and writes the pages' rows.

Work on streams runs in inference mode: vLLM's caches are inference tensors, which may not be written outside of it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import torch

from connector.canonical.runs import BlockRun
from connector.device.base import Fence, PageGather, RunsMemo, Ticket, check_blocks, storage_bytes
from connector.device.rows import (
    CacheGeometry,
    RowIndexes,
    RowPlan,
    gather_rows,
    join_planes,
    pack_indexes,
    plan_rows,
    scatter_rows,
    split_planes,
)
from connector.device.streams import Event, Stream, Streams
from kvstore.errors import InternalError, InvalidRequest, KVStoreError

_log = logging.getLogger("vllm.kvstore")  # below vLLM's logger, so that its handlers and levels apply

_BATCH_BYTES = 32 << 20
_LANE_BYTES = 16 << 20
"""Room for pages whose copies are ordered at once: some hundred microseconds of the link."""
_LANE_PAGES = 4
_NUM_LANES = 2
"""While the pages of one are copied, those of the other are placed."""
_ALIGN_BYTES = 512
_UNIT_BYTES_MIN = 64
_PLANE_WIDTHS = (2, 4)
"""Sizes of elements that the codec stores as byte planes."""


class StreamDevice:
    """`Device` with streams: what the copiers of all groups of one rank share.

    Args:
        ring_bytes: Room for pages that are gathered but not drained. As much as the host memory for saves, so that a
            page with a host buffer has room here.
        page_bytes_max: Size of the largest page.
        unit_bytes_min: A layout whose rows are smaller is refused: their indexes would take more than an eighth of a
            page's bytes on the GPU and on the way there, and copies of single rows are slow.

    Attributes:
        device_bytes: GPU memory that it has taken.
        placer: Places the pages of loads.

    Raises:
        InvalidRequest: The GPU has no room.
    """

    def __init__(
        self,
        streams: Streams,
        *,
        ring_bytes: int,
        page_bytes_max: int,
        unit_bytes_min: int = _UNIT_BYTES_MIN,
    ) -> None:
        self._streams = streams
        self.unit_bytes_min = unit_bytes_min
        batch_bytes = _aligned(max(page_bytes_max, min(_BATCH_BYTES, ring_bytes)))
        # one extra batch, since a slot that does not fit at the ring's end leaves up to its size unused there
        self._ring = Ring(_aligned(ring_bytes) + batch_bytes)
        self._slots = streams.device_memory(self._ring.num_bytes)
        self._split = streams.device_memory(batch_bytes)
        self._drain = streams.side()
        lane_bytes = max(_aligned(page_bytes_max), min(_LANE_BYTES, _LANE_PAGES * _aligned(page_bytes_max)))
        self.placer = Placer([Lane(streams, lane_bytes) for _ in range(_NUM_LANES)])
        self._page_bytes_max = page_bytes_max
        lanes_bytes = 2 * _NUM_LANES * lane_bytes
        self.device_bytes = self._ring.num_bytes + batch_bytes + lanes_bytes
        _log.info(
            "kvstore: the connector takes %d MiB of the GPU's memory: %d for saves, %d for loads",
            self.device_bytes >> 20,
            (self.device_bytes - lanes_bytes) >> 20,
            lanes_bytes >> 20,
        )

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return self._streams.host_arena(num_bytes)

    def index_memory(self, num_bytes: int) -> torch.Tensor:
        """Host memory for a few integers on their way to the device; may be released once their copy is ordered."""
        return self._streams.host_memory(num_bytes)

    def fence(self) -> Fence:
        return self._streams.compute().record()

    def copier(self, layers: Sequence[torch.Tensor], feeds: Sequence[int], element_bytes: int) -> StreamCopier:
        return StreamCopier(self, layers, feeds, element_bytes)

    def gather(
        self, work: Callable[[torch.Tensor], None], targets: Sequence[torch.Tensor], width: int
    ) -> Ticket | None:
        """Gather some pages of one size and start draining them. Called on the engine's thread.

        Args:
            work: Fills the slot it is given with the pages, one after the other.
            targets: Where they go on the host.
            width: Bytes of the elements to split; 1: do not split.

        Returns:
            Their ticket, or `None`: the ring is full, and nothing was ordered.
        """
        page_bytes = targets[0].numel()
        num_bytes = page_bytes * len(targets)
        start = self._ring.take(num_bytes)
        if start is None:
            return None
        slot = self._slots[start : start + num_bytes]
        compute = self._streams.compute()
        compute.run(partial(work, slot))
        self._drain.wait(compute.record())
        self._drain.run(partial(_drain, slot, self._split[:num_bytes], targets, width))
        drained = self._drain.record()
        self._ring.fill(start, num_bytes, drained)
        return drained

    @property
    def batch_bytes(self) -> int:
        """Bytes of pages that fit one gather."""
        return self._split.numel()

    def place(self, work: Callable[[torch.Tensor], None], source: torch.Tensor, width: int, after: Fence) -> None:
        """Copy a page to the GPU, and have `work` write it to blocks once `after` is done; returns when it is written.

        Args:
            work: Is given the page on the GPU.
            source: The page in host memory.
            width: Bytes of the elements that are split there; 1: they are not.
        """
        if source.numel() > self._page_bytes_max:
            raise InternalError("a page is larger than page_bytes_max", page_bytes=source.numel())
        self.placer.place(Placement(work, source, width, after))


class StreamCopier:
    """`BlockCopier` of one group on a `StreamDevice`.

    Attributes:
        plane_width: Bytes of the elements that are split into byte planes in host memory; 1: pages are canonical.
    """

    def __init__(
        self, device: StreamDevice, layers: Sequence[torch.Tensor], feeds: Sequence[int], element_bytes: int
    ) -> None:
        self._device = device
        self._cache = storage_bytes(layers[0])
        if any(layer.untyped_storage().data_ptr() != self._cache.data_ptr() for layer in layers):
            raise InvalidRequest("the layers of a group must be in one allocation")
        self._num_blocks = min(layer.shape[0] for layer in layers)
        geometry = CacheGeometry(
            starts=tuple(layer.storage_offset() * layer.element_size() for layer in layers),
            strides=tuple(layer.stride(0) * layer.element_size() for layer in layers),
            feeds=tuple(feeds),
        )
        self._plans = RunsMemo(partial(plan_rows, geometry, unit_bytes_min=device.unit_bytes_min))
        self.plane_width = element_bytes if element_bytes in _PLANE_WIDTHS else 1

    def gather_all(self, pages: Sequence[PageGather]) -> list[Ticket | None]:
        planned = [(page, self._plans.of(page.runs, page.target.numel())) for page in pages]
        for page, plans in planned:
            check_blocks(page.block_ids, self._num_blocks)
            if any(len(ids) != plans[0].num_blocks for ids in page.block_ids):
                raise InternalError("every table must place the whole page", num_blocks=plans[0].num_blocks)
            if page.target.numel() > self._device.batch_bytes:
                raise InternalError("a page is larger than page_bytes_max", page_bytes=page.target.numel())
        # pages whose plans differ only in the slice are adjacent: a page's slices, and pages of equal length
        tickets: list[Ticket | None] = []
        for _, alike in groupby(planned, key=lambda each: [plan.key for plan in each[1]]):
            tickets += self._gather_alike(list(alike))
        return tickets

    def _gather_alike(self, planned: Sequence[tuple[PageGather, tuple[RowPlan, ...]]]) -> list[Ticket | None]:
        page_bytes = planned[0][0].target.numel()
        at_once = max(1, self._device.batch_bytes // page_bytes)
        tickets: list[Ticket | None] = []
        for start in range(0, len(planned), at_once):
            batch = planned[start : start + at_once]
            ticket = self._gather_batch(batch)
            if ticket is None and len(batch) > 1:  # no room for a batch, but there may be for a page
                tickets += [self._gather_batch([one]) for one in batch]
            else:
                tickets += [ticket] * len(batch)
        return tickets

    def _gather_batch(self, batch: Sequence[tuple[PageGather, tuple[RowPlan, ...]]]) -> Ticket | None:
        shapes = list(zip(*(plans for _, plans in batch), strict=True))  # for each shape of piece the pages' plans
        indexes = [
            pack_indexes(
                plans,
                [page.block_ids for page, _ in batch],
                is_alone=len(shapes) == 1,
                allocate=self._device.index_memory,
            )
            for plans in shapes
        ]
        return self._device.gather(
            partial(_gather, self._cache, indexes), [page.target for page, _ in batch], self.plane_width
        )

    def scatter(
        self,
        runs: Sequence[BlockRun],
        block_ids: Sequence[Sequence[int]],
        source: torch.Tensor,
        first_block: int,
        after: Fence,
    ) -> None:
        check_blocks(block_ids, self._num_blocks, writes=True)
        plans = self._plans.of(runs, source.numel())
        if any(first_block < 0 or first_block + len(ids) > plans[0].num_blocks for ids in block_ids):
            raise InternalError("blocks to write must be in the page", first_block=first_block)
        if not block_ids[0]:
            return
        indexes = [
            pack_indexes(
                [plan],
                [block_ids],
                first_block=first_block,
                is_alone=len(plans) == 1,
                allocate=self._device.index_memory,
            )
            for plan in plans
        ]
        self._device.place(partial(_scatter, self._cache, indexes), source, self.plane_width, after)


@dataclass(eq=False, slots=True)
class Placement:
    """A page that a thread wants on the GPU, see `StreamDevice.place`.

    Attributes:
        told: Set when the page is placed, when it failed, or when its thread gets `lane`.
        lane: The lane that its thread now has.
        error: Why it failed.
    """

    work: Callable[[torch.Tensor], None]
    source: torch.Tensor
    width: int
    after: Fence
    told: threading.Event = field(default_factory=threading.Event)
    lane: Lane | None = None
    error: KVStoreError | None = None

    def may_join(self, other: Placement) -> bool:
        """Whether the other page would not have to wait for this one's fence."""
        return self.after is other.after or (self.after.is_done() and other.after.is_done())


class Placer:
    """Gives a lane to one thread at a time, which orders the copies of other threads' pages too. The technique is
    from Hendler, Incze, Shavit, Tzafrir, "Flat combining and the synchronization-parallelism tradeoff", SPAA 2010.

    Attributes:
        lanes: All of them.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes = tuple(lanes)
        self._lock = threading.Lock()
        self._free = list(lanes)
        self._waiting: deque[Placement] = deque()

    @property
    def num_free(self) -> int:
        """Lanes that no thread has."""
        return len(self._free)

    @property
    def num_waiting(self) -> int:
        """Pages that no thread has ordered."""
        return len(self._waiting)

    def place(self, own: Placement) -> None:
        """Return when the page is placed.

        Raises:
            KVStoreError: Ordering the copies of a page failed that were ordered together with this one's: then none of
                them is known to be placed.
            Exception: The same where it is this thread that ordered them.
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
        elif own.error is not None:
            raise own.error

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
            for placement in batch:
                placement.told.set()
            if next_one is not None:
                next_one.told.set()


class Lane:
    """One stream, and the memory for pages on their way to the blocks.

    Attributes:
        arrived: uint8: the pages as they are in host memory.
    """

    def __init__(self, streams: Streams, num_bytes: int) -> None:
        self._stream: Stream = streams.side()
        self.arrived = streams.device_memory(num_bytes)
        self._joined = streams.device_memory(num_bytes)

    def has_room(self, taken: Sequence[Placement], one: Placement) -> bool:
        """Whether a page fits behind others, and none of them has to wait for another's fence."""
        num_bytes = sum(_aligned(each.source.numel()) for each in taken) + one.source.numel()
        return num_bytes <= self.arrived.numel() and one.may_join(taken[0])

    def load(self, placements: Sequence[Placement]) -> None:
        """Copy pages here and place each behind its fence; returns when all are placed. After an error nothing of this
        is done later either: the blocks may be given to others.
        """
        start, pages = 0, []
        try:
            for each in placements:
                stop = start + each.source.numel()
                arrived, joined = self.arrived[start:stop], self._joined[start:stop]
                self._stream.run(partial(_fetch, each.source, arrived, joined, each.width))
                pages.append(joined if each.width > 1 else arrived)
                start = _aligned(stop)
            for each, page in zip(placements, pages, strict=True):
                self._stream.wait(each.after)  # only here: the copies run beside what the engine computes until then
                self._stream.run(partial(each.work, page))
        finally:
            self._stream.settle()


class Ring:
    """Allocates stretches of a ring of bytes, which are freed in order. Not thread-safe.

    Attributes:
        num_bytes: Size of the ring.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._slots: deque[tuple[int, int, Event]] = deque()

    def take(self, num_bytes: int) -> int | None:
        """Where a free stretch begins, or `None`. It is taken only once `fill` is called."""
        while self._slots and self._slots[0][2].is_done():
            self._slots.popleft()
        if not self._slots:
            return 0 if num_bytes <= self.num_bytes else None
        (oldest, _, _), (newest, head, _) = self._slots[0], self._slots[-1]
        if newest < oldest:  # it has wrapped: the free part is between them
            return head if head + num_bytes <= oldest else None
        if head + num_bytes <= self.num_bytes:
            return head
        return 0 if num_bytes <= oldest else None

    def fill(self, start: int, num_bytes: int, until: Event) -> None:
        """Mark the stretch that `take` returned last as used until the event is done."""
        self._slots.append((start, _aligned(start + num_bytes), until))


@torch.inference_mode()
def _gather(cache: torch.Tensor, indexes: Sequence[RowIndexes], slot: torch.Tensor) -> None:
    for index in indexes:
        gather_rows(cache, index, slot)


@torch.inference_mode()
def _drain(slot: torch.Tensor, split: torch.Tensor, targets: Sequence[torch.Tensor], width: int) -> None:
    if width > 1:
        # here and not on the compute stream, which it would stall
        split_planes(slot, len(targets), width, split)
        slot = split
    for target, page in zip(targets, slot.split(targets[0].numel()), strict=True):
        target.copy_(page, non_blocking=True)


@torch.inference_mode()
def _scatter(cache: torch.Tensor, indexes: Sequence[RowIndexes], page: torch.Tensor) -> None:
    for index in indexes:
        scatter_rows(cache, index, page)


@torch.inference_mode()
def _fetch(source: torch.Tensor, arrived: torch.Tensor, joined: torch.Tensor, width: int) -> None:
    arrived.copy_(source, non_blocking=True)
    if width > 1:
        join_planes(arrived, width, joined)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
