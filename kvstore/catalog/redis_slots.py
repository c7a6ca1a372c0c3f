"""Slots of a Redis Cluster, and for each slot a hash tag that maps to it. Pure."""

from __future__ import annotations

import binascii
from functools import cache
from itertools import count

__all__ = ["NUM_SLOTS", "slot_of", "tag_of"]

NUM_SLOTS = 16384


def slot_of(tag: bytes) -> int:
    """The slot of every key with this hash tag."""
    return binascii.crc_hqx(tag, 0) % NUM_SLOTS


def tag_of(slot: int) -> bytes:
    """A short hash tag whose keys are in `slot`."""
    return _tags()[slot]


@cache
def _tags() -> tuple[bytes, ...]:
    """For each slot the lowest decimal number that maps to it; found by trying, once per process."""
    tags: dict[int, bytes] = {}
    for number in count():
        tag = b"%d" % number
        if tags.setdefault(slot_of(tag), tag) is tag and len(tags) == NUM_SLOTS:
            return tuple(tags[slot] for slot in range(NUM_SLOTS))
    raise AssertionError("not reached")
