"""`/v1/deletions`: many boundaries at once: a namespace, what goes on from a boundary, one user's, the unused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from kvstore.catalog.base import BoundaryEntry, Catalog, NamespaceTotals
from kvstore.model.keys import PlainChain, PrefixHash
from kvstore.service.admin.access import Administrator
from kvstore.service.admin.catalog_access import Namespace
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.admin.deletion import Deleted, count_entry, delete_entries
from kvstore.service.admin.family import family_of
from kvstore.service.admin.job import Job, JobKind
from kvstore.service.admin.jobs import JobStatus, status_of
from kvstore.service.admin.listing import entry_at, steps_of
from kvstore.service.admin.parameters import (
    FROM_WHOLE,
    NAMESPACE_EXAMPLE,
    NAMESPACE_PATTERN,
    PREFIX_PATTERN,
    Confirm,
    namespace_id,
    prefix_hash,
)
from kvstore.service.admin.pinned import protected_by_pins
from kvstore.service.admin.problems import Refused, refusals

__all__ = ["WALK_S", "delete_part", "router"]

router = APIRouter(tags=["prefixes"])

WALK_S = 86_400.0
"""A job walks for as long as it takes; whoever has enough of it cancels it."""
_TOKENS_MAX = 8192
_BOUNDARIES_AT_ONCE = 64
_UNUSED_S_MAX = 10 * 366 * 86_400

TokenId = Annotated[int, Field(strict=True, ge=0, lt=1 << 32), FROM_WHOLE]
Seconds = Annotated[int, Field(strict=True, gt=0, le=_UNUSED_S_MAX), FROM_WHOLE]


class NewDeletion(BaseModel):
    """What to delete: all of a namespace, unless more is said."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "example": {"namespace": NAMESPACE_EXAMPLE, "token_ids": list(range(1, 33)), "cache_salt": "user-17"}
        },
    )

    namespace: str = Field(pattern=NAMESPACE_PATTERN)
    prefix: str | None = Field(
        default=None, pattern=PREFIX_PATTERN, description="this boundary, and all that go on from it"
    )
    token_ids: list[TokenId] | None = Field(
        default=None,
        max_length=_TOKENS_MAX,
        description="prompts that begin like this, and all that go on from them; the first page is enough",
    )
    cache_salt: str | None = Field(
        default=None, max_length=4096, description="of those prompts: one user's alone; needs `token_ids`"
    )
    unused_s: Seconds | None = Field(default=None, description="only what was neither stored nor read for so long")


@router.post("/deletions", status_code=202, responses=refusals(401, 403, 404, 413, 422, 429, 503))
async def start_deletion(
    context: Context, grant: Administrator, request: Request, deletion: NewDeletion, confirm: Confirm = False
) -> JobStatus:
    """Delete many boundaries, but for what pins protect, as a job (`/v1/jobs`). Without `confirm` nothing is deleted,
    and the job's report tells what would be. A hash cannot be turned back into its salt: one user's prompts are found
    by the salt together with the tokens that they begin with, once for each such beginning.
    """
    if deletion.cache_salt is not None and deletion.token_ids is None:
        detail = (
            "a salt alone finds nothing, since hashes are made of salt and tokens: name what the prompts begin with"
        )
        raise Refused(422, detail, field="body.token_ids", expected="the first page of the prompts, or more")
    if deletion.prefix is not None and deletion.token_ids is not None:
        raise Refused(422, "either a prefix or token ids", field="body.prefix")
    found = await context.catalog.find(namespace_id(deletion.namespace), grant, deadline=context.soon())
    request.state.audit = {"dry_run": not confirm, "namespace": deletion.namespace}

    async def work(job: Job) -> None:
        await _delete(context, found, deletion, job)

    about = {"namespace": deletion.namespace}
    if deletion.prefix is not None:
        about["prefix"] = deletion.prefix
    job = context.jobs.start(JobKind.DELETION, grant, work, about=about, is_dry_run=not confirm, unit="boundaries")
    return status_of(job)


async def _delete(context: AdminContext, namespace: Namespace, wanted: NewDeletion, job: Job) -> None:
    catalog = await context.catalog.open()
    protected = await protected_by_pins(context, catalog, namespace, walk_s=WALK_S)
    used_until_s = context.now_s() - wanted.unused_s if wanted.unused_s is not None else None
    deleted = Deleted(is_dry_run=job.is_dry_run, is_complete=False, num_pinned=0, by_tier={})
    job.report = deleted.model_dump()
    try:
        async for part in _parts(context, catalog, namespace, wanted, job):
            old = [entry for entry in part if used_until_s is None or entry.last_use_s <= used_until_s]
            await delete_part(context, catalog, old, protected, deleted)
            job.done += len(part)
            job.report = deleted.model_dump()
        deleted.is_complete = True
    finally:
        context.catalog.forget_totals()
        job.report = deleted.model_dump()


async def delete_part(
    context: AdminContext,
    catalog: Catalog,
    entries: Sequence[BoundaryEntry],
    protected: set[PrefixHash],
    deleted: Deleted,
) -> None:
    """Delete some boundaries but for what pins protect, or only count them in a dry run.

    Raises:
        Unavailable: A tier or the catalog does not answer; these boundaries are not counted.
    """
    free = [entry for entry in entries if entry.prefix not in protected]
    if not deleted.is_dry_run:
        await delete_entries(context, catalog, free)
    deleted.num_pinned += len(entries) - len(free)
    for entry in free:
        count_entry(context, deleted, entry)


async def _parts(
    context: AdminContext, catalog: Catalog, namespace: Namespace, wanted: NewDeletion, job: Job
) -> AsyncIterator[list[BoundaryEntry]]:
    """What is meant, a bounded piece at a time; tells the job how much it is."""
    roots = _roots(context, namespace, wanted)
    if roots is None:
        totals = (await context.catalog.totals(deadline=context.soon())).get(namespace.id, NamespaceTotals())
        job.total = totals.num_boundaries
        async for _, step in steps_of(catalog, namespace.id, "", context.soon(WALK_S)):
            rows = np.flatnonzero(step.table.present()).tolist()
            for start in range(0, len(rows), _BOUNDARIES_AT_ONCE):
                yield [entry_at(namespace.id, step, row) for row in rows[start : start + _BOUNDARIES_AT_ONCE]]
        return
    family = await family_of(catalog, namespace.id, roots, deadline=context.soon(WALK_S))
    job.total = len(family)
    for start in range(0, len(family), _BOUNDARIES_AT_ONCE):
        found = [
            await catalog.get(namespace.id, prefix, deadline=context.soon())
            for prefix in family[start : start + _BOUNDARIES_AT_ONCE]
        ]
        yield [entry for entry in found if entry is not None]


def _roots(context: AdminContext, namespace: Namespace, wanted: NewDeletion) -> set[PrefixHash] | None:
    """Where to begin, under the names that records have with each key; `None`: everywhere."""
    if wanted.prefix is not None:
        return {prefix_hash(wanted.prefix)}
    if wanted.token_ids is None:
        return None
    boundaries = PlainChain(wanted.cache_salt).extend(wanted.token_ids)
    page_tokens = namespace.layout.page_tokens
    # of a prompt that fills a page, what is below its end is another prompt's as well
    pages = [boundary.prefix for boundary in boundaries if boundary.tokens % page_tokens == 0]
    plain = pages or [boundary.prefix for boundary in boundaries]
    return {
        prefix if generation is None else generation.name_of(prefix)
        for generation in context.generations(namespace.description.tenant)
        for prefix in plain
    }
