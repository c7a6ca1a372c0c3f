"""How routers know a page: the hashes by which the engine's own cache events name its blocks."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.model.keys import Boundary, NamespaceId

NUMBER_BYTES = 8
"""Hashes of this width are numbers in events, others are bytes: as vLLM publishes them."""


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


@dataclass(frozen=True, slots=True)
class PageBlocks:
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
