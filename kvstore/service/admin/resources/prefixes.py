"""`/v1/prefixes`: boundaries of prompts, what each tier holds of one, and what comes before and after it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from kvstore.catalog.entry import BoundaryEntry, EntryTable, Level
from kvstore.model.keys import PrefixHash, RecordKey
from kvstore.service.admin.access import Administrator, Reader
from kvstore.service.admin.catalog_access import Namespace
from kvstore.service.admin.context import AdminContext, Context, NamedNamespace, QueriedNamespace
from kvstore.service.admin.jobs.deletions import Deleted, audit_deletion, delete_boundary
from kvstore.service.admin.listing import Order, Page, Rows, list_entries
from kvstore.service.admin.models import (
    Confirm,
    Cursor,
    Limit,
    PrefixSummary,
    PrefixText,
    prefix_hash,
    summary_of,
)
from kvstore.service.admin.problems import Refused, refusals

router = APIRouter(tags=["prefixes"])

_PARENTS_MAX = 64


class PrefixList(BaseModel):
    """A page of boundaries."""

    prefixes: list[PrefixSummary]
    next_cursor: str | None = Field(description="for the next page; null: there is none")
    is_complete: bool = Field(description="false: the time was up before all entries were read, so some may be missing")


class Held(BaseModel):
    """What one tier holds of a group's record."""

    slices: list[int] = Field(description="which slices it holds", examples=[[0, 1, 2, 3]])
    num_bytes: int = Field(description="their bytes, headers included", examples=[2097152])


class GroupDetail(BaseModel):
    """One group's record at the boundary."""

    group: int
    kind: str = Field(description="what the group's layers do", examples=["full_attention"])
    num_slices: int = Field(description="slices of a whole record")
    record: str = Field(description="`page`, `tail` or `state`; `unknown` until the position is known")
    held: dict[str, Held] = Field(description="by tier; tiers without a slice are left out")


class PrefixDetail(PrefixSummary):
    """A boundary with its records, its parents and its children."""

    namespace: str
    leaving: list[str] = Field(description="tiers from which its records are being deleted")
    groups: list[GroupDetail]
    parents: list[PrefixSummary] = Field(description="the page boundaries before it, the nearest first, at most 64")
    children: list[PrefixSummary] = Field(description="boundaries that continue it, in no order")
    children_complete: bool = Field(description="false: there may be more children")


@router.get("/prefixes", responses=refusals(404))
async def list_prefixes(
    context: Context,
    grant: Reader,
    *,
    namespace: QueriedNamespace,
    order: Annotated[Order, Query(description="`stored` is cheap, the others read every entry")] = Order.STORED,
    limit: Limit = 100,
    cursor: Cursor = "",
) -> PrefixList:
    """Boundaries of a namespace, sorted by hits, bytes, age or last use, or as they are stored."""
    page = await list_entries(context, namespace, limit=limit, cursor=cursor, order=order)
    return PrefixList(
        prefixes=_summaries(context, page.entries), next_cursor=page.next_cursor, is_complete=page.is_complete
    )


@router.get("/prefixes/{namespace}/{prefix}", responses=refusals(404))
async def show_prefix(
    context: Context,
    grant: Reader,
    namespace: NamedNamespace,
    prefix: PrefixText,
    children_limit: Annotated[
        int, Query(ge=0, le=1000, description="children at most; 0 avoids reading all entries")
    ] = 100,
) -> PrefixDetail:
    """One boundary: its groups and slices by tier, including this node's memory, its parents and its children."""
    wanted = prefix_hash(prefix)
    entry = await namespace.catalog.get(namespace.id, wanted, deadline=context.soon())
    keys = namespace.keys_of(wanted)
    in_memory = {
        key: size for key, size in zip(keys, await context.memory_sizes(keys), strict=True) if size is not None
    }
    if entry is None and not in_memory:
        raise Refused(404, "nothing is stored at this boundary", field="prefix", seen=prefix)
    if entry is None:
        entry = _only_in_memory(namespace, wanted)
    children = await _children(context, namespace, wanted, children_limit)
    names = context.operations.tier_names
    return PrefixDetail(
        **summary_of(entry, names, context.now_s()).model_dump(),
        namespace=namespace.id.hex(),
        leaving=[names[level] for level in sorted(entry.leaving) if level in names],
        groups=[_group(context, namespace, entry, group, in_memory) for group in range(len(namespace.layout.groups))],
        parents=_summaries(context, await _parents(context, namespace, entry)),
        children=_summaries(context, children.entries),
        children_complete=children.is_complete and children.next_cursor is None,
    )


@router.delete("/prefixes/{namespace}/{prefix}", responses=refusals(404, 409))
async def remove_prefix(
    context: Context,
    grant: Administrator,
    request: Request,
    *,
    namespace: NamedNamespace,
    prefix: PrefixText,
    confirm: Confirm = False,
) -> Deleted:
    """Delete the records of one boundary from all tiers and this node's memory. Without `confirm` nothing is deleted,
    and the response says what would be. Prompts that continue the boundary are then hit only up to it.
    """
    deleted = await delete_boundary(context, namespace, prefix_hash(prefix), confirm=confirm)
    audit_deletion(request, deleted)
    return deleted


def _summaries(context: AdminContext, entries: list[BoundaryEntry]) -> list[PrefixSummary]:
    names, now_s = context.operations.tier_names, context.now_s()
    return [summary_of(entry, names, now_s) for entry in entries]


def _only_in_memory(namespace: Namespace, prefix: PrefixHash) -> BoundaryEntry:
    """An entry for a boundary that is in this node's memory but not yet in the catalog."""
    nothing = tuple(tuple(0 for _ in namespace.layout.groups) for _ in Level)
    return BoundaryEntry(namespace.id, prefix, 0, None, 0, 0, 0, 0, nothing, nothing)


def _group(
    context: AdminContext, namespace: Namespace, entry: BoundaryEntry, group: int, in_memory: dict[RecordKey, int]
) -> GroupDetail:
    layout = namespace.layout.groups[group]
    held: dict[str, Held] = {}
    sizes = {key.slice: size for key, size in in_memory.items() if key.group == group}
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


async def _parents(context: AdminContext, namespace: Namespace, entry: BoundaryEntry) -> list[BoundaryEntry]:
    found: list[BoundaryEntry] = []
    parent = entry.parent
    while parent is not None and len(found) < _PARENTS_MAX:
        before = await namespace.catalog.get(namespace.id, parent, deadline=context.soon())
        if before is None:
            break
        found.append(before)
        parent = before.parent
    return found


async def _children(context: AdminContext, namespace: Namespace, prefix: PrefixHash, limit: int) -> Page:
    if not limit:
        return Page([], None, False)

    def is_child(table: EntryTable) -> Rows:
        return table.has_parent(prefix)

    return await list_entries(context, namespace, limit=limit, wanted=is_child)
