"""Entries of the catalog as retention lists them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from kvstore.catalog.entry import (
    FIRST_USE_AT,
    HITS_AT,
    LAST_USE_AT,
    LEAVING_AT,
    PINNED_AT,
    SUM_BYTES,
    BoundaryEntry,
    EntryShape,
    EntryTable,
    Level,
)
from kvstore.model.keys import NamespaceId
from kvstore.store.retention.held import Held, Listing

_STEP = 50


def held_of(entries: Iterable[BoundaryEntry], num_slices: Sequence[int]) -> Held:
    """What the cold tier holds of these, listed in steps; `num_slices` are those of each group."""
    shape, listing = EntryShape(tuple(num_slices)), Listing()
    by_namespace: dict[NamespaceId, list[BoundaryEntry]] = {}
    for entry in entries:
        by_namespace.setdefault(entry.namespace, []).append(entry)
    for namespace, listed in by_namespace.items():
        for start in range(0, len(listed), _STEP):
            part = listed[start : start + _STEP]
            table = EntryTable.of(shape, [_packed(shape, entry) for entry in part])
            assert list(table.entries(namespace, [entry.prefix for entry in part])) == part
            listing.add(namespace, [entry.prefix for entry in part], table)
    return listing.held()


def _packed(shape: EntryShape, entry: BoundaryEntry) -> bytes:
    data = bytearray(shape.blank(entry.tokens, entry.parent, entry.first_use_s))
    data[LEAVING_AT] = sum(1 << level for level in entry.leaving)
    for at, number in (
        (FIRST_USE_AT, entry.first_use_s),
        (LAST_USE_AT, entry.last_use_s),
        (HITS_AT, entry.hits),
        (PINNED_AT, entry.pinned_until_s),
    ):
        struct.pack_into("<I", data, at, number)
    for level in Level:
        for group, (bits, num_bytes) in enumerate(zip(entry.slices[level], entry.group_bytes[level], strict=True)):
            at, size = shape.sum_at(level, group), (shape.num_slices[group] + 7) // 8
            data[at : at + SUM_BYTES] = num_bytes.to_bytes(SUM_BYTES, "little")
            row = shape.row_at(level) + shape.group_at[group]
            data[row : row + size] = bits.to_bytes(size, "little")
    return bytes(data)
