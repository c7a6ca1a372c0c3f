"""Attention: pages of keys and values of every head, for full attention, windows and chunks, and of latent vectors.

Page, in order: layer, head of the slice, token, content (the key's and the value's channels, as vLLM packs them).
Multi-head latent attention has one vector per token instead of heads: one slice, which every rank holds.

Some backends rearrange bytes inside the cells of a block, for example the CPU backend's blocked keys. Such cells are
copied as they are: a head's tokens are contiguous, the runs are whole cells, and block size and backend are part of the
namespace.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from connector.canonical.runs import BlockRun, LayerGeometry
from connector.canonical.slices import HeadGrid
from kvstore.errors import InvalidRequest
from kvstore.model.kinds import ChunkedLocal, GroupKind, SlidingWindow

LATENT_GRID = HeadGrid(num_heads=1, num_slices=1)

_RECORD_BYTES = 4 << 20
_MAX_PAGE_TOKENS = 1024
_SIZE_AFTER_CODEC = {1: 1.0, 2: 0.70, 4: 0.86}
"""Ratio of stored to canonical bytes, by bytes of an element, as measured with the codecs."""
_KEPT_RUNS = 512
"""Of 8 slices of pages of up to 64 blocks. A copier knows runs by their identity, and keeps plans for as many."""


class AttentionPages:
    """The page plan of one attention group on one rank.

    Args:
        grid: The model's KV heads and slices.
        first_slice: The rank's first slice.
        layers: Where the layers' bytes are.

    Raises:
        InvalidRequest: The layers differ in what they hold.
    """

    def __init__(self, *, grid: HeadGrid, first_slice: int, layers: Sequence[LayerGeometry]) -> None:
        self._grid = grid
        self._first_head = first_slice * grid.heads_per_slice
        self._layers = tuple(layers)
        self._block_tokens = layers[0].parts * layers[0].tokens
        self._content_bytes = layers[0].content_bytes
        for layer in layers:
            if (layer.parts * layer.tokens, layer.content_bytes) != (self._block_tokens, self._content_bytes):
                raise InvalidRequest("layers of one group differ in layout")
        self.runs = lru_cache(maxsize=_KEPT_RUNS)(self._runs)

    def decoded_bytes(self, num_blocks: int) -> int:
        heads = self._grid.heads_per_slice
        return len(self._layers) * heads * num_blocks * self._block_tokens * self._content_bytes

    def _runs(self, slice_index: int, num_blocks: int) -> tuple[BlockRun, ...]:
        heads = self._grid.heads_per_slice
        local_head = slice_index * heads - self._first_head
        block_bytes = self._block_tokens * self._content_bytes
        row_bytes = num_blocks * block_bytes
        runs = []
        for index, layer in enumerate(self._layers):
            for head in range(heads):
                for part in range(layer.parts):
                    runs.append(
                        self._run(
                            layer,
                            index,
                            block_offset=(local_head + head) * layer.head_stride + part * layer.part_stride,
                            page_offset=(index * heads + head) * row_bytes + part * layer.tokens * layer.content_bytes,
                            page_block_stride=block_bytes,
                        )
                    )
        return tuple(runs)

    @staticmethod
    def _run(
        layer: LayerGeometry, index: int, *, block_offset: int, page_offset: int, page_block_stride: int
    ) -> BlockRun:
        if layer.token_stride == layer.content_bytes:
            num_bytes = layer.tokens * layer.content_bytes
            return BlockRun(index, block_offset, num_bytes, page_offset, page_block_stride)
        return BlockRun(
            index,
            block_offset,
            layer.content_bytes,
            page_offset,
            page_block_stride,
            repeat=layer.tokens,
            block_stride=layer.token_stride,
            page_stride=layer.content_bytes,
        )


def latent_pages(layers: Sequence[LayerGeometry], *, held_slice: int = 0) -> AttentionPages:
    """The page plan of a latent group: layer, token, channels. `held_slice` is the slice that `layers` are.

    Raises:
        InvalidRequest: A layer has heads, so that it is not one vector per token.
    """
    if any(layer.heads != 1 for layer in layers):
        raise InvalidRequest("a latent cache has one vector per token", heads=max(layer.heads for layer in layers))
    return AttentionPages(grid=LATENT_GRID, first_slice=held_slice, layers=layers)


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


def within_windows(page_tokens: int, kinds: Iterable[GroupKind], boundary_tokens: int) -> int:
    """The longest page of at most `page_tokens`, in whole boundaries, that fits every window; at least one boundary.

    vLLM frees a block once all of its tokens are out of the window, in the step after the one that moved the window. A
    page no longer than the window is therefore complete in the step that makes its last token final, however small the
    steps are.
    """
    for kind in kinds:
        if isinstance(kind, SlidingWindow):
            page_tokens = min(page_tokens, kind.window_tokens)
        elif isinstance(kind, ChunkedLocal):
            page_tokens = min(page_tokens, kind.chunk_tokens)
    return max(1, page_tokens // boundary_tokens) * boundary_tokens


def may_lose_blocks(kind: GroupKind) -> bool:
    """Whether vLLM may free a request's earlier blocks while the request runs. Pages of freed blocks are not saved."""
    return not (kind.needs_all or kind.is_state)
