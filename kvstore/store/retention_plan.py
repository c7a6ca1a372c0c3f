"""Which boundaries leave a level, and in which order: from what the catalog says. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kvstore.catalog.base import BoundaryEntry, LeaveReason
from kvstore.catalog.entry import Level
from kvstore.eviction.base import Policy
from kvstore.eviction.holdings import SHARED, Holdings
from kvstore.eviction.prefixes import Node

__all__ = ["Leaver", "plan_leaving"]


@dataclass(frozen=True, slots=True)
class Leaver:
    """A boundary that is to leave.

    Attributes:
        entry: As the catalog had it.
        reason: Why.
        parent: Index among all leavers of the boundary below it, which may only leave once this one has; `None`: that
            one stays.
    """

    entry: BoundaryEntry
    reason: LeaveReason
    parent: int | None = None


def plan_leaving(
    entries: Iterable[BoundaryEntry],
    *,
    level: Level,
    tenants: Mapping[bytes, str],
    free_bytes: int,
    quotas: Mapping[str, int],
    ttl_s: int | None,
    now_s: int,
    make_policy: Callable[[], Policy],
) -> list[Leaver]:
    """Choose what leaves, ends of prefixes first; nothing that is pinned, nor what a pinned boundary needs.

    Args:
        entries: What is held; entries without records at the level are passed over.
        level: Where room is needed.
        tenants: Of each namespace.
        free_bytes: How many bytes shall leave to meet the budget; 0 or less: none.
        quotas: Bytes that a tenant may take; within it, it gives way after all who have none.
        ttl_s: What was unused for so long leaves; `None`: no limit.
        now_s: Seconds since the Unix epoch.
        make_policy: Ranks what is free to leave.

    Returns:
        Each before the boundary below it. Less than asked for when the rest is pinned.
    """
    pools = {tenant: index for index, tenant in enumerate(sorted(quotas), start=1)}
    holdings = Holdings(0, make_policy)
    for tenant, index in pools.items():
        holdings.pool(index).quota_bytes = quotas[tenant]
    held = sorted((entry for entry in entries if any(entry.slices[level])), key=lambda entry: entry.last_use_s)
    by_key = {entry.namespace + entry.prefix: entry for entry in held}
    for key, entry in _parents_first(by_key):
        node = holdings.add(
            key,
            entry.namespace + entry.parent if entry.parent is not None else None,
            tokens=entry.tokens,
            num_bytes=entry.num_bytes(level),
            now=float(entry.last_use_s),
            num_uses=entry.hits,
            pool=pools.get(tenants.get(entry.namespace, ""), SHARED),
        )
        if entry.pinned_until_s > now_s:
            holdings.pin(node)
    leaving: list[tuple[Node, LeaveReason]] = []
    holdings.budget_bytes = holdings.used_bytes
    if ttl_s is not None:
        leaving += [(node, LeaveReason.EXPIRED) for node in holdings.expire(float(now_s - ttl_s))]
    for index in pools.values():
        leaving += [(node, LeaveReason.QUOTA) for node in holdings.evict(0, pool=index)]
    gone_bytes = sum(node.num_bytes for node, _ in leaving)
    holdings.budget_bytes = holdings.used_bytes - max(0, free_bytes - gone_bytes)
    leaving += [(node, LeaveReason.EVICTED) for node in holdings.evict(0)]
    place = {node.key: index for index, (node, _) in enumerate(leaving)}
    return [
        Leaver(by_key[_name(node)], reason, place.get(node.parent.key) if node.parent is not None else None)
        for node, reason in leaving
    ]


def _name(node: Node) -> bytes:
    assert isinstance(node.key, bytes)
    return node.key


def _parents_first(entries: Mapping[bytes, BoundaryEntry]) -> Iterable[tuple[bytes, BoundaryEntry]]:
    """In order of use, so that a policy sees the past as it was, but for parents, which come before their ends."""
    done: set[bytes] = set()
    for key in entries:
        chain: list[bytes] = []
        at: bytes | None = key
        while at is not None and at in entries and at not in done:
            done.add(at)
            chain.append(at)
            entry = entries[at]
            at = entry.namespace + entry.parent if entry.parent is not None else None
        for name in reversed(chain):
            yield name, entries[name]
