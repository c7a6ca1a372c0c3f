"""Encodes the arguments of the scripts, and decodes the totals and tombstones that they write. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvstore.catalog.base import Addition, LeaveReason, LevelTotals, NamespaceTotals, Removal, Tombstone
from kvstore.catalog.entry import EntryShape, Level
from kvstore.catalog.redis_scripts import ALL_SLICES, TOMBSTONE, TOTALS
from kvstore.model.keys import NAMESPACE_BYTES, NamespaceId, PrefixHash

__all__ = ["add_item", "hash_items", "parse_tombstone", "parse_totals", "remove_item", "sum_totals"]

_ADD_ITEM = struct.Struct("<IIIH")
_REMOVE_ITEM = struct.Struct("<IIIHIIHHH")

Numbers = tuple[int, ...]


def hash_items(reply: Any) -> Iterator[tuple[bytes, bytes]]:
    """Fields and values of an HGETALL reply: a dict, or a flat list where the client did not convert it."""
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    return ((bytes(name), bytes(value)) for name, value in pairs)


def parse_totals(reply: Any) -> dict[NamespaceId, Numbers]:
    """The totals of one slot, from its HGETALL reply. Damaged ones are left out: the next change of the namespace
    removes them.
    """
    parsed = {}
    for namespace, packed in hash_items(reply):
        if len(packed) != TOTALS.size or len(namespace) != NAMESPACE_BYTES:
            continue
        fields = TOTALS.unpack(packed)
        parsed[NamespaceId(namespace)] = tuple(
            low | high << 32 for low, high in zip(fields[::2], fields[1::2], strict=True)
        )
    return parsed


def sum_totals(
    slots: Iterable[Mapping[NamespaceId, Numbers]], tenants: Mapping[NamespaceId, str]
) -> dict[NamespaceId, NamespaceTotals]:
    """Sums over all slots; includes registered namespaces that hold nothing."""
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


def parse_tombstone(packed: bytes) -> Tombstone | None:
    """Decode a tombstone as the scripts write it; `None`: it is damaged."""
    try:
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
    except (struct.error, ValueError):
        return None


def add_item(shape: EntryShape, one: Addition) -> bytes:
    """A record as an argument of the `ADD` script."""
    bit = _set_bit(*shape.bit_at(one.level, one.key.group, one.key.slice))
    return _ADD_ITEM.pack(bit, shape.sum_at(one.level, one.key.group), *_u48(one.num_bytes))


def _set_bit(byte_at: int, bit: int) -> int:
    """The offset that SETBIT uses for a bit: it counts from the highest bit of a byte."""
    return byte_at * 8 + 7 - bit


def _u48(number: int) -> tuple[int, int]:
    return number & 0xFFFFFFFF, number >> 32


def remove_item(shape: EntryShape, one: Removal) -> bytes:
    """A record as an argument of the `REMOVE` script."""
    group = one.key.group
    bit = _set_bit(*shape.bit_at(one.level, group, one.key.slice))
    row = shape.row_at(one.level)
    span = row + shape.group_at[group], row + shape.group_at[group + 1] - 1
    known = _u48(0 if one.num_bytes is None else one.num_bytes + 1)
    at = shape.sum_at(one.level, group)
    return _REMOVE_ITEM.pack(bit, at, *known, *span, group, one.key.slice, int(one.reason))
