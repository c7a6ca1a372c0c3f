"""The contract between an engine, which computes pages, and the store that keeps them.

`TieredStore` implements it in the service, `RemoteStore` in a client.

Reading order: `PrefixQuery`, `PageStore`, then the outcomes and `LeasedRecord`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from operator import lt
from typing import NewType

from kvstore.errors import InvalidRequest
from kvstore.format.record import Record
from kvstore.model.keys import Boundary, NamespaceId, RecordKey
from kvstore.model.layout import MAX_PREFIX_TOKENS
from kvstore.model.namespace import NamespaceDescription
from kvstore.model.outcome import Outcome
from kvstore.model.page_blocks import PageBlocks
from kvstore.model.prompt_hint import EndedPrompt
from kvstore.runtime.arena import Arena, ArenaView
from kvstore.runtime.background import gather_all
from kvstore.runtime.buffers import fresh_buffer
from kvstore.runtime.deadline import Deadline

__all__ = [
    "Ack",
    "Deadline",
    "LeaseId",
    "LeasedRecord",
    "LoadedRecord",
    "Lookup",
    "Offer",
    "Outcome",
    "PageStore",
    "PrefixQuery",
    "Retention",
    "SaveOutcome",
    "Staged",
]

LeaseId = NewType("LeaseId", bytes)
"""16 random bytes: a receipt for staged records."""


@dataclass(frozen=True, slots=True)
class PrefixQuery:
    """A prompt, as the store sees it."""

    namespace: NamespaceId
    """An opened namespace."""
    boundaries: tuple[Boundary, ...]
    """The prompt's boundaries, ascending. They may end beyond `cap_tokens`, up to the last known token: a longer record
    may cover a shorter resume point."""
    local_tokens: int
    """Tokens the engine holds itself; nothing below is fetched."""
    cap_tokens: int
    """No resume point is beyond this."""
    step_tokens: int
    """Resume points are multiples of this (the engine's scheduler block)."""

    def __post_init__(self) -> None:
        if self.step_tokens <= 0:
            raise InvalidRequest("step_tokens must be positive", step_tokens=self.step_tokens)
        if self.local_tokens < 0 or self.cap_tokens < 0:
            raise InvalidRequest("token counts are not negative", local=self.local_tokens, cap=self.cap_tokens)
        tokens = [tokens for tokens, _ in self.boundaries]
        if not all(map(lt, [0, *tokens], tokens)):  # a long prompt has thousands
            raise InvalidRequest("boundaries must ascend from above zero")
        if tokens and tokens[-1] > MAX_PREFIX_TOKENS:
            raise InvalidRequest(f"a prefix has at most {MAX_PREFIX_TOKENS} tokens", seen=tokens[-1])


@dataclass(frozen=True, slots=True)
class Offer:
    """A resume point, and where its records would be read from."""

    resume_tokens: int
    tier_bytes: Mapping[str, int]
    """Encoded bytes by name of the tier, where sizes are known: an estimate, to weigh fetching against computing."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What is there for a prompt, as far as the store can say without reading a record."""

    resume_tokens: int
    """The longest resume point that looks usable; `local_tokens` when there is none."""
    groups_present: tuple[int, ...]
    """For each boundary of the query a bit per group, set when all its slices are there. A hint for saves: bits may be
    missing where a tier did not answer."""
    offers: tuple[Offer, ...] = ()
    """What each tier can restore, quickest first: resume points ascend, the last is `resume_tokens`. Empty when nothing
    is there, or when the store gives no offers."""
    silent: tuple[str, ...] = ()
    """Names of the tiers that did not answer in time, and may hold more."""


@dataclass(frozen=True, slots=True)
class Staged:
    """Records in this node's memory, verified and leased."""

    lease: LeaseId | None
    """The receipt; `None` when nothing is staged."""
    resume_tokens: int
    """The resume point that the staged records serve; `local_tokens` when nothing is staged."""
    keys: tuple[RecordKey, ...] = ()
    """Every record to load for it: all slices of all groups."""
    spans: tuple[tuple[int, int], ...] = ()
    """For each key its (start, stop) tokens; a record may reach past `resume_tokens`."""
    sources: Mapping[str, int] = field(default_factory=dict)
    """Number of records by the name of the tier that they were read from."""
    num_bytes: int = 0
    """Encoded bytes, headers included."""
    lease_s: float = 0.0
    """Seconds that the lease lasts unless it is renewed."""
    cut: str = ""
    """Why `resume_tokens` is less than what looked usable, a reason of docs/explain.md; empty when it is not."""


class Ack(Enum):
    """Where a record must be before a save is acknowledged."""

    MEMORY = "memory"
    HOT = "hot"
    COLD = "cold"


class Retention(Enum):
    """How long a record is likely to be of use: a hint from its first writer."""

    NORMAL = "normal"
    SHORT = "short"
    """Written to no slower tier except one that the save waits for; dropped when this node's memory is full."""
    RELEASED = "released"
    """Its client says that the prompt will not be used again: while the tenant's hints are followed, the cold tier gets
    it only once it is looked up again."""
    RETAINED = "retained"
    """Its client says that the prompt will be used again: admitted to the cold tier, while they are followed."""


class SaveOutcome(Enum):
    """What became of a saved record; all of them are normal."""

    STORED = "stored"
    EXISTS = "exists"
    """An equal name was there before; these bytes were dropped, the first ones stay."""
    FULL = "full"
    """It does not fit: this record is not kept."""
    BUSY = "busy"
    """The store is over its limits for now: this record is not kept, later ones may be."""


Progress = Callable[[int], None]
"""Called with the total bytes staged so far, at least whenever a record arrived."""


class PageStore(ABC):
    """Pages in, pages out. All methods may be called concurrently from one event loop.

    Every method raises `Unavailable` at its deadline or when the store cannot be reached, `Closed` after `aclose`, and
    `InvalidRequest` for a namespace that was not opened. If a call is cancelled, it may have had its effect or not;
    where more is promised, its docstring says so.
    """

    @property
    def arena(self) -> Arena | None:
        """Memory that holds leased records and that peers on this node may read; `None`: there is none."""
        return None

    def buffer(self, num_bytes: int) -> memoryview:
        """Where to receive a record that will be saved here: memory of unspecified content."""
        return fresh_buffer(num_bytes)

    def shared_buffer(self, num_bytes: int) -> memoryview | None:
        """Where to make a record that will be saved here: writable memory of unspecified content that the store can
        read, so that the record need not be sent. `None`: there is no such memory, or too little of it is free.

        The record begins where the buffer does, and may be shorter. The memory is used again when no view of it is
        left, and, if a save was begun, when the store has answered it or is gone. Never waits.
        """
        return None

    def shares(self, num_bytes: int) -> bool:
        """Whether `shared_buffer` has room for a record of this size when all saves have ended."""
        return False

    @abstractmethod
    async def open_namespace(self, description: NamespaceDescription, *, deadline: Deadline) -> NamespaceId:
        """Open a namespace and return its id, which the store computes itself (with the verified tenant).

        Idempotent. The description is kept beside the records, so that tools can read what they are.
        """

    @abstractmethod
    async def lookup(self, query: PrefixQuery, *, deadline: Deadline) -> Lookup:
        """Return what is there. Copies no record, takes no lease."""

    @abstractmethod
    async def stage(self, query: PrefixQuery, *, deadline: Deadline, progress: Progress | None = None) -> Staged:
        """Copy the records of the longest usable resume point into this node's memory, verify and lease them.

        What is missing, corrupt, too slow for `deadline` or too large for the node shortens the resume point; it is
        no error. Concurrent stages of one record fetch it once.

        If cancelled, nothing stays leased; what was fetched may stay in memory.
        """

    @abstractmethod
    async def renew(self, lease: LeaseId, *, deadline: Deadline) -> bool:
        """Restart the lease's time. False: it has ended; its records may be gone."""

    @abstractmethod
    async def load(
        self,
        lease: LeaseId,
        key: RecordKey,
        *,
        deadline: Deadline,
        allocate: Callable[[int], memoryview] | None = None,
    ) -> Record:
        """Return one leased record, its header checked against `key`; the payload checksum is the reader's to verify.

        Args:
            lease: From `stage`.
            key: One of its keys.
            deadline: When to give up.
            allocate: Returns a writable buffer of the given size that the bytes are received into, where they come
                over a wire; a store in the same process may return its own read-only buffer instead.

        Raises:
            Unavailable: The lease has ended, or the record is no longer there.

        If cancelled, an allocated buffer may still be written until the connection has drained it: it must not be
        used again before `aclose`, unless it is dropped.
        """

    async def load_many(
        self, lease: LeaseId, keys: Sequence[RecordKey], *, deadline: Deadline
    ) -> Sequence[LeasedRecord]:
        """Begin to load leased records of one namespace, with one request at most; no record is copied.

        Where this process can read the store's memory, each record is read there. Otherwise each one is loaded when its
        `LeasedRecord.load` is called, so the caller bounds how many are in memory.

        Args:
            lease: From `stage`. It must last until all records have been read.
            keys: Some of its keys.
            deadline: When to give up the request.

        Returns:
            For each key its record.

        Raises:
            Unavailable: The lease has ended, or none of the records is there. Of a record that is no longer there
                `LeasedRecord.load` raises this, as it raises all other errors.
        """
        return [LeasedRecord(self, lease, key) for key in keys]

    def shared_memory(self) -> ArenaView | None:
        """The memory that records of `load_many` will be in, as `LeasedRecord.memory`; `None`: none is known now."""
        return None

    @abstractmethod
    async def save(
        self,
        record: Record,
        *,
        ack: Ack = Ack.MEMORY,
        retention: Retention = Retention.NORMAL,
        deadline: Deadline,
    ) -> SaveOutcome:
        """Keep a sealed record, once; the store verifies it first.

        Returns when the record has reached `ack`. The store copies it to the further tiers later, unless `retention` is
        short. The cold tier may decline a save that waits for memory alone until the prompt is seen again.

        Raises:
            CorruptRecord: The bytes do not match their seal, or the header does not fit the namespace's layout.
            InvalidRequest: `ack` names a tier that this store does not have.

        If cancelled, the record is either wholly stored or wholly absent.
        """

    async def save_many(
        self, records: Sequence[Record], *, retention: Retention = Retention.NORMAL, deadline: Deadline
    ) -> list[SaveOutcome]:
        """As `save` of each of some records of one namespace, which waits for memory alone.

        Records that were made in `shared_buffer` take one request, so that small ones cost less.

        Returns:
            For each record its outcome.

        Raises:
            CorruptRecord, InvalidRequest: As `save`, of one of the records. Others may be stored.

        If cancelled, each record is either wholly stored or wholly absent.
        """
        return await gather_all(self.save(record, retention=retention, deadline=deadline) for record in records)

    @abstractmethod
    async def release(self, lease: LeaseId) -> None:
        """End a lease. Unknown and ended leases are ignored. Never raises `Unavailable`."""

    @abstractmethod
    async def discard(self, key: RecordKey, reason: str, *, deadline: Deadline) -> None:
        """Report a bad record (its checksum failed at the reader): every tier quarantines it, none serves it."""

    def report(self, outcome: Outcome) -> None:  # noqa: B027 - most stores explain nothing
        """Report the outcome of a request, for `explain`. Returns at once, never fails, and may be lost."""

    @property
    def takes_blocks(self) -> bool:
        """Whether it is of use to name pages' blocks to it."""
        return False

    def name_blocks(self, blocks: PageBlocks) -> None:  # noqa: B027 - most stores publish nothing
        """Learn how routers know a page that is, or was, stored here. Returns at once, and may be lost.

        Raises:
            InvalidRequest: The blocks are not of one page of this namespace.
        """

    def end_prompt(self, prompt: EndedPrompt) -> None:  # noqa: B027 - most stores keep nothing of it
        """Learn that a prompt's request has ended, and what its client wishes for it. Returns at once, never fails, and
        may be lost.
        """

    async def explain(self, request: str, *, deadline: Deadline, tenant: str | None = "") -> Mapping[str, object]:
        """Why a request was resumed no further than it was, as plain values; see docs/explain.md.

        Args:
            request: Its id, or the start of one; empty for a list of the latest requests.
            deadline: When to give up.
            tenant: Whose requests; `None`: all tenants'. Over a wire, the client's verified tenant counts instead.

        Raises:
            InvalidRequest: No recent request has this id, or several start like that.
        """
        raise InvalidRequest("this store does not keep what became of requests")

    @abstractmethod
    async def status(self, *, deadline: Deadline, tenant: str = "") -> Mapping[str, object]:
        """Plain values for people: tiers with usage and health, leases, queues, counters, version.

        Args:
            deadline: When to give up.
            tenant: Whose; empty: all of it. A tenant gets nothing about others: no usage, queues and counters. Over a
                wire, the client's verified tenant counts instead.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Release everything. Idempotent."""


class LoadedRecord:
    """A record that this process can read, on any thread; this one is in memory of its own."""

    def __init__(self, record: Record) -> None:
        self._record = record

    @property
    def num_bytes(self) -> int:
        """Header and payload."""
        return self._record.num_bytes

    def peek(self) -> Record:
        """The record, for a reader that calls `check` itself: until then it may be another one, and so may an error.

        Raises:
            CorruptRecord: As `reading`.
        """
        return self._record

    @contextmanager
    def reading(self) -> Iterator[Record]:
        """The record, for the block alone. What is made from its bytes may be used only after the block has ended well.

        Raises:
            CorruptRecord: Its header is damaged, or another record's. The payload checksum is the reader's to verify.
            Unavailable: At the end of the block, also in place of an error of the block: the memory got another content
                during the block, so nothing is known about the record.
        """
        yield self._record

    def check(self) -> None:
        """Return if what was read of the record until now was its own. Called in a block of `reading`, or after `peek`.

        Raises:
            Unavailable: As at the end of the block.
        """


class LeasedRecord:
    """A record of `PageStore.load_many`; this one is loaded with a call of its own.

    Attributes:
        memory: The memory, shared with the service, in which this record and others are; `None`: none.
        offset: Of its first byte there.
        num_bytes: Of a record there; 0: it is not there.
    """

    memory: ArenaView | None = None
    offset = 0
    num_bytes = 0

    def __init__(self, store: PageStore, lease: LeaseId, key: RecordKey) -> None:
        self._store = store
        self._lease = lease
        self._key = key

    async def load(self, *, deadline: Deadline, allocate: Callable[[int], memoryview] | None = None) -> LoadedRecord:
        """Make the record readable here. Arguments, errors and cancellation are those of `PageStore.load`."""
        return LoadedRecord(await self._store.load(self._lease, self._key, deadline=deadline, allocate=allocate))
