"""`/v1/jobs`: long operations, to watch and to cancel."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel, Field

from kvstore.service.admin.access import Administrator, Reader
from kvstore.service.admin.jobs.board import Jobs
from kvstore.service.admin.jobs.job import JOB_EXAMPLE, JobState, JobStatus, status_of
from kvstore.service.admin.problems import refusals

router = APIRouter(tags=["jobs"])

JobText = Annotated[
    str, Path(pattern="^[0-9a-f]{16}$", examples=[JOB_EXAMPLE], description="16 hex digits, as in the list")
]


class JobList(BaseModel):
    """Jobs, the latest first."""

    jobs: list[JobStatus]
    unread: str | None = Field(
        default=None,
        description="why interrupted jobs cannot be read now, so that the list lacks them; null: they were read",
    )


@router.get("/jobs")
async def list_jobs(jobs: Jobs, grant: Reader) -> JobList:
    """Running jobs, and those that ended within the last hour, the latest first. A tenant sees its own. Each service
    lists its own jobs, and for a week those that were interrupted when their service ended.
    """
    found, unread = await jobs.visible_to(grant)
    return JobList(jobs=[status_of(job) for job in found], unread=unread)


@router.get("/jobs/{job}", responses=refusals(404))
async def show_job(jobs: Jobs, grant: Reader, job: JobText) -> JobStatus:
    """One job, how far it is, and what it found so far."""
    return status_of(await jobs.find(job, grant))


@router.delete("/jobs/{job}", responses=refusals(404))
async def cancel_job(jobs: Jobs, grant: Administrator, request: Request, job: JobText) -> JobStatus:
    """End a running job; what it has done stays done. The response is the job as it ended. A job that has ended already
    is returned as it is; an interrupted one is returned a last time and then forgotten.
    """
    found = await jobs.find(job, grant)
    request.state.changed = found.state in (JobState.RUNNING, JobState.INTERRUPTED)
    await jobs.cancel(found)
    return status_of(found)
