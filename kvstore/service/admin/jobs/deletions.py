"""Deletion by an operator: of a boundary or a namespace, and `/v1/deletions` for what takes longer: a prefix with all
that continues it, one user's prompts, or unused data.

Boundaries are hidden in the catalog, their records are deleted, then these are subtracted from the totals. Eviction
works the same way. Lookups of all services stop seeing a boundary before its first record is deleted. If the service
dies in between, a mark stays in the catalog, and the same call completes the deletion.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from kvstore.catalog.base import Catalog, LeaveReason, Leaving, NamespaceTotals, Step
from kvstore.catalog.entry import PINNED_AT, BoundaryEntry, Level
from kvstore.catalog.families import Hashes, family_of, hashes_of
from kvstore.errors import KVStoreError
from kvstore.model.keys import NamespaceId, PlainChain, PrefixHash, RecordKey
from kvstore.runtime.turns import who_asks
from kvstore.service.admin.access import Administrator
from kvstore.service.admin.catalog_access import Namespace
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.admin.jobs.board import Jobs
from kvstore.service.admin.jobs.job import Job, JobKind, JobStatus
from kvstore.service.admin.listing import entry_at
from kvstore.service.admin.models import (
    NAMESPACE_EXAMPLE,
    NAMESPACE_PATTERN,
    PREFIX_PATTERN,
    WHOLE_NUMBER,
    Amount,
    Confirm,
    TokenId,
    amounts_of,
    namespace_id,
    prefix_hash,
)
from kvstore.service.admin.problems import Refused, refusals
from kvstore.service.admin.prompt import body_of, read_fields

router = APIRouter(tags=["prefixes"])

BOUNDARIES_AT_ONCE = 64
_CALL_S = 30.0
_DELETE_S = 10.0
"""A request that deletes much is answered after about this time, with `is_complete` false."""
_FIND_PINS_S = 30.0
_TOKENS_MAX = 8192
_UNUSED_S_MAX = 10 * 366 * 86_400

Seconds = Annotated[int, Field(strict=True, gt=0, le=_UNUSED_S_MAX), WHOLE_NUMBER]

Namespaces = dict[NamespaceId, Namespace]

Held = Mapping[Level, Sequence[BoundaryEntry]]
"""Boundaries by the level that holds some of them."""

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

    def count_entries(self, held: Held, names: Mapping[Level | None, str]) -> None:
        """Add boundaries for each slower tier that holds some of them."""
        for level, entries in held.items():
            for entry in entries:
                if level in names and entry.num_records(level):
                    self.count(names[level], entry.num_records(level), entry.num_bytes(level))


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
            pinned = await _pins_soon(context, namespace)
        await delete_unpinned(context, namespace, [entry], pinned, deleted)
        if deleted.num_pinned:
            detail = "a pin on this boundary, or on a later one, protects it: end it first (`kvstore unpin`)"
            raise Refused(409, detail, field="prefix", seen=prefix.hex())
    if confirm:
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
        pinned = await _pins_soon(context, namespace)
        deadline, is_first = context.soon(_DELETE_S), True
        async for _, part in parts_of(context, {namespace.id: namespace}):
            if deadline.expired and not is_first:
                deleted.is_complete = False
                break
            is_first = False
            await delete_unpinned(context, namespace, part, pinned, deleted)
    await note_what_lacks(context, namespace, deleted)
    context.catalog.forget_totals()
    return deleted


async def parts_of(
    context: AdminContext, namespaces: Namespaces
) -> AsyncIterator[tuple[Namespace, list[BoundaryEntry]]]:
    """All entries of some namespaces, at most 64 of one at a time."""
    async for namespace, step in walk_of(context, namespaces):
        rows = np.flatnonzero(step.table.present()).tolist()
        for start in range(0, len(rows), BOUNDARIES_AT_ONCE):
            yield namespace, [entry_at(namespace, step, row) for row in rows[start : start + BOUNDARIES_AT_ONCE]]


async def walk_of(context: AdminContext, namespaces: Namespaces) -> AsyncIterator[tuple[Namespace, Step]]:
    """The steps over all entries of some namespaces, in one walk: a walk for each would list every name in Redis each
    time.
    """
    catalog = await context.catalog.open()
    async for id_, step in catalog.walk(namespaces):
        yield namespaces[id_], step


async def pins_of(context: AdminContext, namespaces: Namespaces) -> dict[NamespaceId, set[PrefixHash]]:
    """The boundaries of some namespaces that pins protect, as retention does: pinned ones, and every boundary before
    them.

    Raises:
        Unavailable: The catalog does not answer.
    """
    now_s = context.now_s()
    pins: dict[NamespaceId, set[PrefixHash]] = {id_: set() for id_ in namespaces}
    async for namespace, step in walk_of(context, namespaces):
        pinned = pins[namespace.id]
        for row in np.flatnonzero(step.table.present() & (step.table.numbers(PINNED_AT) > now_s)).tolist():
            entry: BoundaryEntry | None = entry_at(namespace, step, row)
            pinned.add(step.prefixes[row])
            while entry is not None and (parent := entry.parent) is not None and parent not in pinned:
                pinned.add(parent)
                entry = await namespace.catalog.get(namespace.id, parent, deadline=context.soon())
    return pins


async def _pins_soon(context: AdminContext, namespace: Namespace) -> set[PrefixHash]:
    """The boundaries of a namespace that pins protect.

    Raises:
        Unavailable: The catalog does not answer, or not every entry could be read in time.
    """
    async with context.soon(_FIND_PINS_S).scope("reading the pins of the namespace"):
        return (await pins_of(context, {namespace.id: namespace}))[namespace.id]


async def delete_unpinned(
    context: AdminContext,
    namespace: Namespace,
    entries: Sequence[BoundaryEntry],
    pinned: set[PrefixHash],
    deleted: Deleted,
) -> None:
    """Delete boundaries that are not pinned, or only count them in a dry run.

    Args:
        pinned: Those that pins protect. One that was pinned since stays too.

    Raises:
        Unavailable: A tier or the catalog does not answer; these boundaries are not counted.
    """
    free = [entry for entry in entries if entry.prefix not in pinned]
    gone: Held = dict.fromkeys(Level, free)
    if not deleted.is_dry_run:
        gone = await delete_entries(context, namespace, free)
        hidden = {entry.prefix for entries in gone.values() for entry in entries}
        stay = [entry.prefix for entry in free if entry.prefix not in hidden]
        now = await namespace.catalog.entries(namespace.id, stay, deadline=context.soon()) if stay else []
        deleted.num_pinned += sum(entry.pinned_until_s > context.now_s() for entry in now)
    deleted.num_pinned += len(entries) - len(free)
    deleted.count_entries(gone, context.operations.tier_names)


async def delete_entries(
    context: AdminContext, namespace: Namespace, entries: Sequence[BoundaryEntry], levels: Iterable[Level] = Level
) -> Held:
    """Delete all records of some boundaries of a namespace; returns what was deleted. One that was pinned stays.

    Raises:
        Unavailable: A tier or the catalog does not answer; records that may be left are visible again.

    If cancelled, records that may be left are visible again.
    """
    catalog = namespace.catalog
    deleted: dict[Level, list[BoundaryEntry]] = {}
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
        try:
            found = await catalog.start_leaving(leaving, level, deadline=context.soon())
            hidden = [entry for entry in found if entry is not None]
            await _delete_hidden(context, hidden, level)
        except (KVStoreError, asyncio.CancelledError):  # of the first call too, which may have hidden some
            await asyncio.shield(_show_again(context, catalog, leaving, level))
            raise
        gone = [(entry, LeaveReason.REMOVED) for entry in hidden]
        await catalog.finish_leaving(gone, level, deadline=context.soon())
        deleted[level] = hidden
    return deleted


async def _delete_hidden(context: AdminContext, hidden: Sequence[BoundaryEntry], level: Level) -> None:
    keys = [key for entry in hidden for key in entry.keys(level)]
    await _forget(context, keys)
    await context.data_loop.call_in_pieces(
        keys, lambda piece, deadline: context.operations.delete(piece, level, deadline=deadline), _CALL_S
    )


async def _show_again(context: AdminContext, catalog: Catalog, leaving: Sequence[Leaving], level: Level) -> None:
    """Make boundaries visible again. A record that is gone is found missing when it is read."""
    stops = (catalog.stop_leaving(one.namespace, one.prefix, level, deadline=context.soon()) for one in leaving)
    await asyncio.gather(*stops, return_exceptions=True)


async def _forget(context: AdminContext, keys: Sequence[RecordKey]) -> None:
    """Drop records from this node's memory and its write-back queues."""
    await context.data_loop.call_in_pieces(keys, lambda piece, _: context.operations.forget(piece))


# as a job


class NewDeletion(BaseModel):
    """What to delete: all of a namespace, unless another field narrows it."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "example": {"namespace": NAMESPACE_EXAMPLE, "token_ids": list(range(1, 33)), "cache_salt": "user-17"}
        },
    )

    namespace: str = Field(pattern=NAMESPACE_PATTERN)
    prefix: str | None = Field(
        default=None, pattern=PREFIX_PATTERN, description="this boundary, and all that continue it"
    )
    token_ids: list[TokenId] | None = Field(
        default=None,
        max_length=_TOKENS_MAX,
        description="prompts that begin with these tokens, and all that continue them; the first page is enough",
    )
    cache_salt: str | None = Field(
        default=None, max_length=4096, description="only prompts with this salt, those of one user; needs `token_ids`"
    )
    unused_s: Seconds | None = Field(default=None, description="only what was not stored or read for this long")


@router.post("/deletions", status_code=202, responses=refusals(404, 408, 413), openapi_extra=body_of(NewDeletion))
async def start_deletion(
    context: Context, grant: Administrator, jobs: Jobs, request: Request, confirm: Confirm = False
) -> JobStatus:
    """Delete many boundaries, except pinned ones, as a job (`/v1/jobs`). Without `confirm` nothing is deleted, and the
    job's report says what would be. A hash cannot be turned back into its salt, so one user's prompts are found by the
    salt together with the tokens that they begin with. If they begin in several ways, make a call for each.
    """
    deletion = await read_fields(request, NewDeletion)
    if deletion.cache_salt is not None and deletion.token_ids is None:
        detail = "a hash is made of salt and tokens: add the tokens that the prompts begin with"
        raise Refused(422, detail, field="body.token_ids", expected="the first page of the prompts, or more")
    if deletion.prefix is not None and deletion.token_ids is not None:
        raise Refused(422, "a prefix and token ids exclude each other", field="body.prefix")
    found = await context.catalog.find(namespace_id(deletion.namespace), grant)
    request.state.audit = {"dry_run": not confirm, "namespace": deletion.namespace}
    work = partial(_delete, context, found, deletion)
    about = {"namespace": deletion.namespace}
    if deletion.prefix is not None:
        about["prefix"] = deletion.prefix
    return jobs.start(JobKind.DELETION, grant, work, about=about, is_dry_run=not confirm, unit="boundaries")


async def _delete(context: AdminContext, namespace: Namespace, wanted: NewDeletion, job: Job) -> None:
    pinned = (await pins_of(context, {namespace.id: namespace}))[namespace.id]
    used_until_s = context.now_s() - wanted.unused_s if wanted.unused_s is not None else None
    deleted = nothing_deleted(is_dry_run=job.is_dry_run)
    await note_what_lacks(context, namespace, deleted)
    job.report = deleted.model_dump()
    try:
        async for part in _parts(context, namespace, wanted, job):
            old = [entry for entry in part if used_until_s is None or entry.last_use_s <= used_until_s]
            await delete_unpinned(context, namespace, old, pinned, deleted)
            job.progress.done += len(part)
            job.report = deleted.model_dump()
        await note_what_lacks(context, namespace, deleted)
        deleted.is_complete = True
    finally:
        context.catalog.forget_totals()
        job.report = deleted.model_dump()


async def _parts(
    context: AdminContext, namespace: Namespace, wanted: NewDeletion, job: Job
) -> AsyncIterator[list[BoundaryEntry]]:
    """The boundaries to delete, at most 64 at a time; sets the total of the job."""
    roots = _roots(context, namespace, wanted)
    if roots is None:
        totals = (await context.catalog.totals()).get(namespace.id, NamespaceTotals())
        job.progress.total = totals.num_boundaries
        async for _, part in parts_of(context, {namespace.id: namespace}):
            yield part
        return
    family = await _family_of(namespace, roots)
    job.progress.total = len(family)
    for start in range(0, len(family), BOUNDARIES_AT_ONCE):
        prefixes = family[start : start + BOUNDARIES_AT_ONCE]
        yield await namespace.catalog.entries(namespace.id, prefixes, deadline=context.soon())


def _roots(context: AdminContext, namespace: Namespace, wanted: NewDeletion) -> set[PrefixHash] | None:
    """The boundaries to begin with, under their names with each key; `None`: the whole namespace."""
    if wanted.prefix is not None:
        return {prefix_hash(wanted.prefix)}
    if wanted.token_ids is None:
        return None
    boundaries = PlainChain(wanted.cache_salt).extend(wanted.token_ids)
    page_tokens = namespace.layout.page_tokens
    # if the tokens fill a page, boundaries inside that page belong to other prompts as well
    pages = [boundary.prefix for boundary in boundaries if boundary.tokens % page_tokens == 0]
    plain = pages or [boundary.prefix for boundary in boundaries]
    return {
        prefix if generation is None else generation.name_of(prefix)
        for generation in context.generations(namespace.description.tenant)
        for prefix in plain
    }


async def _family_of(namespace: Namespace, roots: Set[PrefixHash]) -> list[PrefixHash]:
    """The stored boundaries that are roots or continue one. Needs memory for each entry of the namespace: its hash,
    that of its parent, and an index. A boundary whose parent is unknown is not found; after a reindex parents are
    unknown until the boundaries are read.
    """
    prefixes: list[bytes] = []
    parents: list[Hashes] = []
    async for step in namespace.catalog.steps(namespace.id):
        rows = np.flatnonzero(step.table.present())
        prefixes += [bytes(step.prefixes[row]) for row in rows.tolist()]
        parents.append(step.table.parents()[rows])
    if not prefixes:
        return []
    wanted = hashes_of(sorted(roots))
    found = await asyncio.to_thread(family_of, wanted, hashes_of(prefixes), np.concatenate(parents))
    return list(dict.fromkeys(PrefixHash(prefixes[row]) for row in np.flatnonzero(found).tolist()))
