"""The interface of a migration step: a pure rewrite of one record. The runner does everything else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

from kvstore.format.record import Record

__all__ = ["Rewrite", "Step", "Verdict"]


class Verdict(Enum):
    """A step's verdict for a record."""

    CURRENT = "current"
    """It is in its target form: nothing to do."""
    REWRITTEN = "rewritten"
    """There is a new record for it, under a new name."""
    FOREIGN = "foreign"
    """It was encrypted with a key that is not available: left as it is."""
    REFUSED = "refused"
    """It cannot be authenticated, though its checksums match: left as it is."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """The result for one record.

    Attributes:
        verdict: The verdict.
        record: The new record, for `REWRITTEN`.
    """

    verdict: Verdict
    record: Record | None = None


class Step(ABC):
    """One change of stored records. Pure except for nonces: no I/O, no clock.

    Attributes:
        number: The step's number; steps are applied in this order, one at a time.
        name: Its name for operators.
        text: What it changes, in a sentence.
    """

    number: int
    name: str
    text: str

    @abstractmethod
    def target(self, tenant: str) -> str | None:
        """A short text that identifies the target form of a tenant's records; a run continues only a migration with the
        same target. `None`: there is nothing to do for this tenant.
        """

    @abstractmethod
    def rewrite(self, record: Record, tenant: str) -> Rewrite:
        """The new record for a stored one, whose checksums were verified."""

    @abstractmethod
    def is_same(self, old: Record, new: Record, tenant: str) -> bool:
        """Whether a new record, as read back from the tier, has bit by bit the content of the old one."""
