"""Keeps a directory's catalog complete: rebuilds it from the records while the store keeps serving."""

from __future__ import annotations

import asyncio
import logging

from kvstore.catalog.base import Catalog
from kvstore.catalog.entry import Level
from kvstore.errors import Closed, CorruptRecord, InvalidRequest, Unavailable
from kvstore.runtime.background import Background
from kvstore.runtime.clock import Clock
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters
from kvstore.store.reindexing import reindex_level
from kvstore.tiers.base import Tier

__all__ = ["CatalogKeeper"]

_log = logging.getLogger(__name__)

_CALL_S = 10.0
_LOOK_S = 1.0
_REST_S = 30.0
"""Pause after a rebuild that failed."""


class CatalogKeeper:
    """Rebuilds the catalog of a tier that one process owns, whenever it is not complete: its file is new, was damaged,
    or missed changes.

    Args:
        catalog: What to keep; stays the caller's.
        tier: The records; stays the caller's.
        level: What the tier is to the catalog.
        meters: Where to count: `catalog_rebuilds{tier}`.
        clock: For deadlines, and to tell what was used since a rebuild began.
    """

    def __init__(self, catalog: Catalog, tier: Tier, level: Level, *, meters: Meters, clock: Clock) -> None:
        self._catalog = catalog
        self._tier = tier
        self._level = level
        self._meters = meters
        self._clock = clock
        self._background = Background("catalog keeper")
        self._is_doubtful = False  # it could not be compared

    async def compare(self) -> bool:
        """Whether the catalog lists as many records as the tier holds; if not, mark it incomplete. Call it before
        anything is stored: a write in flight would count as a difference.

        Raises:
            Unavailable: One of them does not answer.
        """
        self._is_doubtful = True
        totals = await self._catalog.totals(deadline=self._deadline())
        told = sum(total.levels[self._level].num_records for total in totals.values())
        usage = await self._tier.usage(deadline=self._deadline())
        self._is_doubtful = False
        if usage.num_records != told:
            await self._catalog.set_complete(False, deadline=self._deadline())
            return False
        if not told:  # also at the first start
            await self._catalog.set_complete(True, deadline=self._deadline())
        return await self._catalog.is_complete(deadline=self._deadline())

    def start(self) -> None:
        """Check in the background, until `aclose`."""
        self._background.spawn(self._run(), "keeping it complete")

    async def _run(self) -> None:
        while True:
            rest_s = _LOOK_S
            try:
                await self.rebuild_if_incomplete()
            except (Unavailable, Closed, CorruptRecord, InvalidRequest) as error:
                _log.warning("could not rebuild the catalog, will retry: %s", error)
                rest_s = _REST_S
            await asyncio.sleep(rest_s)

    async def rebuild_if_incomplete(self) -> bool:
        """Rebuild the catalog unless it is complete, and could be compared; returns whether that was necessary.

        Raises:
            Unavailable: The catalog or the tier failed several times in a row.
        """
        if self._is_doubtful:
            await self._catalog.set_complete(False, deadline=self._deadline())
            self._is_doubtful = False
        if await self._catalog.is_complete(deadline=self._deadline()):
            return False
        report = await reindex_level(self._catalog, self._tier, self._level, clock=self._clock)
        await self._catalog.set_complete(True, deadline=self._deadline())
        self._meters.add("catalog_rebuilds", tier=self._tier.name)
        _log.info("the catalog is complete again records=%d stale=%d", report.num_records, report.num_stale)
        return True

    async def aclose(self) -> None:
        """Stop. Idempotent."""
        await self._background.aclose()

    def _deadline(self) -> Deadline:
        return Deadline.after(_CALL_S, self._clock)
