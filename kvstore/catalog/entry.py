"""A boundary's entry as bytes (little-endian), and many of them as one array. Pure.

| at | bytes | field |
|---|---|---|
| 0 | 1 | version, 1 |
| 1 | 1 | leaving: a bit per level |
| 2 | 2 | the mark of the last recount, zero before; only in Redis ([scripts](redis/scripts.py)) |
| 4 | 4 | tokens |
| 8 | 32 | prefix hash of the parent; zeros: unknown or none |
| 40 | 4 | first use, s since the Unix epoch |
| 44 | 4 | last use |
| 48 | 4 | hits |
| 52 | 4 | pinned until; 0: not |
| 56 | 6 per level and group | bytes of the group's records, level by level |
| after these | `row_bytes` per level | one bit per slice, lowest bit first; each group starts on a new byte |

The layout follows from the namespace's groups, so all its entries have one size: 112 bytes for 4 groups of 8 slices.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvstore.errors import CorruptRecord, InvalidRequest
from kvstore.model.keys import PREFIX_BYTES, NamespaceId, PrefixHash, RecordKey
from kvstore.model.layout import Layout


class Level(IntEnum):
    """A tier that outlives the process and that all services see alike. The numbers are stored."""

    HOT = 0
    COLD = 1


ENTRY_VERSION = 1
SUM_BYTES = 6
LEAVING_AT, MARK_AT, TOKENS_AT, PARENT_AT = 1, 2, 4, 8
FIRST_USE_AT, LAST_USE_AT, HITS_AT, PINNED_AT, SUMS_AT = 40, 44, 48, 52, 56

_HEAD = struct.Struct("<BBHI32sIIII")
_NO_PARENT = bytes(PREFIX_BYTES)
_LEVELS = tuple(frozenset(level for level in Level if bits >> level & 1) for bits in range(256))
"""The levels that are being left, by the value of the entry's `leaving` byte."""


@dataclass(frozen=True, slots=True)
class BoundaryEntry:
    """The catalog's entry of one boundary.

    Attributes:
        tokens: Its position in tokens; 0: not known, as after a reindex until it is read.
        parent: The page boundary before it; `None`: not known, or there is none (`tokens` is at most one page).
        first_use_s: When its first record was stored, in seconds since the Unix epoch.
        last_use_s: When it was last stored or read.
        hits: How often it was read.
        pinned_until_s: When its pin ends; 0: not pinned.
        slices: Per level and group: a bit for each slice that is stored.
        group_bytes: Per level and group: the bytes of those slices.
        leaving: Levels whose records are being deleted: lookups see nothing there.
    """

    namespace: NamespaceId
    prefix: PrefixHash
    tokens: int
    parent: PrefixHash | None
    first_use_s: int
    last_use_s: int
    hits: int
    pinned_until_s: int
    slices: tuple[tuple[int, ...], ...]
    group_bytes: tuple[tuple[int, ...], ...]
    leaving: frozenset[Level] = frozenset()

    def num_bytes(self, level: Level) -> int:
        """Bytes of the boundary's records at a level."""
        return sum(self.group_bytes[level])

    def num_records(self, level: Level) -> int:
        """Records of the boundary at a level."""
        return sum(bits.bit_count() for bits in self.slices[level])

    def keys(self, level: Level) -> list[RecordKey]:
        """The records at a level."""
        return [
            RecordKey(self.namespace, self.prefix, group, slice_)
            for group, bits in enumerate(self.slices[level])
            for slice_ in range(bits.bit_length())
            if bits >> slice_ & 1
        ]


@dataclass(frozen=True)
class EntryShape:
    """The offsets of the fields in a namespace's entries, which follow from the number of slices of each group."""

    num_slices: tuple[int, ...]

    @classmethod
    def of(cls, layout: Layout) -> EntryShape:
        """The shape of a layout's entries: at most 1,464 bytes, for 64 groups of 2,048 slices in all."""
        return cls(tuple(group.num_slices for group in layout.groups))

    @cached_property
    def group_at(self) -> tuple[int, ...]:
        """Offset of each group's bytes in a level's row of bits; then the row's end."""
        at = [0]
        for count in self.num_slices:
            at.append(at[-1] + (count + 7) // 8)
        return tuple(at)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one level's row of bits."""
        return self.group_at[-1]

    @cached_property
    def rows_at(self) -> int:
        """Offset of the rows of bits."""
        return SUMS_AT + SUM_BYTES * len(Level) * len(self.num_slices)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of an entry."""
        return self.rows_at + len(Level) * self.row_bytes

    def sum_at(self, level: Level, group: int) -> int:
        """Offset of the sum of a group's bytes at a level."""
        return SUMS_AT + SUM_BYTES * (level * len(self.num_slices) + group)

    def row_at(self, level: Level) -> int:
        """Offset of a level's row of bits."""
        return self.rows_at + level * self.row_bytes

    def holds(self, group: int, slice_: int) -> bool:
        """Whether the layout has such a slice."""
        return 0 <= group < len(self.num_slices) and 0 <= slice_ < self.num_slices[group]

    def bit_at(self, level: Level, group: int, slice_: int) -> tuple[int, int]:
        """Offset of the byte, and the bit in it (0 is the lowest), of a slice.

        Raises:
            InvalidRequest: The layout has no such slice.
        """
        if not self.holds(group, slice_):
            raise InvalidRequest("the namespace has no such slice", group=group, slice=slice_, groups=self.num_slices)
        return self.row_at(level) + self.group_at[group] + slice_ // 8, slice_ % 8

    def blank(self, tokens: int, parent: PrefixHash | None, now_s: int) -> bytes:
        """An entry without records."""
        head = _HEAD.pack(ENTRY_VERSION, 0, 0, tokens, parent or _NO_PARENT, now_s, now_s, 0, 0)
        return head + bytes(self.num_bytes - len(head))

    def check(self, data: bytes) -> bytes:
        """Refuse bytes that are no entry of this shape.

        Raises:
            CorruptRecord: Wrong size or version.
        """
        if len(data) != self.num_bytes or data[0] != ENTRY_VERSION:
            raise CorruptRecord(
                "not an entry of the catalog: rebuild it with `kvstore reindex`",
                expected=f"version {ENTRY_VERSION}, {self.num_bytes} bytes",
                seen=f"version {data[0] if data else None}, {len(data)} bytes",
            )
        return data

    def slices(self, data: bytes, level: Level) -> tuple[int, ...]:
        """For each group a bit per slice."""
        return tuple([int.from_bytes(data[part], "little") for part in self._bit_parts[level]])

    def group_bytes(self, data: bytes, level: Level) -> tuple[int, ...]:
        """For each group the bytes of its records."""
        return tuple([int.from_bytes(data[part], "little") for part in self._sum_parts[level]])

    @cached_property
    def _bit_parts(self) -> tuple[tuple[slice, ...], ...]:
        """Per level and group: where its bits are. Computed once, since retention reads every entry."""
        ends = list(pairwise(self.group_at))
        return tuple(tuple(slice(row + start, row + stop) for start, stop in ends) for row in map(self.row_at, Level))

    @cached_property
    def _sum_parts(self) -> tuple[tuple[slice, ...], ...]:
        starts = [[self.sum_at(level, group) for group in range(len(self.num_slices))] for level in Level]
        return tuple(tuple(slice(at, at + SUM_BYTES) for at in listed) for listed in starts)


def entry_of(shape: EntryShape, namespace: NamespaceId, prefix: PrefixHash, data: bytes) -> BoundaryEntry:
    """An entry's bytes as a value.

    Raises:
        CorruptRecord: They are no entry of this shape.
    """
    _, leaving, _, tokens, parent, first_use_s, last_use_s, hits, pinned_until_s = _HEAD.unpack_from(shape.check(data))
    return BoundaryEntry(
        namespace,
        prefix,
        tokens,
        None if parent == _NO_PARENT else PrefixHash(parent),
        first_use_s,
        last_use_s,
        hits,
        pinned_until_s,
        slices=(shape.slices(data, Level.HOT), shape.slices(data, Level.COLD)),
        group_bytes=(shape.group_bytes(data, Level.HOT), shape.group_bytes(data, Level.COLD)),
        leaving=_LEVELS[leaving],
    )


@dataclass(frozen=True)
class EntryTable:
    """The entries of many boundaries, in the order of the request."""

    shape: EntryShape
    data: npt.NDArray[np.uint8]
    """[boundaries, `shape.num_bytes`]; zeros where there is no entry."""

    @classmethod
    def of(cls, shape: EntryShape, entries: list[bytes | None]) -> EntryTable:
        """A table of entries as they were read; an entry of another size or version counts as absent."""
        size, blank = shape.num_bytes, bytes(shape.num_bytes)
        joined = b"".join([entry if entry is not None and len(entry) == size else blank for entry in entries])
        data = np.frombuffer(joined, dtype=np.uint8).reshape(len(entries), size)
        wrong = data[:, 0] > ENTRY_VERSION
        if wrong.any():
            data = np.where(wrong[:, None], np.uint8(0), data)
        return cls(shape, data)

    def present(self) -> npt.NDArray[np.bool_]:
        """[boundaries]: whether there is an entry."""
        found: npt.NDArray[np.bool_] = self.data[:, 0] == ENTRY_VERSION
        return found

    def entry(self, index: int) -> bytes | None:
        """One boundary's entry; `None`: there is none."""
        return self.data[index].tobytes() if self.data[index, 0] == ENTRY_VERSION else None

    def entries(self, namespace: NamespaceId, prefixes: Sequence[PrefixHash]) -> Iterator[BoundaryEntry]:
        """The entries that there are, as values. `prefixes` are the boundaries of the request."""
        for index, prefix in enumerate(prefixes):
            if (data := self.entry(index)) is not None:
                yield entry_of(self.shape, namespace, prefix, data)

    def rows(self, level: Level) -> npt.NDArray[np.uint8]:
        """[boundaries, `row_bytes`]: the bits of a level; zeros where the boundary is leaving it."""
        start = self.shape.row_at(level)
        rows = self.data[:, start : start + self.shape.row_bytes]
        leaving = (self.data[:, LEAVING_AT] >> level & 1).astype(bool)
        return np.where(leaving[:, None], np.uint8(0), rows) if leaving.any() else rows

    def parents(self) -> npt.NDArray[np.uint8]:
        """[boundaries, 32]: the hash of each one's parent; zeros: there is none, or it is not known."""
        return self.data[:, PARENT_AT : PARENT_AT + PREFIX_BYTES]

    def num_slices(self, levels: Collection[Level] = tuple(Level)) -> npt.NDArray[np.int64]:
        """[boundaries, groups]: slices that levels hold together, but those that the boundary is leaving."""
        rows = np.bitwise_or.reduce([self.rows(level) for level in levels])
        return np.add.reduceat(np.bitwise_count(rows).astype(np.int64), self.shape.group_at[:-1], axis=1)

    def numbers(self, at: int) -> npt.NDArray[np.int64]:
        """[boundaries]: the field of 4 bytes that begins at `at`, like `HITS_AT`."""
        return self._field(at, "<u4")

    def level_bytes(self, level: Level) -> npt.NDArray[np.int64]:
        """[boundaries]: bytes of the records at a level."""
        groups = range(len(self.shape.num_slices))
        return sum((self._group_bytes(level, group) for group in groups), np.zeros(len(self.data), dtype=np.int64))

    def _group_bytes(self, level: Level, group: int) -> npt.NDArray[np.int64]:
        """[boundaries]: bytes of a group's records at a level."""
        low, high = self.shape.sum_at(level, group), self.shape.sum_at(level, group) + 4
        return self._field(low, "<u4") | self._field(high, "<u2") << 32

    def _field(self, at: int, dtype: str) -> npt.NDArray[np.int64]:
        """[boundaries]: a number in each entry, at any offset."""
        fields = np.dtype({"names": ["number"], "formats": [dtype], "offsets": [at], "itemsize": self.shape.num_bytes})
        found: npt.NDArray[np.int64] = self.data.view(fields)["number"][:, 0].astype(np.int64)
        return found

    def has_parent(self, parent: PrefixHash) -> npt.NDArray[np.bool_]:
        """[boundaries]: whether `parent` is its parent."""
        wanted = np.frombuffer(parent, dtype=np.uint8)
        found: npt.NDArray[np.bool_] = (self.parents() == wanted).all(axis=1)
        return found

    def leaves(self, index: int, level: Level) -> bool:
        """Whether the records of one boundary at a level are being deleted."""
        return bool(self.data[index][LEAVING_AT] >> level & 1)

    def has(self, index: int, level: Level, group: int, slice_: int) -> bool:
        """Whether one boundary has a slice at a level, and is not leaving it. False for a slice that the layout lacks:
        tiers may list any name.
        """
        if not self.shape.holds(group, slice_):
            return False
        byte_at, bit = self.shape.bit_at(level, group, slice_)
        return bool(self.data[index][byte_at] >> bit & 1) and not self.leaves(index, level)

    def mean_bytes(self, level: Level, group: int) -> int:
        """Mean size of the group's records at a level, over all entries; 0: there are none."""
        num_bytes = int(self._group_bytes(level, group).sum())
        start = self.shape.row_at(level)
        bits = self.data[:, start + self.shape.group_at[group] : start + self.shape.group_at[group + 1]]
        count = int(np.bitwise_count(bits).sum())
        return num_bytes // count if count else 0
