"""Pages in the store as vLLM's own cache events: one for each of its groups that a canonical group is fed by."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from connector.identity import CacheShape
from connector.scheduler.cache_events import PageEvent
from tests.unit.connector.support import BLOCK, make_facts, make_shape


def two_feeds() -> tuple[CacheShape, Any]:
    """A model whose one canonical group is fed by vLLM's groups 0 and 2, and vLLM's configuration of its cache."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    shape = make_shape(make_facts())
    (group,) = shape.groups
    shape = replace(shape, groups=(replace(group, facts=replace(group.facts, feed_groups=(0, 2))),))
    spec = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
    specs = [SlidingWindowSpec(sliding_window=64, **spec), None, FullAttentionSpec(**spec)]
    groups = [SimpleNamespace(kv_cache_spec=made) for made in specs]
    return shape, SimpleNamespace(kv_cache_groups=groups)


def events_of(*events: PageEvent) -> list[Any]:
    """As the events of `two_feeds`."""
    from connector.vllm.observability import to_events

    return list(to_events(events, *two_feeds()))
