"""What a migration step is: one pure rewrite of one record. The runner does everything else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

from kvstore.format.record import Record

__all__ = ["Rewrite", "Step", "Verdict"]


class Verdict(Enum):
    """What a step makes of a record."""

    CURRENT = "current"
    """It stands as it should: nothing to do."""
    REWRITTEN = "rewritten"
    """There is a new record for it, under a new name."""
    FOREIGN = "foreign"
    """It is of a key that is not at hand: left alone."""
    REFUSED = "refused"
    """It is not what it says, though its checksums match: left alone."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """The answer for one record.

    Attributes:
        verdict: What is to be done.
        record: The new record of a `REWRITTEN` one.
    """

    verdict: Verdict
    record: Record | None = None


class Step(ABC):
    """Takes what is stored one version further. Pure but for nonces: no I/O, no clock.

    Attributes:
        number: Of the step; they are taken in this order, one at a time.
        name: What an operator calls it.
        text: What it changes, in a sentence.
    """

    number: int
    name: str
    text: str

    @abstractmethod
    def target(self, tenant: str) -> str | None:
        """What a tenant's records are to be when it is done, in a word that another run must agree with; `None`: there
        is nothing to do for this tenant.
        """

    @abstractmethod
    def rewrite(self, record: Record, tenant: str) -> Rewrite:
        """The new record for a stored one, verified by its checksums."""

    @abstractmethod
    def is_same(self, old: Record, new: Record, tenant: str) -> bool:
        """Whether a new record, read back from where it was written, holds bit by bit what the old one does."""
