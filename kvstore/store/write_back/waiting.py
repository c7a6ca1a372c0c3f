"""What waits in the memory tier for room in a queue: tenants take turns, and of each the oldest comes first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

from kvstore.model.keys import RecordKey


class Job(Protocol):
    """What waits."""

    key: RecordKey
    tenant: str


J = TypeVar("J", bound=Job)


class Waiting(Generic[J]):
    """Jobs by key. One tenant's long backlog delays another's job by one job of each tenant."""

    def __init__(self) -> None:
        self._jobs: dict[RecordKey, J] = {}
        self._by_tenant: OrderedDict[str, OrderedDict[RecordKey, J]] = OrderedDict()  # the one to come next first

    def __len__(self) -> int:
        return len(self._jobs)

    def get(self, key: RecordKey) -> J | None:
        """The job of a key; `None`: it does not wait."""
        return self._jobs.get(key)

    def add(self, job: J) -> None:
        """Have a job wait, whose key does not wait yet."""
        self._jobs[job.key] = job
        self._by_tenant.setdefault(job.tenant, OrderedDict())[job.key] = job

    def first(self) -> J:
        """The job whose turn it is; there must be one."""
        of_tenant = next(iter(self._by_tenant.values()))
        return next(iter(of_tenant.values()))

    def remove(self, job: J, *, is_its_turn: bool = False) -> None:
        """Take a job out.

        Args:
            is_its_turn: It is queued now, and the next turn is another tenant's.
        """
        del self._jobs[job.key]
        of_tenant = self._by_tenant[job.tenant]
        del of_tenant[job.key]
        if not of_tenant:
            del self._by_tenant[job.tenant]
        elif is_its_turn:
            self._by_tenant.move_to_end(job.tenant)
