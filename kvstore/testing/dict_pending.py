"""A `PendingLog` and an `Ownership` in dictionaries that outlive them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvstore.catalog.coordination import Ownership
from kvstore.catalog.pending import PendingEntry, PendingLog, PendingTotals
from kvstore.errors import Closed
from kvstore.model.keys import RecordKey
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.deadline import Deadline
from kvstore.testing.dict_catalog import Ask, at_once

T = TypeVar("T")


_NOBODY = "nobody"
"""The owner of entries that were released."""


@dataclass
class PendingBooks:
    """What several logs share.

    Attributes:
        entries: For each record its entry, and when the lease of each owner ends.
        is_full: There is no room for an entry.
    """

    entries: dict[RecordKey, tuple[PendingEntry, dict[object, float]]] = field(default_factory=dict)
    is_full: bool = False


@dataclass
class LeaseBooks:
    """By name: the holder of its lease, when the lease ends, and the holder's word."""

    held: dict[str, tuple[object, float, str]] = field(default_factory=dict)


class DictPendingLog(PendingLog):
    """One owner's view of the dictionaries.

    Args:
        books: The dictionaries.
        lease_s: Seconds that a claim lasts.
        clock: Measures the leases of all owners, like a server's.
        ask: The connection to the dictionaries.
    """

    def __init__(self, books: PendingBooks, *, lease_s: float, clock: Clock = SYSTEM_CLOCK, ask: Ask = at_once) -> None:
        self._books = books
        self.lease_s = lease_s
        self._clock = clock
        self._ask = ask
        self._owner = object()
        self._closed = False

    def other_owner(self) -> DictPendingLog:
        return DictPendingLog(self._books, lease_s=self.lease_s, clock=self._clock, ask=self._ask)

    async def add(self, entries: Sequence[PendingEntry], *, deadline: Deadline) -> bool:
        def work() -> bool:
            if self._books.is_full:
                return False
            for entry in entries:
                _, ends_s = self._books.entries.get(entry.key, (entry, {}))
                self._books.entries[entry.key] = (entry, {**ends_s, self._owner: self._end_s()})
            return True

        return await self._run("pending add", work, deadline)

    async def renew(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> list[int]:
        def work() -> list[int]:
            owned = [self._owned(key) for key in keys]
            for ends_s in owned:
                if ends_s:
                    ends_s[self._owner] = self._end_s()
            return [len(ends_s) for ends_s in owned]

        return await self._run("pending renew", work, deadline)

    async def release(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        def work() -> None:
            for key in keys:
                if ends_s := self._owned(key):
                    del ends_s[self._owner]
                    ends_s[_NOBODY] = float("-inf")

        await self._run("pending release", work, deadline)

    async def finish(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        def work() -> None:
            for key in keys:
                if ends_s := self._owned(key):
                    del ends_s[self._owner]
                    if not ends_s:
                        del self._books.entries[key]

        await self._run("pending finish", work, deadline)

    async def claim(self, limit: int, *, deadline: Deadline) -> list[PendingEntry]:
        def work() -> list[PendingEntry]:
            now_s = self._clock.monotonic_s()
            free = [entry for entry, ends_s in self._books.entries.values() if max(ends_s.values()) <= now_s]
            claimed = sorted(free, key=lambda entry: entry.stop_tokens)[:limit]
            self._books.entries.update({entry.key: (entry, {self._owner: self._end_s()}) for entry in claimed})
            return claimed

        return await self._run("pending claim", work, deadline)

    async def totals(self, *, deadline: Deadline) -> PendingTotals:
        def work() -> PendingTotals:
            held = self._books.entries.values()
            return PendingTotals(len(held), sum(entry.num_bytes for entry, _ in held))

        return await self._run("pending totals", work, deadline)

    async def aclose(self) -> None:
        self._closed = True

    def _owned(self, key: RecordKey) -> dict[object, float]:
        """When the leases end, if this owner is among the owners."""
        _, ends_s = self._books.entries.get(key, (None, {}))
        return ends_s if self._owner in ends_s else {}

    def _end_s(self) -> float:
        return self._clock.monotonic_s() + self.lease_s

    async def _run(self, what: str, work: Callable[[], T], deadline: Deadline) -> T:
        if self._closed:
            raise Closed("the pending entries are closed")
        return await self._ask(what, work, deadline)


class DictOwnership(Ownership):
    """One owner's view of the leases on names; arguments like `DictPendingLog`."""

    def __init__(self, books: LeaseBooks, *, lease_s: float, clock: Clock = SYSTEM_CLOCK, ask: Ask = at_once) -> None:
        self._books = books
        self.lease_s = lease_s
        self._clock = clock
        self._ask = ask
        self._owner = object()

    async def hold(self, name: str, *, deadline: Deadline) -> bool:
        is_ours, _ = await self._ask("ownership hold", lambda: self._hold(name, None), deadline)
        return is_ours

    async def agree(self, name: str, word: str, *, deadline: Deadline) -> str:
        _, said = await self._ask("ownership agree", lambda: self._hold(name, word), deadline)
        return said

    def _hold(self, name: str, word: str | None) -> tuple[bool, str]:
        now_s = self._clock.monotonic_s()
        owner, end_s, said = self._books.held.get(name, (self._owner, 0.0, ""))
        if end_s <= now_s:
            owner, said = self._owner, ""
        if owner is not self._owner:
            return False, said
        said = said if word is None else word
        self._books.held[name] = (self._owner, now_s + self.lease_s, said)
        return True, said

    async def release(self, name: str, *, deadline: Deadline) -> None:
        def work() -> None:
            if self._books.held.get(name, (None,))[0] is self._owner:
                del self._books.held[name]

        await self._ask("ownership release", work, deadline)
