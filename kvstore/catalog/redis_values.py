"""Totals and tombstones as the scripts write them, read back. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvstore.catalog.base import LeaveReason, LevelTotals, NamespaceTotals, Tombstone
from kvstore.catalog.entry import Level
from kvstore.catalog.redis_scripts import ALL_SLICES, TOMBSTONE, TOTALS
from kvstore.model.keys import NamespaceId, PrefixHash

__all__ = ["parse_tombstone", "parse_totals", "sum_totals"]

Numbers = tuple[int, ...]


def parse_totals(reply: Any) -> dict[NamespaceId, Numbers]:
    """What HGETALL tells of one slot."""
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    parsed = {}
    for namespace, packed in pairs:
        fields = TOTALS.unpack(packed)
        parsed[NamespaceId(bytes(namespace))] = tuple(
            low | high << 32 for low, high in zip(fields[::2], fields[1::2], strict=True)
        )
    return parsed


def sum_totals(
    slots: Iterable[Mapping[NamespaceId, Numbers]], tenants: Mapping[NamespaceId, str]
) -> dict[NamespaceId, NamespaceTotals]:
    """All slots together; a namespace that holds nothing is told too."""
    sums: dict[NamespaceId, list[int]] = {namespace: [0] * (1 + 3 * len(Level)) for namespace in tenants}
    for slot in slots:
        for namespace, numbers in slot.items():
            row = sums.setdefault(namespace, [0] * len(numbers))
            for index, number in enumerate(numbers):
                row[index] += number
    return {
        namespace: NamespaceTotals(
            tenants.get(namespace, ""),
            row[0],
            tuple(LevelTotals(*row[1 + 3 * level : 4 + 3 * level]) for level in Level),
        )
        for namespace, row in sums.items()
    }


def parse_tombstone(packed: bytes) -> Tombstone:
    """The inverse of what the scripts write."""
    namespace, prefix, level, reason, group, slice_, low, high, at_s = TOMBSTONE.unpack(packed)
    whole = group == ALL_SLICES
    return Tombstone(
        NamespaceId(namespace),
        PrefixHash(prefix),
        Level(level),
        None if whole else group,
        None if whole else slice_,
        low | high << 32,
        LeaveReason(reason),
        at_s,
    )
