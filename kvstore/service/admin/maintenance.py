"""Work on one tier: pause, resume and drain its write-back, verify its records, reindex it. For operators."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from enum import Enum
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, Field

from kvstore.catalog.base import LeaveReason, Removal
from kvstore.catalog.entry import Level
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.format.names import parse_name
from kvstore.model.keys import NamespaceId
from kvstore.service.admin.access import OperatorAdministrator
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.admin.job import Job, JobKind
from kvstore.service.admin.jobs import JobStatus, status_of
from kvstore.service.admin.parameters import Confirm
from kvstore.service.admin.problems import Refused, refusals
from kvstore.service.credentials import Grant
from kvstore.store.upkeep.reindexing import ReindexReport, reindex_level
from kvstore.store.upkeep.verification import ByteRate, Findings, count_records, verify_tier

__all__ = ["router"]

router = APIRouter(tags=["tiers"])

_LOOK_S = 0.1
_BYTES_PER_S = 100 << 20
_BYTES_PER_S_MAX = 1 << 40
_SHOWN_MAX = 100


class TierLevel(Enum):
    """A slower tier, by what it is for."""

    HOT = "hot"
    COLD = "cold"


LevelText = Annotated[TierLevel, Path(description="as `GET /v1/tiers` tells")]


class WriteBackState(BaseModel):
    """Whether this service writes to a tier in the background."""

    tier: str = Field(description="its name", examples=["s3"])
    level: TierLevel
    write_back: str = Field(description="`running` or `paused`", examples=["paused"])
    waiting_records: int = Field(description="records that wait to be written there", examples=[12])


@router.post("/tiers/{level}/pause", responses=refusals(401, 403, 404, 422, 429, 503))
async def pause_write_back(context: Context, grant: OperatorAdministrator, level: LevelText) -> WriteBackState:
    """Have this service write nothing more to a tier in the background, others' write-backs included. What waits is
    kept, as far as `write_back_bytes` goes; saves that wait for the tier, and reads, go on. A restart ends it.
    """
    return await _pause(context, level, is_paused=True)


@router.post("/tiers/{level}/resume", responses=refusals(401, 403, 404, 422, 429, 503))
async def resume_write_back(context: Context, grant: OperatorAdministrator, level: LevelText) -> WriteBackState:
    """Have this service write to a tier again."""
    return await _pause(context, level, is_paused=False)


@router.post("/tiers/{level}/drain", status_code=202, responses=refusals(401, 403, 404, 409, 422, 429, 503))
async def drain_tier(context: Context, grant: OperatorAdministrator, level: LevelText) -> JobStatus:
    """Wait, as a job, until everything that waits now to be written to a tier has been: before a machine or a tier is
    taken away. What is saved meanwhile is not waited for.
    """
    wanted = _level(context, level)
    num_waiting, mark, is_paused = await _left(context, wanted, None)
    if is_paused:
        raise Refused(409, "the write-back to this tier is paused: resume it first", field="level", seen=level.value)

    async def work(job: Job) -> None:
        job.total = num_left = num_waiting
        while num_left:
            await asyncio.sleep(_LOOK_S)
            num_left, _, is_paused = await _left(context, wanted, mark)
            job.done = num_waiting - num_left
            if is_paused and num_left:
                raise Unavailable("the write-back was paused meanwhile")
        job.report = {"num_records": num_waiting}

    return status_of(context.jobs.start(JobKind.DRAIN, grant, work, about={"tier": level.value}))


@router.post("/tiers/{level}/verify", status_code=202, responses=refusals(401, 403, 404, 422, 429, 503))
async def verify_records(
    context: Context,
    grant: OperatorAdministrator,
    level: LevelText,
    bytes_per_s: Annotated[
        int, Query(ge=1, le=_BYTES_PER_S_MAX, description="how fast; the tier has other users")
    ] = _BYTES_PER_S,
) -> JobStatus:
    """Check every record of a tier against its checksums, as a job, and put aside what is bad, as `kvstore verify`
    does: over connections of its own.
    """
    wanted = _level(context, level)

    async def work(job: Job) -> None:
        await _verify(context, grant, wanted, bytes_per_s, job)

    return status_of(context.jobs.start(JobKind.VERIFY, grant, work, about={"tier": level.value}, unit="bytes"))


@router.post("/tiers/{level}/reindex", status_code=202, responses=refusals(401, 403, 404, 422, 429, 503))
async def reindex_tier(
    context: Context, grant: OperatorAdministrator, request: Request, level: LevelText, confirm: Confirm = False
) -> JobStatus:
    """Make the catalog tell of what a tier holds, as a job. With `confirm` the catalog is marked as complete
    afterwards: do so with the last tier. This service remembers what was listed until the end; for large stores take
    `kvstore reindex`, which has memory of its own and goes on where it was interrupted.
    """
    wanted = _level(context, level)
    request.state.audit = {"marks_complete": confirm}

    async def work(job: Job) -> None:
        await _reindex(context, wanted, job, is_last=confirm)

    return status_of(context.jobs.start(JobKind.REINDEX, grant, work, about={"tier": level.value}))


def _level(context: AdminContext, level: TierLevel) -> Level:
    wanted = Level[level.name]
    if wanted not in context.operations.tier_names:
        raise Refused(404, "this service has no such tier", field="level", seen=level.value)
    return wanted


async def _left(context: AdminContext, level: Level, mark: int | None) -> tuple[int, int, bool]:
    return await context.bridge.call(lambda: context.operations.left_to_write(level, mark), deadline=context.soon())


async def _pause(context: AdminContext, level: TierLevel, *, is_paused: bool) -> WriteBackState:
    wanted = _level(context, level)
    await context.bridge.call(lambda: context.operations.pause(wanted, is_paused=is_paused), deadline=context.soon())
    num_waiting, _, is_paused = await _left(context, wanted, None)
    return WriteBackState(
        tier=context.operations.tier_names[wanted],
        level=level,
        write_back="paused" if is_paused else "running",
        waiting_records=num_waiting,
    )


async def _verify(context: AdminContext, grant: Grant, level: Level, bytes_per_s: int, job: Job) -> None:
    def tell(findings: Findings) -> None:
        job.done = findings.num_bytes
        job.report = {
            **{
                name: getattr(findings, name)
                for name in ("num_records", "num_bytes", "num_whole", "num_bad", "num_gone", "num_unread")
            },
            "bad": [asdict(bad) for bad in findings.bad[:_SHOWN_MAX]],
            "unread": findings.unread[:_SHOWN_MAX],
        }

    async with context.catalog.tier(level) as tier:
        _, job.total = await count_records(tier)
        findings = await verify_tier(tier, rate=ByteRate(bytes_per_s), progress=tell)
        tell(findings)
    await _tell_catalog(context, grant, level, findings)


async def _tell_catalog(context: AdminContext, grant: Grant, level: Level, findings: Findings) -> None:
    """What was put aside is not there any more."""
    by_namespace: dict[NamespaceId, list[Removal]] = {}
    for bad in findings.bad:
        key = parse_name(bad.name)
        by_namespace.setdefault(key.namespace, []).append(Removal(key, level, None, LeaveReason.CORRUPT))
    for namespace, removals in by_namespace.items():
        try:
            await context.catalog.find(namespace, grant, deadline=context.soon())
            catalog = await context.catalog.open()
            await catalog.remove(removals, deadline=context.soon())
        except (Refused, Unavailable, InvalidRequest):
            continue  # whoever reads one finds out, and tells it
    context.catalog.forget_totals()


async def _reindex(context: AdminContext, level: Level, job: Job, *, is_last: bool) -> None:
    def tell(report: ReindexReport) -> None:
        job.done, job.report = report.num_records, report.as_json()

    catalog = await context.catalog.open()
    async with context.catalog.tier(level) as tier:
        tell(await reindex_level(catalog, tier, level, clock=context.clock, tell=tell))
    if is_last:
        await catalog.set_complete(True, deadline=context.soon())
    context.catalog.forget_totals()
