"""One long operation as a value: what it does, where it is, who may see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvstore.service.authentication import Grant

__all__ = ["Job", "JobKind", "JobState"]


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
    INTERRUPTED = "interrupted"


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
