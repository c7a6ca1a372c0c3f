"""Why a boundary was not stored when a request needed it: from the catalog, its tombstones, and other namespaces."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.catalog.base import BoundaryEntry, Catalog, Tombstone
from kvstore.catalog.entry import Level
from kvstore.model.keys import NamespaceId, PrefixHash
from kvstore.model.layout import Layout
from kvstore.model.namespace import NamespaceDescription, field_differences
from kvstore.runtime.deadline import Deadline
from kvstore.store.explain.reasons import LEFT
from kvstore.store.namespaces import Manifests

__all__ = ["Absence", "AbsenceFinder", "Removals"]

Removals = Mapping[tuple[NamespaceId, PrefixHash], Sequence[Tombstone]]
"""Tombstones by boundary, the latest first."""

_NAMESPACES_MAX = 64
"""Namespaces of the same tenant to compare with; each costs one read of a manifest and one of the catalog."""
_TOMBSTONES_MAX = 1 << 20
"""As many as the catalog keeps."""
_FIELDS_MAX = 8


@dataclass(frozen=True, slots=True)
class Absence:
    """Why something was not there: a key of `REASONS`, and the evidence for it."""

    reason: str
    detail: Mapping[str, object] = field(default_factory=dict)


class AbsenceFinder:
    """Judges by the catalog's present state. Changes after the request are recognized by their time, in whole seconds.

    Args:
        manifests: Describes other namespaces.
    """

    def __init__(self, catalog: Catalog, manifests: Manifests) -> None:
        self._catalog = catalog
        self._manifests = manifests

    async def find(
        self,
        namespace: NamespaceId,
        prefix: PrefixHash,
        groups: int,
        missed_s: int,
        *,
        deadline: Deadline,
        removals: Removals | None = None,
    ) -> Absence:
        """Why a boundary could not be used by a request.

        Args:
            namespace: Where it was looked up.
            prefix: The boundary.
            groups: A bit for each group that was complete there at the time.
            missed_s: Time of the request, in seconds since the Unix epoch.
            deadline: When to give up.
            removals: As `removals` returned them a moment ago; `None`: they are read.

        Raises:
            KVStoreError: The catalog did not answer.
        """
        entry = await self._catalog.get(namespace, prefix, deadline=deadline)
        since: dict[str, object] = {}
        if entry is not None and entry.first_use_s >= missed_s:
            since = {"stored_after_s": entry.first_use_s - missed_s}
        description = await self._manifests.describe(namespace, deadline=deadline)
        removals = removals if removals is not None else await self.removals(deadline=deadline)
        tombstones = removals.get((namespace, prefix), ())
        tombstone = next((one for one in tombstones if one.at_s <= missed_s), None)
        if groups:
            layout = description.layout() if description is not None else None
            return Absence("group_incomplete", {**_groups(layout, groups), **_removal(tombstone, missed_s), **since})
        if tombstone is not None:
            return Absence(LEFT[tombstone.reason], {**_removal(tombstone, missed_s), **since})
        if entry is not None and not since:
            return Absence("group_incomplete", _slices(entry, description))
        if description is not None and (other := await self._elsewhere(description, prefix, deadline)) is not None:
            return Absence("namespace_differs", {**other, **since})
        if not since and not await self._catalog.is_complete(deadline=deadline):
            return Absence("catalog_incomplete")
        return Absence("never_stored", since)

    async def removals(self, *, deadline: Deadline) -> Removals:
        """All removals that the catalog remembers. Read them once for several boundaries.

        Raises:
            KVStoreError: The catalog did not answer.
        """
        tombstones = await self._catalog.tombstones(limit=_TOMBSTONES_MAX, deadline=deadline)
        return await asyncio.to_thread(_by_boundary, tombstones)  # many: the loop serves engines at the same time

    async def _elsewhere(
        self, description: NamespaceDescription, prefix: PrefixHash, deadline: Deadline
    ) -> dict[str, object] | None:
        """The namespace of the same tenant that holds this prefix and differs least, and in which fields."""
        tenants = await self._catalog.namespaces(deadline=deadline)
        others = [
            other for other, tenant in tenants.items() if tenant == description.tenant and other != description.id
        ]
        nearest: tuple[NamespaceId, dict[str, tuple[object, object]]] | None = None
        for other in others[-_NAMESPACES_MAX:]:
            described = await self._manifests.describe(other, deadline=deadline)
            if described is None:
                continue
            await self._catalog.register(other, described.layout(), described.tenant, deadline=deadline)
            if await self._catalog.get(other, prefix, deadline=deadline) is None:
                continue
            fields = field_differences(description.fields, described.fields)
            if nearest is None or len(fields) < len(nearest[1]):
                nearest = other, fields
        if nearest is None:
            return None
        namespace, fields = nearest
        differences = {
            name: f"{mine!r} here, {theirs!r} there" for name, (mine, theirs) in sorted(fields.items())[:_FIELDS_MAX]
        }
        return {"other_namespace": namespace.hex(), "fields": ", ".join(differences), **differences}


def _by_boundary(tombstones: Sequence[Tombstone]) -> Removals:
    found: dict[tuple[NamespaceId, PrefixHash], list[Tombstone]] = {}
    for tombstone in tombstones:
        found.setdefault((tombstone.namespace, tombstone.prefix), []).append(tombstone)
    return found


def _removal(tombstone: Tombstone | None, missed_s: int) -> dict[str, object]:
    if tombstone is None:
        return {}
    return {
        "left": LEFT[tombstone.reason],
        "left_from": tombstone.level.name.lower(),
        "left_before_s": missed_s - tombstone.at_s,
    }


def _groups(layout: Layout | None, groups: int) -> dict[str, object]:
    if layout is None:
        return {}
    missing = [f"{i} ({group.kind.name})" for i, group in enumerate(layout.groups) if not groups >> i & 1]
    return {"groups_missing": ", ".join(missing)}


def _slices(entry: BoundaryEntry, description: NamespaceDescription | None) -> dict[str, object]:
    """What a boundary lacks now, by group and slice. It may have been completed after the request."""
    if description is None:
        return {}
    layout = description.layout()
    whole, missing = 0, []
    for group, shape in enumerate(layout.groups):
        held = 0
        for level in Level:
            held |= entry.slices[level][group] if level not in entry.leaving else 0
        num_missing = shape.num_slices - held.bit_count()
        whole |= (num_missing == 0) << group
        if num_missing:
            missing.append(f"{num_missing} of {shape.num_slices} of group {group} ({shape.kind.name})")
    if not missing:
        return {"missing_now": "nothing: what was missing was stored after this request"}
    return {**_groups(layout, whole), "slices_missing": ", ".join(missing)}
