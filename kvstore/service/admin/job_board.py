"""Long operations while they run and for a while after: bounded, watched, cancelled, ended with the service."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvstore.errors import Closed, KVStoreError
from kvstore.runtime.background import Background
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.service.admin.problems import Refused
from kvstore.service.credentials import Grant

__all__ = ["Job", "JobBoard", "JobKind", "JobState"]

_log = logging.getLogger(__name__)
_audit = logging.getLogger("kvstore.audit")

_RUNNING_MAX, _RUNNING_OF_ONE_MAX = 6, 2
"""Jobs that run at a time, and of those one tenant's (or the operators'): each walks over much."""
_KEPT_OF_ONE_MAX = 64
_KEPT_S = 3600
_ID_BYTES = 8
_BUSY_S = 5


class JobKind(Enum):
    """What a job does."""

    DELETION = "deletion"
    GC = "gc"
    VERIFY = "verify"
    REINDEX = "reindex"
    DRAIN = "drain"


class JobState(Enum):
    """Where a job is. All but the first are final."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class Job:
    """One long operation, also while it works.

    Attributes:
        id: 16 hex digits that nobody can guess.
        kind: What it does.
        tenant: Whose it is; `None`: the operators'.
        about: What it is about, like `{"tier": "cold"}`.
        is_dry_run: It only tells what it would do.
        created_s: When it was asked for, in seconds since the Unix epoch.
        state: Where it is.
        ended_s: When it ended.
        done: How far it is, in `unit`.
        total: How far it goes; `None`: not known.
        unit: What is counted.
        report: What it found and did so far; when it has ended, all of it.
        error: Why it failed.
        who: What logs call whoever asked for it.
    """

    id: str
    kind: JobKind
    tenant: str | None
    about: Mapping[str, str]
    is_dry_run: bool
    created_s: int
    state: JobState = JobState.RUNNING
    ended_s: int | None = None
    done: int = 0
    total: int | None = None
    unit: str = "records"
    report: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    who: str = ""

    def is_seen_by(self, grant: Grant) -> bool:
        """Whether it is there for a token: its own tenant's, and every operator's."""
        return grant.tenant is None or grant.tenant == self.tenant


Work = Callable[[Job], Awaitable[None]]
"""Does what a job is about, and writes progress and report into it."""


class JobBoard:
    """All jobs of this service. Belongs to the administration's loop; a restart forgets them.

    Args:
        clock: For times.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
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
        return job

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

    def seen_by(self, grant: Grant) -> Iterator[Job]:
        """The jobs that a token may see, the latest first."""
        return (job for job in reversed(list(self._jobs.values())) if job.is_seen_by(grant))

    def find(self, id_: str, grant: Grant) -> Job:
        """A job that a token may see. Another's is not there.

        Raises:
            Refused: 404: it is not there.
        """
        job = self._jobs.get(id_)
        if job is None or not job.is_seen_by(grant):
            raise Refused(
                404, "no such job: ended ones are kept for an hour, a restart forgets all", field="job", seen=id_
            )
        return job

    async def cancel(self, job: Job) -> None:
        """End a job that runs, and return when it has; one that has ended stays as it is."""
        task = self._tasks.get(job.id)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def aclose(self) -> None:
        """Cancel all, and wait until they have ended. Idempotent."""
        await self._background.aclose()
