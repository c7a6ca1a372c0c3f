"""Pending write-backs: which records still have to reach the cold tier, and who is seeing to it."""

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
        key: The record's.
        num_bytes: Its bytes, header included.
        stop_tokens: Where its span ends: shorter prefixes are finished first.
    """

    key: RecordKey
    num_bytes: int
    stop_tokens: int


@dataclass(frozen=True, slots=True)
class PendingTotals:
    """What is pending, whoever holds it."""

    num_records: int
    num_bytes: int


class PendingLog(ABC):
    """Entries that outlive the service that wrote them. Whoever writes one owns it for a lease, together with all who
    wrote it too: it stands until each has finished it. One whose leases have all ended may be claimed by anybody, who
    is then its only owner. A log belongs to one owner, which it names by itself.

    An entry is written *before* the record that it stands for, and removed when the cold tier has the record: what a
    crash leaves behind is an entry too many, never one too few. The same record may so be written twice, which is
    harmless: it is written once under its name. That owners share an entry is why one of them may die between seeing
    that it owns the entry and writing the record, whatever others do meanwhile.

    Every method raises `Unavailable` at its deadline or when the medium refuses, and may then have done its work or
    not; repeating it is harmless.
    """

    @property
    @abstractmethod
    def lease_s(self) -> float:
        """Seconds that a claim lasts unless it is renewed."""

    @abstractmethod
    def other_owner(self) -> PendingLog:
        """The same entries, for an owner that is not this one; it ends with this log, and need not be closed."""

    @abstractmethod
    async def add(self, entries: Sequence[PendingEntry], *, deadline: Deadline) -> bool:
        """Write entries, claimed by this owner; one that is there already becomes this owner's too.

        False: the medium has no room. Some of the entries may then have been written.
        """

    @abstractmethod
    async def renew(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> list[int]:
        """Start the leases anew. For each: how many own it; 0: not this owner any more, somebody else finishes it."""

    @abstractmethod
    async def finish(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        """Own entries no more; those that nobody owns now are removed, unless somebody else has claimed them."""

    @abstractmethod
    async def release(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        """Own entries no more, and let them stand: anybody may claim those that nobody has a lease on. What this owner
        adds and finishes from now on leaves them there.
        """

    @abstractmethod
    async def claim(self, limit: int, *, deadline: Deadline) -> list[PendingEntry]:
        """Make up to about `limit` entries without a living lease this owner's, and nobody else's."""

    @abstractmethod
    async def totals(self, *, deadline: Deadline) -> PendingTotals:
        """Count all entries."""

    @abstractmethod
    async def aclose(self) -> None:
        """Let go of the medium; leases run out by themselves. Idempotent."""


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
