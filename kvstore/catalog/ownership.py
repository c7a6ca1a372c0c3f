"""Who may do what only one service should do at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvstore.runtime.deadline import Deadline

__all__ = ["Ownership", "SoleOwnership"]


class Ownership(ABC):
    """Leases on names, held by one owner at a time. Two owners at once, after a long pause of one, must do no harm:
    this saves work, it does not protect data.
    """

    @abstractmethod
    async def hold(self, name: str, *, deadline: Deadline) -> bool:
        """Take or renew the lease on `name`. False: somebody else holds it.

        Raises:
            Unavailable: Nobody could be asked.
        """

    @abstractmethod
    async def agree(self, name: str, word: str, *, deadline: Deadline) -> str:
        """Take or renew the lease as `hold` does, and return the word of whoever holds it then: `word`, where that is
        this one, else what that owner said last, or nothing. A word ends with its lease.

        Raises:
            Unavailable: Nobody could be asked.
        """

    @abstractmethod
    async def release(self, name: str, *, deadline: Deadline) -> None:
        """Give the lease back, if it is held. A lease that is not given back ends by itself."""


class SoleOwnership(Ownership):
    """Where one process owns everything, as the service of a directory does."""

    async def hold(self, name: str, *, deadline: Deadline) -> bool:
        return True

    async def agree(self, name: str, word: str, *, deadline: Deadline) -> str:
        return word

    async def release(self, name: str, *, deadline: Deadline) -> None:
        pass
