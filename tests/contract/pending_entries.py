"""Entries of a log of pending writes."""

from __future__ import annotations

from kvstore.catalog.pending import PendingEntry
from kvstore.testing.records import make_key


def entries(*numbers: int) -> list[PendingEntry]:
    return [PendingEntry(make_key(number), 1000 + number, 64 * (number + 1)) for number in numbers]
