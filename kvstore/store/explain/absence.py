"""Why a boundary was not stored when a request needed it: from the catalog, its tombstones, other namespaces, and the
tiers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.catalog.base import Tombstone
from kvstore.catalog.entry import BoundaryEntry, Level
from kvstore.model.keys import NamespaceId, PrefixHash
from kvstore.model.layout import GroupLayout, Layout
from kvstore.model.namespace import NamespaceDescription, field_differences
from kvstore.runtime.deadline import Deadline
from kvstore.store.explain.reasons import LEFT
from kvstore.store.namespaces import Manifests
from kvstore.store.recorder import Recorder
from kvstore.tiers.base import Tier

Removals = Mapping[tuple[NamespaceId, PrefixHash], Sequence[Tombstone]]
"""Tombstones by boundary, the latest first."""

_NAMESPACES_MAX = 64
"""Namespaces of the same tenant to compare with; each costs one read of a manifest and one of the catalog."""
_TOMBSTONES_MAX = 1 << 20
"""More than any catalog keeps: in a Redis Cluster these are up to 65,536, 4 in each slot."""
_OF_A_MODEL = {"model", "architecture", "weights_id"}
"""Fields of a description that are equal for engines of one model."""
_PARTS = {"group", "pool.name", "pipeline", "context"}
"""Fields in which the namespaces of one engine differ that names its pages itself: each has a part of the same pages,
under the same keys."""
_CONNECTOR = "connector"
_FIELDS_MAX = 8
_HEADS_MAX = 64
"""Records of a boundary that each tier is asked for."""


@dataclass(frozen=True, slots=True)
class Absence:
    """Why something was not there: a key of `REASONS`, and the evidence for it."""

    reason: str
    detail: Mapping[str, object] = field(default_factory=dict)


class AbsenceFinder:
    """Finds out why a boundary was not stored when a request needed it, by the catalog's present state. Changes after
    the request are recognized by their time, in whole seconds.

    Args:
        recorder: Reports what this service stores to the catalog.
        manifests: Describes namespaces.
        tiers: The tier at each level; `None`: this service has none there.
    """

    def __init__(self, recorder: Recorder, manifests: Manifests, tiers: Mapping[Level, Tier | None]) -> None:
        self._catalog = recorder.catalog
        self._recorder = recorder
        self._manifests = manifests
        self._tiers = tiers

    async def find(
        self,
        namespace: NamespaceId,
        prefix: PrefixHash,
        groups: int,
        missed_s: int,
        *,
        late_s: int,
        deadline: Deadline,
        removals: Removals | None,
    ) -> Absence:
        """Why a boundary could not be used by a request.

        Args:
            namespace: Where it was looked up.
            prefix: The boundary.
            groups: A bit for each group that was complete there at the time.
            missed_s: Time of the request, in seconds since the Unix epoch.
            late_s: Removals count that the catalog learnt of this long after the request.
            deadline: When to give up.
            removals: As `removals` returned them a moment ago; `None`: they are read.

        Raises:
            KVStoreError: The catalog, or a tier that describes namespaces, did not answer.
        """
        entry = await self._catalog.get(namespace, prefix, deadline=deadline)
        since: dict[str, object] = {}
        if entry is not None and entry.first_use_s >= missed_s:
            since = {"stored_after_s": entry.first_use_s - missed_s}
        description = await self._manifests.describe(namespace, deadline=deadline)
        removals = removals if removals is not None else await self.removals(deadline=deadline)
        layout = description.layout() if description is not None else None
        before = [one for one in removals.get((namespace, prefix), ()) if one.at_s <= missed_s + late_s]
        tombstone = before[0] if before else None
        left = {**_removal(tombstone, missed_s), **self._places(entry, before, missed_s, layout), **since}
        if not since and _is_whole(entry, layout, Level):
            if tombstone is not None:
                return Absence("other_tier", left)
            return Absence("stored_since", {**(_groups(layout, groups) if groups else {}), **left})
        if groups:
            return Absence("group_incomplete", {**_groups(layout, groups), **left})
        if tombstone is not None:
            return Absence(LEFT[tombstone.reason], left)
        if entry is not None and not since:
            return Absence("group_incomplete", {**_slices(entry, layout), **left})
        nearest, has_it = await self._nearest(description, prefix, deadline) if description is not None else ({}, False)
        if has_it:
            return Absence("namespace_differs", {**nearest, **since})
        self._recorder.check_reported()
        if since:
            return Absence("never_stored", since)
        unlisted = await self._unlisted(namespace, prefix, layout, missed_s, deadline)
        if unlisted or not await self._catalog.is_complete(deadline=deadline):
            return Absence("catalog_incomplete", unlisted)
        return Absence("never_stored", nearest)

    async def removals(self, *, deadline: Deadline) -> Removals:
        """All removals that the catalog remembers. Read them once for several boundaries.

        Raises:
            KVStoreError: The catalog did not answer.
        """
        tombstones = await self._catalog.tombstones(limit=_TOMBSTONES_MAX, deadline=deadline)
        return await asyncio.to_thread(_by_boundary, tombstones)  # many: the loop serves engines at the same time

    def _places(
        self, entry: BoundaryEntry | None, before: Sequence[Tombstone], missed_s: int, layout: Layout | None
    ) -> dict[str, object]:
        """For each tier whether it has the boundary now, and when it left before the request."""
        found: dict[str, object] = {}
        for level in Level if entry is not None or before else ():
            tier = self._tiers[level]
            left = next((one for one in before if one.level is level), None)
            is_there = entry is not None and entry.num_records(level) > 0 and level not in entry.leaving
            if tier is None and left is None and not is_there:
                continue
            text = "not stored"
            if is_there:
                text = "stored" if _is_whole(entry, layout, (level,)) else "stored in part"
            if left is not None:
                text += f": {LEFT[left.reason]} {max(0, missed_s - left.at_s)} s before the request"
            found[f"in_{tier.name if tier is not None else level.name.lower()}"] = text
        return found

    async def _unlisted(
        self, namespace: NamespaceId, prefix: PrefixHash, layout: Layout | None, missed_s: int, deadline: Deadline
    ) -> dict[str, object]:
        """The tiers that hold records of a boundary without an entry: the catalog never learnt of them, because the
        service that stored them was killed, or has yet to report them. Not those that the request itself has just
        computed.
        """
        if layout is None:  # nothing of the namespace is stored: its description would be beside it
            return {}
        keys = layout.keys_of(namespace, prefix)[:_HEADS_MAX]
        found: dict[str, object] = {}
        for tier in [one for one in self._tiers.values() if one is not None]:
            sizes = await tier.head(keys, deadline=deadline)
            there = next((key for key, size in zip(keys, sizes, strict=True) if size is not None), None)
            record = await tier.get(there, deadline=deadline) if there is not None else None
            if record is not None and record.header.created_ms < 1000 * missed_s:
                found[f"in_{tier.name}"] = "stored, and unknown to the catalog"
        return found

    async def _nearest(
        self, description: NamespaceDescription, prefix: PrefixHash, deadline: Deadline
    ) -> tuple[dict[str, object], bool]:
        """The namespace of the same tenant whose description is most like this one's, with the fields that differ; and
        whether it has an entry for this prefix.

        Namespaces that have an entry come first. If none has, only those of the connector with the same weights count:
        with blocks or windows of another size they may have the same prompt, but end at other boundaries. Engines that
        name their pages themselves have no boundaries, and several namespaces each.
        """
        tenants = await self._catalog.namespaces(deadline=deadline)
        others = [
            other for other, tenant in tenants.items() if tenant == description.tenant and other != description.id
        ]
        nearest: tuple[bool, dict[str, tuple[object, object]], NamespaceId] | None = None
        for other in others[-_NAMESPACES_MAX:]:
            described = await self._manifests.describe(other, deadline=deadline)
            if described is None:
                continue
            self._catalog.know(other, described.layout(), described.tenant)
            lacks_it = await self._catalog.get(other, prefix, deadline=deadline) is None
            fields = field_differences(description.fields, described.fields)
            is_comparable = description.door == described.door == _CONNECTOR and _OF_A_MODEL.isdisjoint(fields)
            if not is_comparable and (lacks_it or not _PARTS.isdisjoint(fields)):
                continue
            if nearest is None or (lacks_it, len(fields)) < (nearest[0], len(nearest[1])):
                nearest = lacks_it, fields, other
        num_left = max(0, len(others) - _NAMESPACES_MAX)
        left: dict[str, object] = {"namespaces_not_compared": num_left} if num_left else {}
        if nearest is None:
            return left, False
        lacks_it, fields, namespace = nearest
        differences = {
            name: f"{mine!r} here, {theirs!r} there" for name, (mine, theirs) in sorted(fields.items())[:_FIELDS_MAX]
        }
        found = {"other_namespace": namespace.hex(), "fields": ", ".join(differences), **differences, **left}
        return found, not lacks_it


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
        "left_before_s": max(0, missed_s - tombstone.at_s),
    }


def _groups(layout: Layout | None, groups: int) -> dict[str, object]:
    if layout is None:
        return {}
    missing = [f"{i} ({group.kind.name})" for i, group in enumerate(layout.groups) if not groups >> i & 1]
    return {"groups_missing": ", ".join(missing)}


def _missing(entry: BoundaryEntry, layout: Layout, levels: Iterable[Level]) -> Iterator[tuple[GroupLayout, int]]:
    """Each group, and the number of its slices that are at none of these levels."""
    seen = [entry.slices[level] for level in levels if level not in entry.leaving]
    for group, shape in enumerate(layout.groups):
        held = 0
        for slices in seen:
            held |= slices[group]
        yield shape, shape.num_slices - held.bit_count()


def _is_whole(entry: BoundaryEntry | None, layout: Layout | None, levels: Iterable[Level]) -> bool:
    """Whether these levels together have all records of a boundary now, as far as that is known."""
    if entry is None or layout is None:
        return False
    return not any(num_missing for _, num_missing in _missing(entry, layout, levels))


def _slices(entry: BoundaryEntry, layout: Layout | None) -> dict[str, object]:
    """What a boundary lacks now, by group and slice."""
    if layout is None:
        return {}
    whole, missing = 0, []
    for group, (shape, num_missing) in enumerate(_missing(entry, layout, Level)):
        whole |= (num_missing == 0) << group
        if num_missing:
            missing.append(f"{num_missing} of {shape.num_slices} of group {group} ({shape.kind.name})")
    return {**_groups(layout, whole), "slices_missing": ", ".join(missing)}
