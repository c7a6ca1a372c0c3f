"""Work of operators on the slower tiers: pause, resume and drain a write-back, verify records, reindex the catalog."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from enum import Enum
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, Field

from kvstore.catalog.base import LeaveReason, Removal
from kvstore.catalog.entry import Level
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.format.names import parse_name
from kvstore.model.keys import NamespaceId
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.service.admin.access import OperatorAdministrator
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.admin.jobs.board import Jobs
from kvstore.service.admin.jobs.job import Job, JobKind, JobStatus
from kvstore.service.admin.problems import Refused, refusals
from kvstore.service.authentication import Grant
from kvstore.store.upkeep.reindexing import ReindexReport, reindex_store
from kvstore.store.upkeep.verification import BadRecord, ByteRate, Findings, count_records, verify_tier

router = APIRouter(tags=["tiers"])

_DRAIN_POLL_S = 0.1
_BYTES_PER_S = 100 << 20
_BYTES_PER_S_MAX = 1 << 40
_SHOWN_MAX = 100


class TierLevel(Enum):
    """A slower tier, by its purpose."""

    HOT = "hot"
    COLD = "cold"


LevelText = Annotated[TierLevel, Path(description="as in `GET /v1/tiers`")]


class WriteBackState(BaseModel):
    """Whether this service writes to a tier in the background."""

    tier: str = Field(description="its name", examples=["s3"])
    level: TierLevel
    write_back: str = Field(description="`running` or `paused`", examples=["paused"])
    waiting_records: int = Field(description="records that wait to be written there", examples=[12])


@router.post("/tiers/{level}/pause", responses=refusals(404))
async def pause_write_back(
    context: Context, grant: OperatorAdministrator, request: Request, level: LevelText
) -> WriteBackState:
    """Stop this service's background writes to a tier, also those for services that have ended. Waiting records are
    kept in memory; saves that wait for the tier, and reads, continue. A restart resumes.
    """
    return await _pause(context, request, level, is_paused=True)


@router.post("/tiers/{level}/resume", responses=refusals(404))
async def resume_write_back(
    context: Context, grant: OperatorAdministrator, request: Request, level: LevelText
) -> WriteBackState:
    """Resume this service's background writes to a tier."""
    return await _pause(context, request, level, is_paused=False)


@router.post("/tiers/{level}/drain", status_code=202, responses=refusals(404, 409))
async def drain_tier(context: Context, grant: OperatorAdministrator, jobs: Jobs, level: LevelText) -> JobStatus:
    """Wait, as a job, until everything that waits now to be written to a tier is written, for example before a machine
    or a tier is removed. Later saves are not waited for.
    """
    wanted = _level(context, level)
    num_waiting, mark, is_paused = await _waiting(context, wanted)
    if is_paused:
        raise Refused(409, "the write-back to this tier is paused: resume it first", field="level", seen=level.value)

    async def work(job: Job) -> None:
        job.progress.total = num_left = num_waiting
        while num_left:
            await asyncio.sleep(_DRAIN_POLL_S)
            num_left, _, is_paused = await _waiting(context, wanted, mark)
            job.progress.done = num_waiting - num_left
            if is_paused and num_left:
                raise Unavailable("the write-back was paused during the drain")
        job.report = {"num_records": num_waiting}

    return jobs.start(JobKind.DRAIN, grant, work, about={"tier": level.value})


@router.post("/tiers/{level}/verify", status_code=202, responses=refusals(404))
async def verify_records(
    context: Context,
    grant: OperatorAdministrator,
    jobs: Jobs,
    level: LevelText,
    bytes_per_s: Annotated[
        int, Query(ge=1, le=_BYTES_PER_S_MAX, description="a limit, since the tier has other users")
    ] = _BYTES_PER_S,
) -> JobStatus:
    """Check every record of a tier against its checksums, as a job, and quarantine corrupt ones, like `kvstore verify`.
    Uses connections of its own.
    """
    wanted = _level(context, level)
    work = partial(_verify, context, grant, wanted, bytes_per_s)
    return jobs.start(JobKind.VERIFY, grant, work, about={"tier": level.value}, unit="bytes")


@router.post("/reindex", status_code=202)
async def reindex(context: Context, grant: OperatorAdministrator, jobs: Jobs) -> JobStatus:
    """Make the catalog equal to what the slower tiers hold and mark it complete, as a job. This service remembers what
    it listed until the end. For a large store use `kvstore reindex`, which has memory of its own.
    """
    return jobs.start(JobKind.REINDEX, grant, partial(_reindex, context), about={})


def _level(context: AdminContext, level: TierLevel) -> Level:
    wanted = Level[level.name]
    if wanted not in context.operations.tier_names:
        raise Refused(404, "this service has no such tier", field="level", seen=level.value)
    return wanted


async def _waiting(context: AdminContext, level: Level, mark: int | None = None) -> tuple[int, int, bool]:
    return await context.data_loop.call_short(lambda: context.operations.left_to_write(level, mark))


async def _pause(context: AdminContext, request: Request, level: TierLevel, *, is_paused: bool) -> WriteBackState:
    wanted = _level(context, level)
    request.state.changed = (await _waiting(context, wanted))[2] != is_paused
    await context.data_loop.call_short(lambda: context.operations.pause(wanted, is_paused=is_paused))
    num_waiting, _, is_paused = await _waiting(context, wanted)
    return WriteBackState(
        tier=context.operations.tier_names[wanted],
        level=level,
        write_back="paused" if is_paused else "running",
        waiting_records=num_waiting,
    )


async def _verify(context: AdminContext, grant: Grant, level: Level, bytes_per_s: int, job: Job) -> None:
    def report(findings: Findings) -> None:
        job.progress.done = findings.num_bytes
        shown = replace(findings, bad=findings.bad[:_SHOWN_MAX], unread=findings.unread[:_SHOWN_MAX])
        job.report = asdict(shown)

    async with context.catalog.tier(level) as tier:
        _, job.progress.total = await count_records(tier)
        findings = await verify_tier(tier, rate=ByteRate(bytes_per_s), progress=report)
        report(findings)
    await _remove_from_catalog(context, grant, level, findings.bad)


async def _remove_from_catalog(context: AdminContext, grant: Grant, level: Level, bad: list[BadRecord]) -> None:
    """Remove quarantined records from the catalog. Where that fails, the next reader of a record removes it."""
    by_namespace: dict[NamespaceId, list[Removal]] = {}
    for one in bad:
        key = parse_name(one.name)
        by_namespace.setdefault(key.namespace, []).append(Removal(key, level, None, LeaveReason.CORRUPT))
    for namespace, removals in by_namespace.items():
        try:
            found = await context.catalog.find(namespace, grant)
            await found.catalog.remove(removals, deadline=context.soon())
        except (Refused, Unavailable, InvalidRequest):
            continue
    context.catalog.forget_totals()


async def _reindex(context: AdminContext, job: Job) -> None:
    def show(level: Level, report: ReindexReport) -> None:
        job.report[level.name.lower()] = asdict(report)
        job.progress.done = sum(one["num_records"] for one in job.report.values())

    catalog = await context.catalog.open()
    async with AsyncExitStack() as stack:
        levels = [level for level in context.operations.tier_names if level is not None]
        tiers = {level: await stack.enter_async_context(context.catalog.tier(level)) for level in levels}
        await reindex_store(catalog, tiers, clock=SYSTEM_CLOCK, progress=show)
    context.catalog.forget_totals()
