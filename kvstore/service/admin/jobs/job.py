"""A long operation as a value, as the interface returns it, and as it is stored beyond the service that runs it."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kvstore.catalog.coordination import FOREIGN_TEXT, TextStore
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.deadline import Deadline
from kvstore.service.authentication import Grant

_log = logging.getLogger(__name__)

JOB_EXAMPLE = "5f0c6b1d2e7a4819"
KEEP_S = 2.0
"""How often the progress of a running job is stored."""
_GONE_S = 60
"""A job of another service that was not stored for this long counts as interrupted. When it was stored is said by that
node's clock."""
_REMEMBERED_S = 7 * 86_400
_CALL_S = 2.0


class JobKind(Enum):
    """What a job does."""

    DELETION = "deletion"
    GC = "gc"
    VERIFY = "verify"
    REINDEX = "reindex"
    DRAIN = "drain"


class JobState(Enum):
    """The state of a job. All but the first are final."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"


class JobProgress(BaseModel):
    """How far a job is."""

    done: int = Field(description="how many are done", examples=[4096])
    total: int | None = Field(description="how many there are; null: not known")
    unit: str = Field(description="what is counted", examples=["boundaries"])


@dataclass(slots=True)
class Job:
    """One long operation, changed by the operation while it runs. `JobStatus` describes most fields.

    Attributes:
        id: 16 hex digits that cannot be guessed.
        who: The name of the token, for logs.
    """

    id: str
    kind: JobKind
    tenant: str | None
    about: Mapping[str, str]
    is_dry_run: bool
    created_s: int
    progress: JobProgress
    state: JobState = JobState.RUNNING
    ended_s: int | None = None
    report: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    who: str = ""

    def is_visible_to(self, grant: Grant) -> bool:
        """A tenant sees its own jobs, an operator all."""
        return grant.tenant is None or grant.tenant == self.tenant

    @property
    def again(self) -> str | None:
        """What starts an interrupted job again; `None` for others."""
        if self.state is not JobState.INTERRUPTED:
            return None
        match self.kind:
            case JobKind.GC:
                return f"kvstore gc{'' if self.is_dry_run else ' --yes'}"
            case JobKind.DELETION:  # its salt and age are not stored: never suggest a deletion without them
                confirm = "" if self.is_dry_run else "?confirm=true"
                return f"the same kvstore rm as before, or POST /v1/deletions{confirm} with the same body"
            case JobKind.REINDEX:
                return "POST /v1/reindex, or kvstore reindex"
            case JobKind.VERIFY:
                tier = self.about.get("tier", "")
                return f"POST /v1/tiers/{tier}/verify, or kvstore verify {tier} --by-service"
            case JobKind.DRAIN:
                return f"POST /v1/tiers/{self.about.get('tier', '')}/drain"


class JobStatus(BaseModel):
    """A long operation, running or ended."""

    model_config = ConfigDict(from_attributes=True, populate_by_name=True)

    job: str = Field(validation_alias="id", description="its id", examples=[JOB_EXAMPLE])
    kind: JobKind
    tenant: str | None = Field(description="the tenant that started it; null: an operator")
    about: dict[str, str] = Field(description="what it concerns", examples=[{"tier": "cold"}])
    is_dry_run: bool = Field(description="it changes nothing, and reports what it would do")
    state: JobState = Field(description="all but `running` are final; `interrupted`: its service ended before it")
    created_s: int = Field(description="when it was started, in seconds since the Unix epoch", examples=[1763800000])
    ended_s: int | None = Field(description="when it ended")
    progress: JobProgress
    report: dict[str, Any] = Field(description="what it found and did so far; docs/admin.md has the fields by kind")
    error: str | None = Field(description="why it failed")
    again: str | None = Field(description="for an interrupted job: the call that starts it again")


def status_of(job: Job) -> JobStatus:
    """The response for a job."""
    return JobStatus.model_validate(job)


class JobKeeper:
    """Stores jobs in a book while they run, and finds those whose service ended before them. A book that cannot be used
    is logged once, and jobs run without it.

    Args:
        place: Where this service listens. A stored job of the same place that is not ours is from an earlier run.
    """

    def __init__(self, book: TextStore, place: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._book = book
        self._place = place
        self._clock = clock
        self._warned = False

    async def write(self, job: Job) -> None:
        """Store the progress of a job."""
        values = {
            "kind": job.kind.value,
            "tenant": job.tenant,
            "about": dict(job.about),
            "is_dry_run": job.is_dry_run,
            "created_s": job.created_s,
            "done": job.progress.done,
            "total": job.progress.total,
            "unit": job.progress.unit,
            "who": job.who,
            "place": self._place,
            "seen_s": self._now_s(),
        }
        try:
            await self._book.write(job.id, json.dumps(values), deadline=self._deadline())
        except (Unavailable, InvalidRequest) as error:
            self._warn(error)

    async def remove(self, ids: Collection[str]) -> None:
        """Forget jobs."""
        try:
            await self._book.remove(ids, deadline=self._deadline())
        except Unavailable as error:
            self._warn(error)

    async def ended(self, job: Job) -> None:
        """Forget a job that has ended. If it is done, forget interrupted jobs with the same aim too."""
        try:
            replaced = [one.id for one in await self.interrupted({job.id}) if _aim(one) == _aim(job)]
        except Unavailable:
            replaced = []
        await self.remove([job.id, *(replaced if job.state is JobState.DONE else ())])

    async def interrupted(self, own: Collection[str]) -> list[Job]:
        """Interrupted jobs, the latest first.

        Args:
            own: Ids of this service's own jobs.

        Raises:
            Unavailable: The book does not answer.
        """
        texts = await self._book.read(deadline=self._deadline())
        found: list[Job] = []
        old: list[Job] = []
        for id_, text in texts.items():
            try:
                values = json.loads(text)
                job, place, seen_s = _job_of(id_, values), str(values["place"]), int(values["seen_s"])
            except FOREIGN_TEXT:
                continue
            is_ours = not self._book.is_shared or place == self._place
            if id_ in own or not (is_ours or seen_s + _GONE_S < self._now_s()):
                continue
            if not is_ours:  # by the other node's clock
                job.error = "its service was silent for a minute: it ended, or its node's clock is behind"
            (old if seen_s + _REMEMBERED_S < self._now_s() else found).append(job)
        if old:
            await self.remove([job.id for job in old])
        return sorted(found, key=lambda job: -job.created_s)

    def _deadline(self) -> Deadline:
        return Deadline.after(_CALL_S, self._clock)

    def _now_s(self) -> int:
        return self._clock.wall_ms() // 1000

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("a restart will forget the jobs that it interrupts: %s", error)


def _aim(job: Job) -> tuple[object, ...]:
    return job.kind, job.tenant, tuple(sorted(job.about.items())), job.is_dry_run


def _job_of(id_: str, values: Any) -> Job:
    tenant = values["tenant"]
    if tenant is not None and not isinstance(tenant, str):
        raise TypeError("a tenant is text, or null")
    return Job(
        id_,
        JobKind(values["kind"]),
        tenant,
        {str(name): str(value) for name, value in values["about"].items()},
        bool(values["is_dry_run"]),
        int(values["created_s"]),
        JobProgress(done=int(values["done"]), total=values["total"], unit=str(values["unit"])),
        state=JobState.INTERRUPTED,
        ended_s=int(values["seen_s"]),
        error="its service ended before it",
        who=str(values["who"]),
    )
