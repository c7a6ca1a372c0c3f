"""`/v1/gc`: what nothing can be resumed from: retired weights, incomplete boundaries, half deleted ones, orphans."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fastapi import APIRouter, Request

from kvstore.catalog.base import BoundaryEntry, Catalog, NamespaceTotals
from kvstore.catalog.entry import Level
from kvstore.errors import Unavailable
from kvstore.model.keys import NamespaceId, PrefixHash
from kvstore.service.admin.access import Administrator
from kvstore.service.admin.catalog_access import Namespace
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.admin.deletion import Deleted, count_entry, delete_entries
from kvstore.service.admin.deletions import WALK_S, delete_part
from kvstore.service.admin.job import Job, JobKind
from kvstore.service.admin.jobs import JobStatus, status_of
from kvstore.service.admin.memory import all_keys, memory_sizes
from kvstore.service.admin.orphans import Orphans
from kvstore.service.admin.parameters import Confirm
from kvstore.service.admin.pinned import protected_by_pins
from kvstore.service.admin.problems import refusals
from kvstore.service.credentials import Grant
from kvstore.store.retention.plan import broken_of

__all__ = ["router"]

router = APIRouter(tags=["gc"])

_MENDED_S = 60
"""What serves no hit is left alone for so long, as by retention: what it lacks may be on its way."""
_AT_ONCE = 64
_KINDS = ("retired", "incomplete", "unfinished", "orphans")


@router.post("/gc", status_code=202, responses=refusals(401, 403, 422, 429, 503))
async def start_gc(context: Context, grant: Administrator, request: Request, confirm: Confirm = False) -> JobStatus:
    """Delete what serves no hit, as a job (`/v1/jobs`): everything of retired weights; boundaries that lack slices or
    stand on nothing, a minute after their last use; what an interrupted deletion has left; and, with an operator's
    token, records that the catalog does not tell of. What pins protect stays. Without `confirm` nothing is deleted, and
    the report tells what would be. A tenant's token reaches its own.
    """
    request.state.audit = {"dry_run": not confirm}

    async def work(job: Job) -> None:
        await _Gc(context, grant, job).run()

    return status_of(context.jobs.start(JobKind.GC, grant, work, about={}, is_dry_run=not confirm, unit="boundaries"))


class _Gc:
    """One run."""

    def __init__(self, context: AdminContext, grant: Grant, job: Job) -> None:
        self._context = context
        self._grant = grant
        self._job = job
        self._found = {
            kind: Deleted(is_dry_run=job.is_dry_run, is_complete=False, num_pinned=0, by_tier={}) for kind in _KINDS
        }
        self._undescribed: list[str] = []
        self._notes: list[str] = []
        self._tell()

    async def run(self) -> None:
        context, job = self._context, self._job
        catalog = await context.catalog.open()
        totals = await context.catalog.totals(deadline=context.soon())
        seen = {namespace: held for namespace, held in totals.items() if self._grant.sees(held.tenant)}
        job.total = sum(held.num_boundaries for held in seen.values())
        is_complete = await catalog.is_complete(deadline=context.soon())
        if not is_complete:
            self._notes.append("the catalog is not complete: incomplete ones are looked for after `kvstore reindex`")
        try:
            for namespace, held in seen.items():
                if held.num_boundaries:
                    await self._one(catalog, namespace, held, is_complete=is_complete)
            if is_complete and self._grant.tenant is None:
                await self._orphans(catalog)
        finally:
            context.catalog.forget_totals()
            self._tell()

    def _tell(self) -> None:
        self._job.report = {
            **{kind: deleted.model_dump()["by_tier"] for kind, deleted in self._found.items()},
            "num_pinned": sum(deleted.num_pinned for deleted in self._found.values()),
            "undescribed_namespaces": list(self._undescribed),
            "notes": list(self._notes),
        }

    async def _one(self, catalog: Catalog, namespace: NamespaceId, held: NamespaceTotals, *, is_complete: bool) -> None:
        context = self._context
        try:
            found = await context.catalog.find(namespace, self._grant, deadline=context.soon())
        except Unavailable:  # its manifest is nowhere, or cannot be read
            self._undescribed.append(namespace.hex())
            self._job.done += held.num_boundaries
            return
        entries = [entry async for entry in catalog.iterate(namespace)]
        protected = await protected_by_pins(context, catalog, found, walk_s=WALK_S)
        before = self._job.done
        if context.is_retired(found):
            await self._delete(catalog, entries, protected, "retired")
        else:
            await self._finish(catalog, [entry for entry in entries if entry.leaving])
            if is_complete:
                in_memory = await self._in_memory(found, entries)
                broken = await asyncio.to_thread(_incomplete, entries, in_memory, context.now_s())
                await self._delete(catalog, broken, protected, "incomplete")
        self._job.done = before + held.num_boundaries
        self._tell()

    async def _in_memory(self, namespace: Namespace, entries: Sequence[BoundaryEntry]) -> dict[PrefixHash, list[int]]:
        """For boundaries that the tiers do not make whole, bits of the slices that this node's memory has: the
        write-back may have still to bring them.
        """
        held: dict[PrefixHash, list[int]] = {}
        for entry in entries:
            bits = _together(entry)
            whole = [(1 << group.num_slices) - 1 for group in namespace.layout.groups]
            if all(some in (0, every) for some, every in zip(bits, whole, strict=True)):
                continue
            keys = all_keys(namespace, entry.prefix)
            for key, size in zip(keys, await memory_sizes(self._context, keys), strict=True):
                if size is not None:
                    held.setdefault(entry.prefix, [0] * len(whole))[key.group] |= 1 << key.slice
        return held

    async def _delete(
        self, catalog: Catalog, entries: Sequence[BoundaryEntry], protected: set[PrefixHash], kind: str
    ) -> None:
        for start in range(0, len(entries), _AT_ONCE):
            part = entries[start : start + _AT_ONCE]
            await delete_part(self._context, catalog, part, protected, self._found[kind])
            self._job.done += len(part)
            self._tell()

    async def _finish(self, catalog: Catalog, hidden: Sequence[BoundaryEntry]) -> None:
        """What somebody had hidden and not deleted; whoever is still at it loses nothing."""
        for level in Level:
            there = [entry for entry in hidden if level in entry.leaving]
            for start in range(0, len(there), _AT_ONCE):
                part = there[start : start + _AT_ONCE]
                if not self._job.is_dry_run:
                    await delete_entries(self._context, catalog, part, [level])
                for entry in part:
                    count_entry(self._context, self._found["unfinished"], entry)

    async def _orphans(self, catalog: Catalog) -> None:
        job = self._job
        job.done, job.total, job.unit = 0, None, "records"
        for level, name in self._context.operations.tier_names.items():
            if level is None:
                continue
            orphans = Orphans(self._context, catalog, self._grant, level)
            async with self._context.catalog.tier(level) as tier:
                async for entry in tier.scan():
                    job.done += 1
                    await orphans.look_at(entry)
                await orphans.look()
            if orphans.is_full:
                self._notes.append(f"there are more orphans in {name}: run it again")
            found = orphans.found
            if found:
                tally = self._found["orphans"]
                tally.count(name, len(found), sum(found.values()))
                tally.by_tier[name].num_boundaries = len({(key.namespace, key.prefix) for key in found})
            self._tell()
            if not job.is_dry_run:
                await orphans.delete()


def _incomplete(
    entries: Sequence[BoundaryEntry], in_memory: Mapping[PrefixHash, Sequence[int]], now_s: int
) -> list[BoundaryEntry]:
    """Boundaries that tiers and this node's memory together do not make whole, or that stand on such a one, and were
    left alone for a minute. Worked out in a thread.
    """
    together = []
    for entry in entries:
        bits = _together(entry, in_memory.get(entry.prefix))
        together.append(replace(entry, slices=tuple(bits for _ in Level)))
    used_s = broken_of(together, Level.COLD, now_s)
    left_alone = {name for name, last_s in used_s.items() if last_s <= now_s - _MENDED_S}
    return [entry for entry in entries if not entry.leaving and entry.namespace + entry.prefix in left_alone]


def _together(entry: BoundaryEntry, more: Sequence[int] | None = None) -> tuple[int, ...]:
    """For each group the bits of slices that the tiers, and whatever has `more`, hold together."""
    found = list(more) if more is not None else [0] * len(entry.slices[Level.COLD])
    for level in Level:
        if level not in entry.leaving:
            found = [some | bits for some, bits in zip(found, entry.slices[level], strict=True)]
    return tuple(found)
