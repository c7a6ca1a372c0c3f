"""Where a walk over the names in a Redis, or in all nodes of a cluster, continues, and whether slots move. Pure.

A name whose hash slot moves from a node that is yet to be listed to one that was listed before is missed. So if slots
move during a walk, every node is listed a second time: the second listing finds such a name at its new node.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from zlib import crc32

from kvstore.errors import InvalidRequest

MOVING = 0
"""The digest of slots of which some are moving: it says nothing about a later time."""
_NUMBERS = re.compile(r"(\d{1,10})\.(\d{1,10})\.(\d{1,5})\.(\d{1,20})", re.ASCII)
_FIRST_SLOT_AT = 8
"""The words of a line of `CLUSTER NODES` before the slots."""


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a walk.

    Attributes:
        nodes: Digest of the names of the nodes, in the order of the walk.
        slots: Digest of the slots of each node when the walk began.
        index: How many listings of a node are done.
        place: The position of the next SCAN.
    """

    nodes: int
    slots: int
    index: int = 0
    place: int = 0

    @property
    def cursor(self) -> str:
        """The position as a text."""
        return f"{self.nodes}.{self.slots}.{self.index}.{self.place}"

    def after(self, place: int) -> Position:
        """The position after a SCAN that answered `place`."""
        return replace(self, place=place) if place else replace(self, index=self.index + 1, place=0)


def position_of(cursor: str, names: Sequence[str]) -> Position:
    """The inverse of `Position.cursor`.

    Args:
        names: Of the nodes now.

    Raises:
        InvalidRequest: Not a cursor, or one from when the cluster had other nodes.
    """
    match = _NUMBERS.fullmatch(cursor)
    if match is not None:
        position = Position(*(int(part) for part in match.groups()))
        is_inside = position.index < 2 * len(names) and position.place < 1 << 64
        if is_inside and position.nodes == digest_of_names(names):
            return position
    raise InvalidRequest(
        "not a cursor of this catalog, or no longer valid: start again without one", field="cursor", seen=cursor[:80]
    )


def digest_of_names(names: Sequence[str]) -> int:
    """A number for the names of nodes."""
    return crc32(" ".join(names).encode())


def digest_of_slots(texts: Sequence[str]) -> int:
    """A number for the slots of each node, from each node's `CLUSTER NODES`; `MOVING`: some are on their way."""
    words: list[str] = []
    for text in texts:
        own = next((line for line in text.splitlines() if "myself" in line), "")
        words += [*own.split()[_FIRST_SLOT_AT:], "|"]
    if any(word.startswith("[") for word in words):  # [93->-id] or [93-<-id]
        return MOVING
    return crc32(" ".join(words).encode()) or 1
