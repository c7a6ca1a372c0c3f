"""The boundaries that the cold tier holds, as arrays, so that millions fit. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from kvstore.catalog.entry import (
    FIRST_USE_AT,
    HITS_AT,
    LAST_USE_AT,
    PINNED_AT,
    TOKENS_AT,
    EntryShape,
    EntryTable,
    Level,
)
from kvstore.catalog.families import Hashes, Rows, depths, hashes_of, rows_of
from kvstore.model.keys import PREFIX_BYTES, NamespaceId, PrefixHash
from kvstore.store.retention.broken import Flags, Numbers, broken_rows, is_known, lack_slices

_LEVEL = Level.COLD


class Listing:
    """Collects entries as they are read, as their bytes."""

    def __init__(self) -> None:
        self._read: dict[NamespaceId, tuple[EntryShape, bytearray, bytearray]] = {}

    def add(self, namespace: NamespaceId, prefixes: Sequence[PrefixHash], table: EntryTable) -> None:
        """Add entries; those without records in the cold tier, and those that are leaving it, are passed over."""
        has_records = table.rows(_LEVEL).any(axis=1)
        _, hashes, entries = self._read.setdefault(namespace, (table.shape, bytearray(), bytearray()))
        hashes += hashes_of(prefixes)[has_records].tobytes()
        entries += table.data[has_records].tobytes()

    def held(self) -> Held:
        """What was listed. Nothing is listed afterwards."""
        read, self._read = self._read, {}
        return Held.joined([_held(namespace, *read.pop(namespace)) for namespace in list(read)])


@dataclass(frozen=True)
class Held:
    """Boundaries, those of a namespace one after the other; each field is an array [boundaries].

    Attributes:
        namespaces: Not an array: the namespaces, in order.
        namespace: Each one's index in `namespaces`.
        prefixes: [boundaries, 32].
        above: The row of each one's parent; -1: it is not held, or there is none.
        has_parent: Whether the catalog knows of a parent.
        lack_slices: As the function of that name.
        num_records: In the cold tier, as are `num_bytes`.
        tokens, first_use_s, last_use_s, hits, pinned_until_s: As in `BoundaryEntry`.
    """

    namespaces: Sequence[NamespaceId]
    namespace: Rows
    prefixes: Hashes
    above: Rows
    has_parent: Flags
    lack_slices: Flags
    num_records: Numbers
    num_bytes: Numbers
    tokens: Numbers
    first_use_s: Numbers
    last_use_s: Numbers
    hits: Numbers
    pinned_until_s: Numbers

    @classmethod
    def joined(cls, parts: Sequence[Held]) -> Held:
        """The boundaries of all parts, which have distinct namespaces."""
        if not parts:
            nothing, no = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.bool_)
            return cls((), nothing, hashes_of(()), nothing, no, no, *[nothing] * 7)
        at, starts = 0, []
        for part in parts:
            starts.append(at)
            at += len(part)
        arrays = {
            field.name: np.concatenate([getattr(part, field.name) for part in parts])
            for field in fields(cls)
            if field.name not in ("namespaces", "namespace", "above")
        }
        return cls(
            namespaces=[namespace for part in parts for namespace in part.namespaces],
            namespace=np.repeat(np.arange(len(parts)), [len(part) for part in parts]),
            above=np.concatenate(
                [np.where(part.above < 0, -1, part.above + start) for part, start in zip(parts, starts, strict=True)]
            ),
            **arrays,
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def broken(self) -> Flags:
        """[boundaries]: whether one serves no hit from the cold tier."""
        return broken_rows(self.above, self.has_parent, self.lack_slices)

    def fullest(self) -> Numbers:
        """[boundaries]: the records of the boundary with most of them in its namespace."""
        most = np.zeros(len(self.namespaces), dtype=np.int64)
        np.maximum.at(most, self.namespace, self.num_records)
        return most[self.namespace]

    @cached_property
    def depth(self) -> Rows:
        """[boundaries]: how many held boundaries each one continues."""
        return depths(self.above)

    def ends_first(self) -> Iterator[Rows]:
        """Rows of boundaries with a parent, grouped so that no group has a parent of one in a later group."""
        order = np.argsort(-self.depth, kind="stable")
        counts = np.bincount(self.depth)
        start = 0
        for count in counts[:0:-1].tolist():
            yield order[start : start + count]
            start += count

    def rows_of(self, names: Iterable[bytes]) -> dict[bytes, int]:
        """The rows of boundaries by name (namespace and prefix); those that are not held are left out."""
        by_namespace: dict[bytes, list[bytes]] = {}
        for name in names:
            by_namespace.setdefault(name[:-PREFIX_BYTES], []).append(name)
        found: dict[bytes, int] = {}
        for index, namespace in enumerate(self.namespaces):
            if listed := by_namespace.get(namespace):
                start, stop = np.searchsorted(self.namespace, [index, index + 1])
                rows = rows_of(hashes_of(name[-PREFIX_BYTES:] for name in listed), self.prefixes[start:stop])
                found |= {name: row + int(start) for name, row in zip(listed, rows.tolist(), strict=True) if row >= 0}
        return found

    def flags(self, rows: Iterable[int]) -> Flags:
        """[boundaries]: whether a row is among these."""
        flags = np.zeros(len(self), dtype=np.bool_)
        flags[np.fromiter(rows, dtype=np.int64)] = True
        return flags


def _held(namespace: NamespaceId, shape: EntryShape, hashes: bytearray, entries: bytearray) -> Held:
    """The boundaries of one namespace. A walk may have listed one twice: the first counts."""
    prefixes = np.frombuffer(hashes, dtype=np.uint8).reshape(-1, PREFIX_BYTES)
    data = np.frombuffer(entries, dtype=np.uint8).reshape(-1, shape.num_bytes)
    first = rows_of(prefixes, prefixes)
    is_first = (first < 0) | (first == np.arange(len(first)))
    if not is_first.all():
        prefixes, data = prefixes[is_first], data[is_first]
    table = EntryTable(shape, data)
    parents, num_slices = table.parents(), table.num_slices([_LEVEL])
    above = rows_of(parents, prefixes)
    return Held(
        namespaces=[namespace],
        namespace=np.zeros(len(prefixes), dtype=np.int64),
        prefixes=prefixes,
        above=np.where(depths(above) < 0, -1, above),
        has_parent=is_known(parents),
        lack_slices=lack_slices(num_slices),
        num_records=num_slices.sum(axis=1),
        num_bytes=table.level_bytes(_LEVEL),
        tokens=table.numbers(TOKENS_AT),
        first_use_s=table.numbers(FIRST_USE_AT),
        last_use_s=table.numbers(LAST_USE_AT),
        hits=table.numbers(HITS_AT),
        pinned_until_s=table.numbers(PINNED_AT),
    )
