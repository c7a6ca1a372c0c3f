"""Pending writes: which records are not yet in the cold tier, and which service writes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.model.keys import RecordKey
from kvstore.runtime.deadline import Deadline


@dataclass(frozen=True, slots=True)
class PendingEntry:
    """A record that is not yet in the cold tier.

    Attributes:
        num_bytes: Its bytes, header included.
        stop_tokens: Where its span ends; shorter prefixes are written first.
    """

    key: RecordKey
    num_bytes: int
    stop_tokens: int


@dataclass(frozen=True, slots=True)
class PendingTotals:
    """Sums over the entries of all owners."""

    num_records: int
    num_bytes: int


class PendingLog(ABC):
    """Entries that outlive the service that added them.

    A service that adds an entry owns it for a lease. Several services may own the same entry: it stays until each has
    finished it. An entry whose leases have all expired may be claimed by any service, which is then its only owner. A
    log object acts for one owner, whose id it generates.

    An entry is added *before* its record is written, and removed when the cold tier has the record. A crash may leave
    an entry that is not needed, but no record without its entry. A record may be written twice, which is harmless: the
    second write of a name changes nothing. If an owner dies between renewing its lease and writing the record, the
    other owners still hold the entry.

    Every method raises `Unavailable` at its deadline or when the medium refuses, and may then have taken effect or
    not; repeating it is harmless.
    """

    lease_s: float
    """Seconds that ownership lasts unless it is renewed."""

    @abstractmethod
    def other_owner(self) -> PendingLog:
        """The same log under a new owner id; it shares this log's connection and need not be closed."""

    @abstractmethod
    async def add(self, entries: Sequence[PendingEntry], *, deadline: Deadline) -> bool:
        """Add entries, owned by this owner; it becomes a further owner of one that exists.

        False: the medium has no room. Some of the entries may then have been added.
        """

    @abstractmethod
    async def renew(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> list[int]:
        """Renew the leases. Per key: the number of its owners; 0: this owner no longer owns it, another finishes it."""

    @abstractmethod
    async def finish(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        """Give up this owner's share of entries; those without an owner left are removed. Others' claims stay."""

    @abstractmethod
    async def release(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        """Give up this owner's share of entries, but keep them: any service may claim those without a lease. They stay
        even if this owner adds and finishes them again.
        """

    @abstractmethod
    async def claim(self, limit: int, *, deadline: Deadline) -> list[PendingEntry]:
        """Become the only owner of up to about `limit` entries whose leases have expired."""

    @abstractmethod
    async def totals(self, *, deadline: Deadline) -> PendingTotals:
        """Count all entries."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close the files that the log opened. Leases are not released. Idempotent."""
