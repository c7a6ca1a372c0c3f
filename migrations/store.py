"""What a migration works on: the tiers and the catalog, asked again when they do not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from kvstore.catalog.base import Catalog
from kvstore.catalog.entry import Level
from kvstore.errors import Unavailable
from kvstore.format.manifest import parse_manifest
from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.model.namespace import NamespaceDescription
from kvstore.runtime.deadline import Deadline
from kvstore.tiers.base import Tier

__all__ = ["Listed", "Store", "soon"]

T = TypeVar("T")

_CALL_S = 30.0
_ATTEMPTS = 5
_PAUSE_S = 0.5
_HEADS_AT_ONCE = 512

Listed = dict[NamespaceId, dict[RecordKey, int]]
"""Records and their bytes."""


def soon() -> Deadline:
    """When one call gives up."""
    return Deadline.after(_CALL_S)


class Store:
    """Tiers and catalog.

    Args:
        tiers: The slower tiers, by level. Not guarded: a migration waits for a tier that is away.
        catalog: Told of what comes and goes.

    Attributes:
        tiers: The cold one first.
        lasting: The one that loses nothing by itself, as far as there is one.
    """

    def __init__(self, tiers: Mapping[Level, Tier], catalog: Catalog) -> None:
        self.tiers = {level: tiers[level] for level in (Level.COLD, Level.HOT) if level in tiers}
        self.lasting = next(iter(self.tiers.values()))
        self.catalog = catalog
        self._descriptions: dict[NamespaceId, NamespaceDescription | None] = {}

    async def listed(self, tier: Tier) -> Listed:
        """All records of a tier, by namespace."""
        listed: Listed = {}
        async for entry in tier.scan():
            listed.setdefault(entry.key.namespace, {})[entry.key] = entry.num_bytes
        return listed

    async def describe(self, namespace: NamespaceId) -> NamespaceDescription | None:
        """What a namespace is; `None`: its manifest is nowhere."""
        if namespace not in self._descriptions:
            found = None
            for tier in self.tiers.values():
                data = await self.retry(lambda at=tier: at.get_manifest(namespace, deadline=soon()))
                if found is None and data is not None:
                    found = parse_manifest(data, namespace)
            self._descriptions[namespace] = found
        return self._descriptions[namespace]

    async def heads(self, tier: Tier, keys: Sequence[RecordKey]) -> set[RecordKey]:
        """Those of the records that are there."""
        there: set[RecordKey] = set()
        for start in range(0, len(keys), _HEADS_AT_ONCE):
            some = keys[start : start + _HEADS_AT_ONCE]
            sizes = await self.retry(lambda asked=some: tier.head(asked, deadline=soon()))
            there |= {key for key, size in zip(some, sizes, strict=True) if size is not None}
        return there

    async def standing(self, level: Level, keys: Sequence[RecordKey]) -> set[RecordKey]:
        """Those of the records that a level has, and of those that the cold one has, where the quick one gets them."""
        there = await self.heads(self.tiers[level], keys)
        cold = self.tiers.get(Level.COLD)
        if level is Level.HOT and cold is not None:
            there |= await self.heads(cold, [key for key in keys if key not in there])
        return there

    async def to_rely_on(self, level: Level, keys: Sequence[RecordKey]) -> set[RecordKey]:
        """Those of the records for whose sake others may be removed from a level: the quick one may let its own go."""
        return await self.heads(self.tiers.get(Level.COLD, self.tiers[level]), keys)

    async def retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """A call, tried several times: a tier that is away for a moment does not end hours of work.

        Raises:
            Unavailable: It failed five times in a row.
        """
        for attempt in range(_ATTEMPTS):
            try:
                return await call()
            except Unavailable:
                if attempt == _ATTEMPTS - 1:
                    raise
                await asyncio.sleep(_PAUSE_S * 2**attempt)
        raise AssertionError("not reached")
