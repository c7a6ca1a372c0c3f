"""Deletion by an operator: hidden in the catalog first, then deleted, then taken off the totals, in bounded pieces.

As retention does it (kvstore/store/retention/owner.py): lookups of all services stop seeing a boundary before its first
record goes, and whoever dies in between leaves a mark that the same call, made again, finishes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import numpy as np
from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field

from kvstore.catalog.base import BoundaryEntry, Catalog, LeaveReason, Leaving, NamespaceTotals
from kvstore.catalog.entry import Level
from kvstore.errors import KVStoreError
from kvstore.model.keys import PrefixHash, RecordKey
from kvstore.service.admin.catalog_access import Namespace
from kvstore.service.admin.context import AdminContext
from kvstore.service.admin.listing import entry_at, steps_of
from kvstore.service.admin.memory import all_keys, memory_sizes
from kvstore.service.admin.models import Amount
from kvstore.service.admin.pinned import protected_by_pins
from kvstore.service.admin.problems import Refused
from kvstore.store.upkeep.operations import PIECE_RECORDS_MAX

__all__ = ["Deleted", "count_entry", "delete_boundary", "delete_entries", "delete_namespace", "told"]

_CALL_S = 30.0
_WHOLE_S = 10.0
"""A call that deletes much answers after about so long, and says that there is more."""
_BOUNDARIES_AT_ONCE = 64
_WHENEVER_USED = 0xFFFFFFFF


class Deleted(BaseModel):
    """What was deleted, or would be."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "is_dry_run": True,
                "is_complete": True,
                "num_pinned": 0,
                "by_tier": {"redis": {"num_boundaries": 1, "num_records": 8, "num_bytes": 2097152}},
            }
        }
    )

    is_dry_run: bool = Field(description="nothing was deleted: `confirm=true` does")
    is_complete: bool = Field(description="false: there is more, call again")
    num_pinned: int = Field(description="boundaries that stay: a pin is on them, or on one that goes on from them")
    by_tier: dict[str, Amount]

    def count(self, tier: str, num_records: int, num_bytes: int) -> None:
        """One more boundary of a tier."""
        held = self.by_tier.setdefault(tier, Amount(num_boundaries=0, num_records=0, num_bytes=0))
        held.num_boundaries += 1
        held.num_records += num_records
        held.num_bytes += num_bytes


def told(request: Request, deleted: Deleted) -> None:
    """For the audit log."""
    num_records = sum(held.num_records for held in deleted.by_tier.values())
    request.state.audit = {"dry_run": deleted.is_dry_run, "records": num_records}


async def delete_boundary(context: AdminContext, namespace: Namespace, prefix: PrefixHash, *, confirm: bool) -> Deleted:
    """Delete all records of one boundary, or tell what they are.

    Raises:
        Refused: 404: nothing is stored there. 409: a pin protects it.
        Unavailable: A tier or the catalog does not answer: what is left is seen again, or the same call finishes it.
    """
    catalog = await context.catalog.open()
    entry = await catalog.get(namespace.id, prefix, deadline=context.soon())
    keys = all_keys(namespace, prefix)
    sizes = await memory_sizes(context, keys)
    if entry is None and not any(size is not None for size in sizes):
        raise Refused(404, "nothing is stored at this boundary", field="prefix", seen=prefix.hex())
    if entry is not None:
        async with context.walks:
            if prefix in await protected_by_pins(context, catalog, namespace):
                detail = "the boundary is pinned, or one that goes on from it: delete that pin first"
                raise Refused(409, detail, field="prefix", seen=prefix.hex())
    deleted = Deleted(is_dry_run=not confirm, is_complete=True, num_pinned=0, by_tier={})
    _count_memory(context, deleted, sizes)
    if entry is not None:
        count_entry(context, deleted, entry)
    if confirm:
        if entry is not None:
            await delete_entries(context, catalog, [entry])
        await _forget(context, keys)
        context.catalog.forget_totals()
    return deleted


async def delete_namespace(context: AdminContext, namespace: Namespace, *, confirm: bool) -> Deleted:
    """Delete what the catalog knows of a namespace, but for what is pinned, for some seconds; or tell what that is.

    Raises:
        Unavailable: A tier or the catalog does not answer; what was deleted stays so.
    """
    catalog = await context.catalog.open()
    deleted = Deleted(is_dry_run=not confirm, is_complete=True, num_pinned=0, by_tier={})
    if not confirm:
        totals = (await context.catalog.totals(deadline=context.soon())).get(namespace.id, NamespaceTotals())
        names = context.operations.tier_names
        for level, held in zip(Level, totals.levels, strict=True):
            if level in names:
                deleted.by_tier[names[level]] = Amount(
                    num_boundaries=held.num_boundaries, num_records=held.num_records, num_bytes=held.num_bytes
                )
        return deleted
    async with context.walks:
        protected = await protected_by_pins(context, catalog, namespace)
        deadline = context.soon(_WHOLE_S)
        async for _, step in steps_of(catalog, namespace.id, "", deadline):
            rows = np.flatnonzero(step.table.present()).tolist()
            deleted.is_complete = step.cursor is None
            for start in range(0, len(rows), _BOUNDARIES_AT_ONCE):
                if start and deadline.expired:
                    deleted.is_complete = False
                    break
                part = [entry_at(namespace.id, step, row) for row in rows[start : start + _BOUNDARIES_AT_ONCE]]
                free = [entry for entry in part if entry.prefix not in protected]
                deleted.num_pinned += len(part) - len(free)
                await delete_entries(context, catalog, free)
                for entry in free:
                    count_entry(context, deleted, entry)
    context.catalog.forget_totals()
    return deleted


async def delete_entries(
    context: AdminContext, catalog: Catalog, entries: Sequence[BoundaryEntry], levels: Iterable[Level] = Level
) -> None:
    """Delete all records of some boundaries, a bounded piece of work.

    Raises:
        Unavailable: A tier or the catalog does not answer; what may still be there is seen again.
    """
    for level in levels:
        if level not in context.operations.tier_names:
            continue
        there = [entry for entry in entries if entry.num_records(level) or level in entry.leaving]
        if not there:
            continue
        leaving = [Leaving(entry.namespace, entry.prefix, _WHENEVER_USED) for entry in there]
        found = await catalog.start_leaving_all(leaving, level, deadline=context.soon())
        hidden = [entry for entry in found if entry is not None]
        try:
            await _delete_hidden(context, hidden, level)
        except (KVStoreError, asyncio.CancelledError):
            await asyncio.shield(_show_again(context, catalog, hidden, level))
            raise
        gone = [(entry, LeaveReason.REMOVED) for entry in hidden]
        await catalog.finish_leaving_all(gone, level, deadline=context.soon())


async def _delete_hidden(context: AdminContext, hidden: Sequence[BoundaryEntry], level: Level) -> None:
    keys = [key for entry in hidden for key in entry.keys(level)]
    await _forget(context, keys)
    deadline = context.soon(_CALL_S)
    for start in range(0, len(keys), PIECE_RECORDS_MAX):
        piece = keys[start : start + PIECE_RECORDS_MAX]

        async def work(piece: Sequence[RecordKey] = piece) -> None:
            await context.operations.delete(piece, level, deadline=deadline)

        await context.bridge.call(work, deadline=deadline)


async def _show_again(context: AdminContext, catalog: Catalog, hidden: Sequence[BoundaryEntry], level: Level) -> None:
    """What may still be there is seen again; what is not is found missing when it is read."""
    stops = (catalog.stop_leaving(e.namespace, e.prefix, level, deadline=context.soon()) for e in hidden)
    await asyncio.gather(*stops, return_exceptions=True)


async def _forget(context: AdminContext, keys: Sequence[RecordKey]) -> None:
    deadline = context.soon()
    for start in range(0, len(keys), PIECE_RECORDS_MAX):
        piece = keys[start : start + PIECE_RECORDS_MAX]

        async def work(piece: Sequence[RecordKey] = piece) -> int:
            return await context.operations.forget(piece)

        await context.bridge.call(work, deadline=deadline)


def _count_memory(context: AdminContext, deleted: Deleted, sizes: Sequence[int | None]) -> None:
    held = [size for size in sizes if size is not None]
    if held:
        deleted.count(context.operations.tier_names[None], len(held), sum(held))


def count_entry(context: AdminContext, deleted: Deleted, entry: BoundaryEntry) -> None:
    """One more boundary, at each slower tier that holds some of it."""
    for level, name in context.operations.tier_names.items():
        if level is not None and entry.num_records(level):
            deleted.count(name, entry.num_records(level), entry.num_bytes(level))
