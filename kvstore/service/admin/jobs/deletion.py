"""Deletion by an operator: hide boundaries in the catalog, delete their records, subtract these from the totals.

Eviction works the same way. Lookups of all services stop seeing a boundary before its first record is deleted. If the
service dies in between, a mark stays in the catalog, and the same call completes the deletion.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

import numpy as np
from fastapi import Request
from pydantic import BaseModel, Field

from kvstore.catalog.base import LeaveReason, Leaving, NamespaceTotals
from kvstore.catalog.entry import PINNED_AT, BoundaryEntry, Level
from kvstore.errors import KVStoreError, Unavailable
from kvstore.model.keys import PrefixHash, RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.turns import who_asks
from kvstore.service.admin.catalog_access import Namespace
from kvstore.service.admin.context import AdminContext
from kvstore.service.admin.listing import entry_at, steps_of
from kvstore.service.admin.models import Amount, amounts_of
from kvstore.service.admin.problems import Refused

WALK_S = 86_400.0
"""How long a job may read entries. It can be cancelled."""
BOUNDARIES_AT_ONCE = 64
_CALL_S = 30.0
_DELETE_S = 10.0
"""A request that deletes much is answered after about this time, with `is_complete` false."""
_FIND_PINS_S = 30.0


MAY_LACK = "the catalog may lack records that are stored: repeat this once a service has added them"


class Deleted(BaseModel):
    """What was deleted, or would be."""

    is_dry_run: bool = Field(description="nothing was deleted; `confirm=true` deletes")
    is_complete: bool = Field(description="false: there is more, repeat the call")
    num_pinned: int = Field(description="boundaries that a pin protects: on them, or on a later one", examples=[0])
    by_tier: dict[str, Amount]
    notes: list[str] = Field(
        default_factory=list, description="what else is to be known", examples=[[MAY_LACK]], max_length=8
    )

    def count(self, tier: str, num_records: int, num_bytes: int) -> None:
        """Add a boundary of a tier."""
        held = self.by_tier.setdefault(tier, Amount(num_boundaries=0, num_records=0, num_bytes=0))
        held.num_boundaries += 1
        held.num_records += num_records
        held.num_bytes += num_bytes

    def count_entry(self, entry: BoundaryEntry, names: Mapping[Level | None, str]) -> None:
        """Add a boundary for each slower tier that holds some of it."""
        for level, name in names.items():
            if level is not None and entry.num_records(level):
                self.count(name, entry.num_records(level), entry.num_bytes(level))


def nothing_deleted(*, is_dry_run: bool, is_complete: bool = False) -> Deleted:
    """A report to begin with."""
    return Deleted(is_dry_run=is_dry_run, is_complete=is_complete, num_pinned=0, by_tier={})


async def note_what_lacks(context: AdminContext, namespace: Namespace, deleted: Deleted) -> None:
    """Note that the catalog may lack records, which a rebuild then adds again. Before a deletion and after it: a
    rebuild may end in between.

    Raises:
        Unavailable: The catalog does not answer.
    """
    if MAY_LACK not in deleted.notes and await namespace.catalog.complete_epoch(deadline=context.soon()) is None:
        deleted.notes.append(MAY_LACK)


def audit_deletion(request: Request, deleted: Deleted) -> None:
    """Add to a request's line in the audit log what it deleted."""
    num_records = sum(held.num_records for held in deleted.by_tier.values())
    request.state.audit = {"dry_run": deleted.is_dry_run, "records": num_records}


async def delete_boundary(context: AdminContext, namespace: Namespace, prefix: PrefixHash, *, confirm: bool) -> Deleted:
    """Delete all records of one boundary, or report what they are.

    Raises:
        Refused: 404: nothing is stored there. 409: a pin protects it.
        Unavailable: A tier or the catalog does not answer. Records that are left are visible again, or the same call
            completes the deletion.
    """
    entry = await namespace.catalog.get(namespace.id, prefix, deadline=context.soon())
    keys, names = namespace.keys_of(prefix), context.operations.tier_names
    in_memory = [size for size in await context.memory_sizes(keys) if size is not None]
    if entry is None and not in_memory:
        raise Refused(404, "nothing is stored at this boundary", field="prefix", seen=prefix.hex())
    deleted = nothing_deleted(is_dry_run=not confirm, is_complete=True)
    if in_memory:
        deleted.count(names[None], len(in_memory), sum(in_memory))
    if entry is not None:
        async with context.scans.turn(who_asks()):
            if prefix in await pinned_boundaries(context, namespace):
                detail = "a pin on this boundary, or on a later one, protects it: delete that pin first"
                raise Refused(409, detail, field="prefix", seen=prefix.hex())
        deleted.count_entry(entry, names)
    if confirm:
        if entry is not None:
            await delete_entries(context, namespace, [entry])
        await _forget(context, keys)
        context.catalog.forget_totals()
    return deleted


async def delete_namespace(context: AdminContext, namespace: Namespace, *, confirm: bool) -> Deleted:
    """Delete for some seconds what the catalog has of a namespace, except pinned boundaries; or report what it has.

    Raises:
        Unavailable: A tier or the catalog does not answer. What was deleted stays deleted.
    """
    deleted = nothing_deleted(is_dry_run=not confirm, is_complete=True)
    if not confirm:
        totals = (await context.catalog.totals()).get(namespace.id, NamespaceTotals())
        deleted.by_tier = amounts_of(totals, context.operations.tier_names)
        return deleted
    await note_what_lacks(context, namespace, deleted)
    async with context.scans.turn(who_asks()):
        pinned = await pinned_boundaries(context, namespace)
        deadline, is_first = context.soon(_DELETE_S), True
        async for part in parts_of(namespace, context.soon(WALK_S)):
            if deadline.expired and not is_first:
                deleted.is_complete = False
                break
            is_first = False
            await delete_unpinned(context, namespace, part, pinned, deleted)
    await note_what_lacks(context, namespace, deleted)
    context.catalog.forget_totals()
    return deleted


async def parts_of(namespace: Namespace, deadline: Deadline) -> AsyncIterator[list[BoundaryEntry]]:
    """All entries of a namespace, at most 64 at a time."""
    async for _, step in steps_of(namespace, deadline):
        rows = np.flatnonzero(step.table.present()).tolist()
        for start in range(0, len(rows), BOUNDARIES_AT_ONCE):
            yield [entry_at(namespace, step, row) for row in rows[start : start + BOUNDARIES_AT_ONCE]]


async def pinned_boundaries(
    context: AdminContext, namespace: Namespace, within_s: float = _FIND_PINS_S
) -> set[PrefixHash]:
    """The boundaries that pins protect, as retention does: pinned ones, and every boundary before them.

    Raises:
        Unavailable: The catalog does not answer, or not every entry could be read in time.
    """
    deadline, now_s = context.soon(within_s), context.now_s()
    pinned: set[PrefixHash] = set()
    cursor: str | None = ""
    async for _, step in steps_of(namespace, deadline):
        for row in np.flatnonzero(step.table.present() & (step.table.numbers(PINNED_AT) > now_s)).tolist():
            entry: BoundaryEntry | None = entry_at(namespace, step, row)
            pinned.add(step.prefixes[row])
            while entry is not None and (parent := entry.parent) is not None and parent not in pinned:
                pinned.add(parent)
                entry = await namespace.catalog.get(namespace.id, parent, deadline=context.soon())
        cursor = step.cursor
    if cursor is not None:
        raise Unavailable("the pins of the namespace could not be read in time")
    return pinned


async def delete_unpinned(
    context: AdminContext,
    namespace: Namespace,
    entries: Sequence[BoundaryEntry],
    pinned: set[PrefixHash],
    deleted: Deleted,
) -> None:
    """Delete boundaries that are not pinned, or only count them in a dry run.

    Raises:
        Unavailable: A tier or the catalog does not answer; these boundaries are not counted.
    """
    free = [entry for entry in entries if entry.prefix not in pinned]
    if not deleted.is_dry_run:
        await delete_entries(context, namespace, free)
    deleted.num_pinned += len(entries) - len(free)
    for entry in free:
        deleted.count_entry(entry, context.operations.tier_names)


async def delete_entries(
    context: AdminContext, namespace: Namespace, entries: Sequence[BoundaryEntry], levels: Iterable[Level] = Level
) -> None:
    """Delete all records of some boundaries of a namespace.

    Raises:
        Unavailable: A tier or the catalog does not answer; records that may be left are visible again.

    If cancelled, records that may be left are visible again.
    """
    catalog = namespace.catalog
    for level in levels:
        if level not in context.operations.tier_names:
            continue
        leaving = [
            Leaving(namespace.id, entry.prefix)
            for entry in entries
            if entry.num_records(level) or level in entry.leaving
        ]
        if not leaving:
            continue
        found = await catalog.start_leaving(leaving, level, deadline=context.soon())
        hidden = [entry for entry in found if entry is not None]
        try:
            await _delete_hidden(context, hidden, level)
        except (KVStoreError, asyncio.CancelledError):
            await asyncio.shield(_show_again(context, namespace, hidden, level))
            raise
        gone = [(entry, LeaveReason.REMOVED) for entry in hidden]
        await catalog.finish_leaving(gone, level, deadline=context.soon())


async def _delete_hidden(context: AdminContext, hidden: Sequence[BoundaryEntry], level: Level) -> None:
    keys = [key for entry in hidden for key in entry.keys(level)]
    await _forget(context, keys)
    await context.data_loop.call_in_pieces(
        keys, lambda piece, deadline: context.operations.delete(piece, level, deadline=deadline), _CALL_S
    )


async def _show_again(
    context: AdminContext, namespace: Namespace, hidden: Sequence[BoundaryEntry], level: Level
) -> None:
    """Make boundaries visible again. A record that is gone is found missing when it is read."""
    catalog = namespace.catalog
    stops = (catalog.stop_leaving(namespace.id, entry.prefix, level, deadline=context.soon()) for entry in hidden)
    await asyncio.gather(*stops, return_exceptions=True)


async def _forget(context: AdminContext, keys: Sequence[RecordKey]) -> None:
    """Drop records from this node's memory and its write-back queues."""
    await context.data_loop.call_in_pieces(keys, lambda piece, _: context.operations.forget(piece))
