"""Walks over a namespace's entries for lists: in bounded steps, with a cursor, within a time."""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvstore.catalog.base import BoundaryEntry, Catalog, Step, entry_of
from kvstore.catalog.entry import FIRST_USE_AT, HITS_AT, LAST_USE_AT, EntryShape, EntryTable, Level
from kvstore.errors import InvalidRequest
from kvstore.model.keys import PREFIX_BYTES, NamespaceId, PrefixHash
from kvstore.runtime.deadline import Deadline

__all__ = ["Listed", "Order", "Rows", "entry_at", "first_in_order", "some_of", "steps_of"]

STEP_ENTRIES = 512
"""Entries that are read and looked at before whoever else waits for this thread, or for Python's lock, gets a turn."""

_STEP_S = 10.0

Rows = npt.NDArray[np.bool_]


class Order(Enum):
    """In which order prefixes are listed."""

    STORED = "stored"
    """None: a page costs what it holds."""
    HITS = "hits"
    """The most hits first. This and the others look at every entry of the namespace, for each page."""
    BYTES = "bytes"
    """The largest first."""
    AGE = "age"
    """The oldest first."""
    IDLE = "idle"
    """First what was not used for the longest time."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A page of a list.

    Attributes:
        entries: In order.
        next_cursor: For what comes behind; `None`: nothing does.
        is_complete: Every entry was looked at that belongs before the cursor; else the time was up.
    """

    entries: list[BoundaryEntry]
    next_cursor: str | None
    is_complete: bool


async def some_of(
    catalog: Catalog,
    namespace: NamespaceId,
    cursor: str,
    *,
    limit: int,
    deadline: Deadline,
    wanted: Callable[[EntryTable], Rows] = EntryTable.present,
) -> Listed:
    """A page in no order. It may be short, even empty, and still have a cursor: then the time was up.

    Args:
        catalog: Where to read.
        namespace: Whose entries.
        cursor: From the page before; empty: from the start.
        limit: How many at most.
        deadline: When to answer with what was found.
        wanted: Which of a step's entries.

    Raises:
        InvalidRequest: No cursor.
        Unavailable: The catalog does not answer.
    """
    at, _, text = cursor.partition("~")
    if not text.isascii() or (text and not text.isdecimal()) or len(text) > 6:
        raise InvalidRequest("not a cursor of this list: begin again without one", field="cursor", seen=cursor[:80])
    skip = int(text or 0)
    found: list[BoundaryEntry] = []
    async for place, step in steps_of(catalog, namespace, at, deadline):
        rows = np.flatnonzero(wanted(step.table) & step.table.present())
        for number, row in enumerate(rows.tolist()):
            if number < skip:
                continue
            if len(found) == limit:
                return Listed(found, f"{place}~{number}", True)
            found.append(entry_at(namespace, step, row))
        skip = 0
        if step.cursor is None:
            return Listed(found, None, True)
        if len(found) == limit:
            return Listed(found, step.cursor, True)
        at = step.cursor
    return Listed(found, at, False)


async def first_in_order(
    catalog: Catalog, namespace: NamespaceId, order: Order, cursor: str, *, limit: int, deadline: Deadline
) -> Listed:
    """The first entries behind a cursor, by a look at all of them; memory for `limit` of them is needed.

    Args:
        catalog: Where to read.
        namespace: Whose entries.
        order: Any but `STORED`.
        cursor: From the page before; empty: from the start.
        limit: How many at most.
        deadline: When to answer with the best of what was seen.

    Raises:
        InvalidRequest: No cursor.
        Unavailable: The catalog does not answer.
    """
    after = _parse_place(cursor)
    best: list[tuple[int, PrefixHash, bytes]] = []
    num_behind = 0
    is_complete = False
    shape: EntryShape | None = None
    async for _, step in steps_of(catalog, namespace, "", deadline):
        shape, keys = step.table.shape, _keys(order, step.table)
        is_in = step.table.present()
        if after is not None:
            is_in &= keys >= after[0]
        places = [(int(keys[row]), step.prefixes[row], row) for row in np.flatnonzero(is_in).tolist()]
        behind = [place for place in places if after is None or place[:2] > after]
        num_behind += len(behind)
        worst, held = best[-1][:2] if len(best) == limit else None, {prefix for _, prefix, _ in best}
        fresh = [
            (key, prefix, step.table.data[row].tobytes())
            for key, prefix, row in behind
            if prefix not in held and (worst is None or (key, prefix) < worst)
        ]
        best = heapq.nsmallest(limit, [*best, *fresh])
        is_complete = step.cursor is None
    next_cursor = f"{best[-1][0]}.{best[-1][1].hex()}" if best and (num_behind > len(best) or not is_complete) else None
    assert shape is not None
    return Listed([entry_of(shape, namespace, prefix, data) for _, prefix, data in best], next_cursor, is_complete)


async def steps_of(
    catalog: Catalog, namespace: NamespaceId, cursor: str, deadline: Deadline
) -> AsyncIterator[tuple[str, Step]]:
    """Steps, each with the cursor it began at, until the last one or the deadline; one at least."""
    place: str | None = cursor
    while place is not None:
        step = await catalog.step(namespace, place, count=STEP_ENTRIES, deadline=Deadline.after(_STEP_S))
        yield place, step
        place = None if deadline.expired else step.cursor


def entry_at(namespace: NamespaceId, step: Step, row: int) -> BoundaryEntry:
    """One entry of a step."""
    return entry_of(step.table.shape, namespace, step.prefixes[row], step.table.data[row].tobytes())


def _keys(order: Order, table: EntryTable) -> npt.NDArray[np.int64]:
    """What the order goes by, the smallest first."""
    match order:
        case Order.HITS:
            return -table.numbers(HITS_AT)
        case Order.BYTES:
            return -sum((table.level_bytes(level) for level in Level), np.zeros(len(table.data), dtype=np.int64))
        case Order.AGE:
            return table.numbers(FIRST_USE_AT)
        case Order.IDLE:
            return table.numbers(LAST_USE_AT)
        case Order.STORED:
            raise InvalidRequest("no order to sort by", field="order")


def _parse_place(cursor: str) -> tuple[int, PrefixHash] | None:
    if not cursor:
        return None
    number, _, prefix = cursor.partition(".")
    try:
        if not number.isascii() or len(number) > 20 or len(prefix) != 2 * PREFIX_BYTES:
            raise ValueError
        return int(number), PrefixHash(bytes.fromhex(prefix))
    except ValueError as error:
        raise InvalidRequest(
            "not a cursor of this list: begin again without one", field="cursor", seen=cursor[:80]
        ) from error
