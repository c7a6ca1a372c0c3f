"""A lookup's question to the catalog: which slices of a prompt's boundaries are at the hot and the cold level."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.api import PrefixQuery
from kvstore.catalog.base import Catalog
from kvstore.catalog.entry import EntryTable, Level
from kvstore.errors import Closed, CorruptRecord, InvalidRequest, Unavailable
from kvstore.model.layout import Layout
from kvstore.runtime.clock import Clock
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters
from kvstore.store.placement import Presence, inner_probes
from kvstore.store.slices import PackedSlices
from kvstore.tiers.gather import gather_all

__all__ = ["CatalogLookup"]

_AT_ONCE = 4096
"""Up to this many boundaries are asked for in one round trip. Of a longer prompt most of whose boundaries do not end a
page, the pages are asked for first, then the tails and states that can still matter."""

_SHARE = 0.6
"""The catalog's share of a lookup's time: one that hangs must leave time to ask the tiers."""

_COMPLETE_S = 5.0
"""How long an answer to "is the catalog complete?" holds."""

_REST_S = 1.0
"""How long a catalog that did not answer in time is left alone."""


class CatalogLookup:
    """Fills a `Presence` from the catalog."""

    def __init__(self, catalog: Catalog, meters: Meters, clock: Clock) -> None:
        self._catalog = catalog
        self._meters = meters
        self._clock = clock
        self._complete = False
        self._asked_s = float("-inf")
        self._rests_until_s = float("-inf")

    async def fill(self, presence: Presence, deadline: Deadline, *, hot: bool, cold: bool) -> bool:
        """Note what the catalog knows of a query's boundaries. True: it knows everything, no tier need be asked."""
        if self._clock.monotonic_s() < self._rests_until_s:
            return False
        deadline = deadline.earlier(deadline.remaining_s * _SHARE)
        try:
            asking = self._ask_all(presence, deadline, hot=hot, cold=cold)
            if self._clock.monotonic_s() - self._asked_s > _COMPLETE_S:
                await gather_all([self._ask_complete(deadline), asking])  # no round trip more
            else:
                await asking
        except (Unavailable, Closed, CorruptRecord, InvalidRequest):
            self._meters.add("catalog_failures", call="lookup")
            self._rests_until_s = self._clock.monotonic_s() + _REST_S
            presence.hot, presence.cold = {}, {}
            return False
        self._meters.add("catalog_lookups", complete=str(self._complete).lower())
        return self._complete

    async def _ask_complete(self, deadline: Deadline) -> None:
        now_s = self._clock.monotonic_s()
        self._complete = await self._catalog.is_complete(deadline=deadline)
        self._asked_s = now_s

    async def _ask_all(self, presence: Presence, deadline: Deadline, *, hot: bool, cold: bool) -> None:
        query, layout = presence.query, presence.layout
        every = list(range(len(query.boundaries)))
        ends = every if len(every) <= _AT_ONCE else _page_ends(query, layout)
        if len(every) <= max(_AT_ONCE, 2 * len(ends)):
            await self._ask(presence, every, deadline, hot=hot, cold=cold)
        else:
            await self._ask(presence, ends, deadline, hot=hot, cold=cold)
            inner = {probe[0] for probe in inner_probes(layout, query, presence.complete)}
            await self._ask(presence, sorted(inner.difference(ends)), deadline, hot=hot, cold=cold)

    async def _ask(self, presence: Presence, indexes: list[int], deadline: Deadline, *, hot: bool, cold: bool) -> None:
        query = presence.query
        prefixes = [query.boundaries[index].prefix for index in indexes]
        table = await self._catalog.lookup(query.namespace, prefixes, deadline=deadline)
        for level, wanted in ((Level.HOT, hot), (Level.COLD, cold)):
            rows = table.rows(level)
            if not wanted or not rows.any():
                continue
            if len(indexes) < len(query.boundaries):
                rows = _placed(rows, indexes, presence, level)
            found = PackedSlices(presence.layout, rows)
            if level is Level.HOT:
                presence.hot = found
            else:
                presence.cold = found
        _note_sizes(presence, table)


def _page_ends(query: PrefixQuery, layout: Layout) -> list[int]:
    return [index for index, boundary in enumerate(query.boundaries) if boundary.tokens % layout.page_tokens == 0]


def _placed(rows: npt.NDArray[np.uint8], indexes: list[int], presence: Presence, level: Level) -> npt.NDArray[np.uint8]:
    """Rows of some boundaries merged into the rows of all, which keep what was found before."""
    before = presence.hot if level is Level.HOT else presence.cold
    if isinstance(before, PackedSlices):
        placed = before.rows.copy()
    else:
        placed = np.zeros((len(presence.query.boundaries), rows.shape[1]), dtype=np.uint8)
    placed[indexes] = rows
    return placed


def _note_sizes(presence: Presence, table: EntryTable) -> None:
    for group in range(len(presence.layout.groups)):
        for level in (Level.COLD, Level.HOT):
            presence.note_size(group, table.mean_bytes(level, group))
