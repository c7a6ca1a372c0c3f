"""Who rebuilds a catalog that is incomplete, and when: one service in the background, while all of them serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from kvstore.catalog.base import Catalog
from kvstore.catalog.coordination import Ownership, SoleOwnership
from kvstore.catalog.entry import Level
from kvstore.errors import Closed, CorruptRecord, InvalidRequest, KVStoreError, Unavailable
from kvstore.runtime.background import Background
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.store.upkeep.reindexing import LOST_MORE, Progress, ReindexReport, Reports, reindex_store
from kvstore.tiers.base import Tier

_log = logging.getLogger(__name__)

_CALL_S = 10.0
_RELEASE_S = 1.0
"""Short, since a service that is stopped waits for it."""
_POLL_S = 1.0
_REST_S, _REST_SHARE = 30.0, 3
"""Pause after a rebuild, also one that failed: at least these seconds, and three times as long as it took. A program
that stores records without the catalog would otherwise have S3 listed all the time."""
_LEASE = "rebuild"
LEASE_S = 30.0
"""The lease of the service that rebuilds: so long after its death another one begins."""

_FAILURES = (Unavailable, Closed, CorruptRecord, InvalidRequest)
_LOGGED_S = 60.0
"""How often the log says how far a rebuild is."""

Rebuild = Callable[[Progress], Awaitable[Reports]]


class CatalogKeeper:
    """Rebuilds a catalog whenever it is incomplete: it is new beside an old store, lost its data, or missed changes.

    Args:
        catalog: Stays the caller's.
        rebuild: Adds every stored record to it and marks it complete, as `reindex_store`, in any thread.
        ownership: Decides which of the services that share the catalog rebuilds it.
        poll_s: Seconds between looks at whether it is complete.
    """

    def __init__(
        self,
        catalog: Catalog,
        rebuild: Rebuild,
        ownership: Ownership,
        instruments: Instruments,
        *,
        poll_s: float,
    ) -> None:
        self._catalog = catalog
        self._rebuild = rebuild
        self._ownership = ownership
        self._poll_s = poll_s
        self._clock = instruments.clock
        self._background = Background("catalog keeper")
        self._failure = ""  # why the last rebuild failed; empty: it did not
        self._is_incomplete = False  # at the last check

    def start(self) -> None:
        """Check in the background, until `aclose`."""
        self._background.repeat(self._rebuild_if_due, "keeping it complete", every_s=self._poll_s)

    async def _rebuild_if_due(self) -> None:
        try:
            is_due = await self.is_due()
        except _FAILURES:  # the catalog does not answer, which its users report
            return
        if is_due:
            await self._rebuild_and_rest()

    async def is_due(self) -> bool:
        """Whether this service is to rebuild the catalog now: the catalog was incomplete at the last two checks, and no
        other service has the lease of the rebuild, which this one has then.

        One check is not enough: other services that notice the same loss a little later mark the catalog incomplete
        again, and a rebuild that began before that would be in vain.

        Raises:
            Unavailable: The catalog does not answer.
        """
        was_incomplete = self._is_incomplete
        self._is_incomplete = not await self._catalog.is_complete(deadline=self._deadline())
        if not (was_incomplete and self._is_incomplete):
            return False
        return await self._ownership.hold(_LEASE, deadline=self._deadline())

    async def _rebuild_and_rest(self) -> None:
        """The lease is kept while this rests, so that all services together rebuild a small part of the time."""
        renewals, started_s = self._background.spawn(self._renew(), "lease of the rebuild"), self._clock.monotonic_s()
        try:
            try:
                await self.rebuild()
                self._failure = ""
            except _FAILURES as error:
                self._log_failure(error)
            await asyncio.sleep(max(_REST_S, _REST_SHARE * (self._clock.monotonic_s() - started_s)))
        finally:
            renewals.cancel()
            with suppress(Unavailable, Closed):  # then it expires
                await self._ownership.release(_LEASE, deadline=Deadline.after(_RELEASE_S, self._clock))

    def _log_failure(self, error: KVStoreError) -> None:
        """Say once why the catalog cannot be rebuilt."""
        if error.message != self._failure:
            self._failure = error.message
            _log.warning("the catalog cannot be rebuilt now, which is tried again: %s", error)

    async def rebuild(self) -> None:
        """Add what the tiers hold, and mark the catalog complete.

        Raises:
            Unavailable: The catalog or a tier failed several times in a row, or the catalog was marked incomplete once
                more during the rebuild.
        """
        epoch = await self._catalog.epoch(deadline=self._deadline())
        if not self._failure:  # else this is one of many attempts
            _log.info("the catalog may lack records that are stored: adding them from the tiers, beside requests")
        walk = asyncio.ensure_future(self._rebuild(self._progress()))
        try:
            while not (await asyncio.wait({walk}, timeout=LEASE_S / 3))[0]:
                if await self._has_ended(epoch):
                    raise Unavailable(LOST_MORE)
        finally:
            if not walk.done():
                walk.cancel()
                await asyncio.wait({walk})
        reports = walk.result().values()
        num_records, num_added = sum(one.num_records for one in reports), sum(one.num_added for one in reports)
        _log.info("the catalog is complete again records=%d added=%d", num_records, num_added)
        if num_unknown := sum(one.num_unknown for one in reports):
            text = "%d stored records are not in the catalog: no readable description of a namespace has such ones"
            _log.warning(text, num_unknown)

    async def _has_ended(self, epoch: bytes) -> bool:
        """Whether the catalog was marked incomplete again after `epoch` began, so that the rebuild is in vain. False
        while the catalog does not answer: the rebuild itself tries again then, or fails.
        """
        try:
            return await self._catalog.epoch(deadline=self._deadline()) != epoch
        except Unavailable:
            return False

    def _progress(self) -> Progress:
        logged_s = self._clock.monotonic_s()

        def progress(level: Level, report: ReindexReport) -> None:
            nonlocal logged_s
            if self._clock.monotonic_s() - logged_s >= _LOGGED_S:
                logged_s = self._clock.monotonic_s()
                text = "adding records to the catalog: %d of the %s tier are listed, %d of them were added"
                _log.info(text, report.num_records, level.name.lower(), report.num_added)

        return progress

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            with suppress(Unavailable):
                await self._ownership.hold(_LEASE, deadline=self._deadline())

    async def aclose(self) -> None:
        """Stop. Idempotent."""
        await self._background.aclose()

    def _deadline(self) -> Deadline:
        return Deadline.after(_CALL_S, self._clock)


class DirectoryKeeper(CatalogKeeper):
    """Keeps the catalog of a directory complete. One process owns both, so that they can be compared at start.

    Args:
        catalog: Stays the caller's.
        tier: Where the records are; stays the caller's.
    """

    def __init__(self, catalog: Catalog, tier: Tier, instruments: Instruments) -> None:
        async def rebuild(progress: Progress) -> Reports:
            return await reindex_store(catalog, {Level.COLD: tier}, clock=instruments.clock, progress=progress)

        super().__init__(catalog, rebuild, SoleOwnership(), instruments, poll_s=_POLL_S)
        self._tier = tier
        self._is_doubtful = False  # `compare` failed, so the catalog may lack records

    async def compare(self) -> bool:
        """Whether the catalog lists as many records as the tier holds; if not, mark it incomplete. Call it before
        anything is stored: a write in flight would count as a difference.

        Raises:
            Unavailable: One of them does not answer.
        """
        self._is_doubtful = True
        totals = await self._catalog.totals(deadline=self._deadline())
        listed = sum(total.levels[Level.COLD].num_records for total in totals.values())
        usage = await self._tier.usage(deadline=self._deadline())
        self._is_doubtful = False
        if usage.num_records != listed:
            await self._catalog.mark_incomplete(deadline=self._deadline())
            return False
        if not listed:  # also at the first start
            epoch = await self._catalog.epoch(deadline=self._deadline())
            return await self._catalog.mark_complete(epoch, deadline=self._deadline())
        return await self._catalog.is_complete(deadline=self._deadline())

    async def is_due(self) -> bool:
        """As of `CatalogKeeper`. If `compare` failed, the catalog is marked incomplete first."""
        if self._is_doubtful:
            await self._catalog.mark_incomplete(deadline=self._deadline())
            self._is_doubtful = False
        return await super().is_due()
