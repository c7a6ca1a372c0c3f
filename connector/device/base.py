"""The contract of a device: gather blocks into host pages, scatter host pages into blocks.

Both are asynchronous on a GPU. What the engine's thread calls (`gather_all`, `fence`) returns at once and only orders
work. What a codec thread calls (`Ticket.wait`, `scatter_all`) may wait for the device.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar

import torch

from connector.canonical.runs import BlockRun
from connector.device.streams import Event
from kvstore.errors import CorruptRecord, InternalError
from kvstore.runtime.arena import ArenaView

if TYPE_CHECKING:  # the GPU kit runs with torch and numpy alone
    from kvstore.codec.tiles import TilesHead

Fence: TypeAlias = Event
"""A point in the engine's work: a scatter after it overtakes nothing that was ordered before it."""

TILES_ALIGN_BYTES = 16
"""Pages that a device decodes from tiles, or encodes, are whole multiples of it, since they are adjacent."""

Made = TypeVar("Made")
_KEPT = 512


@dataclass(frozen=True, eq=False, slots=True)
class Ticket:
    """A page on its way to host memory: `wait` for it before reading a byte or reusing the memory.

    Attributes:
        arrived: Done when it is there.
        sizes: int32, in host memory, of pages that the device has encoded, this one's at `index`; `None`: it has not.
    """

    arrived: Event
    sizes: torch.Tensor | None = None
    index: int = 0

    def is_done(self) -> bool:
        return self.arrived.is_done()

    def wait(self) -> None:
        self.arrived.wait()

    @property
    def tiles_bytes(self) -> int | None:
        """Once it is done: bytes at the start of its memory that are the page in tiles; 0: it gains too little, and is
        there as it is. `None`: the device did not try.
        """
        return None if self.sizes is None else int(self.sizes[self.index])


@dataclass(frozen=True, slots=True)
class PageGather:
    """One page to gather.

    Attributes:
        runs: The plan for one slice and as many blocks as each feed has; they fill the page exactly.
        block_ids: For each feed the blocks, in token order.
        target: uint8 `[page bytes]`, contiguous memory of the device's `host_memory`.
    """

    runs: Sequence[BlockRun]
    block_ids: Sequence[Sequence[int]]
    target: torch.Tensor


@dataclass(frozen=True, slots=True)
class SharedRecord:
    """A record in memory that the device shares with the service.

    Attributes:
        parts: Its payload, as `Device.shared` returns it.
        decoded_bytes: Size of its page.
        digest: XXH3-128 of a payload that is the page's canonical bytes, as records have it; `None`: it is verified.
        tiles: The head of a payload that is encoded in tiles, which have sums of their own; `None`: it is not.
    """

    parts: tuple[torch.Tensor, ...]
    decoded_bytes: int
    digest: bytes | None = None
    tiles: TilesHead | None = None


class WrongSource(CorruptRecord):
    """One of these pages does not have the digest, or its tiles the sums, that they should have."""


def no_check() -> None:
    return


@dataclass(frozen=True, eq=False, slots=True)
class PageScatter:
    """A page of which all or some blocks are scattered.

    Attributes:
        runs: The plan for one slice and the whole page.
        block_ids: For each feed where to write, in token order; none of them is block 0.
        source: The whole page: uint8 `[page bytes]`, contiguous, memory of the device's `host_memory`; or a record in
            shared memory.
        first_block: Index in the page of the block that goes to `block_ids[feed][0]`.
        check: Called when the device has read `source` for the last time, and before a block is written. Where it
            raises `KVStoreError`, no block is: so a source may be memory that the service reuses.
    """

    runs: Sequence[BlockRun]
    block_ids: Sequence[Sequence[int]]
    source: torch.Tensor | SharedRecord
    first_block: int = 0
    check: Callable[[], None] = no_check

    @property
    def page_bytes(self) -> int:
        return self.source.decoded_bytes if isinstance(self.source, SharedRecord) else self.source.numel()


class BlockCopier(Protocol):
    """Executes runs for the layers of one group, whose blocks are placed by one or more tables (feeds).

    Attributes:
        plane_width: The form of pages in host memory. 1: canonical bytes. Otherwise: byte planes of elements of this
            many bytes, the highest plane first, as the codec stores them.
    """

    plane_width: int

    def gather_all(self, pages: Sequence[PageGather], *, as_tiles: bool = False) -> list[Ticket | None]:
        """Copy blocks into pages. Called on the engine's thread, which never waits for it.

        When it returns the blocks may be reused: the copy is done, or ordered before any later write.

        Args:
            as_tiles: Encode the pages, if the device can: see `Ticket.tiles_bytes`.

        Returns:
            For each page its ticket, or `None`: the device had no buffer for it, and nothing was copied.

        Raises:
            InternalError: A block does not exist, or runs and page do not fit; nothing was copied.
            InvalidRequest: The device cannot copy pages of this layout. A group's first gather raises it.
            Exception: Of torch or the device: copies of some pages may have been ordered.
        """
        ...

    def scatter_all(self, pages: Sequence[PageScatter], after: Fence) -> None:
        """Copy pages into blocks. Called on a codec thread, which may have to wait.

        Args:
            pages: Their sources together have at most `Device.batch_bytes`, or it is one page.
            after: Taken when the engine gave the blocks to this load.

        When it returns, the sources may be reused, and a forward that starts afterwards reads the new content.

        Raises:
            InternalError: A block does not exist or is the null block; nothing was written.
            WrongSource: A page is damaged: it was not written, and others may not have been.
            KVStoreError: Of a page's `check`: it was not written, and others may not have been.
        """
        ...


class Device(Protocol):
    """One rank's device: what its groups' copiers share. One that inherits what has an answer here reads no shared
    memory, and leaves the rest to processors.

    Attributes:
        batch_bytes: Bytes of pages that are best scattered in one call; 0: each in a call of its own.
        batches_at_once: Such calls that it needs at a time to be busy.
    """

    batch_bytes: int = 0
    batches_at_once: int = 1

    def verifies(self, num_bytes: int) -> bool:
        """Whether it verifies the digest of a source of this size."""
        return False

    def decodes_tiles(self, decoded_bytes: int) -> bool:
        """Whether it decodes sources that are encoded in tiles, for pages of this size."""
        return False

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """uint8 `[num_bytes]` on the host, fast for the device to copy to and from; content undefined.

        It is slow and stalls the device, so it is called once, at start, for everything that is needed (`HostPages`).

        Raises:
            InvalidRequest: There is not enough memory.
        """
        ...

    def fence(self) -> Fence:
        """The engine's work until now. Called on the engine's thread, which does not wait."""
        ...

    def prepare_tiles(self) -> None:
        """Find out whether it can encode pages; called at start if an engine stores tiles. Without it `as_tiles` does
        nothing. Idempotent.
        """
        return

    def adopt(self, view: ArenaView | None) -> None:
        """Prepare to read memory that this process shares with the service, in the background; of two, the last one.
        Called again and again: what has got memory since is prepared too. Cheap if nothing has. `None`: none is shared.

        Never called while an engine captures graphs: CUDA refuses to register memory then, or ends the capture.
        """
        return

    def close(self) -> None:
        """Prepare nothing more. Loads that run are not disturbed. Idempotent."""
        return

    def shared(self, memory: ArenaView, start: int, num_bytes: int) -> tuple[torch.Tensor, ...] | None:
        """uint8, together over a range of the memory that was adopted, read-only, as parts of a `SharedRecord`.

        `None`: the device cannot read there, at least not yet.
        """
        return None

    def copier(self, layers: Sequence[torch.Tensor], feeds: Sequence[int], element_bytes: int) -> BlockCopier:
        """A copier for one group.

        Args:
            layers: One cache tensor per layer, dimension 0 = blocks.
            feeds: For each layer the feed that places its blocks.
            element_bytes: Size of an element, or of most of them.

        Raises:
            InvalidRequest: The device cannot copy tensors of this layout.
        """
        ...


class RunsMemo(Generic[Made]):
    """What a copier computes for each plan of a page, kept by the identity of the runs. Safe from any thread.

    A page plan returns the same tuple of runs each time. Its hash would cost as much as a copy.

    Args:
        make: Computes the value from the runs and the page's size.
    """

    def __init__(self, make: Callable[[Sequence[BlockRun], int], Made]) -> None:
        self._make = make
        self._lock = threading.Lock()
        # an entry keeps its runs alive, so that no others can get their id
        self._known: OrderedDict[tuple[int, int], tuple[Sequence[BlockRun], Made]] = OrderedDict()

    def of(self, runs: Sequence[BlockRun], page_bytes: int) -> Made:
        """The value for these runs, which must not change afterwards."""
        key = (id(runs), page_bytes)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known[1]
        made = self._make(runs, page_bytes)
        with self._lock:
            self._known[key] = (runs, made)
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return made


def check_blocks(pages: Iterable[PageGather] | Iterable[PageScatter], num_blocks: int, *, writes: bool = False) -> None:
    """Raise `InternalError` unless all blocks of the pages exist and none that is written is the null block."""
    ids = list(chain.from_iterable(chain.from_iterable(page.block_ids for page in pages)))
    if not ids:
        return
    first, last = min(ids), max(ids)
    if writes and first == 0:
        raise InternalError("blocks to write must not be the null block", blocks=ids)
    if first < 0 or last >= num_blocks:
        raise InternalError("blocks to copy must exist", first=first, last=last, num_blocks=num_blocks)


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 `[all bytes of the allocation]` of a tensor, over the same memory."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
