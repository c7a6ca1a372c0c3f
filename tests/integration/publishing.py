"""A store that publishes cache events, and prompts in it whose pages have names, as engines give them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

from kvstore.model.keys import Boundary
from kvstore.model.page_blocks import BlockGroup, PageBlocks
from kvstore.settings import Settings, load_settings
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import Prompt
from kvstore.testing.waiting import soon

BLOCK = 16
NODE, POOL = "kv@node:here@org/model", "kv@pool:kvstore@org/model"


def named(prompt: Prompt, boundary: Boundary) -> PageBlocks:
    """The blocks of a prompt's page or tail, with hashes that follow from the prompt's name."""
    _, span = prompt.layout.groups[0].record_at(boundary.tokens, prompt.layout.page_tokens)
    hashes = [prompt.boundary(end).prefix[:8] for end in range(span.start, span.stop + 1, BLOCK)]
    return PageBlocks(
        namespace=prompt.namespace,
        boundary=boundary,
        group=0,
        model="org/model",
        hash_bytes=8,
        hashes=b"".join(hashes[1:]),
        parent=hashes[0] if span.start else b"",
        block_tokens=BLOCK,
        groups=(BlockGroup(0, "full_attention"),),
        tokens=struct.pack(f"<{span.num_tokens}I", *range(span.start, span.stop)),
    )


async def save(store: TieredStore, prompts: Sequence[Prompt]) -> None:
    """Save prompts and name their pages, as engines do: the names come after the records."""
    for prompt in prompts:
        await store.open_namespace(prompt.description, deadline=soon())
        for record in prompt.records():
            await store.save(record, deadline=soon())
        for tokens in sorted({record.header.span.stop for record in prompt.records()}):
            store.name_blocks(named(prompt, prompt.boundary(tokens)))


def publishing(folder: Path, **settings: object) -> Settings:
    return load_settings(
        {
            "memory_bytes": "64MiB",
            "events_endpoint": f"ipc://{folder}/events",
            "events_replay_endpoint": f"ipc://{folder}/replay",
            "events_node": "node:here",
            **settings,
        }
    )
