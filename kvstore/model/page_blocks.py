"""How routers know a page: the hashes by which the engine's own cache events name its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvstore.errors import InvalidRequest
from kvstore.model.keys import Boundary, NamespaceId
from kvstore.model.layout import MAX_PREFIX_TOKENS, Layout

NUMBER_BYTES = 8
"""Hashes of this width are numbers in events, others are bytes: as vLLM publishes them."""

GROUPS_MAX = 16
"""Engine's groups that may have a page's blocks. A model with many states for one layer of attention has ten."""
HASHES_MAX, TOKENS_MAX = 8_192, 131_072
"""Hashes and tokens of a page, counted once for each of its groups, since each of them has its own event."""


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """One of the engine's groups that has the page's blocks.

    Attributes:
        index: The engine's number of it.
        kind: The engine's word for its kind of cache, like `full_attention`.
        window_tokens: Of a sliding window; `None`: it has none.
    """

    index: int
    kind: str
    window_tokens: int | None = None


class PageBlocks(NamedTuple):  # made for each page that is saved: a frozen dataclass takes longer to make
    """The blocks of one page, tail or state, as its engine names them. Never the salt of a user.

    Attributes:
        boundary: Where the page ends.
        group: The canonical group that it is of.
        model: The model's name as the engine serves it.
        hash_bytes: Width of a hash; numbers are big-endian.
        hashes: One for each block, in order.
        parent: Hash of the block before them; empty at the prompt's start.
        tokens: A little-endian u32 for each token of the blocks; empty unless the engine's operator allows them.
        lora_name: Empty for none.
    """

    namespace: NamespaceId
    boundary: Boundary
    group: int
    model: str
    hash_bytes: int
    hashes: bytes
    parent: bytes
    block_tokens: int
    groups: tuple[BlockGroup, ...]
    tokens: bytes = b""
    lora_name: str = ""

    @property
    def num_blocks(self) -> int:
        return len(self.hashes) // self.hash_bytes

    @property
    def start(self) -> int:
        """The token at which the first of its blocks begins."""
        return self.boundary.tokens - self.num_blocks * self.block_tokens

    def hash_at(self, index: int) -> bytes:
        """The hash of one of its blocks."""
        return self.hashes[index * self.hash_bytes : (index + 1) * self.hash_bytes]

    def all_hashes(self) -> list[bytes]:
        """The hashes of its blocks in order."""
        width = self.hash_bytes
        return [self.hashes[start : start + width] for start in range(0, len(self.hashes), width)]

    @property
    def is_too_large(self) -> bool:
        """Whether it has more than a service publishes. No engine's pages are that large."""
        num_groups = len(self.groups)
        num_hashes = self.num_blocks * num_groups
        return num_hashes > HASHES_MAX or num_groups > GROUPS_MAX or num_hashes * self.block_tokens > TOKENS_MAX

    def check_page(self, layout: Layout) -> None:
        """Refuse blocks that are not of one page, tail or state.

        Args:
            layout: Of the namespace.

        Raises:
            InvalidRequest: There is no such group or boundary, or the blocks have more tokens than the page there.
        """
        if self.group >= len(layout.groups):
            raise InvalidRequest(
                "a page is of one group",
                field="blocks.group",
                expected=f"less than {len(layout.groups)}",
                seen=self.group,
            )
        stop, page_tokens, tokens = self.boundary.tokens, layout.page_tokens, self.num_blocks * self.block_tokens
        if not 0 < stop <= MAX_PREFIX_TOKENS:
            raise InvalidRequest(
                "a page ends at a boundary",
                field="blocks.boundary",
                expected=f"1 to {MAX_PREFIX_TOKENS} tokens",
                seen=stop,
            )
        group = layout.groups[self.group]
        _, span = group.record_at(stop, page_tokens)
        most = page_tokens if group.is_state else span.num_tokens  # a state is at the end of a block
        if tokens > most:
            raise InvalidRequest(
                "the blocks have more tokens than their page", field="blocks", expected=f"at most {most}", seen=tokens
            )
