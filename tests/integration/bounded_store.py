"""Writes many prompts into a bounded store and looks at what is left of them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence

from kvstore.api import Ack, SaveOutcome
from kvstore.catalog.base import Catalog
from kvstore.catalog.entry import BoundaryEntry, Level
from kvstore.model.keys import NamespaceId, PrefixHash
from kvstore.settings import Settings, load_settings
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import Prompt
from kvstore.testing.waiting import soon, until
from kvstore.tiers.base import Tier

__all__ = ["check_whole", "directory_settings", "entries_of", "settled", "write"]

_AT_ONCE = 8


def directory_settings(path: object, **settings: object) -> Settings:
    """Of a store of memory and a directory alone, as the embedded one is."""
    return load_settings({"memory_bytes": "64MiB", "cold": f"file://{path}/records", **settings})


async def write(store: TieredStore, prompts: Sequence[Prompt], look: Callable[[], Awaitable[None]]) -> None:
    """Look each prompt up and save it as engines do, several records at a time, acknowledged by the cold tier; none is
    refused. `look` is called after each prompt.
    """
    for prompt in prompts:
        await store.open_namespace(prompt.description, deadline=soon())
        await store.lookup(prompt.query(), deadline=soon())
        records = prompt.records()
        for start in range(0, len(records), _AT_ONCE):
            part = records[start : start + _AT_ONCE]
            outcomes = await asyncio.gather(*(store.save(record, ack=Ack.COLD, deadline=soon()) for record in part))
            assert set(outcomes) <= {SaveOutcome.STORED, SaveOutcome.EXISTS}
        await look()


async def entries_of(catalog: Catalog, prompt: Prompt) -> dict[PrefixHash, BoundaryEntry]:
    """What the catalog tells of the cold level of a prompt's namespace."""
    await catalog.register(prompt.namespace, prompt.layout, prompt.description.tenant, deadline=soon())
    found = [entry async for entry in catalog.iterate(prompt.namespace)]
    return {entry.prefix: entry for entry in found if entry.num_records(Level.COLD)}


async def settled(catalog: Catalog, prompt: Prompt) -> None:
    """Return when nothing is on its way out: what a store that ends leaves half done, its next start finishes."""
    await until(
        lambda: entries_of(catalog, prompt), holds=lambda entries: not any(one.leaving for one in entries.values())
    )


async def check_whole(tier: Tier, catalog: Catalog, prompts: Sequence[Prompt]) -> int:
    """Every boundary that is left in the tier has all its records of all groups, and the one below it is there; the
    catalog tells of exactly that. Returns how many are left.
    """
    held: dict[tuple[NamespaceId, PrefixHash], int] = defaultdict(int)
    async for one in tier.scan():
        held[one.key.namespace, one.key.prefix] += 1
    num_left = 0
    for prompt in {prompt.namespace: prompt for prompt in prompts}.values():
        entries = await entries_of(catalog, prompt)
        whole = sum(group.num_slices for group in prompt.layout.groups)
        assert dict.fromkeys(entries, whole) == {
            prefix: count for (namespace, prefix), count in held.items() if namespace == prompt.namespace
        }
        for entry in entries.values():
            assert entry.num_records(Level.COLD) == whole
            assert entry.parent is None or entry.parent in entries
            assert entry.parent is not None or entry.tokens <= prompt.layout.page_tokens
        num_left += len(entries)
    return num_left
