"""A tier: a place that stores records by name and knows no policy."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvstore.errors import Closed
from kvstore.format.record import Record
from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.runtime.background import gather_all
from kvstore.runtime.deadline import Deadline
from kvstore.tiers.verify import check_deadline

_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_DELETED_AT_ONCE = 256
"""To begin calls for thousands of records in one go would hold the event loop."""


class PutOutcome(Enum):
    """The result of a put; all of them are normal."""

    STORED = "stored"
    EXISTS = "exists"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Entry:
    """A record as a tier lists it.

    Attributes:
        num_bytes: Header included.
        age_s: Since it was stored, by the medium's own clock; `None`: its listing does not say that.
    """

    key: RecordKey
    num_bytes: int
    age_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class TierUsage:
    """What a tier holds.

    Attributes:
        num_records: `None` if counting would mean a scan.
        used_bytes: Bytes of records; `None` as for `num_records`.
        limit_bytes: The budget. `None`: the store sets no limit.
        num_quarantined: Corrupt records quarantined since the tier was opened.
        limit_name: The setting behind `limit_bytes`: `memory_bytes`, `disk_bytes`, `cold_bytes`, or Redis' `maxmemory`.
            Empty: there is no limit.
        refuses_writes: Why the tier refuses writes now, in fixed words. Empty: it accepts them, or this is unknown.
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
    """Records that must stay may be lost."""
    ADVICE = "advice"
    """It costs hits or speed."""


@dataclass(frozen=True, slots=True)
class Concern:
    """A property of a tier's server that an operator should change; `text` ends with the next step."""

    severity: Severity
    address: str
    text: str

    def __str__(self) -> str:
        return f"{self.text} address={self.address}"


class Tier(ABC):
    """Stores sealed records by name, once each.

    The caller guarantees that a record it puts was verified. The tier guarantees that what `get` returns was verified
    against its seal and its key *after* it left the medium. Anything else is quarantined, counted, answered as a miss.

    Every method raises `Unavailable` at its deadline or when the medium refuses, and `Closed` after `aclose`. No
    foreign exception leaves a tier. A busy or unreachable medium is never answered as "missing".
    """

    name: str
    """Short and stable: `memory`, `filesystem`, `redis`, `s3`; shown in metrics and answers."""

    no_room = ""
    """Why the last put was `FULL`, with the next step, in fixed words; empty: the tier does not say."""

    on_quarantine: Callable[[RecordKey, str], None] | None = None
    """Called with each quarantined record and the reason, in any thread; set by the tier's owner."""

    on_drop: Callable[[Sequence[RecordKey]], None] | None = None
    """Called on the loop with the records that the tier evicts for its own budget; set by the tier's owner."""

    _num_quarantined = 0
    _closed = False

    @property
    def num_quarantined(self) -> int:
        """Corrupt records quarantined since the tier was opened."""
        return self._num_quarantined

    @abstractmethod
    async def head(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> list[int | None]:
        """For each key the record's bytes, header included; 0 if only its presence is known, `None` if it is absent.

        One round trip for any number of keys, if the medium supports that.
        """

    @abstractmethod
    async def get(
        self, key: RecordKey, *, deadline: Deadline, allocate: Callable[[int], memoryview] | None = None
    ) -> Record | None:
        """Return the verified record, or `None`: absent, incomplete or just quarantined.

        Args:
            allocate: Returns a writable buffer of the given size to receive into; by default a fresh `bytearray`. It is
                called in the thread that receives, which may be another one than the caller's.

        If cancelled, a buffer from `allocate` may still be written to: do not use it again.
        """

    @abstractmethod
    async def put(self, record: Record, *, deadline: Deadline) -> PutOutcome:
        """Store the record under its name, once. `EXISTS` writes nothing, `FULL` stores nothing.

        `EXISTS` ends an earlier `allow_eviction`: the record stays as if it had just been stored.

        If cancelled, the record is either wholly stored or wholly absent for every reader.
        """

    async def put_evictable(self, record: Record, *, deadline: Deadline) -> PutOutcome:
        """As `put`, for a record that no caller relies on: a medium that evicts by itself may evict it at once.
        `EXISTS` does not change whether the existing record may be evicted.
        """
        return await self.put(record, deadline=deadline)

    @abstractmethod
    async def delete(self, key: RecordKey, *, deadline: Deadline) -> bool:
        """Remove a record. False: it was not there."""

    async def delete_all(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        """Remove many records; absent ones are ignored. If it raises, some may be left."""
        for start in range(0, len(keys), _DELETED_AT_ONCE):
            await gather_all(self.delete(key, deadline=deadline) for key in keys[start : start + _DELETED_AT_ONCE])

    def cost_bytes(self, num_bytes: int) -> int:
        """Bytes of the medium that a record of `num_bytes` takes, as `usage` counts them."""
        return num_bytes

    async def allow_eviction(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> None:  # noqa: B027
        """Let the medium evict these records from now on, because a slower tier has them too. Absent ones are ignored.

        A medium that evicts by itself keeps a record until this call. Tiers with a budget of their own ignore it.
        """

    @abstractmethod
    async def quarantine(self, key: RecordKey, reason: str, *, seen: Record | None = None, deadline: Deadline) -> bool:
        """Hide a record from readers, and keep its bytes if the medium allows. False: nothing was quarantined.

        Args:
            reason: What is wrong with it, for people.
            seen: The corrupt record as it was read; another record that has the name by now stays. `None`: quarantine
                any record of this name.
        """

    @abstractmethod
    def scan(self, namespace: NamespaceId | None = None) -> AsyncIterator[Entry]:
        """Yield the stored records in no order. Those put or deleted during the scan may be missing or listed. One may
        be listed twice, so that no tier has to remember what it has listed.
        """

    @abstractmethod
    async def put_manifest(self, namespace: NamespaceId, manifest: bytes, *, deadline: Deadline) -> None:
        """Keep a namespace's description beside its records. Idempotent."""

    @abstractmethod
    async def get_manifest(self, namespace: NamespaceId, *, deadline: Deadline) -> bytes | None:
        """The description that `put_manifest` kept, or `None`."""

    @abstractmethod
    async def usage(self, *, deadline: Deadline) -> TierUsage:
        """What the tier holds, at a small cost."""

    async def concerns(self, *, deadline: Deadline) -> list[Concern]:
        """What an operator should change about the medium, dangers first."""
        return []

    @abstractmethod
    async def aclose(self) -> None:
        """Release connections, files and buffers. Idempotent."""

    # for implementations

    def _check_open(self) -> None:
        """Refuse a call after `aclose` (`_closed` is set)."""
        if self._closed:
            raise Closed("the tier is closed", tier=self.name)

    def _check(self, deadline: Deadline) -> None:
        """Refuse a call that comes after `aclose`, or has no time left."""
        self._check_open()
        check_deadline(deadline, self.name)

    def _quarantined(self, key: RecordKey, reason: str, place: str | None = "") -> bool:
        """Count, report and log a record that was just quarantined. False: it was not.

        Args:
            place: Where its bytes are; `None`: it went away before.
        """
        if place is None:
            _log.info("a corrupt record went away before its quarantine tier=%s key=%s", self.name, key)
            return False
        self._num_quarantined += 1
        if self.on_quarantine is not None:
            self.on_quarantine(key, reason)
        _log.warning("record quarantined tier=%s key=%s reason=%s place=%s", self.name, key, reason, place)
        return True


def _passed(
    method: Callable[Concatenate[Tier, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[TierWrapper, P], Coroutine[Any, Any, T]]:
    """A method that makes the same call of the inner tier."""
    name = method.__name__

    @wraps(method, updated=())  # without the mark of an abstract method
    async def call(self: TierWrapper, /, *args: P.args, **kwargs: P.kwargs) -> T:
        deadline = kwargs["deadline"]
        assert isinstance(deadline, Deadline)
        return await self._pass(name, partial(getattr(self.inner, name), *args, **kwargs), deadline)

    return call


class TierWrapper(Tier):
    """Passes all calls to another tier, and passes on what that one reports. A subclass overrides what it changes.

    `delete_all` deletes the records one by one, unless a subclass overrides it: `delete` may do more than pass a call.

    Args:
        inner: The tier; owned from now on.
        name: By default that of `inner`.
    """

    def __init__(self, inner: Tier, name: str | None = None) -> None:
        self.name = name if name is not None else inner.name
        self.inner = inner
        inner.on_quarantine = self._inner_quarantined
        inner.on_drop = self._inner_dropped

    async def _pass(self, what: str, call: Callable[[], Awaitable[T]], deadline: Deadline) -> T:
        """Make one call of `inner`, named `what`. Every call that takes a deadline goes through here."""
        return await call()

    def _inner_quarantined(self, key: RecordKey, reason: str) -> None:
        if self.on_quarantine is not None:
            self.on_quarantine(key, reason)

    def _inner_dropped(self, keys: Sequence[RecordKey]) -> None:
        if self.on_drop is not None:
            self.on_drop(keys)

    @property
    def num_quarantined(self) -> int:
        return self.inner.num_quarantined

    def cost_bytes(self, num_bytes: int) -> int:
        return self.inner.cost_bytes(num_bytes)

    def scan(self, namespace: NamespaceId | None = None) -> AsyncIterator[Entry]:
        return self.inner.scan(namespace)

    head, get = _passed(Tier.head), _passed(Tier.get)
    put, put_evictable = _passed(Tier.put), _passed(Tier.put_evictable)
    delete, quarantine = _passed(Tier.delete), _passed(Tier.quarantine)
    allow_eviction = _passed(Tier.allow_eviction)
    put_manifest, get_manifest = _passed(Tier.put_manifest), _passed(Tier.get_manifest)
    usage, concerns = _passed(Tier.usage), _passed(Tier.concerns)

    async def aclose(self) -> None:
        await self.inner.aclose()
