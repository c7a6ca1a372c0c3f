"""Which boundaries are evicted from the cold tier, and in which order. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from kvstore.catalog.base import LeaveReason, Leaving
from kvstore.catalog.entry import BoundaryEntry, Level
from kvstore.eviction.holdings import SHARED, Holdings, Quota
from kvstore.eviction.policies import Policy
from kvstore.eviction.prefixes import Node
from kvstore.runtime.pauses import SplitDict, empty_in_pieces

_LEVEL = Level.COLD
_SORTED_S = 256
_SORTED_AT_ONCE = 1024
"""Entries are sorted in pieces that span this many seconds and hold this many: about a millisecond each."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A boundary that is to be evicted."""

    entry: BoundaryEntry
    reason: LeaveReason
    parent: int | None = None
    """Index, among all victims, of its parent, which may only be evicted after this one; `None`: the parent stays."""

    def leaving(self, place: Mapping[int, int]) -> Leaving:
        """The catalog's form of it, with the parent given as its place in the same call, if it is there."""
        parent = None if self.parent is None else place.get(self.parent)
        return Leaving(self.entry.namespace, self.entry.prefix, self.entry.last_use_s, parent)


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """What is to be evicted."""

    victims: list[Victim]
    """Each before its parent."""
    is_enough: bool
    """Budget and quotas are met after that."""
    has_broken: bool = False
    """Whether there are boundaries that serve no hit."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the tier, and each tenant in it, may hold."""

    free_bytes: int
    """Bytes to free to meet the budget; 0 or less: none."""
    quotas: Mapping[str, Quota]
    """What each tenant is guaranteed, and the most it may hold."""
    elsewhere_bytes: Mapping[str, int]
    """What tenants with a quota hold beyond the entries that are planned with."""
    ttl_s: int | None
    """What was unused for longer is evicted; `None`: no limit."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Which of the boundaries that may be evicted goes first."""

    make_policy: Callable[[], Policy]
    order: Mapping[bytes, float]
    """Ranks boundaries used in the same second by name, from 0 to 1."""
    marks: Mapping[bytes, int]
    """Priorities of boundaries by name, from hints that apply; with any, the policy is a `Hinted` one."""


def plan_eviction(
    entries: Iterable[BoundaryEntry],
    *,
    tenants: Mapping[bytes, str],
    now_s: int,
    limits: Limits,
    ranking: Ranking,
    kept: Set[bytes],
    kept_since_s: int | None,
    broken: Set[bytes],
) -> EvictionPlan:
    """Choose what to evict, ends of prefixes first: nothing that is pinned, nor what a pinned boundary needs.

    Args:
        entries: What is held; entries without records in the cold tier are skipped.
        tenants: The tenant of each namespace.
        now_s: Seconds since the Unix epoch.
        kept: Names (namespace and prefix) of boundaries that stay, as if pinned: they may not be complete yet.
        kept_since_s: Boundaries first stored after this time stay too; `None`: they may be evicted.
        broken: Names of boundaries that serve no hit: they are evicted even if the budget is not reached.

    Returns:
        Less than `Limits.free_bytes` if the rest is pinned.
    """
    quotas, order = limits.quotas, ranking.order
    pools = {tenant: index for index, tenant in enumerate(sorted(quotas), start=1)}
    holdings = Holdings(0, ranking.make_policy, SplitDict())
    for tenant, index in pools.items():
        pool = holdings.pool(index)
        pool.quota, pool.elsewhere_bytes = quotas[tenant], limits.elsewhere_bytes.get(tenant, 0)
    held = _Held(_longest_unused_first(entries, order))
    for index in held.parents_first():
        key, entry = held.names[index], held.entries[index]
        node = holdings.add(
            key,
            entry.namespace + entry.parent if entry.parent is not None else None,
            tokens=entry.tokens,
            num_bytes=entry.num_bytes(_LEVEL),
            now=entry.last_use_s + order.get(key, 0.0),
            num_uses=entry.hits,
            pool=pools.get(tenants.get(entry.namespace, ""), SHARED),
            owner=tenants.get(entry.namespace, ""),
        )
        is_new = kept_since_s is not None and entry.first_use_s > kept_since_s
        if is_new or entry.pinned_until_s > now_s or key in kept:
            holdings.pin(node)
    for name, priority in ranking.marks.items():
        if (marked := holdings.get(name)) is not None:
            holdings.mark(marked, priority)
    chosen: list[tuple[Node, LeaveReason]] = []
    holdings.budget_bytes = holdings.used_bytes
    if broken:
        chosen += [(node, LeaveReason.BROKEN) for node in holdings.drop(lambda node: node.key in broken)]
    if limits.ttl_s is not None:
        chosen += [(node, LeaveReason.EXPIRED) for node in holdings.expire(float(now_s - limits.ttl_s))]
    for index in pools.values():
        chosen += [(node, LeaveReason.QUOTA) for node in holdings.evict(0, pool=index)]
    chosen_bytes = sum(node.num_bytes for node, _ in chosen)
    holdings.budget_bytes = holdings.used_bytes - max(0, limits.free_bytes - chosen_bytes)
    chosen += [(node, LeaveReason.EVICTED) for node in holdings.evict(0)]
    place = {node.key: index for index, (node, _) in enumerate(chosen)}
    victims = [
        Victim(held.get(_name(node)), reason, place.get(node.parent.key) if node.parent is not None else None)
        for node, reason in chosen
    ]
    is_enough = all(holdings.fits(0, pool=index) for index in (SHARED, *pools.values()))
    del chosen
    held.empty_in_pieces()
    empty_in_pieces(place)
    holdings.discard()
    return EvictionPlan(victims, is_enough)


def incomplete_of(entries: Iterable[BoundaryEntry], recent: Set[bytes]) -> Set[bytes]:
    """Of the recently written boundaries (names of namespace and prefix), those with fewer records than the fullest
    boundary of their namespace: more may be on their way.
    """
    most: dict[bytes, int] = {}
    records: dict[bytes, tuple[bytes, int]] = {}
    for entry in entries:
        count = entry.num_records(_LEVEL)
        most[entry.namespace] = max(count, most.get(entry.namespace, 0))
        if (name := entry.namespace + entry.prefix) in recent:
            records[name] = entry.namespace, count
    return {name for name in recent if name not in records or records[name][1] < most[records[name][0]]}


class _Held:
    """Boundaries by number, name and parent. Built and freed in steps so small that other threads can run in between.

    Args:
        listed: Names (namespace and prefix) with their entries; of duplicates the first counts.
    """

    def __init__(self, listed: Iterable[tuple[bytes, BoundaryEntry]]) -> None:
        self.names: list[bytes] = []
        self.entries: list[BoundaryEntry] = []
        self._indexes: SplitDict[bytes, int] = SplitDict()
        for name, entry in listed:
            if self._indexes.setdefault(name, len(self.names)) == len(self.names):
                self.names.append(name)
                self.entries.append(entry)

    def get(self, name: bytes) -> BoundaryEntry:
        return self.entries[self._indexes[name]]

    def parent_of(self, index: int) -> int | None:
        """The index of the parent, if that is held."""
        entry = self.entries[index]
        return None if entry.parent is None else self._indexes.get(entry.namespace + entry.parent)

    def parents_first(self) -> Iterator[int]:
        """Indexes in the order of listing, except that parents come before their children."""
        done = bytearray(len(self.names))
        for index in range(len(self.names)):
            chain: list[int] = []
            at: int | None = index
            while at is not None and not done[at]:
                done[at] = True
                chain.append(at)
                at = self.parent_of(at)
            yield from reversed(chain)

    def empty_in_pieces(self) -> None:
        """Free everything; unusable afterwards."""
        empty_in_pieces(self.names, self.entries, self._indexes)


def _longest_unused_first(
    entries: Iterable[BoundaryEntry], order: Mapping[bytes, float]
) -> Iterator[tuple[bytes, BoundaryEntry]]:
    """Entries with their names, in the order of their last use, as a policy expects. Sorted in pieces: one sort of them
    all would stop all other threads.
    """
    spans: dict[int, list[tuple[tuple[int, float, int, bytes], BoundaryEntry]]] = {}
    for entry in entries:
        if any(entry.slices[_LEVEL]):
            name = entry.namespace + entry.prefix
            place = (entry.last_use_s, order.get(name, 0.0), -entry.tokens, name)
            spans.setdefault(entry.last_use_s // _SORTED_S, []).append((place, entry))
    for span in sorted(spans):
        placed = spans.pop(span)
        pieces = [placed[at : at + _SORTED_AT_ONCE] for at in range(0, len(placed), _SORTED_AT_ONCE)]
        for piece in pieces:
            piece.sort(key=_place)
        for place, entry in heapq.merge(*pieces, key=_place):
            yield place[-1], entry
        empty_in_pieces(placed, *pieces)


def _place(one: tuple[tuple[int, float, int, bytes], BoundaryEntry]) -> tuple[int, float, int, bytes]:
    return one[0]


def _name(node: Node) -> bytes:
    assert isinstance(node.key, bytes)
    return node.key
