"""Announcements as vLLM's cache events, which its publisher sends together with those of its own blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from connector.identity import CacheShape
from connector.scheduler.announcements import Announcement

__all__ = ["to_events"]

OWNERSHIP = "kvstore"
"""Tells our events from those of vLLM's own tiers."""

_ON_THIS_NODE = ("memory", "filesystem")


def to_events(announcements: Iterable[Announcement], shape: CacheShape, kv_cache_config: Any) -> Iterator[KVCacheEvent]:
    """One event for each of vLLM's groups whose blocks are in a page; the tier's name is the medium."""
    for announcement in announcements:
        run, tier = announcement.run, announcement.tier
        hashes = [maybe_convert_block_hash(BlockHash(block_hash)) for block_hash in run.hashes]
        locality = "LOCAL" if tier in _ON_THIS_NODE else "REMOTE"
        for index in shape.groups[run.group].facts.feed_groups:
            if announcement.removed:
                yield BlockRemoved(
                    block_hashes=hashes, medium=tier, group_idx=index, locality=locality, ownership=OWNERSHIP
                )
                continue
            spec = kv_cache_config.kv_cache_groups[index].kv_cache_spec
            yield BlockStored(
                block_hashes=hashes,
                parent_block_hash=None if run.parent is None else maybe_convert_block_hash(BlockHash(run.parent)),
                token_ids=list(run.tokens),
                block_size=run.block_tokens,
                lora_id=run.lora_id,
                medium=tier,
                lora_name=run.lora_name,
                group_idx=index,
                kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
                kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(spec),
                locality=locality,
                ownership=OWNERSHIP,
            )
