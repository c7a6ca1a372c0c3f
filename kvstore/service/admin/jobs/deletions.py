"""`/v1/deletions`: delete a namespace, a prefix with all that continues it, one user's prompts, or unused data."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Set
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from kvstore.catalog.base import NamespaceTotals
from kvstore.catalog.entry import BoundaryEntry
from kvstore.catalog.families import Hashes, family_of, hashes_of
from kvstore.model.keys import PlainChain, PrefixHash
from kvstore.runtime.deadline import Deadline
from kvstore.service.admin.access import Administrator
from kvstore.service.admin.catalog_access import Namespace
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.admin.jobs.board import Jobs
from kvstore.service.admin.jobs.deletion import (
    BOUNDARIES_AT_ONCE,
    WALK_S,
    delete_unpinned,
    note_what_lacks,
    nothing_deleted,
    parts_of,
    pinned_boundaries,
)
from kvstore.service.admin.jobs.job import Job, JobKind, JobStatus
from kvstore.service.admin.listing import steps_of
from kvstore.service.admin.models import (
    NAMESPACE_EXAMPLE,
    NAMESPACE_PATTERN,
    PREFIX_PATTERN,
    WHOLE_NUMBER,
    Confirm,
    TokenId,
    namespace_id,
    prefix_hash,
)
from kvstore.service.admin.problems import Refused, refusals

router = APIRouter(tags=["prefixes"])

_TOKENS_MAX = 8192
_UNUSED_S_MAX = 10 * 366 * 86_400

Seconds = Annotated[int, Field(strict=True, gt=0, le=_UNUSED_S_MAX), WHOLE_NUMBER]


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


@router.post("/deletions", status_code=202, responses=refusals(404, 413))
async def start_deletion(
    context: Context,
    grant: Administrator,
    *,
    jobs: Jobs,
    request: Request,
    deletion: NewDeletion,
    confirm: Confirm = False,
) -> JobStatus:
    """Delete many boundaries, except pinned ones, as a job (`/v1/jobs`). Without `confirm` nothing is deleted, and the
    job's report says what would be. A hash cannot be turned back into its salt, so one user's prompts are found by the
    salt together with the tokens that they begin with. If they begin in several ways, make a call for each.
    """
    if deletion.cache_salt is not None and deletion.token_ids is None:
        detail = "a hash is made of salt and tokens: add the tokens that the prompts begin with"
        raise Refused(422, detail, field="body.token_ids", expected="the first page of the prompts, or more")
    if deletion.prefix is not None and deletion.token_ids is not None:
        raise Refused(422, "a prefix and token ids exclude each other", field="body.prefix")
    found = await context.catalog.find(namespace_id(deletion.namespace), grant)
    request.state.audit = {"dry_run": not confirm, "namespace": deletion.namespace}

    async def work(job: Job) -> None:
        await _delete(context, found, deletion, job)

    about = {"namespace": deletion.namespace}
    if deletion.prefix is not None:
        about["prefix"] = deletion.prefix
    return jobs.start(JobKind.DELETION, grant, work, about=about, is_dry_run=not confirm, unit="boundaries")


async def _delete(context: AdminContext, namespace: Namespace, wanted: NewDeletion, job: Job) -> None:
    pinned = await pinned_boundaries(context, namespace, WALK_S)
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
        async for part in parts_of(namespace, context.soon(WALK_S)):
            yield part
        return
    family = await _family_of(namespace, roots, deadline=context.soon(WALK_S))
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


async def _family_of(namespace: Namespace, roots: Set[PrefixHash], *, deadline: Deadline) -> list[PrefixHash]:
    """The stored boundaries that are roots or continue one. Needs memory for each entry of the namespace: its hash,
    that of its parent, and an index. A boundary whose parent is unknown is not found; after a reindex parents are
    unknown until the boundaries are read.
    """
    prefixes: list[bytes] = []
    parents: list[Hashes] = []
    async for _, step in steps_of(namespace, deadline):
        rows = np.flatnonzero(step.table.present())
        prefixes += [bytes(step.prefixes[row]) for row in rows.tolist()]
        parents.append(step.table.parents()[rows])
    if not prefixes:
        return []
    wanted = hashes_of(sorted(roots))
    found = await asyncio.to_thread(family_of, wanted, hashes_of(prefixes), np.concatenate(parents))
    return list(dict.fromkeys(PrefixHash(prefixes[row]) for row in np.flatnonzero(found).tolist()))
