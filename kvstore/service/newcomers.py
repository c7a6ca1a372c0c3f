"""Connections that have not yet proven who they are: few for each address and in all, the oldest one goes first."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

__all__ = ["Newcomer", "Newcomers"]


class Newcomer:
    """One connection among the newcomers; made by `Newcomers.enter`."""

    def __init__(self, of: Newcomers, source: str) -> None:
        self.source = source
        self._of = of
        self._end: Callable[[], object] | None = None

    def end_with(self, end: Callable[[], object]) -> None:
        """Set what ends this connection; no effect once it has left."""
        if self._of.has(self):
            self._end = end

    def leave(self) -> None:
        """The peer has proven who it is, or the connection is lost. Idempotent."""
        self._end = None
        self._of.remove(self)

    def end(self) -> None:
        """End the connection."""
        end, self._end = self._end, None
        self.leave()
        if end is not None:
            end()


class Newcomers:
    """The connections of which nothing is known yet. Belongs to one loop.

    When there are too many, the one that has waited longest is ended, never the one that comes: a peer that says hello
    at once gets in beside any number of silent ones.

    Args:
        per_source_max: For one IPv4 address or one IPv6 network of 64 bits. Connections without an address, those of a
            Unix socket, are bounded only in all: they are our own user's.
        total_max: In all.
    """

    def __init__(self, per_source_max: int, total_max: int) -> None:
        self._per_source_max = per_source_max
        self._total_max = total_max
        self._all: dict[Newcomer, None] = {}  # oldest first
        self._by_source: dict[str, dict[Newcomer, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def has(self, newcomer: Newcomer) -> bool:
        """Whether it has neither left nor been ended."""
        return newcomer in self._all

    def enter(self, address: str) -> Newcomer:
        """One more connection, from `address`; empty: it has none. Ends others where there are too many."""
        source = _source(address)
        mine = self._by_source.get(source, {})
        if source and len(mine) >= self._per_source_max:
            next(iter(mine)).end()
        while len(self._all) >= self._total_max:
            self.end_oldest()
        newcomer = Newcomer(self, source)
        self._all[newcomer] = None
        self._by_source.setdefault(source, {})[newcomer] = None
        return newcomer

    def end_oldest(self) -> None:
        """End the connection that has waited longest, if there is one."""
        oldest = next(iter(self._all), None)
        if oldest is not None:
            oldest.end()

    def remove(self, newcomer: Newcomer) -> None:
        """Forget a connection. Idempotent; called by `Newcomer`."""
        if self._all.pop(newcomer, newcomer) is None:
            mine = self._by_source[newcomer.source]
            del mine[newcomer]
            if not mine:
                del self._by_source[newcomer.source]


def _source(address: str) -> str:
    """What counts as one peer: whoever has an IPv6 address usually has 2^64 of them."""
    if ":" not in address:
        return address
    found = ipaddress.IPv6Address(address.partition("%")[0])
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(found) >> 64 << 64, 64)))
