"""The one contract between whoever has pages and whoever keeps them.

`TieredStore` fulfils it in the service, `RemoteStore` in a client.

Reading order: `PrefixQuery`, `PageStore`, then the outcomes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from kvstore.errors import InvalidRequest
from kvstore.format.record import Record
from kvstore.model.keys import Boundary, NamespaceId, RecordKey
from kvstore.model.layout import MAX_PREFIX_TOKENS
from kvstore.model.namespace import NamespaceDescription
from kvstore.model.outcome import Outcome
from kvstore.runtime.arena import Arena
from kvstore.runtime.buffers import fresh_buffer
from kvstore.runtime.deadline import Deadline

__all__ = [
    "Ack",
    "Deadline",
    "LeaseId",
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
    """A prompt, as the store sees it.

    Attributes:
        namespace: An opened namespace.
        boundaries: The prompt's boundaries, ascending. They may end beyond `cap_tokens`, up to the last known token:
            a longer record may cover a shorter resume point.
        local_tokens: Tokens the engine holds itself; nothing below is fetched.
        cap_tokens: No resume point is beyond this.
        step_tokens: Resume points are multiples of this (the engine's scheduler block).
    """

    namespace: NamespaceId
    boundaries: tuple[Boundary, ...]
    local_tokens: int
    cap_tokens: int
    step_tokens: int

    def __post_init__(self) -> None:
        if self.step_tokens <= 0:
            raise InvalidRequest("step_tokens must be positive", step_tokens=self.step_tokens)
        if self.local_tokens < 0 or self.cap_tokens < 0:
            raise InvalidRequest("token counts are not negative", local=self.local_tokens, cap=self.cap_tokens)
        tokens = [boundary.tokens for boundary in self.boundaries]
        if any(later <= earlier for earlier, later in zip([0, *tokens], tokens, strict=False)):
            raise InvalidRequest("boundaries must ascend from above zero")
        if tokens and tokens[-1] > MAX_PREFIX_TOKENS:
            raise InvalidRequest(f"a prefix has at most {MAX_PREFIX_TOKENS} tokens", seen=tokens[-1])


@dataclass(frozen=True, slots=True)
class Offer:
    """A resume point, and where its records would be read from.

    Attributes:
        resume_tokens: The resume point.
        tier_bytes: Encoded bytes by name of the tier, as far as sizes are known: an estimate for whoever weighs
            fetching against computing.
    """

    resume_tokens: int
    tier_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Lookup:
    """What is there for a prompt, by what the store knows without reading a record.

    Attributes:
        resume_tokens: The longest resume point that looks usable; `local_tokens` when there is none.
        groups_present: For each boundary of the query a bit per group, set when all its slices are there. A hint for
            whoever saves: bits may be missing where a tier could not be asked.
        offers: What each tier adds, quickest first: resume points ascend, the last is `resume_tokens`. Empty when
            nothing is there, or when the store does not say.
        silent: Names of what did not answer in time, and may hold more.
    """

    resume_tokens: int
    groups_present: tuple[int, ...]
    offers: tuple[Offer, ...] = ()
    silent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Staged:
    """Records in this node's memory, verified and leased.

    Attributes:
        lease: The receipt; `None` when nothing is staged.
        resume_tokens: The resume point that the staged records serve; `local_tokens` when nothing is staged.
        keys: Every record to load for it: all slices of all groups.
        spans: For each key its (start, stop) tokens; a record may reach past `resume_tokens`.
        sources: Number of records by the name of the tier that they were read from.
        num_bytes: Encoded bytes, headers included.
        lease_s: Seconds that the lease lasts unless it is renewed.
        cut: Why `resume_tokens` is less than what looked usable, a word of docs/explain.md; empty when it is not.
    """

    lease: LeaseId | None
    resume_tokens: int
    keys: tuple[RecordKey, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    sources: Mapping[str, int] = field(default_factory=dict)
    num_bytes: int = 0
    lease_s: float = 0.0
    cut: str = ""


class Ack(Enum):
    """Where a record must be before a save is acknowledged."""

    MEMORY = "memory"
    HOT = "hot"
    COLD = "cold"


class Retention(Enum):
    """How long a record is likely to be of use, as whoever saves it first thinks: a hint."""

    NORMAL = "normal"
    SHORT = "short"
    """Not written to the slower tiers, but for one that the save waits for: gone when this node's memory is full."""


class SaveOutcome(Enum):
    """What became of a saved record; all of them are normal."""

    STORED = "stored"
    EXISTS = "exists"
    """An equal name was there before; these bytes were dropped, the first ones stay."""
    FULL = "full"
    """No room: this record is not kept."""
    BUSY = "busy"
    """The store is over its limits for now: this record is not kept, later ones may be."""


Progress = Callable[[int], None]
"""Called with the total bytes staged so far, at least whenever a record arrived."""


class PageStore(ABC):
    """Pages in, pages out. All methods may be called concurrently from one event loop.

    Every method raises `Unavailable` at its deadline or when the store cannot be reached, `Closed` after `aclose`, and
    `InvalidRequest` for a namespace that was not opened.
    """

    @property
    def arena(self) -> Arena | None:
        """Memory that leased records may stand in, which peers on this node may read; `None`: there is none."""
        return None

    def buffer(self, num_bytes: int) -> memoryview:
        """Where to receive a record that will be saved here: memory of unspecified content."""
        return fresh_buffer(num_bytes)

    @abstractmethod
    async def open_namespace(self, description: NamespaceDescription, *, deadline: Deadline) -> NamespaceId:
        """Make a namespace known and return its id, which the store computes itself (with the verified tenant).

        Idempotent. The description is kept beside the records, so that they can be explained later.
        """

    @abstractmethod
    async def lookup(self, query: PrefixQuery, *, deadline: Deadline) -> Lookup:
        """Say what is there. Moves no record, takes no lease."""

    @abstractmethod
    async def stage(self, query: PrefixQuery, *, deadline: Deadline, progress: Progress | None = None) -> Staged:
        """Bring the records of the longest usable resume point into this node's memory, verify and lease them.

        What is missing, corrupt, too slow for `deadline` or too large for the node shortens the resume point; it is
        no error. Concurrent stages of one record fetch it once.

        If cancelled, nothing stays leased; what was fetched may stay in memory.
        """

    @abstractmethod
    async def renew(self, lease: LeaseId, *, deadline: Deadline) -> bool:
        """Start the lease's time anew. False: it has ended; its records may be gone."""

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

        Returns when the record has reached `ack`; it goes on to the further tiers by itself, unless its `retention`
        is short. What waits for memory alone may be declined by the cold tier, as long as it was not seen before.

        Raises:
            CorruptRecord: The bytes do not match their seal, or the header does not fit the namespace's layout.
            InvalidRequest: `ack` names a tier that this store does not have.

        If cancelled, the record is either wholly stored or wholly absent.
        """

    @abstractmethod
    async def release(self, lease: LeaseId) -> None:
        """End a lease. Unknown and ended leases are ignored. Never raises `Unavailable`."""

    @abstractmethod
    async def discard(self, key: RecordKey, reason: str, *, deadline: Deadline) -> None:
        """Report a bad record, whose checksum failed at the reader. Every tier quarantines it, and none serves it."""

    def report(self, outcome: Outcome) -> None:  # noqa: B027 - most stores keep no reports
        """Report what became of a request, for `explain`. Returns at once and never fails; the report may be lost."""

    async def explain(self, request: str, *, deadline: Deadline, tenant: str | None = "") -> Mapping[str, object]:
        """Why a request was resumed no further than it was, as plain values; see docs/explain.md.

        Args:
            request: Its id, or the start of one; empty for a list of the latest requests.
            deadline: When to give up.
            tenant: Whose requests; `None`: everybody's. A client asks for its own, whatever it says.

        Raises:
            InvalidRequest: No such request was told of lately, or several start like that.
        """
        raise InvalidRequest("this store does not keep what became of requests")

    @abstractmethod
    async def status(self, *, deadline: Deadline, tenant: str = "") -> Mapping[str, object]:
        """Plain values for people: tiers with usage and health, leases, queues, counters, version.

        Args:
            deadline: When to give up.
            tenant: Whose; empty: all of it. For a tenant, nothing that tells of others: no usage, queues and counters.
                A client is told of its own, whatever it says.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Release everything. Idempotent."""
