"""Leases on work that only one service should do at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvstore.runtime.deadline import Deadline

__all__ = ["Ownership", "SoleOwnership"]


class Ownership(ABC):
    """Named leases, each held by one owner at a time.

    They avoid duplicate work and do not protect data: an owner that was paused past its lease may run beside the next
    one, which must do no harm.
    """

    @abstractmethod
    async def hold(self, name: str, *, deadline: Deadline) -> bool:
        """Take or renew the lease on `name`. False: another owner holds it.

        Raises:
            Unavailable: The medium could not be reached.
        """

    @abstractmethod
    async def agree(self, name: str, word: str, *, deadline: Deadline) -> str:
        """Take or renew the lease as `hold` does, storing `word` with it if this owner holds it; return the holder's
        word, which is empty where that owner stored none. A word expires with its lease.

        Raises:
            Unavailable: The medium could not be reached.
        """

    @abstractmethod
    async def release(self, name: str, *, deadline: Deadline) -> None:
        """Release the lease, if this owner holds it. A lease that is not released expires."""


class SoleOwnership(Ownership):
    """For a process that shares nothing, like the service of a directory: it holds every lease."""

    async def hold(self, name: str, *, deadline: Deadline) -> bool:
        return True

    async def agree(self, name: str, word: str, *, deadline: Deadline) -> str:
        return word

    async def release(self, name: str, *, deadline: Deadline) -> None:
        pass
