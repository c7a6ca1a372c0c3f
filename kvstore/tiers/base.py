"""A tier: a place that stores records by name and knows no policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvstore.format.record import Record
from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.runtime.background import gather_all
from kvstore.runtime.deadline import Deadline

__all__ = ["Concern", "Entry", "PutOutcome", "Severity", "Tier", "TierUsage"]


class PutOutcome(Enum):
    """What became of a put; all of them are normal."""

    STORED = "stored"
    EXISTS = "exists"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Entry:
    """A record as a tier lists it.

    Attributes:
        key: The record's key, parsed from its name.
        num_bytes: Bytes of the record, header included.
    """

    key: RecordKey
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TierUsage:
    """What a tier holds.

    Attributes:
        num_records: Records, or `None` where counting would mean a scan.
        used_bytes: Bytes of records, or `None` likewise.
        limit_bytes: The budget, or `None` for no bound of ours.
        num_quarantined: Corrupt records put aside since the tier was opened.
        limit_name: The setting behind `limit_bytes`: `memory_bytes`, `disk_bytes`, `cold_bytes`, or Redis' `maxmemory`;
            empty: there is no bound.
        refuses_writes: Why it takes no writes at present, in fixed words; empty: it does, or nobody knows.
    """

    num_records: int | None
    used_bytes: int | None
    limit_bytes: int | None
    num_quarantined: int = 0
    limit_name: str = ""
    refuses_writes: str = ""


class Severity(Enum):
    """How bad a concern is."""

    DANGER = "danger"
    """What was promised to stay may be lost."""
    ADVICE = "advice"
    """It costs hits or speed."""


@dataclass(frozen=True, slots=True)
class Concern:
    """Something about a tier's medium that an operator should change.

    Attributes:
        severity: How bad it is.
        address: The server's address.
        text: What was seen, what follows from it, and the next step.
    """

    severity: Severity
    address: str
    text: str

    def __str__(self) -> str:
        return f"{self.text} address={self.address}"


class Tier(ABC):
    """Stores sealed records by name, once each.

    The caller guarantees that a record it puts was verified. The tier guarantees that what `get` returns was verified
    against its seal and its key *after* it left the medium: anything else is quarantined, counted, answered as a miss.

    Every method raises `Unavailable` at its deadline or when the medium refuses, `Closed` after `aclose`; no
    foreign exception crosses this border. Busy or unreachable is never answered as "missing".
    """

    name: str
    """Short and stable: `memory`, `filesystem`, `redis`, `s3`; shown in metrics and answers."""

    on_quarantine: Callable[[RecordKey, str], None] | None = None
    """Called with each record that is put aside, and why; set by the tier's owner. May be called in any thread."""

    on_drop: Callable[[Sequence[RecordKey]], None] | None = None
    """Called with the records that the tier evicts for its own budget; set by the tier's owner. Called on the loop."""

    @property
    def num_quarantined(self) -> int:
        """Corrupt records put aside since the tier was opened."""
        return 0

    @abstractmethod
    async def head(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> list[int | None]:
        """For each key the record's bytes where known (header included, 0 when present but unknown), `None` if absent.

        One round trip for any number of keys where the medium can.
        """

    @abstractmethod
    async def get(
        self, key: RecordKey, *, deadline: Deadline, allocate: Callable[[int], memoryview] | None = None
    ) -> Record | None:
        """Return the verified record, or `None`: absent, incomplete or just quarantined.

        Args:
            key: What to read.
            deadline: When to give up.
            allocate: Returns a writable buffer of the given size to receive into; by default a fresh `bytearray`.

        If cancelled, a buffer from `allocate` may still be written to: drop it, never use it again.
        """

    @abstractmethod
    async def put(self, record: Record, *, deadline: Deadline) -> PutOutcome:
        """Store the record under its name, once; `EXISTS` writes nothing, `FULL` stores nothing.

        After `EXISTS` the record stays as if it had just been stored: an earlier `allow_eviction` is void.

        If cancelled, the record is either wholly stored or wholly absent for every reader.
        """

    async def put_evictable(self, record: Record, *, deadline: Deadline) -> PutOutcome:
        """As `put`, for a record that was promised to nobody: a medium that evicts by itself may evict it at once.
        After `EXISTS` the existing record may be evicted, or must stay, as before.
        """
        return await self.put(record, deadline=deadline)

    @abstractmethod
    async def delete(self, key: RecordKey, *, deadline: Deadline) -> bool:
        """Remove a record. False: it was not there."""

    async def delete_all(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        """Remove many records; those that are not there are ignored. When it raises, some may be left."""
        await gather_all(self.delete(key, deadline=deadline) for key in keys)

    def cost_bytes(self, num_bytes: int) -> int:
        """Bytes of the medium that a record of `num_bytes` takes, as `usage` counts them."""
        return num_bytes

    async def allow_eviction(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> None:  # noqa: B027
        """Let the medium evict these records from now on: a slower tier has them too. Absent ones are ignored.

        A medium that evicts by itself must keep a record until then. Tiers with a budget of ours evict by use alone,
        and ignore this call.
        """

    @abstractmethod
    async def quarantine(self, key: RecordKey, reason: str, *, seen: Record | None = None, deadline: Deadline) -> bool:
        """Put a record out of readers' reach, and keep its bytes if the medium allows. False: nothing was put aside.

        Args:
            key: Its name.
            reason: What was found, for people.
            seen: The record that was found bad, as it was read. Another one that was put under the name since stays.
                `None`: whatever stands there.
            deadline: When to give up.
        """

    @abstractmethod
    def scan(self, namespace: NamespaceId | None = None) -> AsyncIterator[Entry]:
        """Yield what is stored, in no order; records put or deleted meanwhile may or may not be seen."""

    @abstractmethod
    async def put_manifest(self, namespace: NamespaceId, manifest: bytes, *, deadline: Deadline) -> None:
        """Keep a namespace's description beside its records. Idempotent."""

    @abstractmethod
    async def get_manifest(self, namespace: NamespaceId, *, deadline: Deadline) -> bytes | None:
        """Return what `put_manifest` kept, or `None`."""

    @abstractmethod
    async def usage(self, *, deadline: Deadline) -> TierUsage:
        """Report what is held, cheaply."""

    async def concerns(self, *, deadline: Deadline) -> list[Concern]:
        """What an operator should change about the medium, dangers first; by default nothing."""
        return []

    @abstractmethod
    async def aclose(self) -> None:
        """Release connections, files and buffers. Idempotent."""
