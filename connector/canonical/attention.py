"""Full attention: pages of keys and values, one slice per share of the KV heads.

The bytes of one head in one block are taken as they are (an opaque cell): what a backend does inside, e.g. the CPU
backend's blocked keys, is not guessed. The block size and the backend are therefore part of the namespace.

Page, in order: layer, head of the slice, block, cell bytes.
"""

from __future__ import annotations

from functools import lru_cache

from connector.canonical.runs import BlockRun
from connector.canonical.slices import HeadGrid

__all__ = ["AttentionPages", "page_tokens_for"]

_RECORD_BYTES = 4 << 20
_MAX_PAGE_TOKENS = 1024
_SIZE_AFTER_CODEC = {1: 1.0, 2: 0.70, 4: 0.86}
"""Stored share of the canonical bytes, by bytes of an element: what the codecs were measured to reach."""


def page_tokens_for(token_bytes: int, element_bytes: int, block_tokens: int) -> int:
    """Tokens of a page, from the model alone, so that one encoded slice stays near and under 4 MiB.

    Args:
        token_bytes: Canonical bytes of one token in one slice, all layers.
        element_bytes: Bytes of one cache element.
        block_tokens: Smallest page that makes sense: the model's block.

    Returns:
        The largest multiple of the block within a power of two of at most 1,024 tokens, and at least one block.
    """
    ratio = _SIZE_AFTER_CODEC.get(element_bytes, 1.0)
    tokens = 1
    while tokens * 2 <= _MAX_PAGE_TOKENS and tokens * 2 * token_bytes * ratio <= _RECORD_BYTES:
        tokens *= 2
    if block_tokens <= tokens and tokens % block_tokens == 0:
        return tokens
    return max(1, tokens // block_tokens) * block_tokens


class AttentionPages:
    """The page plan of one full-attention group on one rank.

    Args:
        num_layers: Layers of the group.
        grid: The model's KV heads and slices.
        first_head: Global index of the rank's first head.
        block_tokens: Tokens of a block.
        cell_bytes: Bytes of one head in one block, keys and values.
        head_stride: Distance between heads in a block, in bytes.
    """

    def __init__(
        self, *, num_layers: int, grid: HeadGrid, first_head: int, block_tokens: int, cell_bytes: int, head_stride: int
    ) -> None:
        self.block_tokens = block_tokens
        self._num_layers = num_layers
        self._grid = grid
        self._first_head = first_head
        self._cell_bytes = cell_bytes
        self._head_stride = head_stride
        self.runs = lru_cache(maxsize=256)(self._runs)

    def decoded_bytes(self, num_blocks: int) -> int:
        return self._num_layers * self._grid.heads_per_slice * num_blocks * self._cell_bytes

    def _runs(self, slice_index: int, num_blocks: int) -> tuple[BlockRun, ...]:
        heads = self._grid.heads_per_slice
        local_head = slice_index * heads - self._first_head
        row_bytes = num_blocks * self._cell_bytes
        return tuple(
            BlockRun(
                layer=layer,
                block_offset=(local_head + head) * self._head_stride,
                num_bytes=self._cell_bytes,
                page_offset=(layer * heads + head) * row_bytes,
                page_block_stride=self._cell_bytes,
            )
            for layer in range(self._num_layers)
            for head in range(heads)
        )
