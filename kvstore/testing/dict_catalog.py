"""A `Catalog` in dictionaries that outlive it: no threads, no server, no time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from kvstore.catalog.base import TOMBSTONES_MAX, Tombstone
from kvstore.catalog.coordination import TextStore, TextStoreKind
from kvstore.catalog.local import LocalCatalog
from kvstore.model.keys import NamespaceId, PrefixHash
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.deadline import Deadline
from kvstore.tiers.verify import check_deadline

T = TypeVar("T")


class Ask(Protocol):
    """A connection to the dictionaries: it may be slow, and may fail before or after the work is done."""

    async def __call__(self, what: str, work: Callable[[], T], deadline: Deadline) -> T: ...


async def at_once(what: str, work: Callable[[], T], deadline: Deadline) -> T:
    """Do the work without delay or failure."""
    check_deadline(deadline, what)
    return work()


@dataclass
class CatalogBooks:
    """What several catalogs share, like a server.

    Attributes:
        totals: Boundaries, records and bytes by namespace and level; level -1 counts entries.
        complete: Everything that is stored has an entry.
        num_doubts: How often it was marked incomplete, or emptied.
        tombstones: The latest first.
    """

    entries: dict[tuple[NamespaceId, PrefixHash], bytes] = field(default_factory=dict)
    totals: dict[tuple[NamespaceId, int], tuple[int, int, int]] = field(default_factory=dict)
    tenants: dict[NamespaceId, str] = field(default_factory=dict)
    complete: bool = False
    num_doubts: int = 0
    tombstones: deque[Tombstone] = field(default_factory=lambda: deque(maxlen=TOMBSTONES_MAX))

    def lose_everything(self) -> None:
        """Become empty, like a server that was flushed."""
        self.entries.clear()
        self.totals.clear()
        self.tenants.clear()
        self.tombstones.clear()
        self.mark_incomplete()

    def mark_incomplete(self) -> None:
        self.complete = False
        self.num_doubts += 1

    def mark_complete(self, epoch: bytes) -> bool:
        if epoch != b"%d" % self.num_doubts:
            return False
        self.complete = True
        return True

    def count(self, namespace: NamespaceId, level: int, boundaries: int, records: int = 0, num_bytes: int = 0) -> None:
        held = self.totals.get((namespace, level), (0, 0, 0))
        self.totals[namespace, level] = (held[0] + boundaries, held[1] + records, held[2] + num_bytes)


class DictCatalog(LocalCatalog):
    """One service's view of the dictionaries.

    Args:
        books: The dictionaries.
        clock: For first and last use.
        ask: The connection to them.
    """

    def __init__(self, books: CatalogBooks, *, clock: Clock = SYSTEM_CLOCK, ask: Ask = at_once) -> None:
        super().__init__(clock)
        self._books = books
        self._ask = ask

    async def is_complete(self, *, deadline: Deadline) -> bool:
        return await self._run("is_complete", lambda: self._books.complete, deadline)

    async def epoch(self, *, deadline: Deadline) -> bytes:
        return await self._run("epoch", lambda: b"%d" % self._books.num_doubts, deadline)

    async def mark_incomplete(self, *, deadline: Deadline) -> None:
        await self._run("mark_incomplete", self._books.mark_incomplete, deadline)

    async def mark_complete(self, epoch: bytes, *, deadline: Deadline) -> bool:
        return await self._run("mark_complete", partial(self._books.mark_complete, epoch), deadline)

    async def tombstones(self, *, limit: int, deadline: Deadline) -> list[Tombstone]:
        return await self._run("tombstones", lambda: list(self._books.tombstones)[:limit], deadline)

    def text_store(self, kind: TextStoreKind) -> TextStore:
        raise NotImplementedError("texts are beside a real catalog only")

    async def _run(self, what: str, work: Callable[[], T], deadline: Deadline, *, changes: bool = False) -> T:
        self._check_open()
        return await self._ask(what, work, deadline)

    def _read(self, namespace: NamespaceId, prefixes: Sequence[PrefixHash]) -> list[bytes | None]:
        return [self._books.entries.get((namespace, prefix)) for prefix in prefixes]

    def _read_after(self, namespace: NamespaceId, after: bytes, count: int) -> list[tuple[bytes, bytes]]:
        prefixes = sorted(prefix for of, prefix in self._books.entries if of == namespace and prefix > after)
        return [(prefix, self._books.entries[namespace, prefix]) for prefix in prefixes[:count]]

    def _write(self, namespace: NamespaceId, prefix: PrefixHash, data: bytes | None) -> None:
        if data is None:
            del self._books.entries[namespace, prefix]
        else:
            self._books.entries[namespace, prefix] = data

    def _count(self, namespace: NamespaceId, level: int, boundaries: int, records: int = 0, num_bytes: int = 0) -> None:
        self._books.count(namespace, level, boundaries, records, num_bytes)

    def _sums(self) -> Mapping[tuple[NamespaceId, int], tuple[int, int, int]]:
        return self._books.totals

    def _read_tenants(self) -> Mapping[NamespaceId, str]:
        return self._books.tenants

    def _write_tenant(self, namespace: NamespaceId, tenant: str) -> None:
        self._books.tenants[namespace] = tenant

    def _add_tombstone(self, one: Tombstone) -> None:
        self._books.tombstones.appendleft(one)
