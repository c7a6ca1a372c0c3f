"""Pages of a namespace's entries: read in bounded steps, continued by a cursor, limited in time."""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvstore.catalog.base import Step
from kvstore.catalog.entry import (
    FIRST_USE_AT,
    HITS_AT,
    LAST_USE_AT,
    BoundaryEntry,
    EntryShape,
    EntryTable,
    Level,
    entry_of,
)
from kvstore.errors import InvalidRequest
from kvstore.model.keys import PREFIX_BYTES, PrefixHash
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.turns import who_asks
from kvstore.service.admin.catalog_access import Namespace
from kvstore.service.admin.context import AdminContext

_PAGE_S = 10.0

Rows = npt.NDArray[np.bool_]


class Order(Enum):
    """The order of a list of prefixes."""

    STORED = "stored"
    """No order; a page costs what it holds. Each page in any other order reads every entry of the namespace."""
    HITS = "hits"
    """Most hits first."""
    BYTES = "bytes"
    """Largest first."""
    AGE = "age"
    """Oldest first."""
    IDLE = "idle"
    """Least recently used first."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a list.

    Attributes:
        next_cursor: For the next page; `None`: this is the last one.
        is_complete: Every entry before the cursor was read; false: the time was up.
    """

    entries: list[BoundaryEntry]
    next_cursor: str | None
    is_complete: bool


async def list_entries(
    context: AdminContext,
    namespace: Namespace,
    *,
    limit: int,
    cursor: str = "",
    order: Order = Order.STORED,
    wanted: Callable[[EntryTable], Rows] = EntryTable.present,
) -> Page:
    """A page of at most `limit` entries, read within ten seconds. At most two requests read at a time.

    Args:
        limit: Entries at most.
        cursor: From the previous page; empty: from the start.
        order: How to sort. Without an order a page can be short, even empty, and have a cursor: then the time was up.
        wanted: Selects entries of a step; without an order only.

    Raises:
        InvalidRequest: The cursor is not one of this list.
        Unavailable: The catalog does not answer.
    """
    async with context.scans.turn(who_asks()):
        deadline = context.soon(_PAGE_S)
        if order is Order.STORED:
            return await _unordered(namespace, cursor, limit, deadline, wanted)
        return await _ordered(namespace, order, cursor, limit, deadline)


async def _unordered(
    namespace: Namespace, cursor: str, limit: int, deadline: Deadline, wanted: Callable[[EntryTable], Rows]
) -> Page:
    """The cursor is that of the catalog, and behind `~` the number of entries to skip there."""
    at, _, text = cursor.partition("~")
    if not text.isascii() or (text and not text.isdecimal()) or len(text) > 6:
        raise _wrong(cursor)
    skip = int(text or 0)
    found: list[BoundaryEntry] = []
    async for start, step in steps_of(namespace, deadline, at):
        rows = np.flatnonzero(wanted(step.table) & step.table.present())
        for number, row in enumerate(rows.tolist()):
            if number < skip:
                continue
            if len(found) == limit:
                return Page(found, f"{start}~{number}", True)
            found.append(entry_at(namespace, step, row))
        skip = 0
        if step.cursor is None:
            return Page(found, None, True)
        if len(found) == limit:
            return Page(found, step.cursor, True)
        at = step.cursor
    return Page(found, at, False)


async def _ordered(namespace: Namespace, order: Order, cursor: str, limit: int, deadline: Deadline) -> Page:
    """Reads every entry and keeps the first `limit` ones behind the cursor, which is a sort key and a prefix."""
    after = place_of(cursor, PREFIX_BYTES)
    best: list[tuple[int, PrefixHash, bytes]] = []
    num_behind = 0
    is_complete = False
    async for _, step in steps_of(namespace, deadline):
        keys = _sort_keys(order, step.table)
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
    next_cursor = cursor_behind(*best[-1][:2]) if best and (num_behind > len(best) or not is_complete) else None
    shape = EntryShape.of(namespace.layout)
    return Page([entry_of(shape, namespace.id, prefix, data) for _, prefix, data in best], next_cursor, is_complete)


async def steps_of(namespace: Namespace, deadline: Deadline, cursor: str = "") -> AsyncIterator[tuple[str, Step]]:
    """As `Catalog.steps`, each with the cursor that it began at, until the deadline; at least one."""
    at = cursor
    async for step in namespace.catalog.steps(namespace.id, cursor):
        yield at, step
        if step.cursor is None or deadline.expired:
            return
        at = step.cursor


def entry_at(namespace: Namespace, step: Step, row: int) -> BoundaryEntry:
    """One entry of a step."""
    return entry_of(step.table.shape, namespace.id, step.prefixes[row], step.table.data[row].tobytes())


def _sort_keys(order: Order, table: EntryTable) -> npt.NDArray[np.int64]:
    """[entries]: the smallest comes first."""
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


def cursor_behind(key: int, id_: bytes) -> str:
    """The cursor of a sorted list behind an entry: its sort key, and what tells entries of one key apart."""
    return f"{key}.{id_.hex()}"


def place_of(cursor: str, id_bytes: int) -> tuple[int, bytes] | None:
    """The place behind which a list continues, from `cursor_behind`; `None`: the cursor is empty.

    Raises:
        InvalidRequest: It is no such cursor.
    """
    if not cursor:
        return None
    number, _, id_ = cursor.partition(".")
    try:
        if not number.isascii() or len(number) > 20 or len(id_) != 2 * id_bytes:
            raise ValueError
        return int(number), bytes.fromhex(id_)
    except ValueError as error:
        raise _wrong(cursor) from error


def _wrong(cursor: str) -> InvalidRequest:
    return InvalidRequest("not a cursor of this list: start again without one", field="cursor", seen=cursor[:80])
