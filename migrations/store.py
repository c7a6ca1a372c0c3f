"""The store that a migration works on: tiers and catalog, with retries."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

from kvstore.catalog.base import Catalog
from kvstore.catalog.entry import Level
from kvstore.format.manifest import parse_manifest
from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.model.namespace import NamespaceDescription
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.retries import retry
from kvstore.tiers.base import Tier

_CALL_S = 30.0

Listed = dict[NamespaceId, dict[RecordKey, int]]
"""Per namespace its records and their bytes."""


def soon() -> Deadline:
    """The deadline of one call."""
    return Deadline.after(_CALL_S)


class Store:
    """Tiers and catalog.

    Args:
        tiers: The slower tiers, by level. Without circuit breakers: a migration retries a tier that is unavailable.
        catalog: New and removed records are reported to it.

    Attributes:
        tiers: The cold one first.
        lasting_level: The cold level if there is one, which evicts no record without the catalog; else the hot one.
    """

    def __init__(self, tiers: Mapping[Level, Tier], catalog: Catalog) -> None:
        self.tiers = {level: tiers[level] for level in (Level.COLD, Level.HOT) if level in tiers}
        self.lasting_level = next(iter(self.tiers))
        self.catalog = catalog
        self._descriptions: dict[NamespaceId, NamespaceDescription | None] = {}

    @property
    def lasting(self) -> Tier:
        """The tier at `lasting_level`."""
        return self.tiers[self.lasting_level]

    async def listed(self) -> dict[Level, Listed]:
        """List all records of all tiers."""
        return {level: await retry(partial(_listed, tier)) for level, tier in self.tiers.items()}

    async def lasting_records(self, namespace: NamespaceId) -> Collection[RecordKey]:
        """List a namespace's records at the lasting level; where a new record is there, its old one may be removed."""
        listed = await retry(lambda: _listed(self.lasting, namespace))
        return listed.get(namespace, {})

    async def describe(self, namespace: NamespaceId) -> NamespaceDescription | None:
        """A namespace's description; `None`: no tier has its manifest."""
        if namespace not in self._descriptions:
            found = None
            for tier in self.tiers.values():
                data = await retry(partial(_manifest, tier, namespace))
                if found is None and data is not None:
                    found = parse_manifest(data, namespace)
            self._descriptions[namespace] = found
        return self._descriptions[namespace]


async def _listed(tier: Tier, namespace: NamespaceId | None = None) -> Listed:
    listed: Listed = {}
    async for entry in tier.scan(namespace):
        listed.setdefault(entry.key.namespace, {})[entry.key] = entry.num_bytes
    return listed


async def _manifest(tier: Tier, namespace: NamespaceId) -> bytes | None:
    return await tier.get_manifest(namespace, deadline=soon())
