"""Pending write-backs: which records still have to reach the cold tier, and which service is writing them."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import CorruptRecord
from kvstore.model.keys import NAMESPACE_BYTES, PREFIX_BYTES, NamespaceId, PrefixHash, RecordKey
from kvstore.runtime.deadline import Deadline

__all__ = ["PendingEntry", "PendingLog", "PendingTotals", "pack_key", "unpack_key"]

_KEY = struct.Struct(f"<{NAMESPACE_BYTES}s{PREFIX_BYTES}sHH")


@dataclass(frozen=True, slots=True)
class PendingEntry:
    """A record on its way to the cold tier.

    Attributes:
        key: The record's key.
        num_bytes: Its bytes, header included.
        stop_tokens: Where its span ends; shorter prefixes are written first.
    """

    key: RecordKey
    num_bytes: int
    stop_tokens: int


@dataclass(frozen=True, slots=True)
class PendingTotals:
    """All pending entries, whoever owns them."""

    num_records: int
    num_bytes: int


class PendingLog(ABC):
    """Entries that outlive the service that added them.

    Whoever adds an entry owns it for a lease. Several may own the same entry: it stays until each has finished it. An
    entry whose leases have all expired may be claimed by anybody, who is then its only owner. A log object acts for one
    owner, whose id it generates.

    An entry is added *before* its record is written, and removed when the cold tier has the record: a crash can leave
    an entry too many, never one too few. So a record may be written twice, which is harmless: the second write of a
    name changes nothing. Shared ownership means that an owner may die between renewing its lease and writing the
    record, whatever the other owners do meanwhile.

    Every method raises `Unavailable` at its deadline or when the medium refuses, and may then have taken effect or
    not; repeating it is harmless.
    """

    @property
    @abstractmethod
    def lease_s(self) -> float:
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
        """Renew the leases. Per key: how many own it; 0: this owner no longer does, another one finishes it."""

    @abstractmethod
    async def finish(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        """Give up this owner's share of entries; those without an owner left are removed. Others' claims stay."""

    @abstractmethod
    async def release(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        """Give up this owner's share of entries, but keep them: anybody may claim those without a lease. They stay even
        if this owner adds and finishes them again.
        """

    @abstractmethod
    async def claim(self, limit: int, *, deadline: Deadline) -> list[PendingEntry]:
        """Become the only owner of up to about `limit` entries whose leases have expired."""

    @abstractmethod
    async def totals(self, *, deadline: Deadline) -> PendingTotals:
        """Count all entries."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close what the log opened; leases expire by themselves. Idempotent."""


def pack_key(key: RecordKey) -> bytes:
    """A key in 52 bytes."""
    return _KEY.pack(key.namespace, key.prefix, key.group, key.slice)


def unpack_key(packed: bytes) -> RecordKey:
    """The inverse of `pack_key`.

    Raises:
        CorruptRecord: Not 52 bytes.
    """
    if len(packed) != _KEY.size:
        raise CorruptRecord("a packed key has the wrong size", expected=_KEY.size, seen=len(packed))
    namespace, prefix, group, slice_ = _KEY.unpack(packed)
    return RecordKey(NamespaceId(namespace), PrefixHash(prefix), group, slice_)
