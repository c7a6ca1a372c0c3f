"""How a change edits the bytes of an entry. Pure; the Redis scripts do the same on the server."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from kvstore.catalog.base import Addition, Removal
from kvstore.catalog.entry import (
    HITS_AT,
    LAST_USE_AT,
    LEAVING_AT,
    PARENT_AT,
    SUM_BYTES,
    TOKENS_AT,
    EntryShape,
    Level,
)
from kvstore.errors import InvalidRequest
from kvstore.model.keys import PREFIX_BYTES, PrefixHash

_U32 = struct.Struct("<I")
_U32_MAX = 0xFFFFFFFF


class EntryEdit:
    """Edits one entry: `shape` gives the offsets of its fields, `data` is its bytes."""

    def __init__(self, shape: EntryShape, data: bytes) -> None:
        self.shape = shape
        self.data = bytearray(shape.check(data))

    def number(self, at: int) -> int:
        """The 4-byte field at offset `at`."""
        value: int = _U32.unpack_from(self.data, at)[0]
        return value

    def set_number(self, at: int, value: int) -> None:
        _U32.pack_into(self.data, at, value)

    @property
    def empty(self) -> bool:
        """Whether no level has a record."""
        return not any(self.data[self.shape.rows_at :])

    def num_records(self, level: Level, group: int | None = None) -> int:
        """Records at a level, of one group or of all."""
        row, at = self.shape.row_at(level), self.shape.group_at
        start, stop = (row, row + at[-1]) if group is None else (row + at[group], row + at[group + 1])
        return int.from_bytes(self.data[start:stop], "little").bit_count()

    def sum(self, level: Level, group: int) -> int:
        """Bytes of a group at a level."""
        at = self.shape.sum_at(level, group)
        return int.from_bytes(self.data[at : at + SUM_BYTES], "little")

    def _set_sum(self, level: Level, group: int, value: int) -> None:
        at = self.shape.sum_at(level, group)
        self.data[at : at + SUM_BYTES] = value.to_bytes(SUM_BYTES, "little")

    def leaves(self, level: Level) -> bool:
        """Whether its records at a level are being deleted."""
        return bool(self.data[LEAVING_AT] >> level & 1)

    def set_leaving(self, level: Level, leaving: bool) -> None:
        self.data[LEAVING_AT] = self.data[LEAVING_AT] & ~(1 << level) | leaving << level

    def add(self, one: Addition) -> int:
        """Add a record; returns its bytes, 0 for one that was known."""
        byte_at, bit = self.shape.bit_at(one.level, one.key.group, one.key.slice)
        if self.data[byte_at] >> bit & 1:
            return 0
        if not 0 < one.num_bytes < 1 << 40:
            raise InvalidRequest("a record has at least one byte, and less than 1 TiB", seen=one.num_bytes, key=one.key)
        self.data[byte_at] |= 1 << bit
        self._set_sum(one.level, one.key.group, self.sum(one.level, one.key.group) + one.num_bytes)
        return one.num_bytes

    def remove(self, one: Removal) -> int | None:
        """Remove a record; returns its bytes, `None` for one that was not known."""
        group = one.key.group
        byte_at, bit = self.shape.bit_at(one.level, group, one.key.slice)
        if not self.data[byte_at] >> bit & 1:
            return None
        held, total = self.num_records(one.level, group), self.sum(one.level, group)
        num_bytes = total // held if one.num_bytes is None else min(one.num_bytes, total)
        if held == 1:
            num_bytes = total
        self.data[byte_at] &= ~(1 << bit)
        self._set_sum(one.level, group, total - num_bytes)
        if self.num_records(one.level) == 0:
            self.set_leaving(one.level, False)
        return num_bytes

    def wipe(self, level: Level) -> int:
        """Remove all records of a level; returns their bytes."""
        num_bytes = sum(self.sum(level, group) for group in range(len(self.shape.num_slices)))
        for group in range(len(self.shape.num_slices)):
            self._set_sum(level, group, 0)
        row = self.shape.row_at(level)
        self.data[row : row + self.shape.row_bytes] = bytes(self.shape.row_bytes)
        self.set_leaving(level, False)
        return num_bytes

    def fill(self, tokens: int, parent: PrefixHash | None) -> None:
        """Set position and parent where they were not known."""
        if tokens and not self.number(TOKENS_AT):
            self.set_number(TOKENS_AT, tokens)
        if parent is not None and not any(self.data[PARENT_AT : PARENT_AT + PREFIX_BYTES]):
            self.data[PARENT_AT : PARENT_AT + len(parent)] = parent

    def mark_used(self, now_s: int, hits: int = 0) -> None:
        """Set the last use, and add to the hits."""
        self.set_number(LAST_USE_AT, max(now_s, self.number(LAST_USE_AT)))
        self.set_number(HITS_AT, min(_U32_MAX, self.number(HITS_AT) + hits))


def packed_with(shape: EntryShape, additions: Sequence[Addition], now_s: int) -> bytes:
    """A new entry that holds `additions`, all of one boundary."""
    tokens = max(one.tokens for one in additions)
    parent = next((one.parent for one in additions if one.parent is not None), None)
    edit = EntryEdit(shape, shape.blank(tokens, parent, now_s))
    for one in additions:
        edit.add(one)
    return bytes(edit.data)
