"""Long operations while they run and for a while after: bounded, watched, cancelled, ended with the service."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping

from kvstore.errors import Closed, KVStoreError
from kvstore.runtime.background import Background
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.service.admin.job import Job, JobKind, JobState
from kvstore.service.admin.job_keeper import KEEP_S, JobKeeper
from kvstore.service.admin.problems import Refused
from kvstore.service.authentication import Grant

__all__ = ["JobBoard", "Work"]

_log = logging.getLogger(__name__)
_audit = logging.getLogger("kvstore.audit")

_RUNNING_MAX, _RUNNING_OF_ONE_MAX = 6, 2
"""Jobs that run at a time, and of those one tenant's (or the operators'): each walks over much."""
_KEPT_OF_ONE_MAX = 64
_KEPT_S = 3600
_ID_BYTES = 8
_BUSY_S = 5


Work = Callable[[Job], Awaitable[None]]
"""Does what a job is about, and writes progress and report into it."""


class JobBoard:
    """All jobs of this service. Belongs to the administration's loop; of those that a restart cuts short the keeper
    tells the next service.

    Args:
        clock: For times.
        keeper: Remembers them; `None`: there is nowhere to.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK, keeper: JobKeeper | None = None) -> None:
        self._clock = clock
        self._keeper = keeper
        self._jobs: dict[str, Job] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
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
    ) -> Job:
        """Have `work` done in the background.

        Raises:
            Refused: 429: as many run as may; 503: the service is stopping.
        """
        running = [job for job in self._jobs.values() if job.state is JobState.RUNNING]
        own = [job for job in running if job.tenant == grant.tenant]
        if len(running) >= _RUNNING_MAX or len(own) >= _RUNNING_OF_ONE_MAX:
            detail = f"{len(own)} of your jobs run, and {len(running)} in all: wait for one, or cancel it"
            raise Refused(429, detail, headers={"Retry-After": str(_BUSY_S)})
        # not from a seeded generator: whoever could guess the name of another's job learns nothing, yet need not try
        job = Job(
            secrets.token_hex(_ID_BYTES), kind, grant.tenant, dict(about), is_dry_run, self._clock.wall_ms() // 1000
        )
        job.unit, job.who = unit, grant.name
        try:
            task = self._background.spawn(self._run(job, work), kind.value, is_awaited=True)
        except Closed as error:
            raise Refused(503, "the service is stopping", headers={"Retry-After": "1"}) from error
        self._jobs[job.id], self._tasks[job.id] = job, task
        task.add_done_callback(lambda _: self._ended(job))
        if self._keeper is not None:
            self._background.spawn(self._keep(self._keeper, job, task), "keeping")
        return job

    @staticmethod
    async def _keep(keeper: JobKeeper, job: Job, task: asyncio.Task[None]) -> None:
        while not task.done():
            await keeper.write(job)
            await asyncio.wait({task}, timeout=KEEP_S)
        await keeper.ended(job)

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
            job.state, job.error = JobState.FAILED, "the service failed: its log says why"
            _log.error("a job of the administration failed job=%s kind=%s", job.id, job.kind.value, exc_info=error)
            raise
        else:
            job.state = JobState.DONE

    def _ended(self, job: Job) -> None:
        if job.state is JobState.RUNNING:  # cancelled before it began
            job.state = JobState.CANCELLED
        job.ended_s = self._clock.wall_ms() // 1000
        self._tasks.pop(job.id, None)
        values = (job.id, job.kind.value, job.state.value, job.is_dry_run, job.done, job.unit, job.who)
        _audit.info("job=%s kind=%s state=%s dry_run=%s done=%d unit=%s who=%r", *values)
        self._forget_old(job.tenant)

    def _forget_old(self, tenant: str | None) -> None:
        now_s = self._clock.wall_ms() // 1000
        ended = [job for job in self._jobs.values() if job.ended_s is not None]
        old = [job for job in ended if job.ended_s is not None and job.ended_s + _KEPT_S < now_s]
        own = [job for job in ended if job.tenant == tenant]
        for job in (*old, *own[: max(0, len(own) - _KEPT_OF_ONE_MAX)]):
            self._jobs.pop(job.id, None)

    async def seen_by(self, grant: Grant) -> list[Job]:
        """The jobs that a token may see: this service's, the latest first, then those that were cut short."""
        return [
            job for job in [*reversed(list(self._jobs.values())), *await self._cut_short()] if job.is_seen_by(grant)
        ]

    async def find(self, id_: str, grant: Grant) -> Job:
        """A job that a token may see. Another's is not there.

        Raises:
            Refused: 404: it is not there.
        """
        job = self._jobs.get(id_) or next((one for one in await self._cut_short() if one.id == id_), None)
        if job is None or not job.is_seen_by(grant):
            raise Refused(
                404,
                "no such job: ended ones are kept for an hour, and by the service that ran them",
                field="job",
                seen=id_,
            )
        return job

    async def _cut_short(self) -> list[Job]:
        return await self._keeper.interrupted(self._jobs.keys()) if self._keeper is not None else []

    async def cancel(self, job: Job) -> None:
        """End a job that runs, and return when it has; one that has ended stays as it is, one that was cut short is
        forgotten.
        """
        if job.state is JobState.INTERRUPTED and self._keeper is not None:
            await self._keeper.remove([job.id])
        task = self._tasks.get(job.id)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def aclose(self) -> None:
        """Cancel all, and wait until they have ended; how far they came is remembered. Idempotent."""
        cut_short = [job for job in self._jobs.values() if job.state is JobState.RUNNING]
        await self._background.aclose()
        if self._keeper is not None:
            keeper = self._keeper
            await asyncio.gather(*(keeper.write(job) for job in cut_short if job.state is JobState.CANCELLED))
