"""`/v1/prefixes`: boundaries of prompts, what of each is where, and what comes before and behind it."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from kvstore.catalog.base import BoundaryEntry, Catalog
from kvstore.catalog.entry import EntryTable, Level
from kvstore.model.keys import PrefixHash, RecordKey
from kvstore.service.admin.access import Administrator, Reader
from kvstore.service.admin.catalog_access import Namespace
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.admin.deletion import Deleted, delete_boundary, told
from kvstore.service.admin.listing import Listed, Order, first_in_order, some_of
from kvstore.service.admin.memory import all_keys, memory_sizes
from kvstore.service.admin.models import PrefixSummary, summary_of
from kvstore.service.admin.parameters import (
    NAMESPACE_EXAMPLE,
    NAMESPACE_PATTERN,
    Confirm,
    Cursor,
    Limit,
    NamespaceText,
    PrefixText,
    namespace_id,
    prefix_hash,
)
from kvstore.service.admin.problems import Refused, refusals

__all__ = ["router"]

router = APIRouter(tags=["prefixes"])

_WALK_S = 10.0
_PARENTS_MAX = 64

NamespaceQuery = Annotated[
    str, Query(pattern=NAMESPACE_PATTERN, examples=[NAMESPACE_EXAMPLE], description="whose prefixes")
]


class PrefixList(BaseModel):
    """A page of boundaries."""

    prefixes: list[PrefixSummary]
    next_cursor: str | None = Field(description="for the next page; null: there is none")
    is_complete: bool = Field(
        description="false: the time for one page was up before all entries were looked at, so some may be missing"
    )


class Held(BaseModel):
    """What one tier holds of a group's record."""

    slices: list[int] = Field(description="which slices are there", examples=[[0, 1, 2, 3]])
    num_bytes: int = Field(description="their bytes, headers included", examples=[2097152])


class GroupDetail(BaseModel):
    """One group's record at the boundary."""

    group: int
    kind: str = Field(description="what the group's layers do", examples=["full_attention"])
    num_slices: int = Field(description="slices that a whole record has")
    record: str = Field(description="`page`, `tail` or `state`; `unknown` until the position is known")
    held: dict[str, Held] = Field(description="by tier; tiers without a slice are left out")


class PrefixDetail(PrefixSummary):
    """A boundary with its records, and its place among others."""

    namespace: str
    leaving: list[str] = Field(description="tiers whose records are being deleted at this moment")
    groups: list[GroupDetail]
    parents: list[PrefixSummary] = Field(description="the page boundaries before it, the nearest first, 64 at most")
    children: list[PrefixSummary] = Field(description="boundaries that go on from it, in no order")
    children_complete: bool = Field(description="false: there may be more children")


@router.get("/prefixes", responses=refusals(401, 403, 404, 422, 429, 503))
async def list_prefixes(
    context: Context,
    grant: Reader,
    *,
    namespace: NamespaceQuery,
    order: Annotated[Order, Query(description="`stored` is cheap, the others look at every entry")] = Order.STORED,
    limit: Limit = 100,
    cursor: Cursor = "",
) -> PrefixList:
    """Boundaries of a namespace: by hits, bytes, age or last use, or, to walk over all of them, as they are stored."""
    found = await context.catalog.find(namespace_id(namespace), grant, deadline=context.soon())
    catalog = await context.catalog.open()
    async with context.walks:
        deadline = context.soon(_WALK_S)
        if order is Order.STORED:
            listed = await some_of(catalog, found.id, cursor, limit=limit, deadline=deadline)
        else:
            listed = await first_in_order(catalog, found.id, order, cursor, limit=limit, deadline=deadline)
    return PrefixList(
        prefixes=_summaries(context, listed), next_cursor=listed.next_cursor, is_complete=listed.is_complete
    )


@router.get("/prefixes/{namespace}/{prefix}", responses=refusals(401, 403, 404, 422, 429, 503))
async def show_prefix(
    context: Context,
    grant: Reader,
    namespace: NamespaceText,
    prefix: PrefixText,
    children_limit: Annotated[
        int, Query(ge=0, le=1000, description="children at most; 0 spares the walk over all entries")
    ] = 100,
) -> PrefixDetail:
    """One boundary: its groups and slices by tier, this node's memory among them, its parents and its children."""
    found = await context.catalog.find(namespace_id(namespace), grant, deadline=context.soon())
    catalog, wanted = await context.catalog.open(), prefix_hash(prefix)
    entry = await catalog.get(found.id, wanted, deadline=context.soon())
    keys = all_keys(found, wanted)
    in_memory = dict(zip(keys, await memory_sizes(context, keys), strict=True))
    if entry is None and not any(size is not None for size in in_memory.values()):
        raise Refused(404, "nothing is stored at this boundary", field="prefix", seen=prefix)
    if entry is None:
        entry = _only_in_memory(found, wanted)
    listed = await _children(context, catalog, entry, children_limit)
    names = context.operations.tier_names
    return PrefixDetail(
        **summary_of(entry, names, context.now_s()).model_dump(),
        namespace=namespace,
        leaving=[names[level] for level in sorted(entry.leaving) if level in names],
        groups=[_group(context, found, entry, group, in_memory) for group in range(len(found.layout.groups))],
        parents=await _parents(context, catalog, entry),
        children=_summaries(context, listed),
        children_complete=listed.is_complete and listed.next_cursor is None,
    )


@router.delete("/prefixes/{namespace}/{prefix}", responses=refusals(401, 403, 404, 409, 422, 429, 503))
async def remove_prefix(
    context: Context,
    grant: Administrator,
    request: Request,
    *,
    namespace: NamespaceText,
    prefix: PrefixText,
    confirm: Confirm = False,
) -> Deleted:
    """Delete the records of one boundary from all tiers and this node's memory. Without `confirm` nothing is deleted,
    and the answer tells what would be. Prompts that go on from it are hit no further than it from then on.
    """
    found = await context.catalog.find(namespace_id(namespace), grant, deadline=context.soon())
    deleted = await delete_boundary(context, found, prefix_hash(prefix), confirm=confirm)
    told(request, deleted)
    return deleted


def _summaries(context: AdminContext, listed: Listed) -> list[PrefixSummary]:
    names, now_s = context.operations.tier_names, context.now_s()
    return [summary_of(entry, names, now_s) for entry in listed.entries]


def _only_in_memory(namespace: Namespace, prefix: PrefixHash) -> BoundaryEntry:
    """What this node's memory has and no tier yet: the catalog does not know of it."""
    nothing = tuple(tuple(0 for _ in namespace.layout.groups) for _ in Level)
    return BoundaryEntry(namespace.id, prefix, 0, None, 0, 0, 0, 0, nothing, nothing)


def _group(
    context: AdminContext,
    namespace: Namespace,
    entry: BoundaryEntry,
    group: int,
    in_memory: dict[RecordKey, int | None],
) -> GroupDetail:
    layout = namespace.layout.groups[group]
    held: dict[str, Held] = {}
    sizes = {key.slice: size for key, size in in_memory.items() if key.group == group and size is not None}
    for level, name in context.operations.tier_names.items():
        if level is None:
            slices, num_bytes = sorted(sizes), sum(sizes.values())
        else:
            bits, num_bytes = entry.slices[level][group], entry.group_bytes[level][group]
            slices = [slice_ for slice_ in range(bits.bit_length()) if bits >> slice_ & 1]
        if slices:
            held[name] = Held(slices=slices, num_bytes=num_bytes)
    kind = layout.record_at(entry.tokens, namespace.layout.page_tokens)[0].name.lower() if entry.tokens else "unknown"
    return GroupDetail(group=group, kind=layout.kind.name, num_slices=layout.num_slices, record=kind, held=held)


async def _parents(context: AdminContext, catalog: Catalog, entry: BoundaryEntry) -> list[PrefixSummary]:
    names, now_s = context.operations.tier_names, context.now_s()
    found: list[PrefixSummary] = []
    parent = entry.parent
    while parent is not None and len(found) < _PARENTS_MAX:
        before = await catalog.get(entry.namespace, parent, deadline=context.soon())
        if before is None:
            break
        found.append(summary_of(before, names, now_s))
        parent = before.parent
    return found


async def _children(context: AdminContext, catalog: Catalog, entry: BoundaryEntry, limit: int) -> Listed:
    if not limit:
        return Listed([], None, False)

    def wanted(table: EntryTable) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return table.has_parent(entry.prefix)

    async with context.walks:
        deadline = context.soon(_WALK_S)
        return await some_of(catalog, entry.namespace, "", limit=limit, deadline=deadline, wanted=wanted)
