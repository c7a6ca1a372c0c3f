"""Remembers jobs beyond the service that runs them: which were cut short, how far they came, what starts them again."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from typing import Any

from kvstore.catalog.coordination import TextStore
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.deadline import Deadline
from kvstore.service.admin.job import Job, JobKind, JobState

__all__ = ["KEEP_S", "JobKeeper", "again_of"]

_log = logging.getLogger(__name__)

KEEP_S = 2.0
"""A job's progress is written so often: a crash loses so much of it."""
_GONE_S = 60
"""Another service's job that was not written for so long has nobody who works on it."""
_REMEMBERED_S = 7 * 86_400
_CALL_S = 2.0


class JobKeeper:
    """Writes jobs into a book while they run, and reads those whose service is gone. The book is not needed: what it
    cannot do is a line in the log, and jobs go on.

    Args:
        book: Where they stand.
        place: Where this service listens: what stands there from the same place and is not ours is an earlier life's.
        clock: For times.
    """

    def __init__(self, book: TextStore, place: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._book = book
        self._place = place
        self._clock = clock
        self._warned = False

    async def write(self, job: Job) -> None:
        """Put down how far a job is."""
        values = {
            "kind": job.kind.value,
            "tenant": job.tenant,
            "about": dict(job.about),
            "is_dry_run": job.is_dry_run,
            "created_s": job.created_s,
            "done": job.done,
            "total": job.total,
            "unit": job.unit,
            "who": job.who,
            "place": self._place,
            "seen_s": self._now_s(),
        }
        try:
            await self._book.write(job.id, json.dumps(values), deadline=self._soon())
        except (Unavailable, InvalidRequest) as error:
            self._warn(error)

    async def remove(self, ids: Collection[str]) -> None:
        """Forget some."""
        try:
            await self._book.remove(ids, deadline=self._soon())
        except Unavailable as error:
            self._warn(error)

    async def ended(self, job: Job) -> None:
        """Forget a job that has ended; when it is done, also those that it has made up for."""
        made_up = [one.id for one in await self.interrupted({job.id}) if _aim(one) == _aim(job)]
        await self.remove([job.id, *(made_up if job.state is JobState.DONE else ())])

    async def interrupted(self, own: Collection[str]) -> list[Job]:
        """Jobs that were cut short, the latest first; nothing where the book does not answer.

        Args:
            own: Ids of this service's own jobs.
        """
        try:
            texts = await self._book.read(deadline=self._soon())
        except Unavailable as error:
            self._warn(error)
            return []
        found: list[Job] = []
        old: list[Job] = []
        for id_, text in texts.items():
            try:
                values = json.loads(text)
                job, place, seen_s = _job_of(id_, values), str(values["place"]), int(values["seen_s"])
            except (ValueError, TypeError, KeyError):
                continue  # from a later release
            is_ours = not self._book.is_shared or place == self._place
            if id_ in own or not (is_ours or seen_s + _GONE_S < self._now_s()):
                continue
            (old if seen_s + _REMEMBERED_S < self._now_s() else found).append(job)
        if old:
            await self.remove([job.id for job in old])
        return sorted(found, key=lambda job: -job.created_s)

    def _soon(self) -> Deadline:
        return Deadline.after(_CALL_S, self._clock)

    def _now_s(self) -> int:
        return self._clock.wall_ms() // 1000

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("jobs are not remembered beyond a restart: %s", error)


def _aim(job: Job) -> tuple[object, ...]:
    return job.kind, job.tenant, tuple(sorted(job.about.items())), job.is_dry_run


def _job_of(id_: str, values: Any) -> Job:
    job = Job(
        id_,
        JobKind(values["kind"]),
        values["tenant"],
        {str(name): str(value) for name, value in values["about"].items()},
        bool(values["is_dry_run"]),
        int(values["created_s"]),
    )
    job.state, job.ended_s = JobState.INTERRUPTED, int(values["seen_s"])
    job.done, job.total, job.unit = int(values["done"]), values["total"], str(values["unit"])
    job.who, job.error = str(values["who"]), "its service ended before it"
    return job


def again_of(job: Job) -> str | None:
    """What starts an interrupted job again; `None` for others."""
    if job.state is not JobState.INTERRUPTED:
        return None
    confirm = "" if job.is_dry_run else "?confirm=true"
    match job.kind:
        case JobKind.GC:
            return f"kvstore gc{'' if job.is_dry_run else ' --yes'}"
        case JobKind.DELETION:  # what it was narrowed to, a salt or an age, is not remembered: never tell a wider one
            return f"the same kvstore rm as before, or POST /v1/deletions{confirm} with the same body"
        case JobKind.REINDEX:
            return f"POST /v1/tiers/{job.about.get('tier', '')}/reindex, or kvstore reindex"
        case JobKind.VERIFY | JobKind.DRAIN:
            return f"POST /v1/tiers/{job.about.get('tier', '')}/{job.kind.value}"
