"""What queries of a `PageDoor` left behind: what is staged until it is read, and why they reached no further."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.api import LeaseId
from kvstore.model.keys import PrefixHash
from kvstore.runtime.bounded_map import Latest
from kvstore.runtime.clock import SYSTEM_CLOCK

_LEASES_MAX = 256
_CUTS_MAX = 256
_LEASE_SHARE = 0.8
"""A lease counts as ended this early: reading takes time."""


@dataclass(slots=True)
class _Held:
    """Pages that a lease holds and that were not read yet."""

    lease: LeaseId
    unread: set[PrefixHash]
    until_s: float


class Leases:
    """Which lease holds which page. Belongs to the loop's thread."""

    def __init__(self) -> None:
        self._held: OrderedDict[LeaseId, _Held] = OrderedDict()
        self._of: dict[PrefixHash, _Held] = {}

    def add(self, lease: LeaseId, prefixes: Sequence[PrefixHash], lease_s: float) -> list[LeaseId]:
        """Note a lease; returns those that are of no more use, to release."""
        now_s = SYSTEM_CLOCK.monotonic_s()
        held = _Held(lease, set(prefixes), now_s + lease_s * _LEASE_SHARE)
        self._held[lease] = held
        for prefix in prefixes:
            if (before := self._of.get(prefix)) is not None:
                before.unread.discard(prefix)
            self._of[prefix] = held
        ended = [one for one in self._held.values() if one.until_s <= now_s or not one.unread]
        oldest = list(self._held.values())[: max(0, len(self._held) - len(ended) - _LEASES_MAX)]
        return [self._drop(one) for one in {id(one): one for one in (*ended, *oldest)}.values()]

    def find(self, prefixes: Sequence[PrefixHash]) -> tuple[LeaseId | None, int]:
        """The lease that holds the first of these pages, and how many from there on it holds."""
        held = self._of.get(prefixes[0])
        if held is None or held.until_s <= SYSTEM_CLOCK.monotonic_s():
            return None, 0
        num = next((at for at, prefix in enumerate(prefixes) if self._of.get(prefix) is not held), len(prefixes))
        return held.lease, num

    def used(self, lease: LeaseId, prefixes: Sequence[PrefixHash], *, all_of_it: bool) -> list[LeaseId]:
        """Note that pages were read, or that a lease is of no more use; returns what to release."""
        held = self._held.get(lease)
        if held is None:
            return []
        for prefix in prefixes:
            held.unread.discard(prefix)
            if self._of.get(prefix) is held:
                del self._of[prefix]
        return [self._drop(held)] if all_of_it or not held.unread else []

    def _drop(self, held: _Held) -> LeaseId:
        del self._held[held.lease]
        for prefix in held.unread:
            if self._of.get(prefix) is held:
                del self._of[prefix]
        return held.lease


class Cuts:
    """Why the latest query that ended at a page went no further, where the store itself cut it short. Belongs to the
    loop's thread.
    """

    def __init__(self) -> None:
        self._cuts = Latest[PrefixHash, str](_CUTS_MAX)

    def note(self, prefixes: Sequence[PrefixHash], num_found: int, cut: str) -> None:
        """Note how many pages of a query were found, and why not more, as `Staged.cut` says it."""
        if self._cuts:
            for prefix in prefixes[: num_found + 1]:
                self._cuts.pop(prefix, None)
        if cut and num_found < len(prefixes):
            self._cuts[prefixes[num_found]] = cut

    def at(self, prefix: PrefixHash) -> str:
        """Why the latest query that ended at this page did so; empty: the store did not have the page."""
        return self._cuts.get(prefix, "")
