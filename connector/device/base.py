"""The contract of a device: gather blocks into host pages, scatter host pages into blocks.

Both are asynchronous on a GPU. What the engine's thread calls (`gather_all`, `fence`) returns at once and only orders
work; what a codec thread calls (`Ticket.wait`, `scatter`) may wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from connector.canonical.runs import BlockRun
from connector.device.streams import Event
from kvstore.errors import InternalError

__all__ = ["BlockCopier", "Device", "Fence", "PageGather", "Ticket", "check_blocks"]

Ticket: TypeAlias = Event
"""Done when a page has arrived in host memory: `wait` for it before reading a byte or reusing the memory."""

Fence: TypeAlias = Event
"""A point in the engine's work: a scatter after it overtakes nothing that was ordered before it."""


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


class BlockCopier(Protocol):
    """Executes runs for the layers of one group, whose blocks are placed by one or more tables (feeds).

    Attributes:
        plane_width: The form of pages in host memory. 1: canonical bytes. Otherwise: byte planes of elements of this
            many bytes, the highest plane first, as the codec stores them.
    """

    plane_width: int

    def gather_all(self, pages: Sequence[PageGather]) -> list[Ticket | None]:
        """Copy blocks into pages. Called on the engine's thread, which never waits for it.

        When it returns the blocks may be reused: the copy is done, or ordered before any later write.

        Returns:
            For each page its ticket, or `None`: the device had no buffer for it, and nothing was copied.

        Raises:
            InternalError: A block does not exist, or runs and page do not fit; nothing was copied.
            InvalidRequest: The device cannot copy pages of this layout; the first gather of a group tells.
        """
        ...

    def scatter(
        self,
        runs: Sequence[BlockRun],
        block_ids: Sequence[Sequence[int]],
        source: torch.Tensor,
        first_block: int,
        after: Fence,
    ) -> None:
        """Copy part of a page into blocks. Called on a codec thread, which may have to wait.

        Args:
            runs: The plan for one slice and the whole page.
            block_ids: For each feed where to write, in token order; none of them is block 0.
            source: uint8 `[page bytes]`, contiguous memory of the device's `host_memory`, the whole page.
            first_block: Index in the page of the block that goes to `block_ids[feed][0]`.
            after: Taken when the engine gave the blocks to this load.

        When it returns, `source` may be reused, and a forward that starts afterwards reads the new content.

        Raises:
            InternalError: A block does not exist or is the null block; nothing was written.
        """
        ...


class Device(Protocol):
    """One rank's device: what its groups' copiers share."""

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """uint8 `[num_bytes]` on the host, fast for the device to copy to and from; content undefined.

        Slow, and stalls the device: called at start, for all that is needed (`HostPages`).

        Raises:
            InvalidRequest: There is not enough memory.
        """
        ...

    def fence(self) -> Fence:
        """The engine's work until now. Called on the engine's thread, which does not wait."""
        ...

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


def check_blocks(block_ids: Sequence[Sequence[int]], num_blocks: int, *, writes: bool = False) -> None:
    """Raise `InternalError` unless all blocks exist and none that is written is the null block."""
    if writes and any(0 in ids for ids in block_ids):
        raise InternalError("blocks to write must not be the null block", block_ids=block_ids)
    if not all(0 <= block_id < num_blocks for ids in block_ids for block_id in ids):
        raise InternalError("blocks to copy must exist", block_ids=block_ids, num_blocks=num_blocks)
