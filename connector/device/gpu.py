"""Copies between a GPU's blocks and host pages. The engine's thread only orders them and waits for none.

Saving: the compute stream gathers blocks into a slot of the ring, so that what the engine orders next (zeroing,
copy-on-write, the next forward) may overwrite them. A side stream waits for the gather, splits the elements into byte
planes or encodes the pages to tiles, and copies them to pinned memory. Then the slot is free again.

Loading: a codec thread calls with pages and returns when they are placed, see `lanes.py`.

Work on streams runs in inference mode: vLLM's caches are inference tensors, which may not be written outside of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from connector.device.base import (
    TILES_ALIGN_BYTES,
    Fence,
    PageGather,
    PageScatter,
    RunsMemo,
    Ticket,
    check_blocks,
    storage_bytes,
)
from connector.device.host_memory import aligned
from connector.device.lanes import Lane, Placement, Placer, PlannedPage
from connector.device.paths import try_path
from connector.device.registered import RegisteredMemory
from connector.device.rows import (
    CacheGeometry,
    RowIndexes,
    RowPlan,
    gather_rows,
    pack_indexes,
    plan_rows,
    scatter_rows,
    split_planes,
)
from connector.device.streams import Event, Streams
from connector.logs import LOG
from kvstore.errors import InternalError, InvalidRequest
from kvstore.runtime.arena import ArenaView

if TYPE_CHECKING:  # it needs Triton
    from connector.device.kernels import DeviceKernels


_BATCH_BYTES = 32 << 20
_LANE_BYTES = 96 << 20
LANE_PAGES = 48
"""Room for pages whose copies are ordered at once, in the form in which they arrive and in their canonical form. The
interpreter takes about a millisecond to order them, however many they are, and the link almost two to copy them."""
_NUM_LANES, _NUM_LARGE_LANES = 3, 2
"""While the pages of one are copied, those of another are verified and placed, and the next copy is ordered. With two
the link was idle a third of the time (H100, pages of 5 MB), since the check of one's pages also waits for the copies of
the other. Large lanes are those of which two pages need more than `_LANE_BYTES`."""
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
        kernels: What this device does itself, if it can: verify and decode records, copy rows.

    Attributes:
        device_bytes: GPU memory that it has taken.
        batch_bytes: Room for pages in a lane.
        batches_at_once: Lanes.
        placer: Places the pages of loads.
        registered: The service's memory, as far as the GPU can read it.

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
        kernels: type[DeviceKernels] | None = None,
    ) -> None:
        self._streams = streams
        self.unit_bytes_min = unit_bytes_min
        batch_bytes = aligned(max(page_bytes_max, min(_BATCH_BYTES, ring_bytes)))
        # one extra batch, since a slot that does not fit at the ring's end leaves up to its size unused there
        self._ring = Ring(aligned(ring_bytes) + batch_bytes)
        self._slots = streams.device_memory(self._ring.num_bytes)
        self._split = streams.device_memory(batch_bytes)
        self._drain = streams.side()
        page_bytes = aligned(page_bytes_max)
        lane_bytes = max(2 * page_bytes, min(_LANE_BYTES, LANE_PAGES * page_bytes))
        num_lanes = _NUM_LANES if lane_bytes <= _LANE_BYTES else _NUM_LARGE_LANES
        self.batch_bytes, self.batches_at_once = lane_bytes, num_lanes
        self.registered = RegisteredMemory(streams)
        self.kernels = kernels
        self._encodes: bool | None = None  # not tried
        self.placer = Placer(
            [Lane(streams, lane_bytes, kernels(streams, lane_bytes) if kernels else None) for _ in range(num_lanes)]
        )
        self._page_bytes_max = page_bytes_max
        lanes_bytes = sum(lane.device_bytes for lane in self.placer.lanes)
        self.device_bytes = self._ring.num_bytes + batch_bytes + lanes_bytes
        LOG.info(
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
        self, work: Callable[[torch.Tensor], None], targets: Sequence[torch.Tensor], *, width: int, as_tiles: bool
    ) -> list[Ticket | None]:
        """Gather some pages of one size and start draining them. Called on the engine's thread.

        Args:
            work: Fills the slot it is given with the pages, one after the other.
            targets: Where they go on the host.
            width: Bytes of the elements to split; 1: do not split.
            as_tiles: As for `BlockCopier.gather_all`.

        Returns:
            Their tickets, or `None` for each: the ring is full, and nothing was ordered.
        """
        page_bytes = targets[0].numel()
        num_bytes = page_bytes * len(targets)
        start = self._ring.take(num_bytes)
        if start is None:
            return [None] * len(targets)
        slot = self._slots[start : start + num_bytes]
        compute = self._streams.compute()
        try:
            compute.run(partial(work, slot))
            self._drain.wait(compute.record())
            sizes = self._encode(slot, targets) if as_tiles else None
            if sizes is None:
                self._drain.run(partial(_drain, slot, self._split[:num_bytes], targets, width))
        finally:  # after an error too: what was ordered may still read the slot
            drained = self._drain.record()
            self._ring.fill(start, num_bytes, drained)
        return [Ticket(drained, sizes, index) for index in range(len(targets))]

    def _encode(self, slot: torch.Tensor, targets: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Order that the pages are encoded to tiles and copied to the host. Returns where the sizes of the payloads
        will be; `None`: processors encode these pages.
        """
        if not self._encodes or self.kernels is None or targets[0].numel() % TILES_ALIGN_BYTES:
            return None
        try:
            sizes = self._streams.host_memory(4 * len(targets)).view(torch.int32)
            encoded = self._split[: slot.numel()]
            self._drain.run(partial(_drain_encoded, self.kernels, slot, encoded, targets, sizes))
        except Exception:  # noqa: BLE001 - the page itself is there: a processor encodes it
            self._encodes = False
            LOG.warning("kvstore: the GPU could not encode tiles, processors do it from now on", exc_info=True)
            return None
        return sizes

    @property
    def gathered_bytes_max(self) -> int:
        """Bytes of pages that fit one gather."""
        return self._split.numel()

    def verifies(self, num_bytes: int) -> bool:
        return self.kernels is not None and self.kernels.fits(num_bytes)

    def decodes_tiles(self, decoded_bytes: int) -> bool:
        return self.kernels is not None and decoded_bytes % TILES_ALIGN_BYTES == 0

    def prepare_tiles(self) -> None:
        if self.kernels is None or self._encodes is not None:
            return
        if problem := try_path("encoding", self._streams).problem:
            LOG.warning("kvstore: the processor encodes tiles, not the GPU: %s", problem)
        self._encodes = not problem

    def adopt(self, view: ArenaView | None) -> None:
        self.registered.adopt(view)

    def close(self) -> None:
        self.registered.close()

    def shared(self, memory: ArenaView, start: int, num_bytes: int) -> tuple[torch.Tensor, ...] | None:
        return self.registered.at(memory, start, num_bytes)

    def place(self, pages: Sequence[PlannedPage], after: Fence) -> None:
        """Copy pages to the GPU and write them to blocks once `after` is done; returns when they are written."""
        num_bytes = max(page.num_bytes for page in pages)
        if num_bytes > self._page_bytes_max:
            raise InternalError("a page is larger than page_bytes_max", page_bytes=num_bytes)
        for some in self.placer.lanes[0].fitting(pages):
            self.placer.place(Placement(some, after))


class StreamCopier:
    """`BlockCopier` of one group on a `StreamDevice`.

    Attributes:
        memory: uint8: the allocation that the group's layers are in.
        plane_width: Bytes of the elements that are split into byte planes in host memory; 1: pages are canonical.
        geometry: Where the layers are in that allocation.
    """

    def __init__(
        self, device: StreamDevice, layers: Sequence[torch.Tensor], feeds: Sequence[int], element_bytes: int
    ) -> None:
        self._device = device
        self.memory = storage_bytes(layers[0])
        if any(layer.untyped_storage().data_ptr() != self.memory.data_ptr() for layer in layers):
            raise InvalidRequest("the layers of a group must be in one allocation")
        self._num_blocks = min(layer.shape[0] for layer in layers)
        self.geometry = CacheGeometry(
            starts=tuple(layer.storage_offset() * layer.element_size() for layer in layers),
            strides=tuple(layer.stride(0) * layer.element_size() for layer in layers),
            feeds=tuple(feeds),
        )
        self._plans = RunsMemo(partial(plan_rows, self.geometry, unit_bytes_min=device.unit_bytes_min))
        self.plane_width = element_bytes if element_bytes in _PLANE_WIDTHS else 1

    def gather_all(self, pages: Sequence[PageGather], *, as_tiles: bool = False) -> list[Ticket | None]:
        check_blocks(pages, self._num_blocks)
        planned = [(page, self._plans.of(page.runs, page.target.numel())) for page in pages]
        for page, plans in planned:
            if any(len(ids) != plans[0].num_blocks for ids in page.block_ids):
                raise InternalError("every table must place the whole page", num_blocks=plans[0].num_blocks)
            if page.target.numel() > self._device.gathered_bytes_max:
                raise InternalError("a page is larger than page_bytes_max", page_bytes=page.target.numel())
        # pages whose plans differ only in the slice are adjacent: a page's slices, and pages of equal length
        tickets: list[Ticket | None] = []
        for _, alike in groupby(planned, key=lambda each: [plan.key for plan in each[1]]):
            tickets += self._gather_alike(list(alike), as_tiles=as_tiles)
        return tickets

    def _gather_alike(
        self, planned: Sequence[tuple[PageGather, tuple[RowPlan, ...]]], *, as_tiles: bool
    ) -> list[Ticket | None]:
        page_bytes = planned[0][0].target.numel()
        at_once = max(1, self._device.gathered_bytes_max // page_bytes)
        tickets: list[Ticket | None] = []
        for start in range(0, len(planned), at_once):
            batch = planned[start : start + at_once]
            gathered = self._gather_batch(batch, as_tiles=as_tiles)
            if gathered[0] is None and len(batch) > 1:  # no room for a batch, but there may be for a page
                gathered = [ticket for one in batch for ticket in self._gather_batch([one], as_tiles=as_tiles)]
            tickets += gathered
        return tickets

    def _gather_batch(
        self, batch: Sequence[tuple[PageGather, tuple[RowPlan, ...]]], *, as_tiles: bool
    ) -> list[Ticket | None]:
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
        targets = [page.target for page, _ in batch]
        return self._device.gather(
            partial(self._gather, indexes), targets, width=self.plane_width, as_tiles=as_tiles and self.plane_width == 1
        )

    @torch.inference_mode()
    def _gather(self, indexes: Sequence[RowIndexes], slot: torch.Tensor) -> None:
        for index in indexes:
            if (kernels := self._device.kernels) is not None and kernels.copies(index.unit_bytes):
                kernels.copy_rows(self.memory, index, slot, to_cache=False)
            else:
                gather_rows(self.memory, index, slot)

    def scatter(self, indexes: RowIndexes, pages: torch.Tensor) -> None:
        """As `Cache` in `lanes.py` has it."""
        if (kernels := self._device.kernels) is not None and kernels.copies(indexes.unit_bytes):
            kernels.copy_rows(self.memory, indexes, pages, to_cache=True)
        else:
            scatter_rows(self.memory, indexes, pages)

    def scatter_all(self, pages: Sequence[PageScatter], after: Fence) -> None:
        check_blocks(pages, self._num_blocks, writes=True)
        planned = []
        for page in pages:
            plans = self._plans.of(page.runs, page.page_bytes)
            if page.first_block < 0 or page.first_block + max(map(len, page.block_ids)) > plans[0].num_blocks:
                raise InternalError("blocks to write must be in the page", first_block=page.first_block)
            if page.block_ids[0]:
                planned.append(PlannedPage(self, page, plans))
        if planned:
            self._device.place(planned, after)


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
        self._slots.append((start, aligned(start + num_bytes), until))


@torch.inference_mode()
def _drain(slot: torch.Tensor, split: torch.Tensor, targets: Sequence[torch.Tensor], width: int) -> None:
    if width > 1:
        # here and not on the compute stream, which it would stall
        split_planes(slot, len(targets), width, split)
        slot = split
    for target, page in zip(targets, slot.split(targets[0].numel()), strict=True):
        target.copy_(page, non_blocking=True)


@torch.inference_mode()
def _drain_encoded(
    kernels: type[DeviceKernels],
    slot: torch.Tensor,
    encoded: torch.Tensor,
    targets: Sequence[torch.Tensor],
    sizes: torch.Tensor,
) -> None:
    """Whole pages are copied: how long a payload is only the device knows."""
    on_device = torch.empty(len(targets), dtype=torch.int32, device=slot.device)
    kernels.encode(slot, encoded, on_device)
    sizes.copy_(on_device, non_blocking=True)
    for target, page in zip(targets, encoded.split(targets[0].numel()), strict=True):
        target.copy_(page, non_blocking=True)
