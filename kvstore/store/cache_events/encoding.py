"""Batches of cache events in vLLM's format: byte for byte what its publisher makes of the same events. Pure."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from sys import byteorder
from typing import Any

import msgpack

from kvstore.model.media import Medium
from kvstore.model.page_blocks import NUMBER_BYTES, BlockGroup, PageBlocks

Event = Mapping[str, Any]
EventHash = int | bytes
"""The hash of a block as events have it: 8 bytes are a number, big-endian."""

CLEARED: Event = {"type": "AllBlocksCleared"}
"""Everything that was published before on this topic counts no longer."""
_TOKEN_BYTES = 4
_EVENT_BYTES = 512
"""More than the rest of an event takes, in bytes."""
_RANK = 0
"""Dynamo reads the rank as required."""


def encode_batch(time_s: float, events: Sequence[Event]) -> bytes:
    """A batch as the payload of a message.

    Args:
        time_s: Since the Unix epoch.
        events: In order.
    """
    packed: bytes = msgpack.packb([time_s, list(events), _RANK])
    return packed


def event_hashes(blocks: PageBlocks) -> Sequence[EventHash]:
    """The hashes of a page's blocks in order."""
    if blocks.hash_bytes == NUMBER_BYTES:
        return struct.unpack(f">{len(blocks.hashes) // NUMBER_BYTES}Q", blocks.hashes)
    return blocks.all_hashes()


def event_parent(blocks: PageBlocks) -> EventHash | None:
    """The hash of the block before a page; `None`: it begins the prompt."""
    parent = blocks.parent
    if not parent:
        return None
    return int.from_bytes(parent, "big") if len(parent) == NUMBER_BYTES else parent


def event_bytes(event: Event) -> int:
    """About the most bytes that an event takes in a batch."""
    hashes = event.get("block_hashes", ())
    hash_bytes = len(hashes[0]) if hashes and isinstance(hashes[0], bytes) else NUMBER_BYTES
    return _EVENT_BYTES + len(hashes) * (hash_bytes + 2) + len(event.get("token_ids", ())) * (_TOKEN_BYTES + 1)


def stored(blocks: PageBlocks, run: range, group: BlockGroup, medium: Medium) -> Event:
    """The event of consecutive blocks of a page that can be read from a medium. Fields are in vLLM's order; defaults
    are left out as there.

    Args:
        run: Which of the page's blocks.
    """
    hashes = event_hashes(blocks)
    parent = hashes[run.start - 1] if run.start else event_parent(blocks)
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": list(hashes[run.start : run.stop]),
        "parent_block_hash": parent,
        "token_ids": _tokens(blocks, run) if blocks.tokens else [],
        "block_size": blocks.block_tokens,
        "lora_id": None,
        "medium": medium.name,
        "lora_name": blocks.lora_name or None,
        "group_idx": group.index,
        "kv_cache_spec_kind": group.kind,
    }
    if group.window_tokens is not None:
        event["kv_cache_spec_sliding_window"] = group.window_tokens
    event["locality"] = medium.locality
    return event


def _tokens(blocks: PageBlocks, run: range) -> list[int]:
    size = blocks.block_tokens * _TOKEN_BYTES
    tokens = array("I", blocks.tokens[run.start * size : run.stop * size])
    if byteorder == "big":
        tokens.byteswap()
    return tokens.tolist()


def removed(hashes: Sequence[EventHash], group: int, medium: Medium) -> Event:
    """The event of blocks that are gone from a medium."""
    return {
        "type": "BlockRemoved",
        "block_hashes": list(hashes),
        "medium": medium.name,
        "group_idx": group,
        "locality": medium.locality,
    }
