"""Cursors for paging over a catalog's entries, as text. Pure."""

from __future__ import annotations

import re

from kvstore.errors import InvalidRequest
from kvstore.model.keys import PREFIX_BYTES

__all__ = ["bytes_of_cursor", "numbers_of_cursor"]

_NUMBERS = re.compile(r"(\d{1,5})\.(\d{1,5})\.(\d{1,20})", re.ASCII)


def bytes_of_cursor(cursor: str) -> bytes:
    """The prefix that the last step ended with; empty at the start.

    Raises:
        InvalidRequest: Not a cursor.
    """
    try:
        after = bytes.fromhex(cursor)
    except ValueError:
        after = b"?"
    if len(after) not in (0, PREFIX_BYTES):
        raise InvalidRequest("not a cursor of this catalog: start again without one", field="cursor", seen=cursor[:80])
    return after


def numbers_of_cursor(cursor: str, num_nodes: int) -> tuple[int, int]:
    """The index of a node, and the position of the SCAN on it.

    Raises:
        InvalidRequest: Not a cursor, or one from when the cluster had another number of nodes.
    """
    if not cursor:
        return 0, 0
    match = _NUMBERS.fullmatch(cursor)
    of, node, scan = (int(part) for part in match.groups()) if match is not None else (0, 0, 0)
    if of != num_nodes or node >= num_nodes or scan >= 1 << 64:
        raise InvalidRequest(
            "not a cursor of this catalog, or no longer valid: start again without one",
            field="cursor",
            seen=cursor[:80],
        )
    return node, scan
