"""A lookup's question to the catalog: which slices of a prompt's boundaries are at the hot and the cold level."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.api import PrefixQuery
from kvstore.catalog.base import Catalog
from kvstore.catalog.entry import EntryTable, Level
from kvstore.errors import Closed, CorruptRecord, InvalidRequest, Unavailable
from kvstore.model.layout import Layout
from kvstore.runtime.background import gather_all
from kvstore.runtime.clock import Clock
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters
from kvstore.runtime.turns import PIECE, LongWork, Turns, who_asks
from kvstore.store.placement import Presence, inner_probes
from kvstore.store.slices import PackedSlices

__all__ = ["CatalogLookup"]

_QUESTIONS_AT_ONCE = 2
"""Questions at a time, of `PIECE` boundaries at most: a catalog answers one after the other, in some 20 ms each."""

_SHARE = 0.6
"""The catalog's share of a lookup's time: one that hangs must leave time to ask the tiers."""

_COMPLETE_S = 5.0
"""How long an answer to "is the catalog complete?" holds."""

_REST_S = 1.0
"""How long a catalog that did not answer in time is left alone."""


class CatalogLookup:
    """Fills a `Presence` from the catalog.

    Up to `PIECE` boundaries are asked for in one round trip. Of a longer prompt most of whose boundaries do not end a
    page, the pages are asked for first, then the tails and states that can still matter.

    Args:
        catalog: Whom to ask.
        meters: Where to count.
        clock: For pauses.
        work: Runs what takes long for a long prompt.
    """

    def __init__(self, catalog: Catalog, meters: Meters, clock: Clock, work: LongWork) -> None:
        self._catalog = catalog
        self._work = work
        self._questions = Turns(_QUESTIONS_AT_ONCE)
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
        levels = [level for level, wanted in ((Level.HOT, hot), (Level.COLD, cold)) if wanted]
        every = list(range(len(query.boundaries)))
        ends = every if len(every) <= PIECE else _page_ends(query, layout)
        if len(every) <= max(PIECE, 2 * len(ends)):
            await self._ask(presence, every, levels, deadline)
        else:
            await self._ask(presence, ends, levels, deadline)
            inner = await self._work.run(presence.num_cells, _inner_indexes, presence)
            await self._ask(presence, sorted(inner.difference(ends)), levels, deadline)

    async def _ask(self, presence: Presence, indexes: list[int], levels: Sequence[Level], deadline: Deadline) -> None:
        """Ask for some boundaries, `PIECE` at a time: others' questions come between."""
        query = presence.query
        for start in range(0, len(indexes), PIECE):
            piece = indexes[start : start + PIECE]
            prefixes = [query.boundaries[index].prefix for index in piece]
            async with deadline.scope("waiting to ask the catalog"):
                await self._questions.begin(who_asks())
            try:
                table = await self._catalog.lookup(query.namespace, prefixes, deadline=deadline)
            finally:
                self._questions.end()
            await self._work.run(len(piece) * len(presence.layout.groups), _note, presence, piece, levels, table)


def _page_ends(query: PrefixQuery, layout: Layout) -> list[int]:
    return [index for index, boundary in enumerate(query.boundaries) if boundary.tokens % layout.page_tokens == 0]


def _inner_indexes(presence: Presence) -> set[int]:
    return {probe[0] for probe in inner_probes(presence.layout, presence.query, presence.complete)}


def _note(presence: Presence, indexes: list[int], levels: Sequence[Level], table: EntryTable) -> None:
    """Note what a table of some boundaries says; what was found of others before stays."""
    for level in levels:
        rows = table.rows(level)
        if not rows.any():
            continue
        if len(indexes) < len(presence.query.boundaries):
            before = presence.hot if level is Level.HOT else presence.cold
            if not isinstance(before, PackedSlices):
                shape = (len(presence.query.boundaries), rows.shape[1])
                before = PackedSlices(presence.layout, np.zeros(shape, dtype=np.uint8))
            before.rows[indexes] = rows
            found = before
        else:
            found = PackedSlices(presence.layout, rows)
        if level is Level.HOT:
            presence.hot = found
        else:
            presence.cold = found
    for group in range(len(presence.layout.groups)):
        for level in (Level.COLD, Level.HOT):
            presence.note_size(group, table.mean_bytes(level, group))
