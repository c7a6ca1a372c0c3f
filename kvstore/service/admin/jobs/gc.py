"""`/v1/gc`: deletes what serves no hit: retired weights, incomplete boundaries, interrupted deletions, orphans."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import chain

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request

from kvstore.catalog.base import Catalog, NamespaceTotals, Step
from kvstore.catalog.entry import LAST_USE_AT, LEAVING_AT, PINNED_AT, BoundaryEntry, Level
from kvstore.errors import Unavailable
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.service.admin.access import Administrator
from kvstore.service.admin.catalog_access import Namespace
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.admin.jobs.board import Jobs
from kvstore.service.admin.jobs.deletions import (
    BOUNDARIES_AT_ONCE,
    Held,
    Namespaces,
    delete_entries,
    delete_unpinned,
    nothing_deleted,
    parts_of,
    pins_of,
    walk_of,
)
from kvstore.service.admin.jobs.job import Job, JobKind, JobStatus
from kvstore.service.admin.listing import entry_at
from kvstore.service.admin.models import Amount, Confirm
from kvstore.service.admin.problems import Refused
from kvstore.service.authentication import Grant
from kvstore.store.retention.broken import BrokenFinder
from kvstore.store.upkeep.operations import PIECE_RECORDS_MAX
from kvstore.tiers.base import Entry

router = APIRouter(tags=["gc"])

UNUSED_S = 60
"""How long an incomplete boundary is kept after its last use, as by retention, and an orphan after it was found: the
missing slices, or the entry of a record that was just stored, may be on their way."""
YOUNG_S = 86_400.0
"""A record of less age is no orphan, where the tier knows its age. A service that cannot reach Redis still writes to S3
and reports it later: an operator has a day to repair the network, or to reindex after it has died.
"""
MAY_BE_LIVE = (
    "the catalog does not know what a service wrote that has not reached Redis for more than a day: before you delete, "
    "check `kvstore status` of every service"
)
YOUNG = "a service that cannot reach Redis reports later what it writes"
_BATCH = 1024
_ORPHANS_MAX = 65_536
_CALL_S = 30.0
_KINDS = ("retired", "incomplete", "unfinished", "orphans")


@router.post("/gc", status_code=202)
async def start_gc(
    context: Context, grant: Administrator, jobs: Jobs, request: Request, confirm: Confirm = False
) -> JobStatus:
    """Delete what serves no hit, as a job (`/v1/jobs`): data of retired weights; boundaries that lack slices or whose
    parent is missing, a minute after their last use; what an interrupted deletion has left. With an operator's token
    also records that the catalog does not have, and still does not have a minute later; in S3 only those older than a
    day. Pinned boundaries stay. Without `confirm` nothing is deleted, and the report says what would be. A tenant's
    token deletes only that tenant's data.
    """
    request.state.audit = {"dry_run": not confirm}

    async def work(job: Job) -> None:
        await _Collection(context, grant, job).run()

    return jobs.start(JobKind.GC, grant, work, about={}, is_dry_run=not confirm, unit="boundaries")


class _Collection:
    """One garbage collection."""

    def __init__(self, context: AdminContext, grant: Grant, job: Job) -> None:
        self._context = context
        self._grant = grant
        self._job = job
        self._found = {kind: nothing_deleted(is_dry_run=job.is_dry_run) for kind in _KINDS}
        self._undescribed: list[str] = []
        self._notes: list[str] = []
        self._report()

    async def run(self) -> None:
        context, job = self._context, self._job
        catalog = await context.catalog.open()
        totals = await context.catalog.totals()
        seen = {namespace: held for namespace, held in totals.items() if self._grant.sees(held.tenant)}
        job.progress.total = sum(held.num_boundaries for held in seen.values())
        epoch = await catalog.complete_epoch(deadline=context.soon())
        if epoch is None:
            self._notes.append("incomplete boundaries were skipped: the catalog is not complete yet")
        try:
            retired, others = await self._described(seen)
            await self._collect_broken(others, epoch)
            await self._collect_retired(retired)
            if epoch is not None and self._grant.tenant is None:
                await self._collect_orphans(catalog, epoch)
        finally:
            context.catalog.forget_totals()
            self._report()

    def _report(self) -> None:
        self._job.report = {
            **{kind: deleted.model_dump()["by_tier"] for kind, deleted in self._found.items()},
            "num_pinned": sum(deleted.num_pinned for deleted in self._found.values()),
            "undescribed_namespaces": list(self._undescribed),
            "notes": list(self._notes),
        }

    async def _described(self, seen: Mapping[NamespaceId, NamespaceTotals]) -> tuple[Namespaces, Namespaces]:
        """The namespaces that hold something: those whose weights are retired, and the others. Those whose entries
        cannot be read are noted.
        """
        retired: Namespaces = {}
        others: Namespaces = {}
        for id_, held in seen.items():
            if not held.num_boundaries:
                continue
            try:
                found = await self._context.catalog.find(id_, self._grant)
            except (Unavailable, Refused):  # its manifest is in no tier or cannot be read, or it is newer than the list
                self._undescribed.append(id_.hex())
                self._job.progress.done += held.num_boundaries
            else:
                (retired if self._context.is_retired(found) else others)[id_] = found
        self._report()
        return retired, others

    async def _collect_retired(self, namespaces: Namespaces) -> None:
        context, progress = self._context, self._job.progress
        pinned = await pins_of(context, namespaces)
        async for namespace, part in parts_of(context, namespaces):
            await delete_unpinned(context, namespace, part, pinned[namespace.id], self._found["retired"])
            progress.done += len(part)
            self._report()

    async def _collect_broken(self, namespaces: Namespaces, epoch: bytes | None) -> None:
        """Complete interrupted deletions, and delete incomplete boundaries that were unused for a minute.

        Args:
            epoch: Of the catalog when it was complete at the start; `None`: it was not.
        """
        context, progress = self._context, self._job.progress
        finders, now_s = {id_: BrokenFinder() for id_ in namespaces}, context.now_s()
        async for namespace, step in walk_of(context, namespaces):
            table = step.table
            leaving = np.flatnonzero(table.data[:, LEAVING_AT])
            await self._complete_deletions(namespace, [entry_at(namespace, step, row) for row in leaving.tolist()])
            num_slices = table.num_slices()
            await self._add_memory(namespace, step, num_slices)
            is_pinned = table.numbers(PINNED_AT) > now_s
            finders[namespace.id].add(step.prefixes, table.parents(), num_slices, table.numbers(LAST_USE_AT), is_pinned)
            progress.done += int(table.present().sum())
            self._report()
        catalog = await context.catalog.open()
        if epoch is None or await catalog.complete_epoch(deadline=context.soon()) != epoch:
            return
        unused: dict[NamespaceId, dict[PrefixHash, int]] = {}
        for id_, finder in finders.items():
            found = await asyncio.to_thread(finder.found)
            unused[id_] = {prefix: used_s for prefix, used_s in found.items() if used_s <= now_s - UNUSED_S}
        pinned = await pins_of(context, {id_: namespaces[id_] for id_, found in unused.items() if found})
        for id_ in pinned:
            await self._delete_unused(namespaces[id_], unused[id_], pinned[id_])

    async def _delete_unused(
        self, namespace: Namespace, unused: Mapping[PrefixHash, int], pinned: set[PrefixHash]
    ) -> None:
        """Delete incomplete boundaries that were not used since their last use was read."""
        context, prefixes = self._context, list(unused)
        for start in range(0, len(prefixes), BOUNDARIES_AT_ONCE):
            part = prefixes[start : start + BOUNDARIES_AT_ONCE]
            entries = await namespace.catalog.entries(namespace.id, part, deadline=context.soon())
            still = [entry for entry in entries if not entry.leaving and entry.last_use_s == unused[entry.prefix]]
            await delete_unpinned(context, namespace, still, pinned, self._found["incomplete"])
            self._report()

    async def _add_memory(self, namespace: Namespace, step: Step, num_slices: npt.NDArray[np.int64]) -> None:
        """Count, for boundaries that lack slices in the tiers, those in this node's memory too. The write-back may not
        have written them yet.
        """
        layout = [group.num_slices for group in namespace.layout.groups]
        for row in np.flatnonzero(((num_slices > 0) & (num_slices < layout)).any(axis=1)).tolist():
            entry = entry_at(namespace, step, row)
            stored = {key for level in Level if level not in entry.leaving for key in entry.keys(level)}
            missing = [key for key in namespace.keys_of(entry.prefix) if key not in stored]
            for key, size in zip(missing, await self._context.memory_sizes(missing), strict=True):
                num_slices[row, key.group] += size is not None

    async def _complete_deletions(self, namespace: Namespace, entries: Sequence[BoundaryEntry]) -> None:
        """Delete what an earlier deletion has hidden and not deleted. One that still runs is not affected."""
        names = self._context.operations.tier_names
        for level in Level:
            hidden = [entry for entry in entries if level in entry.leaving]
            for start in range(0, len(hidden), BOUNDARIES_AT_ONCE):
                gone: Held = {level: hidden[start : start + BOUNDARIES_AT_ONCE]}
                if not self._job.is_dry_run:
                    gone = await delete_entries(self._context, namespace, gone[level], [level])
                self._found["unfinished"].count_entries(gone, names)

    async def _collect_orphans(self, catalog: Catalog, epoch: bytes) -> None:
        progress = self._job.progress
        progress.done, progress.total, progress.unit = 0, None, "records"
        collected: dict[str, _Orphans] = {}
        for level, name in self._context.operations.tier_names.items():
            if level is None:
                continue
            orphans = collected[name] = _Orphans(self._context, catalog, epoch, self._grant, level)
            async with self._context.catalog.tier(level) as tier:
                async for entry in tier.scan():
                    progress.done += 1
                    await orphans.add(entry)
                await orphans.flush()
            if orphans.num_young:
                self._notes.append(f"{name} keeps {orphans.num_young} more that are younger than a day: {YOUNG}")
            if orphans.is_full:
                self._notes.append(f"{name} has more orphans: run the garbage collection again")
            if self._job.is_dry_run:
                self._count_orphans(name, orphans.found)
                if orphans.found and MAY_BE_LIVE not in self._notes:
                    self._notes.append(MAY_BE_LIVE)
        if self._job.is_dry_run or not any(orphans.found for orphans in collected.values()):
            return
        progress.unit = f"records; the orphans are compared again {UNUSED_S} s later, and deleted then"
        try:
            await asyncio.sleep(UNUSED_S)
        finally:
            progress.unit = "records"
        for name, orphans in collected.items():
            try:
                if not await orphans.delete():
                    self._notes.append(f"orphans of {name} were kept: the catalog is not complete any more")
            finally:
                self._count_orphans(name, orphans.deleted)

    def _count_orphans(self, name: str, found: Mapping[RecordKey, int]) -> None:
        """Report those of one tier that are deleted, or would be."""
        if found:
            num_boundaries = len({(key.namespace, key.prefix) for key in found})
            amount = Amount(num_boundaries=num_boundaries, num_records=len(found), num_bytes=sum(found.values()))
            self._found["orphans"].by_tier[name] = amount
        self._report()


class _Case(Enum):
    """Which records of a namespace are orphans."""

    ALL = "all: neither the catalog nor a manifest has the namespace"
    COMPARE = "those that the catalog lacks"
    NONE = "none: an engine or a reindex may repair the namespace"


class _Orphans:
    """Collects orphans from a listing. A service stores a record first and updates the catalog then, so each orphan is
    checked twice: at the end of its batch, and a minute later, before it is deleted.

    Args:
        catalog: Complete in `epoch`.
        epoch: What the catalog lacks in another one may be stored.
        grant: An operator's.

    Attributes:
        found: Orphans with their bytes, at most 65,536.
        deleted: Those of them that `delete` has deleted.
        num_young: Further records that the catalog lacks, too young to be orphans.
        is_full: There are more.
    """

    def __init__(self, context: AdminContext, catalog: Catalog, epoch: bytes, grant: Grant, level: Level) -> None:
        self.found: dict[RecordKey, int] = {}
        self.deleted: dict[RecordKey, int] = {}
        self.num_young = 0
        self.is_full = False
        self._context = context
        self._catalog = catalog
        self._epoch = epoch
        self._grant = grant
        self._level = level
        self._batch: dict[RecordKey, Entry] = {}
        self._cases: dict[NamespaceId, _Case] = {}

    async def add(self, entry: Entry) -> None:
        """Add a record of the listing."""
        self._batch[entry.key] = entry
        if len(self._batch) >= _BATCH:
            await self.flush()

    async def flush(self) -> None:
        """Compare the batch with the catalog, and what the catalog lacks with the tier: a listing may be outdated."""
        batch, self._batch = self._batch, {}
        missing = []
        for key in await self._missing(list(batch)):
            age_s = batch[key].age_s
            if age_s is not None and age_s < YOUNG_S:
                self.num_young += 1
            else:
                missing.append(key)
        operations = self._context.operations
        sizes = await self._context.data_loop.call_in_pieces(
            missing,
            lambda piece, deadline: operations.stored_sizes(piece, self._level, deadline=deadline),
            _CALL_S,
        )
        for key, size in zip(missing, chain.from_iterable(sizes), strict=True):
            if size is None:
                continue
            if len(self.found) >= _ORPHANS_MAX:
                self.is_full = True
                return
            self.found[key] = batch[key].num_bytes

    async def delete(self) -> bool:
        """Delete what the catalog still lacks. False: it has lost data since, so that what it lacks is no orphan.

        Raises:
            Unavailable: A tier or the catalog does not answer; what was deleted stays deleted.
        """
        keys, operations = list(self.found), self._context.operations
        for start in range(0, len(keys), PIECE_RECORDS_MAX):
            piece = keys[start : start + PIECE_RECORDS_MAX]
            missing = await self._missing(piece)
            if await self._catalog.complete_epoch(deadline=self._context.soon()) != self._epoch:
                return False
            await self._context.data_loop.call_in_pieces(
                missing,
                lambda piece, deadline: operations.delete(piece, self._level, deadline=deadline),
                _CALL_S,
            )
            self.deleted |= {key: self.found[key] for key in missing}
        return True

    async def _missing(self, keys: Sequence[RecordKey]) -> list[RecordKey]:
        """Those that the catalog lacks."""
        by_namespace: dict[NamespaceId, list[RecordKey]] = {}
        for key in keys:
            by_namespace.setdefault(key.namespace, []).append(key)
        missing: list[RecordKey] = []
        for namespace, listed in by_namespace.items():
            case = await self._case_of(namespace)
            if case is _Case.ALL:
                missing += listed
            elif case is _Case.COMPARE:
                rows: dict[PrefixHash, int] = {}
                for key in listed:
                    rows.setdefault(key.prefix, len(rows))
                table = await self._catalog.lookup(namespace, list(rows), deadline=self._context.soon())
                missing += [
                    key
                    for key in listed
                    # a leaving boundary is being deleted by its owner
                    if not table.leaves(rows[key.prefix], self._level)
                    and not table.has(rows[key.prefix], self._level, key.group, key.slice)
                ]
        return missing

    async def _case_of(self, namespace: NamespaceId) -> _Case:
        """What to do with a namespace's records. A namespace without a manifest is repaired by an engine that opens it,
        and one that the catalog lacks by a reindex.

        Raises:
            Unavailable: A tier that may have its manifest does not answer.
        """
        if namespace not in self._cases:
            context = self._context
            tenant = await context.catalog.tenant_of(namespace)
            manifest = await context.data_loop.call(
                lambda deadline: context.operations.manifest(namespace, deadline=deadline)
            )
            if tenant is not None and manifest is not None:
                await context.catalog.find(namespace, self._grant)  # registers the layout, so entries can be read
                self._cases[namespace] = _Case.COMPARE
            else:
                self._cases[namespace] = _Case.ALL if tenant is None and manifest is None else _Case.NONE
        return self._cases[namespace]
