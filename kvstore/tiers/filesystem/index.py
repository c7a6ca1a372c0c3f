"""Which records a directory holds, in order of use, and what they cost."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from kvstore.format.names import pack_key, unpack_key
from kvstore.model.keys import RecordKey
from kvstore.tiers.filesystem.index_log import Held

__all__ = ["Index", "cost_bytes"]

_BLOCK_BYTES = 4096
_INODE_BYTES = 512


def cost_bytes(num_bytes: int) -> int:
    """What a file of `num_bytes` is charged: whole filesystem blocks and an inode."""
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES + _INODE_BYTES


class Index:
    """Keys with sizes, least recently used first, under a byte budget that also counts what is being written, and the
    `aside_bytes` of files that are no records any more.

    Keys are kept packed, 52 bytes each: a million of them take 0.2 GB, and are loaded in about a second.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.aside_bytes = 0
        self._reserved_bytes = 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: RecordKey) -> bool:
        return pack_key(key) in self._sizes

    def __iter__(self) -> Iterator[tuple[RecordKey, int]]:
        return ((unpack_key(packed), num_bytes) for packed, num_bytes in self.packed())

    def packed(self) -> list[tuple[bytes, int]]:
        """A snapshot of the packed keys with their bytes, in order of use."""
        return list(self._sizes.items())

    def load(self, held: Held) -> None:
        """Fill an empty index with what an earlier one held."""
        self._sizes = OrderedDict(held)
        sizes = np.fromiter(held.values(), np.int64, len(held))
        self.used_bytes = int(((sizes + _BLOCK_BYTES - 1) // _BLOCK_BYTES * _BLOCK_BYTES + _INODE_BYTES).sum())

    def size_of(self, key: RecordKey) -> int | None:
        """Bytes of the record, or `None`. Not a use."""
        return self._sizes.get(pack_key(key))

    def touch(self, key: RecordKey) -> None:
        """Mark a held record as used."""
        self._sizes.move_to_end(pack_key(key))

    def add(self, key: RecordKey, num_bytes: int) -> None:
        """Note a file; one that is known already keeps its size and place."""
        packed = pack_key(key)
        if packed not in self._sizes:
            self._sizes[packed] = num_bytes
            self.used_bytes += cost_bytes(num_bytes)

    def remove(self, key: RecordKey) -> bool:
        """Forget a file. False: it was not known."""
        num_bytes = self._sizes.pop(pack_key(key), None)
        if num_bytes is None:
            return False
        self.used_bytes -= cost_bytes(num_bytes)
        return True

    def reserve(self, num_bytes: int) -> list[RecordKey] | None:
        """Make room for a file and hold it until `unreserve`.

        Returns:
            The evicted records, already forgotten here, for the caller to remove; `None`: the file cannot fit at all.
        """
        cost = cost_bytes(num_bytes)
        if self.aside_bytes + self._reserved_bytes + cost > self.limit_bytes:
            return None
        self._reserved_bytes += cost
        return self.shrink()

    def unreserve(self, num_bytes: int) -> None:
        """End a reservation, whatever became of it."""
        self._reserved_bytes -= cost_bytes(num_bytes)

    def shrink(self) -> list[RecordKey]:
        """Forget the least recently used records that are over the budget and return them."""
        victims: list[RecordKey] = []
        while self._sizes and self.used_bytes + self.aside_bytes + self._reserved_bytes > self.limit_bytes:
            packed, num_bytes = self._sizes.popitem(last=False)
            self.used_bytes -= cost_bytes(num_bytes)
            victims.append(unpack_key(packed))
        return victims
