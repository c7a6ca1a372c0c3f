"""`/v1/jobs`: long operations, to be watched and cancelled."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field

from kvstore.service.admin.access import Administrator, Reader
from kvstore.service.admin.context import Context
from kvstore.service.admin.job import Job, JobKind, JobState
from kvstore.service.admin.job_keeper import again_of
from kvstore.service.admin.problems import refusals

__all__ = ["JobStatus", "router", "status_of"]

router = APIRouter(tags=["jobs"])

JOB_EXAMPLE = "5f0c6b1d2e7a4819"
JobText = Annotated[
    str, Path(pattern="^[0-9a-f]{16}$", examples=[JOB_EXAMPLE], description="16 hex digits, as the list tells")
]


class JobProgress(BaseModel):
    """How far a job is."""

    done: int = Field(description="so much is done", examples=[4096])
    total: int | None = Field(description="of so much; null: not known")
    unit: str = Field(description="of what", examples=["boundaries"])


class JobStatus(BaseModel):
    """A long operation, running or ended."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "job": JOB_EXAMPLE,
                "kind": "gc",
                "tenant": None,
                "about": {"namespace": ""},
                "is_dry_run": True,
                "state": "running",
                "created_s": 1763800000,
                "ended_s": None,
                "progress": {"done": 4096, "total": 65536, "unit": "boundaries"},
                "report": {"retired": {"s3": {"num_boundaries": 12, "num_records": 96, "num_bytes": 25165824}}},
                "error": None,
                "again": None,
            }
        }
    )

    job: str = Field(description="its id")
    kind: JobKind
    tenant: str | None = Field(description="whose it is; null: the operators'")
    about: dict[str, str] = Field(description="what it was asked about")
    is_dry_run: bool = Field(description="it changes nothing, and tells what it would do")
    state: JobState = Field(description="all but `running` are final; `interrupted`: its service ended before it")
    created_s: int = Field(description="when it was asked for, in seconds since the Unix epoch")
    ended_s: int | None = Field(description="when it ended")
    progress: JobProgress
    report: dict[str, Any] = Field(description="what it found and did so far; docs/admin.md tells the fields by kind")
    error: str | None = Field(description="why it failed")
    again: str | None = Field(description="of an interrupted one: what starts it again")


class JobList(BaseModel):
    """Jobs of this service, the latest first."""

    jobs: list[JobStatus]


@router.get("/jobs", responses=refusals(401, 403, 422, 429, 503))
async def list_jobs(context: Context, grant: Reader) -> JobList:
    """Jobs that run, and those that ended within the last hour, the latest first; a tenant sees its own. Each service
    tells of its own jobs, and of those that were interrupted because the service that ran them ended, for a week.
    """
    return JobList(jobs=[status_of(job) for job in await context.jobs.seen_by(grant)])


@router.get("/jobs/{job}", responses=refusals(401, 403, 404, 422, 429, 503))
async def show_job(context: Context, grant: Reader, job: JobText) -> JobStatus:
    """One job, how far it is, and what it found so far."""
    return status_of(await context.jobs.find(job, grant))


@router.delete("/jobs/{job}", responses=refusals(401, 403, 404, 422, 429, 503))
async def cancel_job(context: Context, grant: Administrator, job: JobText) -> JobStatus:
    """End a job that runs; what it has done stays done. The answer is the job as it ended; one that had ended before
    is told as it is, and one that was interrupted is told a last time and then forgotten.
    """
    found = await context.jobs.find(job, grant)
    await context.jobs.cancel(found)
    return status_of(found)


def status_of(job: Job) -> JobStatus:
    """A job as it is told."""
    return JobStatus(
        job=job.id,
        kind=job.kind,
        tenant=job.tenant,
        about=dict(job.about),
        is_dry_run=job.is_dry_run,
        state=job.state,
        created_s=job.created_s,
        ended_s=job.ended_s,
        progress=JobProgress(done=job.done, total=job.total, unit=job.unit),
        report=dict(job.report),
        error=job.error,
        again=again_of(job),
    )
