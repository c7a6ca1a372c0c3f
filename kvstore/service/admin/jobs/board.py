"""The jobs of a service, while they run and for an hour after: bounded, visible, and ended with the service."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated

from fastapi import Depends, Request

from kvstore.errors import Closed, KVStoreError, Unavailable
from kvstore.runtime.background import Background
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.service.admin.jobs.job import KEEP_S, Job, JobKeeper, JobKind, JobProgress, JobState, JobStatus, status_of
from kvstore.service.admin.problems import Refused
from kvstore.service.authentication import Grant

_log = logging.getLogger(__name__)
_audit = logging.getLogger("kvstore.audit")

_RUNNING_MAX, _RUNNING_OF_TENANT_MAX = 6, 2
"""Jobs that run at a time, of all tenants and of each, since each reads much. Operators have as many as a tenant beside
these: no tenant keeps them out."""
_KEPT_OF_TENANT_MAX = 64
_KEPT_S = 3600
_ID_BYTES = 8
_BUSY_S = 5


Work = Callable[[Job], Awaitable[None]]
"""Does what a job is for, and updates its progress and report."""


class JobBoard:
    """All jobs of this service. Belongs to the administration's loop.

    Args:
        keeper: Stores jobs, so that the next service can list those that were interrupted; `None`: there is no place to
            store them.
    """

    def __init__(self, keeper: JobKeeper | None) -> None:
        self._keeper = keeper
        self._jobs: dict[str, Job] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stored: dict[str, Job] = {}  # those that may be in the keeper's book
        self._background = Background("administration jobs")

    def start(
        self,
        kind: JobKind,
        grant: Grant,
        work: Work,
        *,
        about: Mapping[str, str],
        is_dry_run: bool = False,
        unit: str = "records",
    ) -> JobStatus:
        """Run `work` in the background.

        Raises:
            Refused: 429: too many jobs run; 503: the service is stopping.
        """
        running = [job for job in self._jobs.values() if job.state is JobState.RUNNING]
        own = [job for job in running if job.tenant == grant.tenant]
        is_full = grant.tenant is not None and sum(job.tenant is not None for job in running) >= _RUNNING_MAX
        if is_full or len(own) >= _RUNNING_OF_TENANT_MAX:
            detail = f"{len(own)} of your jobs are running: wait for one, or cancel it"
            if len(own) < _RUNNING_OF_TENANT_MAX:
                detail = "too many jobs of other tenants are running: try again later"
            raise Refused(429, detail, headers={"Retry-After": str(_BUSY_S)})
        # not from a seeded generator, so that ids cannot be guessed
        id_, created_s = secrets.token_hex(_ID_BYTES), SYSTEM_CLOCK.wall_ms() // 1000
        progress = JobProgress(done=0, total=None, unit=unit)
        job = Job(id_, kind, grant.tenant, dict(about), is_dry_run, created_s, progress, who=grant.name)
        try:
            task = self._background.spawn(self._run(job, work), kind.value, is_awaited=True)
        except Closed as error:
            raise Refused(503, "the service is stopping", headers={"Retry-After": "1"}) from error
        self._jobs[job.id], self._tasks[job.id] = job, task
        task.add_done_callback(lambda _: self._ended(job))
        if self._keeper is not None:
            self._stored[job.id] = job
            self._background.spawn(self._keep(self._keeper, job, task), "keeping")
        return status_of(job)

    async def _keep(self, keeper: JobKeeper, job: Job, task: asyncio.Task[None]) -> None:
        while not task.done():
            await keeper.write(job)
            await asyncio.wait({task}, timeout=KEEP_S)
        await keeper.ended(job)
        del self._stored[job.id]

    async def _run(self, job: Job, work: Work) -> None:
        try:
            await work(job)
        except KVStoreError as error:
            job.state, job.error = JobState.FAILED, str(error)
        except Refused as refused:
            job.state, job.error = JobState.FAILED, refused.problem.detail
        except asyncio.CancelledError:
            job.state = JobState.CANCELLED
            raise
        except BaseException as error:
            job.state, job.error = JobState.FAILED, "internal error: see the log of the service"
            _log.error("a job of the administration failed job=%s kind=%s", job.id, job.kind.value, exc_info=error)
            raise
        else:
            job.state = JobState.DONE

    def _ended(self, job: Job) -> None:
        if job.state is JobState.RUNNING:  # cancelled before it began
            job.state = JobState.CANCELLED
        job.ended_s = SYSTEM_CLOCK.wall_ms() // 1000
        self._tasks.pop(job.id, None)
        values = job.id, job.kind.value, job.state.value, job.is_dry_run, job.progress.done, job.progress.unit, job.who
        _audit.info("job=%s kind=%s state=%s dry_run=%s done=%d unit=%s who=%r", *values)
        self._forget_old(job.tenant)

    def _forget_old(self, tenant: str | None) -> None:
        now_s = SYSTEM_CLOCK.wall_ms() // 1000
        ended = [job for job in self._jobs.values() if job.ended_s is not None]
        old = [job for job in ended if job.ended_s is not None and job.ended_s + _KEPT_S < now_s]
        own = [job for job in ended if job.tenant == tenant]
        for job in (*old, *own[: max(0, len(own) - _KEPT_OF_TENANT_MAX)]):
            self._jobs.pop(job.id, None)

    async def visible_to(self, grant: Grant) -> tuple[list[Job], str | None]:
        """The jobs that a token may see: this service's, the latest first, then interrupted ones. And why these cannot
        be read, if they cannot.
        """
        interrupted: list[Job] = []
        unread: str | None = None
        try:
            interrupted = await self._interrupted()
        except Unavailable as error:
            unread = str(error)
        jobs = [*reversed(list(self._jobs.values())), *interrupted]
        return [job for job in jobs if job.is_visible_to(grant)], unread

    async def find(self, id_: str, grant: Grant) -> Job:
        """A job that a token may see.

        Raises:
            Refused: 404: it does not exist for this token.
            Unavailable: It is not this service's, and interrupted jobs cannot be read.
        """
        job = self._jobs.get(id_) or next((one for one in await self._interrupted() if one.id == id_), None)
        if job is None or not job.is_visible_to(grant):
            detail = "no such job: the service that ran a job lists it for an hour after its end"
            raise Refused(404, detail, field="job", seen=id_)
        return job

    async def _interrupted(self) -> list[Job]:
        return await self._keeper.interrupted(self._jobs.keys()) if self._keeper is not None else []

    async def cancel(self, job: Job) -> None:
        """End a running job, and return when it has ended. Forget an interrupted one. Others stay as they are."""
        if job.state is JobState.INTERRUPTED and self._keeper is not None:
            await self._keeper.remove([job.id])
        task = self._tasks.get(job.id)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def aclose(self) -> None:
        """Cancel all jobs, wait until they have ended, and store how far they came; forget those that had ended by
        themselves. Idempotent.
        """
        running = {job.id for job in self._jobs.values() if job.state is JobState.RUNNING}
        await self._background.aclose()
        stored, self._stored = self._stored, {}
        if (keeper := self._keeper) is not None:
            await asyncio.gather(
                *(
                    keeper.write(job) if job.id in running and job.state is JobState.CANCELLED else keeper.ended(job)
                    for job in stored.values()
                )
            )


async def _jobs(request: Request) -> JobBoard:
    jobs = request.app.state.jobs
    assert isinstance(jobs, JobBoard)
    return jobs


Jobs = Annotated[JobBoard, Depends(_jobs)]
